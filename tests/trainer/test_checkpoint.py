"""Checkpoints are whole or absent, whatever interrupts them."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from ostinato_trainer.checkpoints.inventory import flush
from ostinato_trainer.checkpoints.manager import BEST, LATEST, CheckpointManager, check_complete
from ostinato_trainer.checkpoints.whole_folder import writing_below
from ostinato_trainer.errors import CheckpointError


def write_text(text):
    def write(directory):
        (directory / "actor").mkdir()
        (directory / "actor" / "weights").write_text(text)
        (directory / "data.json").write_text("{}")

    return write


def content(path):
    return (path / "actor" / "weights").read_text()


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_appears_with_its_number(tmp_path):
    """The directory, its inventory and the file with the newest number are there after a save; nothing else is."""
    manager = CheckpointManager(tmp_path / "run")
    assert manager.latest() is None
    path = manager.save(3, write_text("three"))
    assert path == tmp_path / "run" / "global_step_3" == manager.latest()
    assert (tmp_path / "run" / LATEST).read_text().strip() == "3"
    assert names(tmp_path / "run") == ["global_step_3", LATEST]
    assert check_complete(path).step == 3


def test_files_are_as_open_as_their_folder(tmp_path):
    """A file that a library keeps to its owner can be read by whom the checkpoint is open to, such as who serves it."""

    def write(directory):
        write_text("one")(directory)
        (directory / "actor" / "weights").chmod(0o600)

    path = CheckpointManager(tmp_path).save(1, write)
    expected = path.stat().st_mode & 0o666
    assert expected
    assert {each.stat().st_mode & 0o777 for each in path.rglob("*") if each.is_file()} == {expected}


def test_the_last_k_are_kept(tmp_path):
    """Older checkpoints go after a newer one is complete; other files of the directory are left alone."""
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "global_step_x").mkdir()
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in (2, 4, 10):
        manager.save(step, write_text(str(step)))
    assert manager.steps() == [4, 10]
    assert names(tmp_path) == ["global_step_10", "global_step_4", "global_step_x", LATEST, "metrics.jsonl"]


def test_a_lower_step_after_a_resume_is_the_latest(tmp_path):
    """What was written last is the latest, even where a run went back and a higher number still lies there."""
    manager = CheckpointManager(tmp_path)
    manager.save(8, write_text("eight"))
    manager.save(6, write_text("six"))
    assert manager.latest() == tmp_path / "global_step_6"
    (tmp_path / LATEST).write_text("nonsense")
    assert manager.latest() == tmp_path / "global_step_8"


def test_the_same_step_is_replaced(tmp_path):
    """Saving a step again replaces it, and a failure on the way leaves the old one."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, write_text("old"))
    manager.save(1, write_text("new"))
    assert content(tmp_path / "global_step_1") == "new"

    def fail(directory):
        write_text("half")(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 1 must be written below .*No space left.*MiB are free.*unharmed"):
        manager.save(1, fail)
    assert content(tmp_path / "global_step_1") == "new"
    assert names(tmp_path) == ["global_step_1", LATEST]


@pytest.mark.parametrize("error", [ValueError("bad tensor"), RuntimeError(""), KeyboardInterrupt()])
def test_whatever_interrupts_a_save_leaves_nothing_behind(tmp_path, error):
    """An error becomes a CheckpointError with its cause; Ctrl-C goes on as it is; the hidden directory is gone either way."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, write_text("one"))

    def fail(directory):
        write_text("half")(directory)
        raise error

    expected = CheckpointError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected):
        manager.save(2, fail)
    assert names(tmp_path) == ["global_step_1", LATEST]
    assert manager.latest() == tmp_path / "global_step_1"


def test_a_vanished_directory_is_an_error(tmp_path):
    """Somebody removes the directory that is being written: the message says so, earlier checkpoints stay."""
    manager = CheckpointManager(tmp_path)

    def vanish(directory):
        directory.rmdir()
        (directory / "file").write_text("x")

    with pytest.raises(CheckpointError, match="No such file or directory"):
        manager.save(1, vanish)
    assert manager.steps() == []


def test_a_root_that_is_a_file_is_refused(tmp_path):
    """A file in the way is named, whether it is the root or above it."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="must be a directory"):
        CheckpointManager(tmp_path / "file")
    with pytest.raises(CheckpointError, match="Not a directory"):
        CheckpointManager(tmp_path / "file" / "below").save(1, write_text("x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_missing_permission_is_an_error(tmp_path):
    """A directory that may not be written gives one message and stays as it is."""
    root = tmp_path / "run"
    root.mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        CheckpointManager(root).save(1, write_text("x"))


def test_leftovers_of_a_crash_are_removed_and_a_replaced_checkpoint_comes_back(tmp_path):
    """Hidden directories of an earlier life go; a checkpoint that had stepped aside for one that never came is put back."""
    with CheckpointManager(tmp_path) as earlier:
        earlier.save(1, write_text("one"))
    (tmp_path / ".writing-global_step_2-0123abcd").mkdir()
    (tmp_path / ".writing-latest-0123abcd").write_text("2")
    (tmp_path / ".removing-global_step_0-0123abcd").mkdir()
    (tmp_path / ".hidden-of-somebody-else").mkdir()
    (tmp_path / "global_step_1").rename(tmp_path / ".replaced-global_step_1-0123abcd")
    manager = CheckpointManager(tmp_path)
    assert names(tmp_path) == [".hidden-of-somebody-else", "global_step_1", LATEST]
    assert manager.latest() == tmp_path / "global_step_1"


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    """A process that saves over and over is killed; the newest checkpoint is complete and the next start tidies up."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from ostinato_trainer.checkpoints.manager import CheckpointManager
        manager = CheckpointManager(sys.argv[1], max_to_keep=2)
        def write(directory):
            for number in range(20):
                (directory / f"file{number}").write_text("x" * 5000)
        for step in range(1, 100000):
            manager.save(step, write)
            sys.stdout.write(f"{step}\\n"); sys.stdout.flush()
        """
    )
    for round_number in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(2 + round_number):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        with CheckpointManager(tmp_path, max_to_keep=2) as manager:
            assert manager.latest() is not None
            assert all(check_complete(tmp_path / f"global_step_{step}").step == step for step in manager.steps())
        assert not [name for name in names(tmp_path) if name.startswith(".")]


SCRIPT = """
import resource, sys
from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.errors import CheckpointError
{prepare}
manager = CheckpointManager(sys.argv[1])
manager.save(1, write)
{fill}
try:
    manager.save(2, write)
except CheckpointError as error:
    sys.stdout.write(f"CheckpointError: {{error}}")
    sys.exit(3)
"""

TENSORS = """
import torch
from pathlib import Path
from ostinato_trainer.backends.state import BackendState, write_state
def write(directory):
    tensors = {"weight": torch.zeros(400, 1000)}
    write_state(directory / "actor", tensors, tensors, BackendState(num_steps=1, num_skipped=0, policy_version=1))
"""

MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
shape = dict(vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
backend = LocalBackend(LlamaForCausalLM(LlamaConfig(**shape)), LocalBackendOptions(device="cpu"))
def write(directory):
    backend.save_hf(directory / "huggingface")
    backend.save(directory / "actor")
"""

LIMIT_FILES = "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"

FILL_DISK = """
with open(sys.argv[1] + "/ballast", "wb", buffering=0) as file:
    try:
        while file.write(bytes(65536)):
            pass
    except OSError:
        pass
"""


def check_save_without_room(root, prepare, fill):
    """In a process of its own: checkpoint 1 is written, the room goes, checkpoint 2 fails with one message and no trace."""
    script = SCRIPT.format(prepare=prepare, fill=fill)
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "checkpoint of step 2 must be written below" in done.stdout
    assert "MiB are free" in done.stdout
    assert [name for name in names(root) if name != "ballast"] == ["global_step_1", LATEST]
    assert check_complete(root / "global_step_1").step == 1
    assert (root / LATEST).read_text().strip() == "1"


@pytest.mark.parametrize("prepare", [TENSORS, MODEL], ids=["tensors", "model"])
def test_a_file_too_large_is_a_clear_error(tmp_path, prepare):
    """A checkpoint that hits the limit on file size: one message, no half checkpoint, the previous one intact."""
    check_save_without_room(tmp_path, prepare, LIMIT_FILES)


def test_a_full_disk_is_a_clear_error(tmp_path):
    """The same on a file system that is really full, where one can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        check_save_without_room(disk, TENSORS, FILL_DISK)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_one_run_owns_a_root(tmp_path):
    """While a run holds the root another one is refused by name, in this process or another; after `close` it may have it."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, write_text("one"))
        with pytest.raises(CheckpointError, match=r"must belong to one run, got .*; end that one"):
            CheckpointManager(tmp_path)
    CheckpointManager(tmp_path).close()
    with CheckpointManager(tmp_path / "new") as manager, CheckpointManager(tmp_path / "new") as other:
        manager.save(1, write_text("one"))
        with pytest.raises(CheckpointError, match="must belong to one run"):
            other.save(2, write_text("two"))
        assert manager.steps() == [1]


def test_a_run_holds_its_root_from_its_beginning(tmp_path):
    """Of two runs in a new folder the second is refused when it begins, not at its first checkpoint; so is one whose folder has meanwhile
    become another's."""
    root = tmp_path / "new"
    with CheckpointManager(root) as manager, CheckpointManager(root) as second, CheckpointManager(root) as third:
        manager.hold()
        manager.hold()
        with pytest.raises(CheckpointError, match="must belong to one run"):
            second.hold()
        manager.save(1, write_text("one"))
        manager.close()
        with pytest.raises(CheckpointError, match=r"another one has begun and ended meanwhile; .*start again"):
            third.hold()


def test_a_checkpoint_that_was_moved_elsewhere_is_left_there(tmp_path):
    """Where somebody has put a link in its place, the limit removes the link and nothing behind it."""
    with CheckpointManager(tmp_path / "run", max_to_keep=1) as manager:
        path = manager.save(1, write_text("one"))
        path.rename(tmp_path / "kept")
        path.symlink_to(tmp_path / "kept")
        manager.save(2, write_text("two"))
        assert names(tmp_path / "run") == ["global_step_2", LATEST]
    assert check_complete(tmp_path / "kept").step == 1


def test_the_best_is_kept_beside_the_newest(tmp_path):
    """The highest value of the metric stays whatever its age; of equals the newest; steps without a finite value cannot be it."""
    manager = CheckpointManager(tmp_path, max_to_keep=1, best_metric="val")
    assert manager.best() is None
    seen = []
    for step, value in enumerate([0.1, 0.7, 0.3, 0.7, math.nan, math.inf, None, 0.2], start=1):
        manager.save(step, write_text(str(step)), {} if value is None else {"val": value, "other": 9.0})
        seen.append((manager.steps(), (tmp_path / BEST).read_text().strip()))
    assert seen == [
        ([1], "1"),
        ([2], "2"),
        ([2, 3], "2"),
        ([4], "4"),
        ([4, 5], "4"),
        ([4, 6], "4"),
        ([4, 7], "4"),
        ([4, 8], "4"),
    ]
    assert manager.best() == tmp_path / "global_step_4"


def test_what_a_run_that_went_back_left_goes_first(tmp_path):
    """After a run has gone back, its former future is not what is kept of the past."""
    with CheckpointManager(tmp_path) as manager:
        for step in (2, 4, 6, 8):
            manager.save(step, write_text(str(step)))
    with CheckpointManager(tmp_path, max_to_keep=2) as manager:
        manager.point_latest(4)
        assert manager.latest() == tmp_path / "global_step_4"
        manager.save(5, write_text("five"))
        assert manager.steps() == [4, 5]


def test_an_abandoned_checkpoint_never_appears(tmp_path):
    """A run that ends while a thread writes leaves nothing of it, though the thread goes on to its end."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, write_text("one"))
    begun, abandoned, errors = threading.Event(), threading.Event(), []

    def write(directory):
        write_text("two")(directory)
        begun.set()
        assert abandoned.wait(30)

    def save():
        try:
            manager.save(2, write)
        except CheckpointError as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    assert begun.wait(30)
    manager.abandon()
    assert names(tmp_path) == ["global_step_1", LATEST]
    abandoned.set()
    thread.join(30)
    assert names(tmp_path) == ["global_step_1", LATEST]
    assert len(errors) == 1


def test_file_systems_that_flush_no_directories_are_no_failure():
    """Such a directory, as some network file systems have them, is as safe as it can be made."""
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs a file system that cannot flush directories")
    flush(Path("/proc/self"))


def test_nothing_is_begun_after_a_run_was_ended(tmp_path):
    """A thread that comes to its checkpoint late, when the run has ended, makes nothing, not even for a moment."""
    manager, begun = CheckpointManager(tmp_path / "run"), []
    manager.abandon()
    with pytest.raises(CheckpointError, match="the run was ended before the checkpoint was complete"):
        manager.save(1, begun.append)
    assert begun == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no inventory", "foreign", "older"])
def test_damage_is_found_by_name(tmp_path, damage):
    """A file that is cut or gone, or a directory that is no checkpoint, is refused with its path."""
    path = CheckpointManager(tmp_path).save(1, write_text("one"))
    weights = path / "actor" / "weights"
    if damage == "cut":
        weights.write_text("on")
        message = r"weights must have 3 bytes, got 2 bytes; the checkpoint is damaged"
    elif damage == "changed":
        weights.write_text("onE")
        message = r"weights must be as it was written, got another checksum; the checkpoint is damaged"
    elif damage == "missing":
        weights.unlink()
        message = r"weights must have 3 bytes, got no such file"
    elif damage == "no inventory":
        (path / "checkpoint.json").unlink()
        message = "must be a checkpoint"
    elif damage == "older":
        (path / "checkpoint.json").write_text('{"step": 1, "files": {"a": 3}, "format": "ostinato-checkpoint-1"}')
        message = "must be a checkpoint of the format ostinato-checkpoint-2, got ostinato-checkpoint-1"
    else:
        (path / "checkpoint.json").write_text('{"iteration": 1}')
        message = "must be a checkpoint"
    with pytest.raises(CheckpointError, match=message):
        check_complete(path)


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    """How much room there is cannot be told of a folder that is not there, and is no error of its own."""
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "file" / "below"
    with (
        pytest.raises(CheckpointError, match=r"below must be a folder that can be written, got: Not a directory"),
        writing_below(folder),
    ):
        folder.mkdir()


def test_no_byte_of_the_inventory_changes_unnoticed(tmp_path):
    """Whatever bit of it flips, metrics and step too, the checkpoint is damaged; one of an earlier version, without its own checksum, is read."""
    path = CheckpointManager(tmp_path).save(12, write_text("one"), {"val": 0.125, "count": 3, "other": math.nan})
    file = path / "checkpoint.json"
    content = file.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        file.write_bytes(changed)
        with pytest.raises(CheckpointError):
            check_complete(path)
    file.write_bytes(re.sub(rb'"own_sha256":"[0-9a-f]+",', b"", content))
    assert check_complete(path).metrics["val"] == 0.125


def test_limits_are_checked():
    """Nothing to keep, or a negative step, is refused."""
    with pytest.raises(CheckpointError, match="max_ckpt_to_keep must be at least 1"):
        CheckpointManager("unused", max_to_keep=0)
    with pytest.raises(CheckpointError, match="step must be at least 0"):
        CheckpointManager("unused").save(-1, write_text("x"))
