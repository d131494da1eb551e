"""Into how many segments a trajectory is cut makes no difference to what is learned from it."""

import pytest
import torch

from ostinato_trainer.algorithms.advantages import with_advantages
from ostinato_trainer.algorithms.aggregation import LossAggMode, aggregate, with_loss_weights
from ostinato_trainer.batch import Batch
from ostinato_trainer.segments import Segment

PROMPT = [1, 2, 3]
RESPONSE = [11, 12, 50, 13, 51, 52, 14, 15, 53, 16, 54, 17]
SAMPLED = [1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1]
LOGPROBS = [-0.1 * place for place in range(len(RESPONSE))]
CUTS = {1: [0], 2: [0, 3], 5: [0, 3, 6, 9, 11]}
"""Where segments begin: each with a sampled token, its prompt being all that was there before."""


def cut(num, *, trajectory, reward):
    """The segments of one trajectory; what was sampled in earlier ones is context of the later ones."""
    starts = CUTS[num]
    return [
        Segment(
            PROMPT + RESPONSE[:start],
            RESPONSE[start:end],
            SAMPLED[start:end],
            LOGPROBS[start:end],
            "g",
            trajectory,
            reward,
        )
        for start, end in zip(starts, [*starts[1:], len(RESPONSE)], strict=True)
    ]


def batch_of(*nums):
    """A group of trajectories with rewards 0, 1, 2, ..., each cut into so many segments."""
    segments = [
        each for place, num in enumerate(nums) for each in cut(num, trajectory=f"t{place}", reward=float(place))
    ]
    return Batch.from_segments(segments)


def trained(batch, values):
    """Values of the trained tokens, sorted by trajectory and id."""
    places = batch.loss_mask.nonzero().flatten().tolist()
    return sorted((int(batch.token_trajectory[at]), int(batch.token_ids[at]), float(values[at])) for at in places)


@pytest.mark.parametrize("num", [2, 5])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("mode", list(LossAggMode))
def test_cuts_change_neither_baseline_nor_advantage_nor_denominator(num, estimator, mode):
    """A trajectory in 1, 2 or 5 segments gives each of its tokens the same advantage and weight, once; its siblings, too."""
    whole, parts = batch_of(1, 1, 1), batch_of(1, num, 1)
    found = []
    for batch in (whole, parts):
        batch = with_loss_weights(with_advantages(batch, estimator), mode, loss_scale_factor=7.0)
        assert batch.advantages is not None
        assert batch.loss_weights is not None
        found.append((trained(batch, batch.advantages), trained(batch, batch.loss_weights)))
    assert found[0] == found[1]
    assert len(found[1][0]) == 3 * sum(SAMPLED)


@pytest.mark.parametrize("num", [1, 2, 5])
def test_a_shared_prefix_is_trained_once(num):
    """The loss of tokens that later segments show again is that of the tokens where they were sampled, and no other."""
    batch = with_loss_weights(batch_of(num), "token-mean")
    losses = torch.where(batch.loss_mask, batch.token_ids.double(), torch.tensor(1e6, dtype=torch.float64))
    ids = [token for token, mask in zip(RESPONSE, SAMPLED, strict=True) if mask]
    assert aggregate(losses, batch).item() == pytest.approx(sum(ids) / len(ids), rel=1e-12)
