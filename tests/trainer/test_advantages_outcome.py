"""Advantages out of one reward a trajectory, against plain loops in float64; groups of one and groups that are flat."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.algorithms.advantages_outcome import gpg, group_centred, grpo, grpo_passk, opo, rloo
from ostinato_trainer.errors import BatchError

TRAJECTORIES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 0.0, 0.2, 0.25, 1.0, 3.5]), st.integers(1, 9)),
    min_size=1,
    max_size=16,
)


def loops(name, trajectories, *, norm_by_std=True):
    """Each estimator in the words of its paper, one trajectory after the other."""
    advantages = []
    for place, (group, reward, _) in enumerate(trajectories):
        members = [other for other, (of, _, _) in enumerate(trajectories) if of == group]
        rewards = [trajectories[other][1] for other in members]
        if len(members) > 1 and max(rewards) == min(rewards):
            advantages.append(0.0)
            continue
        alone = len(members) == 1
        mean = 0.0 if alone else sum(rewards) / len(rewards)
        deviation = 1.0 if alone else math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        if name == "group_centred":
            advantages.append(reward - mean)
        elif name == "opo":
            lengths = [trajectories[other][2] for other in members]
            weighted = sum(length * r for length, r in zip(lengths, rewards, strict=True)) / sum(lengths)
            advantages.append(reward - (0.0 if alone else weighted))
        elif name == "gpg":
            num_rewarded = sum(1 for _, other, _ in trajectories if other != 0)
            advantages.append((reward - mean) * len(trajectories) / max(1, num_rewarded))
        else:
            best, second = ([*sorted(rewards, reverse=True), None])[:2]
            is_best = not alone and place == members[rewards.index(best)]
            lead = best - second if is_best else 0.0
            advantages.append(lead / (deviation + 1e-6) if norm_by_std else lead)
    return advantages


def columns(trajectories):
    groups, rewards, lengths = (list(column) for column in zip(*trajectories, strict=True))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)


@settings(deadline=None)
@given(TRAJECTORIES, st.booleans())
def test_each_is_its_formula(trajectories, norm_by_std):
    """Centred, OPO, GPG and pass@k agree with loops over groups of any size, of one and flat ones too."""
    rewards, groups, lengths = columns(trajectories)
    for name, got in (
        ("group_centred", group_centred(rewards, groups)),
        ("opo", opo(rewards, groups, lengths)),
        ("gpg", gpg(rewards, groups)),
    ):
        assert got.tolist() == pytest.approx(loops(name, trajectories), abs=1e-12)
    got = grpo_passk(rewards, groups, norm_by_std=norm_by_std).tolist()
    assert got == pytest.approx(loops("grpo_passk", trajectories, norm_by_std=norm_by_std), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(TRAJECTORIES, st.randoms(use_true_random=False))
def test_the_order_of_trajectories_does_not_matter(trajectories, random):
    """Any order gives each trajectory the same advantage; pass@k is left out, whose first best is the one that leads."""
    order = list(range(len(trajectories)))
    random.shuffle(order)
    shuffled = [trajectories[place] for place in order]
    for estimate in (grpo, rloo, gpg, group_centred):
        rewards, groups, _ = columns(trajectories)
        plain = estimate(rewards, groups).tolist()
        again = estimate(*columns(shuffled)[:2]).tolist()
        assert again == pytest.approx([plain[place] for place in order], abs=1e-12)


def test_the_known_values():
    """By hand: OPO's baseline leans to the long one, GPG makes up for zeros, pass@k pays the lead."""
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    assert opo(rewards, groups, torch.tensor([3, 1])).tolist() == [0.25, -0.75]
    assert gpg(rewards, groups).tolist() == [1.0, -1.0]
    assert grpo_passk(torch.tensor([0.5, 2.0, 1.5]), torch.tensor([7, 7, 7]), norm_by_std=False).tolist() == [0, 0.5, 0]


@pytest.mark.parametrize("rewards", [[0.81] * 5, [0.1] * 3, [1e6 / 3] * 5, [0.0] * 4])
def test_equal_rewards_give_exactly_zero(rewards):
    """No estimator of groups makes a difference out of rounding, in float32 or float64."""
    for dtype in (torch.float32, torch.float64):
        tensor, groups = torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.int64)
        lengths = torch.arange(1, len(rewards) + 1)
        for got in (group_centred(tensor, groups), opo(tensor, groups, lengths), gpg(tensor, groups)):
            assert got.tolist() == [0.0] * len(rewards)
        assert grpo_passk(tensor, groups).tolist() == [0.0] * len(rewards)


def test_no_trajectory_at_all_is_no_error():
    """Empty vectors in, empty vectors out."""
    nothing, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for got in (grpo(nothing, nobody), rloo(nothing, nobody), gpg(nothing, nobody), grpo_passk(nothing, nobody)):
        assert got.tolist() == []


def test_rewards_at_the_edge_of_the_numbers_are_handled_or_refused():
    """1e300 has a finite advantage without the division; infinity is refused."""
    groups = torch.tensor([0, 0])
    assert torch.isfinite(rloo(torch.tensor([1e300, -1e300], dtype=torch.float64), groups)).all()
    with pytest.raises(BatchError, match="rewards must be finite, got inf"):
        opo(torch.tensor([math.inf, 0.0]), groups, torch.tensor([1, 1]))
