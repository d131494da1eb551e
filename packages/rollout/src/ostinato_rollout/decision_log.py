"""What a replica policy saw and chose, as a file; and the same questions put to a policy again.

A log is JSON lines: first a `LogHeader`, then one `Decision` for each choice, in order. It is written line by line, so
that what a program that died had decided is there. A bounded log keeps the first choices: what a seeded policy decides
depends on all that it decided before.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.routing import ReplicaPolicy, TokenPolicy

logger = logging.getLogger(__name__)

_FORMAT = 1

Line = TypeVar("Line")


class LogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a log."""

    format: int
    """Version of what follows."""
    policy: str
    """The policy with its settings, as Python prints it."""
    max_decisions: int
    """A log that holds so many may be cut off."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One choice."""

    request_id: str
    """The conversation."""
    in_flight: dict[int, int]
    """Generations under way by replica, of those that could be chosen."""
    previous: int | None
    """The replica of its last turn, if that one could be chosen."""
    chosen: int
    """The answer."""
    held_tokens: dict[int, int] = {}
    """Length of all other conversations by replica, of those that could be chosen; seen by a TokenPolicy only."""
    num_tokens: int = 0
    """Length of this one; seen by a TokenPolicy only."""
    at: float
    """When, in seconds since 1970; no policy sees it."""


class DecisionLog:
    """A file that takes the choices of one client.

    Args:
        path: Where; a file that is there is replaced.
        max_decisions: Choices that it takes; then it says so in the program's log and takes no more.
    """

    def __init__(self, path: str | Path, *, max_decisions: int = 1_000_000) -> None:
        if max_decisions < 1:
            raise SessionInputError(f"max_decisions must be at least 1, got {max_decisions}; pass no log for none")
        self.path = Path(path)
        self.num_decisions = 0
        """Choices in the file."""
        self._max_decisions = max_decisions
        self._encoder = msgspec.json.Encoder()
        self._has_policy = False
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise SessionInputError(f"path must be a file that can be written, got {path}: {error}") from error
        self._close = weakref.finalize(self, self._file.close)

    def begin(self, policy: ReplicaPolicy) -> None:
        """Write the header.

        Raises:
            SessionInputError: It has one: choices of two clients in one file cannot be told apart.
        """
        if self._has_policy:
            raise SessionInputError(
                f"a decision log must have one client, got a second for {self.path}; give it its own"
            )
        self._has_policy = True
        self._write(LogHeader(format=_FORMAT, policy=repr(policy), max_decisions=self._max_decisions))

    def record(
        self,
        request_id: str,
        in_flight: Mapping[int, int],
        previous: int | None,
        chosen: int,
        *,
        held_tokens: Mapping[int, int],
        num_tokens: int,
    ) -> None:
        """Write one choice, unless the log is full or closed."""
        if self.num_decisions >= self._max_decisions or not self._close.alive:
            return
        decision = Decision(
            request_id=request_id,
            in_flight=dict(in_flight),
            previous=previous,
            chosen=chosen,
            held_tokens=dict(held_tokens),
            num_tokens=num_tokens,
            at=time.time(),
        )
        self._write(decision)
        self.num_decisions += 1
        if self.num_decisions == self._max_decisions:
            logger.warning(
                "the decision log %s is full with %d choices; it takes no more", self.path, self.num_decisions
            )

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        self._close()

    def _write(self, line: LogHeader | Decision) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first choice that a replayed policy made otherwise."""

    number: int
    """Which choice, from 0."""
    decision: Decision
    """What is in the log."""
    chosen: int
    """What was chosen now."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy decides on the questions of a log."""

    choices: list[int]
    """Its choices, in order; they end with the first that differs."""
    difference: Difference | None
    """None: all are those of the log."""


def read_decisions(path: str | Path) -> tuple[LogHeader, Iterator[Decision]]:
    """Return a log's header and its choices, which are read as they are taken.

    Raises:
        SessionInputError: No such file, or no log; later: a line that is no decision.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise SessionInputError(f"path must be a decision log, got {path}: {error}") from error
    if not lines:
        raise SessionInputError(f"path must be a decision log, got an empty file, {path}; no client has used it")
    header = _decoded(lines[0], LogHeader, path, 1)
    if header.format != _FORMAT:
        raise SessionInputError(
            f"format must be {_FORMAT}, got {header.format} in {path}; read it with its own version"
        )
    return header, (_decoded(line, Decision, path, number) for number, line in enumerate(lines[1:], 2))


def replay(path: str | Path, policy: ReplicaPolicy) -> Replay:
    """Put a log's questions to a new `policy`, up to the first choice that differs.

    Raises:
        SessionInputError: `path` is no decision log.
    """
    choices: list[int] = []
    for number, decision in enumerate(read_decisions(path)[1]):
        request_id, previous = decision.request_id, decision.previous
        if isinstance(policy, TokenPolicy) and decision.held_tokens:
            choices.append(policy.choose_by_tokens(request_id, decision.num_tokens, decision.held_tokens, previous))
        else:
            choices.append(policy.choose(request_id, decision.in_flight, previous))
        if choices[-1] != decision.chosen:
            return Replay(choices=choices, difference=Difference(number=number, decision=decision, chosen=choices[-1]))
    return Replay(choices=choices, difference=None)


def _decoded(line: bytes, kind: type[Line], path: str | Path, number: int) -> Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SessionInputError(
            f"line {number} of a decision log must be a {kind.__name__}, got {error} in {path}; was the file cut off?"
        ) from error
