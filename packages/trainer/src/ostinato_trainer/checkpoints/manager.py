"""`CheckpointManager`: directories of checkpoints that are there whole or not at all.

Invariant: at every moment, a kill included, each `global_step_N` below the root is complete, and
`latest_checkpointed_iteration.txt` names one of them if there is any. A checkpoint is written to a hidden sibling,
flushed to the disk, and renamed; what a crash leaves behind is hidden, and removed when the root is opened again.
One run owns a root, and another one that opens it is refused. The manager does not know what is in a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from ostinato_trainer.checkpoints.inventory import check_complete, flush, read_inventory, seal
from ostinato_trainer.checkpoints.whole_folder import check_root, free_room, share_files, writing_below
from ostinato_trainer.errors import CheckpointError
from ostinato_trainer.home_paths import home_path

__all__ = ["BEST", "LATEST", "CheckpointManager", "check_complete", "steps_below"]

_logger = logging.getLogger(__name__)

LATEST: Final = "latest_checkpointed_iteration.txt"
"""Name of the file that holds the number of the newest step, as elsewhere in the field."""
BEST: Final = "best_checkpointed_iteration.txt"
"""Name of the file that holds the number of the best step, where there is a metric to tell it by."""

_ABANDON_S: Final = 5.0
"""How long a checkpoint may take to be renamed while its run ends."""

_STEP: Final = re.compile(r"global_step_(0|[1-9][0-9]*)")
_HIDDEN: Final = re.compile(r"\.(writing|replaced|removing)-([\w.]+)-[0-9a-f]{8}")


class CheckpointManager:
    """Checkpoints of one run below one root. `close` lets another run have the root."""

    def __init__(self, root: str | Path, *, max_to_keep: int | None = None, best_metric: str | None = None) -> None:
        """Opens the root and removes what an earlier crash left behind. The root is made with the first checkpoint.

        Args:
            root: `trainer.default_local_dir`.
            max_to_keep: `trainer.max_ckpt_to_keep`: older checkpoints are removed after a newer one is complete; None
                keeps all.
            best_metric: `trainer.best_metric`: the checkpoint with the highest value of it is kept beside these.

        Raises:
            CheckpointError: `max_to_keep` is below 1, or the root is no directory, cannot be read, or is another run's.
        """
        if max_to_keep is not None and max_to_keep < 1:
            raise CheckpointError(f"max_ckpt_to_keep must be at least 1 or null, got {max_to_keep}; null keeps all")
        self.root = home_path(root, "default_local_dir", CheckpointError)
        self._max_to_keep = max_to_keep
        self._best_metric = best_metric
        self._root_descriptor: int | None = None
        self.is_held = False
        """Whether a run has begun here; see `hold`."""
        self._publishing = threading.Lock()
        self._abandoned = False
        self._unfinished: Path | None = None
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(
                f"default_local_dir must be a directory, got {self.root}, which is a file; choose another"
            )
        if self.root.is_dir():
            self._own_root()
            self._recover()

    def save(self, step: int, write: Callable[[Path], None], metrics: Mapping[str, float] | None = None) -> Path:
        """Makes the checkpoint of a step; one of the same step is replaced.

        Args:
            step: At least 0.
            write: Fills the empty directory that it is given.
            metrics: Of the step; they are kept in the inventory.

        Returns:
            The directory of the complete checkpoint.

        Raises:
            CheckpointError: it could not be written, or was abandoned; the hidden directory is gone and earlier
                checkpoints are as they were.
        """
        if step < 0:
            raise CheckpointError(f"step must be at least 0, got {step}; number steps from 1")
        target = self.root / f"global_step_{step}"
        hidden = self._hidden("writing", target.name)
        try:
            with self._unless_abandoned():
                hidden.mkdir(parents=True)
                self._own_root()
                self._unfinished = hidden
            write(hidden)
            seal(hidden, step, metrics or {})
            with self._unless_abandoned():
                self._put(hidden, target)
                self.point_latest(step)
        except Exception as error:  # the boundary to whatever `write` does; every cause becomes one message
            _remove(hidden)
            raise self._failure(step, error) from error
        except BaseException:
            _remove(hidden)
            raise
        finally:
            self._unfinished = None
        self._forget_old(step)
        return target

    def abandon(self) -> None:
        """Let no checkpoint appear any more: one that another thread is writing is removed and ends in an error.

        Does not wait for a disk that does not answer.
        """
        self._abandoned = True
        if self._publishing.acquire(timeout=_ABANDON_S):
            self._publishing.release()
        unfinished = self._unfinished
        if unfinished is not None:
            _remove(unfinished)

    def close(self) -> None:
        """Let go of the root."""
        if self._root_descriptor is not None:
            os.close(self._root_descriptor)
            self._root_descriptor = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in rising order.

        Raises:
            CheckpointError: the root cannot be read.
        """
        return steps_below(self.root)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.root / f"global_step_{step}"

    def latest(self) -> Path | None:
        """The checkpoint that was completed last, or None where there is none.

        Raises:
            CheckpointError: see `steps`.
        """
        steps = self.steps()
        if not steps:
            return None
        try:
            named = int((self.root / LATEST).read_text(encoding="ascii"))
        except (OSError, ValueError):
            named = -1
        return self.path_of(named if named in steps else steps[-1])

    def best(self) -> Path | None:
        """The checkpoint with the highest value of `best_metric`, the newest of several; None where none has one.

        Raises:
            CheckpointError: see `steps`.
        """
        if self._best_metric is None:
            return None
        scored = [(score, step) for step in self.steps() if (score := self._score(step)) is not None]
        return self.path_of(max(scored)[1]) if scored else None

    def point_latest(self, step: int) -> None:
        """Make the checkpoint of a step the one that `latest` gives: it was written, or a run has gone back to it.

        Raises:
            OSError: the root cannot be written.
        """
        self.write_file(LATEST, f"{step}\n".encode())

    def write_file(self, name: str, content: bytes) -> None:
        """Make or replace a file of the root, whole or not at all.

        Raises:
            OSError: the root cannot be written.
        """
        hidden = self._hidden("writing", name)
        try:
            with hidden.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(self.root / name)
        finally:
            hidden.unlink(missing_ok=True)
        flush(self.root)

    def write_files(self, write: Callable[[Path], None], *, last: str) -> None:
        """Make or replace files and folders of the root, which is made where absent.

        Args:
            write: Fills the empty directory that it is given.
            last: One of these files, there only while all the others are: by it readers tell that they are whole.

        Raises:
            CheckpointError: They could not be written; `last` is not there then if any of the others was replaced.
        """
        check_root(self.root)
        hidden = self._hidden("writing", "files")
        try:
            hidden.mkdir(parents=True)
            with writing_below(self.root):
                self._own_root()
                write(hidden)
                share_files(hidden)
                for path in [*hidden.rglob("*"), hidden]:
                    flush(path)
                (self.root / last).unlink(missing_ok=True)
                flush(self.root)
                for path in sorted(hidden.iterdir(), key=lambda path: path.name == last):
                    target = self.root / path.name
                    if target.is_dir():
                        shutil.rmtree(target)
                    path.rename(target)
                flush(self.root)
        finally:
            _remove(hidden)

    def hold(self) -> None:
        """Make the root where absent and keep other runs from it until `close`.

        Raises:
            CheckpointError: It cannot be made, is another run's, or has become one's since the manager was made.
        """
        check_root(self.root)
        is_new = self._root_descriptor is None
        with writing_below(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._own_root()
        if is_new and self.steps():
            raise CheckpointError(
                f"default_local_dir must belong to one run, got {self.root}, where another one has begun and ended meanwhile; "
                "choose another folder, or start again to go on from there"
            )
        self.is_held = True

    @contextlib.contextmanager
    def _unless_abandoned(self) -> Iterator[None]:
        """The block is over before `abandon` returns, or does not begin."""
        with self._publishing:
            if self._abandoned:
                raise CheckpointError("the run was ended before the checkpoint was complete")
            yield

    def _score(self, step: int) -> float | None:
        try:
            return read_inventory(self.path_of(step)).metrics.get(self._best_metric or "")
        except CheckpointError as error:
            _logger.warning("A checkpoint cannot be the best: %s", error)
            return None

    def _own_root(self) -> None:
        """Holds the root for this run until `close`, or until the process ends in whatever way."""
        if self._root_descriptor is not None:
            return
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"default_local_dir must belong to one run, got {self.root}, where another one is at work; "
                "end that one or choose another folder"
            ) from error
        except OSError as error:  # file systems without such locks
            _logger.info("%s cannot be held against other runs: %s", self.root, error)
        self._root_descriptor = descriptor

    def _hidden(self, purpose: str, name: str) -> Path:
        return self.root / f".{purpose}-{name}-{uuid.uuid4().hex[:8]}"

    def _put(self, hidden: Path, target: Path) -> None:
        """Renames into place; an older checkpoint of that name steps aside first and comes back if the rename fails."""
        aside = None
        if target.exists():
            aside = self._hidden("replaced", target.name)
            target.rename(aside)
        try:
            hidden.rename(target)
        except BaseException:
            if aside is not None:
                aside.rename(target)
            raise
        flush(self.root)
        if aside is not None:
            _remove(aside)

    def _forget_old(self, newest: int) -> None:
        """Says which is the best and removes the oldest beyond the limit; a failure is logged, for nothing is lost by it."""
        try:
            best = self.best()
            if best is not None:
                self.write_file(BEST, f"{best.name.rpartition('_')[2]}\n".encode())
            if self._max_to_keep is None:
                return
            others = [step for step in self.steps() if step != newest]
            older = sorted(others, key=lambda step: (step < newest, step))  # what a run that went back left goes first
            for step in older[: max(0, len(older) - (self._max_to_keep - 1))]:
                path = self.path_of(step)
                if path == best:
                    continue
                doomed = self._hidden("removing", path.name)
                path.rename(doomed)
                if doomed.is_symlink():
                    doomed.unlink()  # somebody keeps it elsewhere
                else:
                    shutil.rmtree(doomed)
        except OSError as error:
            _logger.warning("An old checkpoint below %s could not be removed: %s", self.root, error)

    def _recover(self) -> None:
        """Removes hidden leftovers; a checkpoint that had stepped aside for one that never came is put back."""
        try:
            leftovers = [(path, match) for path in self.root.iterdir() if (match := _HIDDEN.fullmatch(path.name))]
            for path, match in leftovers:
                target = self.root / match[2]
                if match[1] == "replaced" and not target.exists():
                    path.rename(target)
                    continue
                _logger.info("Removing %s, left behind by a run that was stopped", path)
                _remove(path)
        except OSError as error:
            raise CheckpointError(
                f"{self.root} must be readable and writable, got {error}; fix its permissions"
            ) from error

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        reason = str(error).strip() or type(error).__name__
        cure = "earlier checkpoints are unharmed"
        if self.root.is_dir():
            cure = (
                f"{free_room(self.root)} there; make room, fix permissions or choose another "
                f"trainer.default_local_dir; {cure}"
            )
        return CheckpointError(f"checkpoint of step {step} must be written below {self.root}, but: {reason}; {cure}")


def steps_below(root: Path) -> list[int]:
    """Steps that have a complete checkpoint in a folder, in rising order; none where it is no folder.

    Raises:
        CheckpointError: It cannot be read.
    """
    if not root.is_dir():
        return []
    try:
        names = [_STEP.fullmatch(path.name) for path in root.iterdir() if path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{root} must be readable, got {error}; fix its permissions") from error
    return sorted(int(match[1]) for match in names if match)


def _remove(path: Path) -> None:
    """Removes a file or directory that only this module knows of; what resists is removed when the root is opened again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
