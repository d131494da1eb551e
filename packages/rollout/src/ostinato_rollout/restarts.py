"""How often, and after which waits, lost replicas are restarted. Knows indices and moments, no server."""

from __future__ import annotations

import random
from collections import deque

import msgspec


class RestartPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.pool.restarts`: restarts of replicas that were lost."""

    max_restarts: int = 3
    """Restarts of one replica within the window; it is given up when it would need one more. 0: lost replicas stay lost."""
    max_pool_restarts: int = 32
    """The same of all replicas together, so that what fails everywhere is not restarted everywhere without end."""
    window_s: float = 3600.0
    """Seconds for which a restart counts."""
    first_backoff_s: float = 1.0
    """Wait before the first restart; it doubles with each further one within the window."""
    max_backoff_s: float = 60.0
    """Longest such wait, in seconds."""
    jitter: float = 0.25
    """In [0, 1]: waits are drawn longer by up to this part, so that replicas that were lost together do not start together."""

    def __post_init__(self) -> None:
        for name in ("max_restarts", "max_pool_restarts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}; 0 restarts nothing")
        if not 0 < self.window_s < float("inf"):
            raise ValueError(f"window_s must be positive, got {self.window_s}; give seconds")
        if not 0 <= self.first_backoff_s <= self.max_backoff_s < float("inf"):
            raise ValueError(
                f"first_backoff_s must be in [0, max_backoff_s], got {self.first_backoff_s} and {self.max_backoff_s};"
                " give seconds"
            )
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be in [0, 1], got {self.jitter}; 0 draws nothing")


class RestartBudget:
    """Counts the restarts of one pool.

    Args:
        policy: The bounds.
        seed: Of the jitter.
    """

    def __init__(self, policy: RestartPolicy, seed: int) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self._times: dict[int, deque[float]] = {}

    def take(self, replica: int, now: float) -> float | str:
        """Take a restart of `replica`; return the wait before it in seconds, or in words why there is none left.

        Args:
            replica: Its index.
            now: A moment in seconds; never earlier than those before.
        """
        policy = self._policy
        for times in self._times.values():
            while times and times[0] <= now - policy.window_s:
                times.popleft()
        mine = self._times.setdefault(replica, deque())
        if len(mine) >= policy.max_restarts:
            return f"was restarted {len(mine)} times within {policy.window_s:g} s, as often as max_restarts allows"
        total = sum(map(len, self._times.values()))
        if total >= policy.max_pool_restarts:
            return (
                f"the pool restarted {total} replicas within {policy.window_s:g} s, as many as max_pool_restarts allows"
            )
        wait_s = min(policy.first_backoff_s * 2.0 ** min(len(mine), 60), policy.max_backoff_s)
        mine.append(now)
        return wait_s * (1 + policy.jitter * self._random.random())
