"""Failures as data: where something went wrong, of which kind, in which words.

A failed trajectory is a value that travels beside its healthy siblings. This module knows the error trees of the leaves, no agent and no reward.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

import msgspec

from ostinato_engines import EngineError
from ostinato_rollout.errors import NoReplicaError, ReplicaError
from ostinato_tokenization import TokenizationError
from ostinato_tools import ToolError


class FailureKind(StrEnum):
    """Whose fault a failure is; the closed set that metrics count by."""

    ENGINE = "engine"
    TOOL = "tool"
    AGENT = "agent"
    REWARD = "reward"
    TIMEOUT = "timeout"
    TOKENIZATION = "tokenization"
    CANCELLED = "cancelled"


class Failure(msgspec.Struct, frozen=True):
    """A recorded failure. It is never a reward of 0 and never takes its siblings down."""

    where: str
    """What was being done, for example `trajectory 3-0/1, agent tool_agent`."""
    kind: FailureKind
    """Whose fault it is."""
    message: str
    """The error's class and text, on one paragraph, without a traceback (the log has that)."""

    @classmethod
    def from_error(cls, error: BaseException, where: str, *, kind: FailureKind | None = None) -> Failure:
        """Record `error`; its kind follows from its class unless `kind` is given."""
        return cls(where, kind or classify(error), f"{type(error).__name__}: {error}")


def classify(error: BaseException) -> FailureKind:
    """Return the kind of a failure by the error's class; what no tree claims is the agent's own."""
    if isinstance(error, asyncio.CancelledError):
        return FailureKind.CANCELLED
    if isinstance(error, TimeoutError):
        return FailureKind.TIMEOUT
    if isinstance(error, EngineError | ReplicaError | NoReplicaError):
        return FailureKind.ENGINE
    if isinstance(error, ToolError):
        return FailureKind.TOOL
    if isinstance(error, TokenizationError):
        return FailureKind.TOKENIZATION
    return FailureKind.AGENT
