"""Advantage estimators by name against plain loops in float64, and the rules for groups that have no baseline or no spread."""

import dataclasses
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.algorithms import advantages
from ostinato_trainer.algorithms.advantages import (
    AdvantageOptions,
    advantage_estimator,
    grpo,
    needs_baseline,
    needs_critic,
    register_advantage_estimator,
    rloo,
    with_advantages,
)
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import AlgorithmError, BatchError
from ostinato_trainer.segments import Segment


@pytest.fixture(autouse=True)
def names_of_their_own(monkeypatch):
    """What a test registers is gone after it, for every module of the process sees these names."""
    monkeypatch.setattr(advantages, "_estimators", dict(advantages._estimators))


def of_group(estimator, rewards, **options):
    return estimator(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), **options).tolist()


GROUPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 0.0, 0.2, 0.25, 1.0, 3.5])), min_size=1, max_size=20
)


def by_group(pairs):
    groups = {}
    for group, reward in pairs:
        groups.setdefault(group, []).append(reward)
    return groups


@settings(deadline=None)
@given(GROUPS, st.booleans())
def test_grpo_is_its_formula(pairs, norm_by_std):
    """(r - mean) / (sample deviation + 1e-6), or without the division; a group of one has mean 0 and deviation 1."""
    groups = by_group(pairs)
    got = grpo(
        torch.tensor([reward for _, reward in pairs]),
        torch.tensor([group for group, _ in pairs]),
        norm_by_std=norm_by_std,
    )
    for (group, reward), advantage in zip(pairs, got.tolist(), strict=True):
        values = groups[group]
        mean = statistics.fmean(values) if len(values) > 1 else 0.0
        deviation = statistics.stdev(values) if len(values) > 1 else 1.0
        expected = (reward - mean) / (deviation + 1e-6) if norm_by_std else reward - mean
        assert advantage == pytest.approx(expected, abs=1e-6 if norm_by_std else 1e-7)


@settings(deadline=None)
@given(GROUPS)
def test_rloo_is_its_formula(pairs):
    """The reward minus the mean of the others; alone, the reward."""
    groups = by_group(pairs)
    got = rloo(torch.tensor([reward for _, reward in pairs]), torch.tensor([group for group, _ in pairs]))
    for (group, reward), advantage in zip(pairs, got.tolist(), strict=True):
        others = groups[group].copy()
        others.remove(reward)
        assert advantage == pytest.approx(reward - (statistics.fmean(others) if others else 0.0), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rewards", [[1.0] * 4, [0.81] * 5, [0.95] * 7, [0.1] * 3, [-0.7] * 6, [1e6 / 3] * 5, [0.0] * 8]
)
def test_equal_rewards_give_exactly_zero(rewards, dtype):
    """No rounding residue is divided by a deviation of nothing."""
    tensor, groups = torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.int64)
    for got in (grpo(tensor, groups), grpo(tensor, groups, norm_by_std=False), rloo(tensor, groups)):
        assert got.tolist() == [0.0] * len(rewards)


def test_nearly_equal_rewards_count_as_equal():
    """Rewards that differ by one rounding in float32 are one reward, not a signal of deviation one."""
    rewards = torch.full((6,), 0.81)
    rewards[2] = torch.nextafter(rewards[2], torch.tensor(1.0))
    assert grpo(rewards, torch.zeros(6, dtype=torch.int64)).tolist() == [0.0] * 6


def test_the_known_values():
    """[0, 1] gives +-0.7071 with and +-0.5 without the deviation; one 0 among seven 0.95 gives -0.95 leaving one out."""
    assert of_group(grpo, [0.0, 1.0]) == pytest.approx([-0.70710, 0.70710], abs=1e-5)
    assert of_group(grpo, [0.0, 1.0], norm_by_std=False) == [-0.5, 0.5]
    assert of_group(rloo, [0.0] + [0.95] * 7) == pytest.approx([-0.95] + [0.95 - 6 * 0.95 / 7] * 7, abs=1e-7)


def segment(trajectory, reward, *, group="g", mask=(1, 1)):
    return Segment([1], [2] * len(mask), list(mask), None, group, trajectory, reward)


def test_a_trajectory_counts_once_and_all_its_segments_share_its_advantage():
    """Three segments of one trajectory do not weigh three times in the mean, and each trained token gets the same number."""
    batch = Batch.from_segments(
        [segment("a", 1.0, mask=(1, 0, 1)), segment("a", 1.0), segment("a", 1.0), segment("b", 0.0)]
    )
    advantages = with_advantages(batch, "grpo", AdvantageOptions(norm_by_std=False)).advantages
    assert advantages is not None
    assert advantages.tolist() == [0, 0.5, 0, 0.5, 0, 0.5, 0.5, 0, 0.5, 0.5, 0, -0.5, -0.5]


def test_a_trajectory_without_a_trained_token_moves_nobody():
    """An empty or fully masked response has advantage 0 and does not enter its group's baseline."""
    with_dead = Batch.from_segments(
        [segment("a", 1.0), segment("b", 0.0), segment("c", 5.0, mask=(0, 0)), segment("d", 5.0, mask=())]
    )
    without = Batch.from_segments([segment("a", 1.0), segment("b", 0.0)])
    for name in ("grpo", "rloo"):
        got, expected = with_advantages(with_dead, name).advantages, with_advantages(without, name).advantages
        assert got is not None
        assert expected is not None
        assert torch.equal(got[: without.num_tokens], expected)
        assert not got[without.num_tokens :].any()


def test_a_batch_of_which_nothing_is_trained_has_no_advantage():
    """All rows masked: zeros, not an error and not NaN."""
    advantages = with_advantages(Batch.from_segments([segment("a", 1.0, mask=(0,))]), "grpo").advantages
    assert advantages is not None
    assert advantages.tolist() == [0.0, 0.0]


ESTIMATORS = (
    *("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "remax"),
    "gae",
)


@st.composite
def trajectories(draw):
    """(group, reward, baseline, segments); a segment is a list of (mask, value of the critic)."""
    token = st.tuples(st.integers(0, 1), st.floats(-2, 2))
    return [
        (
            draw(st.integers(0, 2)),
            draw(st.sampled_from([-1.0, 0.0, 0.25, 1.0])),
            draw(st.sampled_from([0.0, 0.5])),
            draw(st.lists(st.lists(token, max_size=5), min_size=1, max_size=3)),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


def batch_of(rows, order):
    """The batch of these trajectories, their segments in `order`: pairs of trajectory and segment number."""
    segments = [
        Segment(
            [1], [2] * len(rows[row][3][number]), [mask for mask, _ in rows[row][3][number]], None,
            f"g{rows[row][0]}", f"t{row}", rows[row][1],
        )
        for row, number in order
    ]  # fmt: skip
    batch = Batch.from_segments(segments)
    values = [value for row, number in order for value in (0.0, *(value for _, value in rows[row][3][number]))]
    baselines = [rows[int(name[1:])][2] for name in batch.trajectory_ids]
    return batch.with_columns(
        values=torch.tensor(values, dtype=torch.float64), baselines=torch.tensor(baselines, dtype=torch.float64)
    )


def whitened(numbers):
    """Mean 0 and variance 1 over all that are there."""
    if len(numbers) < 2 or max(numbers) - min(numbers) < 1e-6 * max(abs(number) for number in numbers):
        return [0.0] * len(numbers)
    mean, variance = statistics.fmean(numbers), statistics.variance(numbers)
    return [(number - mean) / math.sqrt(variance + 1e-8) for number in numbers]


def loops(name, rows, *, gamma, lam):
    """{(trajectory, segment, token): advantage} of every trained token, in plain loops."""
    chains = [
        [(row, number, place, value) for number, tokens in enumerate(row_segments)
         for place, (mask, value) in enumerate(tokens) if mask]
        for row, (_, _, _, row_segments) in enumerate(rows)
    ]  # fmt: skip
    counted = [row for row, chain in enumerate(chains) if chain]
    num_rewarded = sum(rows[row][1] != 0 for row in counted)
    advantages = {}
    for row in counted:
        group, reward, baseline, _ = rows[row]
        siblings = [other for other in counted if rows[other][0] == group]
        rewards = [rows[other][1] for other in siblings]
        alone, equal = len(siblings) == 1, len(siblings) > 1 and len(set(rewards)) == 1
        mean = 0.0 if alone else statistics.fmean(rewards)
        deviation = 1.0 if alone else statistics.stdev(rewards)
        outcome = 0.0
        if name == "grpo":
            outcome = (reward - mean) / (deviation + 1e-6)
        elif name == "grpo_passk" and not alone and row == siblings[rewards.index(max(rewards))]:
            outcome = (max(rewards) - sorted(rewards)[-2]) / (deviation + 1e-6)
        elif name == "rloo":
            outcome = reward - (0.0 if alone else (sum(rewards) - reward) / (len(rewards) - 1))
        elif name == "opo":
            lengths = [len(chains[other]) for other in siblings]
            weighted = sum(length * each for length, each in zip(lengths, rewards, strict=True)) / sum(lengths)
            outcome = reward - (0.0 if alone else weighted)
        elif name == "gpg":
            outcome = (reward - mean) * len(counted) / max(1, num_rewarded)
        elif name == "reinforce_plus_plus_baseline":
            outcome = reward - mean
        running = following = 0.0
        for step, (_, number, place, value) in enumerate(reversed(chains[row])):
            paid = reward if step == 0 else 0.0
            if name == "gae":
                running = paid + gamma * following - value + gamma * lam * running
                following = value
            elif name == "reinforce_plus_plus":
                running = paid + gamma * running
            elif name == "remax":
                running = reward - baseline
            else:
                running = 0.0 if equal else outcome
            advantages[row, number, place] = running
    if name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        advantages = dict(zip(advantages, whitened(list(advantages.values())), strict=True))
    return advantages


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=60)
@given(rows=trajectories(), random=st.randoms(use_true_random=False))
def test_every_estimator_is_its_loops(name, rows, random):
    """Groups of any size, equal rewards, empty and fully masked segments, tool tokens in the middle and at the end, several segments, and
    trajectories in any order in the batch."""
    places = list(range(len(rows)))
    random.shuffle(places)
    order = [(row, number) for row in places for number in range(len(rows[row][3]))]
    batch = batch_of(rows, order)
    advantages = with_advantages(batch, name, AdvantageOptions(gamma=0.9, lam=0.8)).advantages
    assert advantages is not None
    renumbered = [rows[row] for row in places]
    expected = loops(name, renumbered, gamma=0.9, lam=0.8)
    got = {}
    for place, (row, number) in enumerate(order):
        start = int(batch.cu_seqlens[place]) + 1
        for token, (mask, _) in enumerate(rows[row][3][number]):
            if mask:
                got[places.index(row), number, token] = advantages[start + token].item()
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert not advantages[~batch.loss_mask].any()


def test_tool_tokens_are_no_steps():
    """rewards [0, 0, 0, 1], values [.5, 9, 9, .5], mask [1, 0, 0, 1], gamma = lam = .9 gives [.355, -, -, .5]; a reward to go with
    gamma .5 over mask [1, 0, 1] is [.5, -, 1]; tool tokens behind the last trained one change nothing."""
    for tail in ((), (0, 0)):
        batch = Batch.from_segments([segment("a", 1.0, mask=(1, 0, 0, 1, *tail))])
        batch = batch.with_columns(values=torch.tensor([0, 0.5, 9, 9, 0.5, *(9.0 for _ in tail)], dtype=torch.float64))
        got = with_advantages(batch, "gae", AdvantageOptions(gamma=0.9, lam=0.9, whiten=False))
        assert got.advantages is not None
        assert got.returns is not None
        assert got.advantages.tolist() == pytest.approx([0, 0.355, 0, 0, 0.5, *tail])
        assert got.returns.tolist() == pytest.approx([0, 0.855, 0, 0, 1.0, *tail])
    batch = Batch.from_segments([segment("a", 1.0, mask=(1, 0, 1))])
    got = with_advantages(batch, "reinforce_plus_plus", AdvantageOptions(gamma=0.5, whiten=False)).advantages
    assert got is not None
    assert got.tolist() == [0, 0.5, 0, 1.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_to_train_on_is_no_error(name):
    """A batch of which no token is trained on has advantages of 0 under every estimator."""
    batch = Batch.from_segments([segment("a", 1.0, mask=(0,)), segment("b", 2.0, mask=())])
    batch = batch.with_columns(values=torch.zeros(3), baselines=torch.zeros(2))
    advantages = with_advantages(batch, name).advantages
    assert advantages is not None
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_reward_on_tokens_flows_through_every_estimator(name):
    """What is taken off token by token counts: an outcome estimator sees the sum, the others each token."""
    batch = Batch.from_segments([segment("a", 1.0), segment("b", 1.0, mask=(1, 0, 1)), segment("c", 1.0)])
    rewards = torch.tensor([0, -0.5, 1, 0, 0, 0, 1, 0, -0.25, 1], dtype=torch.float64)
    batch = batch.with_columns(values=torch.zeros(10), baselines=torch.zeros(3), token_rewards=rewards)
    got = with_advantages(batch, name, AdvantageOptions(whiten=False)).advantages
    assert got is not None
    if name in ("gae", "reinforce_plus_plus", "remax"):
        assert got.tolist() == pytest.approx([0, 0.5, 1, 0, 1, 0, 1, 0, 0.75, 1])
    else:
        outcomes = torch.tensor([0.5, 1.0, 0.75], dtype=torch.float64)
        sums = dataclasses.replace(batch, token_rewards=None, rewards=outcomes)
        expected = with_advantages(sums, name, AdvantageOptions(whiten=False)).advantages
        assert expected is not None
        assert torch.equal(got, expected)


def test_what_an_estimator_needs_is_known_and_asked_for():
    """gae needs a critic and remax a greedy baseline; without the column they say so."""
    assert [name for name in ESTIMATORS if needs_critic(name)] == ["gae"]
    assert [name for name in ESTIMATORS if needs_baseline(name)] == ["remax"]
    batch = Batch.from_segments([segment("a", 1.0)])
    with pytest.raises(BatchError, match="values must be set for gae"):
        with_advantages(batch, "gae")
    with pytest.raises(BatchError, match="values must be finite, got nan; the critic has diverged"):
        with_advantages(batch.with_columns(values=torch.full((3,), math.nan)), "gae")
    with pytest.raises(BatchError, match="baselines must be set for remax"):
        with_advantages(batch, "remax")


def test_options_out_of_range_are_refused():
    """A discount above 1 or that is no number."""
    for wrong in ({"gamma": 1.5}, {"lam": -0.1}, {"gamma": math.nan}):
        with pytest.raises(BatchError, match=f"{next(iter(wrong))} must lie in"):
            AdvantageOptions(**wrong)


def test_an_unknown_estimator_lists_the_known():
    """A misspelled name is answered with the names that exist."""
    with pytest.raises(AlgorithmError, match=r"grpo, .*rloo, got 'gpro'"):
        advantage_estimator("gpro")


def test_an_own_estimator_is_registered_checked_and_masked():
    """What a user registers is found by name; a name is given once; what it returns outside the mask is dropped."""
    register_advantage_estimator("ones_for_test")(lambda batch, options: torch.full((batch.num_tokens,), 1.0))
    batch = Batch.from_segments([segment("a", 1.0, mask=(1, 0))])
    advantages = with_advantages(batch, "ones_for_test").advantages
    assert advantages is not None
    assert advantages.tolist() == [0.0, 1.0, 0.0]
    with pytest.raises(AlgorithmError, match="must be unique"):
        register_advantage_estimator("ones_for_test")(lambda batch, options: batch.rewards)
    register_advantage_estimator("short_for_test")(lambda batch, options: batch.rewards)
    with pytest.raises(BatchError, match="one finite number a token"):
        with_advantages(batch, "short_for_test")


def test_an_own_estimator_comes_from_a_file(tmp_path):
    """file.py:function runs as it is; one that was registered there keeps what it said it needs; what is not there is named."""
    file = tmp_path / "my_algorithms.py"
    file.write_text(
        "from ostinato_trainer.algorithms.advantages import register_advantage_estimator\n"
        "def twos(batch, options):\n    return batch.loss_mask.double() * 2\n"
        "@register_advantage_estimator('tested_critical', needs_critic=True)\n"
        "def critical(batch, options):\n    return batch.loss_mask.double()\n"
        "number = 3\n"
    )
    batch = Batch.from_segments([segment("a", 1.0, mask=(1, 0))])
    advantages = with_advantages(batch, f"{file}:twos").advantages
    assert advantages is not None
    assert advantages.tolist() == [0.0, 2.0, 0.0]
    assert needs_critic(f"{file}:critical")
    assert not needs_critic(f"{file}:twos")
    for wrong, message in (
        (f"{file}:nothing", "got 'nothing'"),
        (f"{file}:number", "must name a function"),
        (":f", "file.py:function"),
    ):
        with pytest.raises(AlgorithmError, match=message):
            advantage_estimator(wrong)


def test_bad_rewards_are_refused():
    """A reward that is not finite, or vectors of two lengths, are errors."""
    with pytest.raises(BatchError, match="rewards must be finite, got nan"):
        grpo(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(BatchError, match="vectors of one length"):
        rloo(torch.tensor([0.0, 1.0]), torch.tensor([0]))


@pytest.mark.parametrize("returned", [None, [0.0, 0.0, 0.0], {"advantages": 1}])
def test_an_own_estimator_that_returns_no_tensor_is_refused(returned):
    """What is neither a tensor nor an Estimate gets an error that names the estimator and the type."""
    kind = type(returned).__name__
    register_advantage_estimator(f"{kind}_for_test")(lambda batch, options: returned)
    batch = Batch.from_segments([segment("a", 1.0, mask=(1, 0))])
    with pytest.raises(BatchError, match=f"'{kind}_for_test' must return a tensor or an Estimate, got {kind}"):
        with_advantages(batch, f"{kind}_for_test")
