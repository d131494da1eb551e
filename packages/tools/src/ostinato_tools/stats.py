"""What is counted for each tool: outcomes, and how long calls took."""

import math
from typing import Any

import msgspec

from ostinato_tools.calls import OutcomeKind

_STEPS_PER_DOUBLING = 4
_FASTEST_S = 1e-6
_NUM_BUCKETS = 128


class ToolStats(msgspec.Struct):
    """Counts of one tool over all trajectories."""

    outcomes: dict[OutcomeKind, int] = {}
    """Number of calls by class of outcome."""
    seconds: float = 0.0
    """Wall time of all calls together."""
    max_seconds: float = 0.0
    """Wall time of the longest call."""
    latencies: dict[int, int] = {}
    """Number of calls by latency bucket; see `quantile`."""
    num_retries: int = 0
    """Attempts beyond the first."""
    num_cached: int = 0
    """Calls that were answered from the cache."""
    num_fallbacks: int = 0
    """Calls that were answered with the policy's fallback."""

    @property
    def num_calls(self) -> int:
        """Number of calls of any class."""
        return sum(self.outcomes.values())

    def count(self, kind: OutcomeKind, seconds: float) -> None:
        """Count one call.

        Args:
            kind: What became of it.
            seconds: Its wall time.
        """
        self.outcomes[kind] = self.outcomes.get(kind, 0) + 1
        self.seconds += seconds
        if seconds > self.max_seconds:
            self.max_seconds = seconds
        bucket = 0
        if seconds > _FASTEST_S:
            bucket = min(int(math.log2(seconds / _FASTEST_S) * _STEPS_PER_DOUBLING), _NUM_BUCKETS - 1)
        self.latencies[bucket] = self.latencies.get(bucket, 0) + 1

    def quantile(self, q: float) -> float:
        """Return the latency, in seconds, that the share `q` of all calls did not exceed.

        Buckets are a quarter of a doubling wide, so the figure is at most 19 % too high and never too low; it covers calls
        from a microsecond to an hour, and is `max_seconds` at most.

        Args:
            q: In [0, 1].

        Returns:
            Seconds; 0.0 where nothing was counted.

        Raises:
            ValueError: `q` is no share.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q must be in [0, 1], got {q!r}; give 0.5 for the median")
        wanted = q * self.num_calls
        seen = 0
        for bucket in sorted(self.latencies):
            seen += self.latencies[bucket]
            if seen >= wanted and bucket < _NUM_BUCKETS - 1:
                return min(_FASTEST_S * 2 ** ((bucket + 1) / _STEPS_PER_DOUBLING), self.max_seconds)
        return self.max_seconds

    def summary(self) -> dict[str, Any]:
        """Return the counts flat, for a log: outcomes by name, and mean, median, 99th percentile and longest latency in seconds."""
        num_calls = self.num_calls
        return {
            "num_calls": num_calls,
            **{kind.value: self.outcomes.get(kind, 0) for kind in OutcomeKind},
            "num_retries": self.num_retries,
            "num_cached": self.num_cached,
            "num_fallbacks": self.num_fallbacks,
            "mean_s": self.seconds / num_calls if num_calls else 0.0,
            "p50_s": self.quantile(0.5),
            "p99_s": self.quantile(0.99),
            "max_s": self.max_seconds,
        }
