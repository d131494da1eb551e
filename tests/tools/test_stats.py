"""What is counted: outcomes by class, and latencies that can be asked for quantiles."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import OutcomeKind, ToolExecutor, ToolStats
from ostinato_tools.testing import fake_registry, make_call


@given(st.lists(st.floats(0, 7200), min_size=1, max_size=60), st.floats(0, 1))
def test_a_quantile_is_at_most_a_fifth_too_high(latencies: list[float], q: float) -> None:
    """The latency told is no less than that of the share asked for, at most 19 % (and a microsecond) more, never beyond the longest."""
    stats = ToolStats()
    for seconds in latencies:
        stats.count(OutcomeKind.OK, seconds)
    true = sorted(latencies)[max(0, math.ceil(q * len(latencies) - 1e-9) - 1)]
    told = stats.quantile(q)
    assert told >= true * (1 - 1e-9)
    assert told <= max(latencies)
    if true < 3000:  # beyond an hour only the longest is known
        assert told <= true * 1.1893 + 1.2e-6


def test_nothing_counted_and_no_share() -> None:
    """Without calls every figure is 0; a share outside of [0, 1] is refused."""
    assert ToolStats().quantile(0.5) == 0.0
    assert set(ToolStats().summary().values()) == {0}
    with pytest.raises(ValueError, match=r"q must be in \[0, 1\], got 50"):
        ToolStats().quantile(50)


async def test_every_call_is_counted_by_tool_and_class() -> None:
    """Each call counts once for its tool; calls of tools that do not exist count together; the summary tells them all."""
    executor = ToolExecutor(fake_registry(), timeout_s=0.3)
    calls = [make_call("echo", {"text": "a"}), make_call("echo"), make_call("failing"), make_call("hanging")]
    async with executor.open("t") as tools:
        await tools.run([*calls, make_call("nope"), make_call("nada")])
    assert {name: stats.outcomes for name, stats in executor.stats.items()} == {
        "echo": {"ok": 1, "bad_arguments": 1},
        "failing": {"tool_error": 1},
        "hanging": {"timeout": 1},
        "": {"unknown_tool": 2},
    }
    summary = executor.stats["hanging"].summary()
    assert (summary["num_calls"], summary["timeout"], summary["ok"]) == (1, 1, 0)
    assert summary["p50_s"] == summary["p99_s"] == summary["max_s"] == summary["mean_s"] > 0.29
    assert set(summary) >= {kind.value for kind in OutcomeKind}
