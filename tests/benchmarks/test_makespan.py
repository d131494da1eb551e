"""The frozen workload under the real client: its figures, and what the default settings reach."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import msgspec
import pytest
from benchmarks import makespan
from benchmarks.makespan_replica import ReplicaModel
from benchmarks.virtual_time import run_in_virtual_time

WORKLOAD = Path(os.environ.get("OSTINATO_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data" / "makespan"

MODEL = ReplicaModel(
    count=2,
    kv_capacity_tokens=1000,
    weight_bytes=50.0,
    kv_bytes_per_token=1.0,
    bandwidth_bytes_per_s=100.0,
    prefill_tokens_per_s=10.0,
)


@pytest.fixture(scope="module")
def within():
    """The workload that fits, as the benchmark reads it."""
    return _workload("within")


def _workload(name):
    if not WORKLOAD.is_dir():
        pytest.skip(f"the frozen workload is not at {WORKLOAD}; set OSTINATO_SHARED")
    return makespan.read_workload(WORKLOAD / f"{name}.json")


def _over_bound(way, workload, seeds=(0, 1, 2)):
    return [
        run_in_virtual_time(makespan.run_batch(way, seed, workload.replica, workload.seeds[seed])).makespan_s
        / workload.bound_s(seed)
        for seed in seeds
    ]


def test_the_bound_of_a_batch_by_hand():
    """Alone, the conversation takes 1 s and 2 * 0.5 s, its tool 5 s, 0.4 s for 4 new tokens and 0.5 s: 7.9 s. Two replicas do
    the work of fifty of them in 25 times 1.4 s of prefill and 37 tokens read at 0.0105 s each."""
    conversation = makespan.Conversation(10, [(2, 5.0, 4), (1, 0.0, 0)])
    assert conversation.alone_s(MODEL) == pytest.approx(7.9)
    assert (conversation.tokens_read(), conversation.num_prefilled()) == (10 + 11 + 16, 14)
    assert makespan.Workload(MODEL, [[conversation]]).bound_s(0) == pytest.approx(7.9)
    expected = 25 * (1.4 + 37 * (50 / 1000 + 1) / 100)
    assert makespan.Workload(MODEL, [[conversation] * 50]).bound_s(0) == pytest.approx(expected)


def test_no_way_beats_the_bound_and_a_run_repeats_exactly(within):
    """Every way to run a batch takes at least its bound, and the same seed gives the same makespan to the last bit."""
    small = msgspec.structs.replace(within, seeds=[within.seeds[0][:40]])
    for way in (*makespan.WAYS, *makespan.CAPPED):
        first, again = (_over_bound(way, small, seeds=[0]) for _ in range(2))
        assert first == again
        assert first[0] >= 1


def test_the_simulation_has_the_workloads_published_figures(within):
    """Longest-first placement with hindsight reaches 1.30 of the bound, sticky routing about 1.4."""
    assert statistics.mean(_over_bound(makespan.HINDSIGHT, within)) == pytest.approx(1.30, abs=0.01)
    assert statistics.mean(_over_bound(makespan.STICKY, within)) == pytest.approx(1.39, abs=0.04)


def test_the_default_is_nearly_as_good_as_hindsight_where_all_fit(within):
    """Knowing no length, the default settings stay within 1.05 of longest-first placement that knows them all."""
    ours, theirs = (statistics.mean(_over_bound(way, within)) for way in (makespan.DEFAULT, makespan.HINDSIGHT))
    assert ours / theirs <= 1.05


@pytest.mark.slow
def test_the_default_is_far_better_than_sticky_where_not_all_fit():
    """Over capacity it takes at most 0.85 of sticky routing without admission, and at most 1.75 of the bound."""
    beyond = _workload("over")
    ours, sticky, capped = (
        statistics.mean(_over_bound(way, beyond)) for way in (makespan.DEFAULT, makespan.STICKY, makespan.CAPPED[0])
    )
    assert ours / sticky <= 0.85
    assert ours <= 1.75
    assert capped == pytest.approx(1.71, abs=0.02)
