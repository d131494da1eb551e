"""Which replica serves a turn: policies are small objects behind one Protocol.

This module knows ids and counts, no server. What a policy decides depends on its settings and on what it was asked
before, on nothing else: so its choices can be replayed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from ostinato_rollout.config import RoutingConfig, RoutingPolicy
from ostinato_rollout.errors import SessionInputError


class ReplicaPolicy(Protocol):
    """Chooses the replica of one turn. Called on the event loop; must not block.

    A policy that seldom moves a conversation says so by an attribute `stays` that is true: the replica that a conversation
    leaves then frees what it keeps of it, instead of keeping it for a return.
    """

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """Return a key of `in_flight`.

        Args:
            request_id: The conversation.
            in_flight: Generations under way by replica id, of those that may be chosen; never empty. Do not keep it.
            previous: The replica that served this conversation's last turn, if that one may be chosen.
        """
        ...


@runtime_checkable
class TokenPolicy(ReplicaPolicy, Protocol):
    """A policy that is asked with what replicas hold; with counts only where a log has nothing else."""

    def choose_by_tokens(
        self, request_id: str, num_tokens: int, held_tokens: Mapping[int, int], previous: int | None
    ) -> int:
        """Return a key of `held_tokens`.

        Args:
            request_id: The conversation.
            num_tokens: How long it is.
            held_tokens: How long all other conversations on a replica are, by replica id, of those that may be chosen; never
                empty.
            previous: As for `choose`.
        """
        ...


class _LeastDrawn:
    """The replica with the least, ties by a seeded draw."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, load: Mapping[int, int]) -> int:
        least = min(load.values())
        best = [replica for replica, amount in load.items() if amount == least]
        return best[0] if len(best) == 1 else self._random.choice(best)


@dataclass
class BalancedTokens:
    """A conversation begins where others hold the least, and stays there until moving pays.

    What replicas read for each token that they sample is what their conversations hold, so this evens out how fast they go.
    A move costs computing the conversation anew elsewhere: the gain must be larger than the conversation.
    """

    seed: int = 0
    """Decides ties."""
    move_ratio: float | None = RoutingConfig().move_ratio
    """It moves when the others on its replica hold more than those on the best one by this part and its own length; None:
    never."""
    stays: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.move_ratio is not None and not self.move_ratio >= 0:
            raise SessionInputError(f"move_ratio must be at least 0, got {self.move_ratio}; None never moves")
        self._least = _LeastDrawn(self.seed)

    def choose_by_tokens(
        self, request_id: str, num_tokens: int, held_tokens: Mapping[int, int], previous: int | None
    ) -> int:
        """See TokenPolicy."""
        if previous is not None:
            ratio, held = self.move_ratio, held_tokens[previous]
            if ratio is None or held <= num_tokens or held <= (1 + ratio) * min(held_tokens.values()) + num_tokens:
                return previous
        return self._least.choose(held_tokens)

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """Decide by counts as if each conversation were one token long."""
        return self.choose_by_tokens(request_id, 1, in_flight, previous)


@dataclass
class StickyLeastInFlight:
    """A conversation begins where least is under way and stays where its prefix is cached, within a margin."""

    seed: int = 0
    """Decides ties."""
    move_margin: int | None = RoutingConfig().move_margin
    """It moves when its replica has at least so many more generations under way than the best; None: never."""
    stays: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.move_margin is not None and self.move_margin < 1:
            raise SessionInputError(f"move_margin must be at least 1, got {self.move_margin}; None never moves")
        self._least = _LeastDrawn(self.seed)

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """See ReplicaPolicy."""
        if previous is not None:
            margin = self.move_margin
            if margin is None or in_flight[previous] < margin or in_flight[previous] - min(in_flight.values()) < margin:
                return previous
        return self._least.choose(in_flight)


@dataclass
class LeastInFlight:
    """Every turn goes where least is under way; to where the last one was if that is as good, else ties are drawn."""

    seed: int = 0
    """Decides ties."""

    def __post_init__(self) -> None:
        self._least = _LeastDrawn(self.seed)

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """See ReplicaPolicy."""
        if previous is not None and in_flight[previous] == min(in_flight.values()):
            return previous
        return self._least.choose(in_flight)


@dataclass
class RandomReplica:
    """Every turn goes to a replica drawn at random."""

    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """See ReplicaPolicy."""
        return self._random.choice(list(in_flight))


@dataclass
class RoundRobin:
    """Every turn goes to the next replica, in the order of their ids."""

    def __post_init__(self) -> None:
        self._last = -1

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """See ReplicaPolicy."""
        self._last = min((replica for replica in in_flight if replica > self._last), default=min(in_flight))
        return self._last


def make_policy(config: RoutingConfig, *, seed: int) -> ReplicaPolicy:
    """Return the policy that the settings name."""
    match config.policy:
        case RoutingPolicy.BALANCED:
            return BalancedTokens(seed, config.move_ratio)
        case RoutingPolicy.STICKY:
            return StickyLeastInFlight(seed, config.move_margin)
        case RoutingPolicy.LEAST_IN_FLIGHT:
            return LeastInFlight(seed)
        case RoutingPolicy.RANDOM:
            return RandomReplica(seed)
        case RoutingPolicy.ROUND_ROBIN:
            return RoundRobin()
