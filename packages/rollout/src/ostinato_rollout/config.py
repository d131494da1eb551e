"""The configuration nodes that this package reads: of a session, of the choice of replicas, and of admission."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from ostinato_tokenization import SanityCheckMode


def _check_at_least(node: Any, minimum: int, *names: str) -> None:
    """Raise a ValueError (which msgspec reports with the path) where a number is set and smaller than `minimum`."""
    for name in names:
        value = getattr(node, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}; leave it out for its default")


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a conversation needs to know beyond its budget."""

    format: str = "hermes"
    """How the model writes tool calls: the name of a tool parser, or `auto` for the one that the chat template tells."""
    tokenization_sanity_check_mode: SanityCheckMode = SanityCheckMode.STRICT
    """Compare, once at the end of a conversation, the recorded tokens with a fresh render of its messages:
    `strict` reports every difference, `ignore_strippable` only those beyond whitespace, `disable` compares nothing."""
    use_inference_chat_template: bool = False
    """Feed the engine a fresh render of the whole conversation each turn, as a chat server would do at inference.
    Where that render does not extend what was recorded, a new segment begins."""


class RoutingPolicy(StrEnum):
    """How the replica of a turn is chosen."""

    STICKY = "sticky"
    LEAST_IN_FLIGHT = "least_in_flight"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"


class RoutingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.routing`: which replica serves a turn."""

    policy: RoutingPolicy = RoutingPolicy.STICKY
    """`sticky`: a conversation begins where least is under way and stays where its prefix is cached; `least_in_flight`,
    `random` and `round_robin` choose anew for every turn."""
    move_margin: int | None = 8
    """With `sticky`: a conversation moves when its replica has at least so many more generations under way than the
    replica with the least; null: only when its replica is gone."""
    decision_log_path: str | None = None
    """JSONL file for every choice and what it was made from, to be replayed; one that is there is replaced. Null: none."""
    max_logged_decisions: int = 1_000_000
    """Choices that the log takes; later ones are made without being written."""

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "move_margin", "max_logged_decisions")


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.admission`: how many conversations are under way at a time.

    One that is under way keeps its state in a replica's key-value memory, while its tools run as well. Where there are more
    than that memory holds, they push each other's state out, and every turn is computed from its beginning. So a new
    conversation waits, in order of arrival, until a replica has room for the tokens that it is expected to reach.
    """

    enable: bool = True
    """Let new conversations wait for room. Without figures from the engine, or below, nothing waits."""
    kv_capacity_tokens: int | None = None
    """Tokens that one replica's key-value memory holds; null: what the engine says."""
    max_sessions: int | None = None
    """Conversations that one replica has under way at a time; null: what the engine says."""
    expected_tokens: int | None = None
    """Tokens that a conversation is expected to reach, prompt included; null: its prompt and what the conversations that
    have ended added to theirs, on average, or until one has ended, all that it may add."""
    timeout_s: float = 3600.0
    """Seconds that a conversation waits for its place before it fails."""

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "kv_capacity_tokens", "max_sessions", "expected_tokens")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}; give seconds")
