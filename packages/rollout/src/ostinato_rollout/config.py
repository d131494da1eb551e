"""The configuration nodes that this package reads: of a session, of the choice of replicas, of admission, and of the pool."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from ostinato_engines import PauseMode
from ostinato_rollout.restarts import RestartPolicy
from ostinato_tokenization import SanityCheckMode


def _default_of(node: msgspec.Struct, name: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(node) if field.name == name)


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

    BALANCED = "balanced"
    STICKY = "sticky"
    LEAST_IN_FLIGHT = "least_in_flight"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"


class RoutingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.routing`: which replica serves a turn."""

    policy: RoutingPolicy = RoutingPolicy.BALANCED
    """`balanced`: a conversation begins where conversations hold the fewest tokens and stays where its prefix is cached, unless
    moving pays; `sticky`: the same by generations under way; `least_in_flight`, `random` and `round_robin` choose anew for
    every turn."""
    move_ratio: float | None = 0.5
    """With `balanced`: a conversation moves when the others on its replica hold more tokens than those on the replica with the
    fewest by this part, and by its own length, which it costs to compute it there; null: only when its replica is gone."""
    move_margin: int | None = 8
    """With `sticky`: a conversation moves when its replica has at least so many more generations under way than the
    replica with the least; null: only when its replica is gone."""
    decision_log_path: str | None = None
    """JSONL file for every choice and what it was made from, to be replayed; one that is there is replaced. Null: none."""
    max_logged_decisions: int = 1_000_000
    """Choices that the log takes; later ones are made without being written."""

    def __post_init__(self) -> None:
        for name, policy in (("move_ratio", RoutingPolicy.BALANCED), ("move_margin", RoutingPolicy.STICKY)):
            value = getattr(self, name)
            if self.policy is not policy and value != _default_of(self, name):
                raise ValueError(f"{name} must be left out with policy {self.policy}, got {value}; it is for {policy}")
        _check_at_least(self, 0, "move_ratio")
        _check_at_least(self, 1, "move_margin", "max_logged_decisions")


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.admission`: how many conversations are under way at a time.

    One that is under way keeps its state in a replica's key-value memory, while its tools run as well. Where there are more
    than that memory holds, they push each other's state out, and every turn is computed from its beginning. So a new
    conversation waits, in order of arrival, until a replica has room for it, and for part of what it is expected to add.
    """

    enable: bool = True
    """Let new conversations wait for room. Without figures from the engine, or below, nothing waits."""
    kv_capacity_tokens: int | None = None
    """Tokens that one replica's key-value memory holds; null: what the engine says."""
    max_sessions: int | None = None
    """Conversations that one replica has under way at a time; null: what the engine says."""
    expected_tokens: int | None = None
    """Tokens that a conversation is expected to reach, prompt included; null: what conversations add is learned as they end,
    beginning with half of what they may add."""
    growth_share: float = 0.33
    """Part of the tokens that a conversation is still expected to add for which room is kept. 1: room for all; less lets more
    of them in, for when long ones are at their end others have ended. Conversations that are all equally long and begin
    together need 1; where lengths are spread as chance spreads them, a third is enough."""
    timeout_s: float = 3600.0
    """Seconds that a conversation waits for its place before it fails."""

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "kv_capacity_tokens", "max_sessions", "expected_tokens")
        if not 0 <= self.growth_share <= 1:
            raise ValueError(f"growth_share must be from 0 to 1, got {self.growth_share}; 1 keeps room for all")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}; give seconds")


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.pool`: the life of replicas."""

    restarts: RestartPolicy = RestartPolicy()
    """Restarts of replicas that were lost."""
    health_interval_s: float | None = 10.0
    """Seconds between two questions for a replica's health; one that has failed or does not answer is taken out. null: a loss is
    found by the next turn only."""
    no_replica_timeout_s: float = 600.0
    """Seconds that turns wait while no replica is in service and one is being restarted; after that they fail."""
    sync_pause: PauseMode = PauseMode.ABORT
    """What becomes of generations that are under way when new weights come: `abort` ends them, and they go on from their last
    token; `wait` lets them finish; `keep` freezes them in the engine."""

    def __post_init__(self) -> None:
        for name in ("health_interval_s", "no_replica_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {value}; give seconds")
