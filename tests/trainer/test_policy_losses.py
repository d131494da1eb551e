"""The clipped loss against a plain reference in value and gradient, and what the loss function of a micro-batch does with it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.aggregation import with_loss_weights
from ostinato_trainer.backend import MicroBatchOutput
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import AlgorithmError, BatchError
from ostinato_trainer.kl import kl_estimate
from ostinato_trainer.policy_losses import PolicyLossOptions, policy_loss, policy_loss_fn, vanilla
from ostinato_trainer.segments import Segment

OPTIONS = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)


def scalar(new, old, advantage):
    """PPO with dual clip for one token, in Python floats."""
    ratio = math.exp(new - old)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28))
    return min(loss, -advantage * 3.0) if advantage < 0 else loss


@settings(deadline=None)
@given(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3))
def test_vanilla_is_its_formula(new, old, advantage):
    """Value of each token's loss in float64."""
    tensors = [torch.tensor([value], dtype=torch.float64) for value in (new, old, advantage)]
    assert vanilla(*tensors, OPTIONS).losses.item() == pytest.approx(scalar(new, old, advantage), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "slope"),
    [
        (0.1, 1.0, -math.exp(0.1)),  # inside: the gradient of -A r
        (0.5, 1.0, 0.0),  # above 1 + high with A > 0: clipped
        (-0.5, 1.0, -math.exp(-0.5)),  # below with A > 0: not clipped
        (-0.5, -1.0, 0.0),  # below 1 - low with A < 0: clipped
        (0.5, -1.0, math.exp(0.5)),  # above with A < 0: not clipped
        (2.0, -1.0, 0.0),  # r = 7.4 above c = 3 with A < 0: dual clip
        (100.0, -1.0, 0.0),
        (100.0, 1.0, 0.0),
        (-100.0, 1.0, 0.0),
    ],
)
def test_gradients_by_case(log_ratio, advantage, slope):
    """Where the clip holds the gradient is exactly 0, elsewhere that of -A r, and huge ratios stay finite."""
    new = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    tokens = vanilla(new, torch.zeros(1).double(), torch.tensor([advantage]).double(), OPTIONS)
    tokens.losses.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(slope, abs=1e-12)
    assert torch.isfinite(tokens.losses).all()


def test_clip_fractions_tell_the_clips_apart():
    """A ratio above the upper bound is clipped only where the advantage is positive; the dual clip only where it is negative."""
    new, old = torch.tensor([0.5, 0.5, 2.0, 0.0]), torch.zeros(4)
    tokens = vanilla(new, old, torch.tensor([1.0, -1.0, -1.0, 1.0]), OPTIONS)
    assert tokens.clipped.tolist() == [True, False, False, False]
    assert tokens.clipped_lower.tolist() == [False, False, True, False]


def ready_batch(**columns):
    batch = Batch.from_segments(
        [Segment([1], [2, 3, 4], [1, 0, 1], None, "g", "a", 1.0), Segment([1], [2, 2], [1, 1], None, "g", "b", 0.0)]
    )
    batch = batch.with_columns(advantages=torch.tensor([0, 1.0, 0, 1.0, 0, -1.0, -1.0]).double(), **columns)
    return with_loss_weights(batch, "token-mean")


def test_on_policy_the_gradient_is_the_policy_gradient():
    """Without old log-probabilities the ratio is 1: the loss is minus the mean advantage, the gradient minus A / T."""
    new = torch.tensor([0.0, -1.0, 0, -2.0, 0, -1.0, -3.0]).double().requires_grad_()
    batch = ready_batch()
    loss, metrics = policy_loss_fn(OPTIONS)(MicroBatchOutput(new, None), batch)
    loss.backward()
    assert batch.advantages is not None
    assert new.grad is not None
    assert torch.allclose(new.grad, -batch.advantages / 4)
    assert float(metrics["actor/ppo_kl"]) == 0.0
    assert float(metrics["actor/pg_loss"]) == pytest.approx(0.0)


def test_the_terms_add_up():
    """Policy, entropy and KL terms carry their coefficients, in value and gradient, all averaged over the mini-batch."""
    new = torch.tensor([0.0, -1.0, 0, -2.0, 0, -1.0, -3.0]).double().requires_grad_()
    entropy = (new * 2).clone()
    ref = torch.tensor([0.0, -1.5, 0, -1.0, 0, -1.0, -2.0]).double()
    batch = ready_batch(ref_log_probs=ref)
    options = PolicyLossOptions(kl_loss_coef=0.3, kl_loss_type="k2", entropy_coeff=0.1)
    loss, metrics = policy_loss_fn(options)(MicroBatchOutput(new, entropy), batch)
    mask = batch.loss_mask
    kl = kl_estimate(new, ref, "k2")[mask].mean()
    expected = 0.3 * kl - 0.1 * entropy[mask].mean()
    assert loss.item() == pytest.approx(expected.item())
    assert float(metrics["actor/kl_loss"]) == pytest.approx(kl.item())
    assert float(metrics["actor/entropy"]) == pytest.approx(entropy[mask].mean().item())


def test_rubbish_outside_the_mask_reaches_no_gradient():
    """NaN and infinity in every masked slot of every column leave loss, metrics and gradients as they are without."""
    clean = torch.tensor([0.0, -1.0, 0, -2.0, 0, -1.0, -3.0]).double()
    results = []
    for rubbish in (0.0, float("nan"), float("inf")):
        mask = ready_batch().loss_mask
        dirty = [torch.where(mask, column, rubbish) for column in (clean, clean - 0.1, clean + 0.2)]
        new = dirty[0].clone().requires_grad_()
        batch = ready_batch(old_log_probs=dirty[1], ref_log_probs=dirty[2])
        options = PolicyLossOptions(kl_loss_coef=0.3, entropy_coeff=0.0)
        loss, metrics = policy_loss_fn(options)(MicroBatchOutput(new, None), batch)
        loss.backward()
        assert new.grad is not None
        results.append((loss.item(), new.grad.tolist(), {name: float(value) for name, value in metrics.items()}))
    assert results[0] == results[1] == results[2]


def test_what_is_missing_is_named():
    """No advantages, no entropy under an entropy bonus, no reference under a KL term: each says what to compute."""
    output = MicroBatchOutput(torch.zeros(7), None)
    bare = with_loss_weights(ready_batch().with_columns(advantages=None), "token-mean")
    with pytest.raises(BatchError, match="advantages must be set"):
        policy_loss_fn(OPTIONS)(output, bare)
    with pytest.raises(BatchError, match="entropy must be computed"):
        policy_loss_fn(PolicyLossOptions(entropy_coeff=0.1))(output, ready_batch())
    with pytest.raises(BatchError, match="ref_log_probs must be set"):
        policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.1))(output, ready_batch())


def test_bad_options_are_refused():
    """Clips below 0, a dual clip of 1 or less, an unknown KL or loss name."""
    for bad in ({"clip_ratio": -0.1}, {"clip_ratio_high": float("nan")}, {"clip_ratio_c": 1.0}):
        with pytest.raises(BatchError, match=f"{next(iter(bad))} must be"):
            PolicyLossOptions(**bad)
    with pytest.raises(AlgorithmError, match="kl_loss_type"):
        PolicyLossOptions(kl_loss_type="k9")
    with pytest.raises(AlgorithmError, match="vanilla, got 'gspo'"):
        policy_loss("gspo")
