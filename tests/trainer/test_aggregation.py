"""The five aggregations: their value, and gradients that no split, order or masked rubbish can change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.algorithms.aggregation import (
    LossAggMode,
    aggregate,
    loss_weights,
    token_average,
    with_loss_weights,
)
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import AlgorithmError, BatchError
from ostinato_trainer.segments import Segment

FACTOR = 7.0


def batch_of(masks, trajectories=None):
    names = trajectories or [f"t{place}" for place in range(len(masks))]
    return Batch.from_segments(
        [
            Segment([1], [2] * len(mask), list(mask), None, "g", name, 0.0)
            for mask, name in zip(masks, names, strict=True)
        ]
    )


def expected_value(batch, losses, mode):
    """Five plain lines over trajectories, in float64."""
    per_trajectory = [losses[(batch.token_trajectory == t) & batch.loss_mask] for t in range(batch.num_trajectories)]
    per_trajectory = [values for values in per_trajectory if len(values)]
    total, count = torch.cat(per_trajectory), len(per_trajectory)
    if mode == "token-mean":
        return total.mean()
    if mode == "token-sum":
        return total.sum()
    if mode == "seq-mean-token-mean":
        return sum(values.mean() for values in per_trajectory) / count
    return total.sum() / count / (FACTOR if mode.endswith("norm") else 1.0)


@pytest.mark.parametrize("mode", list(LossAggMode))
def test_each_mode_is_its_definition(mode):
    """Sequences are trajectories, over all their segments; a trajectory without a trained token is not counted."""
    batch = batch_of([(1, 0, 1), (1,), (1, 1, 1, 1), (0, 0), ()], ["a", "b", "a", "c", "d"])
    losses = torch.randn(batch.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = aggregate(losses, with_loss_weights(batch, mode, loss_scale_factor=FACTOR))
    assert got.item() == pytest.approx(expected_value(batch, losses, mode).item(), rel=1e-12)


def test_token_mean_of_one_and_three_tokens():
    """Losses 1 on one token and 0 on three are 0.25 in every layout; a mean of means would say 0.5."""
    batch = with_loss_weights(batch_of([(1,), (1, 1, 1)]), "token-mean")
    losses = torch.tensor([0, 1.0, 0, 0, 0, 0])
    whole = aggregate(losses, batch)
    parts = [aggregate(losses[:2], batch.select([0])), aggregate(losses[2:], batch.select([1]))]
    assert (whole.item(), sum(parts).item()) == (0.25, 0.25)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=7),
    st.sampled_from(list(LossAggMode)),
    st.randoms(use_true_random=False),
)
def test_any_split_in_any_order_gives_the_same_loss_and_gradient(masks, mode, random):
    """In float64 the micro-batches' losses and gradients add up to the mini-batch's, whichever way it is cut."""
    batch = with_loss_weights(
        batch_of(masks, [f"t{place // 2}" for place in range(len(masks))]), mode, loss_scale_factor=FACTOR
    )
    values = torch.linspace(-2, 3, batch.num_tokens, dtype=torch.float64)
    whole = values.clone().requires_grad_()
    loss = aggregate(whole.exp() * whole, batch)
    loss.backward()
    places = random.sample(range(batch.num_sequences), batch.num_sequences)
    cut = random.randint(0, len(places))
    pieces = values.clone().requires_grad_()
    total = 0.0
    for chosen in filter(None, (places[:cut], places[cut:])):
        taken = pieces[batch.token_positions(torch.tensor(chosen))]
        part = aggregate(taken.exp() * taken, batch.select(chosen))
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-12, abs=1e-14)
    assert whole.grad is not None
    assert pieces.grad is not None
    assert torch.allclose(whole.grad, pieces.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", list(LossAggMode))
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf")])
def test_masked_rubbish_reaches_nothing(mode, rubbish):
    """NaN or infinity at a masked token or in a fully masked row changes no value, and its own gradient is exactly 0."""
    batch = with_loss_weights(batch_of([(1, 0, 1), (0, 0)]), mode, loss_scale_factor=FACTOR)
    clean = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    dirty = clean.clone()
    dirty[~batch.loss_mask] = rubbish
    dirty.requires_grad_()
    loss = aggregate(dirty, batch)
    loss.backward()
    assert loss.item() == aggregate(clean, batch).item()
    assert dirty.grad is not None
    assert not dirty.grad[~batch.loss_mask].any()
    assert torch.isfinite(dirty.grad).all()


def test_sum_and_mean_around_a_masked_nan():
    """[1, NaN, 3] under [1, 0, 1]: sum 4, mean 2."""
    losses = torch.tensor([0.0, 1.0, float("nan"), 3.0])
    assert aggregate(losses, with_loss_weights(batch_of([(1, 0, 1)]), "token-sum")).item() == 4.0
    assert aggregate(losses, with_loss_weights(batch_of([(1, 0, 1)]), "token-mean")).item() == 2.0


def test_nan_at_a_trained_token_still_shows():
    """The mask hides what is masked and nothing else."""
    batch = with_loss_weights(batch_of([(1, 1)]), "token-mean")
    assert aggregate(torch.tensor([0.0, float("nan"), 1.0]), batch).isnan()
    assert token_average(torch.tensor([0.0, float("nan"), 1.0]), batch).isnan()


def test_all_masked_is_zero():
    """A mini-batch without a trained token has loss 0 under every mode, not 0 / 0."""
    batch = batch_of([(0, 0), ()])
    for mode in LossAggMode:
        weighted = with_loss_weights(batch, mode, loss_scale_factor=FACTOR)
        assert aggregate(torch.ones(batch.num_tokens), weighted).item() == 0.0
        assert token_average(torch.ones(batch.num_tokens), weighted).item() == 0.0


def test_averages_of_parts_add_up():
    """A metric's parts sum to the mean over the mini-batch's trained tokens."""
    batch = with_loss_weights(batch_of([(1,), (1, 0, 1)]), "seq-mean-token-sum")
    values = torch.tensor([9, 1.0, 9, 4.0, 9, 7.0])
    parts = [token_average(values[:2], batch.select([0])), token_average(values[2:], batch.select([1]))]
    assert sum(parts).item() == pytest.approx(4.0)


def test_errors_say_what_to_do():
    """An unknown mode lists the known, the norm mode asks for its constant, and weights come before the split."""
    batch = batch_of([(1,)])
    with pytest.raises(AlgorithmError, match="token-mean, token-sum"):
        loss_weights(batch, "mean")
    with pytest.raises(BatchError, match=r"loss_scale_factor must be positive .* use data.max_response_length"):
        loss_weights(batch, "seq-mean-token-sum-norm")
    with pytest.raises(BatchError, match="call with_loss_weights"):
        aggregate(torch.zeros(2), batch)
