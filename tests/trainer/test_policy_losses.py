"""The policy losses against plain loops in value and gradient, and what the loss function of a micro-batch does with it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.algorithms import policy_losses
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.kl import kl_estimate
from ostinato_trainer.algorithms.policy_losses import (
    PolicyLossOptions,
    TokenLosses,
    needs_whole_trajectories,
    policy_loss,
    policy_loss_fn,
    register_policy_loss,
    vanilla,
)
from ostinato_trainer.backends.base import MicroBatchOutput
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import AlgorithmError, BatchError
from ostinato_trainer.segments import Segment

OPTIONS = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)


@pytest.fixture(autouse=True)
def names_of_their_own(monkeypatch):
    """What a test registers is gone after it, for every module of the process sees these names."""
    monkeypatch.setattr(policy_losses, "_losses", dict(policy_losses._losses))


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
    with pytest.raises(BatchError, match="tau_neg must be above 0, got 0"):
        PolicyLossOptions(tau_neg=0.0)
    with pytest.raises(AlgorithmError, match="vanilla, got 'ppo'"):
        policy_loss("ppo")


LOSSES = ("vanilla", "gspo", "cispo", "gpg", "sapo")
REFERENCE_OPTIONS = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28, tau_pos=1.0, tau_neg=1.05)


@st.composite
def trajectories(draw):
    """Trajectories of one to three segments; a token is (mask, new, old, advantage), a masked one holds rubbish."""
    small, huge = st.floats(-3, 0), st.sampled_from([0.0, -40.0, -200.0])
    token = st.tuples(
        st.integers(0, 1), st.one_of(small, small, small, huge), st.one_of(small, small, small, huge), st.floats(-2, 2)
    )
    return [draw(st.lists(st.lists(token, max_size=5), min_size=1, max_size=3)) for _ in range(draw(st.integers(1, 4)))]


def columns_of(rows):
    """The mini-batch, with the position of each token in its `values` column, and its log-probabilities."""
    segments = [
        Segment([1], [2] * len(tokens), [mask for mask, *_ in tokens], None, "g", f"t{row}", 1.0)
        for row, row_segments in enumerate(rows)
        for tokens in row_segments
    ]
    flat = [
        token for row_segments in rows for tokens in row_segments for token in ((0, math.nan, math.inf, 7.0), *tokens)
    ]
    new, old, advantages = (torch.tensor([token[part] for token in flat], dtype=torch.float64) for part in (1, 2, 3))
    batch = Batch.from_segments(segments)
    advantages = torch.where(batch.loss_mask, advantages, 0.0)
    return batch.with_columns(old_log_probs=old, advantages=advantages, values=torch.arange(len(flat)).double()), new


def loss_and_slope(name, new, old, advantage, mean):
    """A token's loss and its derivative with respect to `new`; `mean` is the log-ratio of its trajectory."""
    difference, limit = (mean, 10.0) if name == "gspo" else (new - old, 20.0)
    ratio = math.exp(min(max(difference, -math.inf if name == "gspo" else -limit), limit))
    moves = difference < limit and (name == "gspo" or difference > -limit)
    clipped = min(max(ratio, 0.8), 1.28)
    if name in ("vanilla", "gspo"):
        loss = max(-advantage * ratio, -advantage * clipped)
        slope = -advantage * ratio if moves and -advantage * ratio >= -advantage * clipped else 0.0
        return (
            (-advantage * 3.0, 0.0)
            if name == "vanilla" and advantage < 0 and loss > -advantage * 3.0
            else (loss, slope)
        )
    if name == "cispo":
        return -clipped * advantage * new, -clipped * advantage
    if name == "gpg":
        return -advantage * new, -advantage
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1.0 / (1.0 + math.exp(-min(tau * (ratio - 1.0), 700.0)))
    return -advantage * gate * 4.0 / tau, -advantage * 4.0 * gate * (1.0 - gate) * ratio if moves else 0.0


def reference(name, rows):
    """The sum of all token losses, and the derivative for every token, one after the other."""
    total, slopes = 0.0, []
    for row_segments in rows:
        trained = [token for segment in row_segments for token in segment if token[0]]
        mean = sum(new - old for _, new, old, _ in trained) / max(1, len(trained))
        for segment in row_segments:
            slopes.append(0.0)
            for mask, new, old, advantage in segment:
                loss, slope = loss_and_slope(name, new, old, advantage, mean) if mask else (0.0, 0.0)
                total += loss
                slopes.append(slope)
    return total, slopes


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=50)
@given(rows=trajectories())
def test_every_loss_is_its_loops(name, rows):
    """Value and gradient agree with plain floats in loops: empty and masked rows, several segments, tool tokens, ratios from e^-200 to e^200."""
    batch, log_probs = columns_of(rows)
    batch = with_loss_weights(batch, "token-sum")
    new = log_probs.clone().requires_grad_()
    loss, _ = policy_loss_fn(REFERENCE_OPTIONS, name)(MicroBatchOutput(new, None), batch)
    (gradient,) = torch.autograd.grad(loss, new)
    expected, slopes = reference(name, rows)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=25)
@given(
    rows=trajectories(),
    mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]),
    size=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
def test_no_split_and_no_order_changes_loss_or_gradient(name, rows, mode, size, random):
    """All micro-batches together give what the mini-batch gives, by count or by tokens, with weights, KL and entropy terms, in any order."""
    batch, log_probs = columns_of(rows)
    ones = torch.ones(batch.num_tokens, dtype=torch.float64)
    batch = batch.with_columns(
        ref_log_probs=log_probs - 0.3, rollout_is_weights=ones + 0.1 * torch.arange(batch.num_tokens) % 3
    )
    batch = with_loss_weights(batch, mode)
    loss_fn = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.1, kl_loss_type="k3+", entropy_coeff=0.01), name)
    whole = needs_whole_trajectories(name)
    longest = int(batch.sequence_lengths.max())
    results = []
    for parts in (
        [batch],
        batch.split_by_count(size, whole_trajectories=whole),
        batch.split_by_tokens(longest * size, whole_trajectories=whole),
        batch.split_by_tokens(longest * size, padded=False, whole_trajectories=whole),
    ):
        random.shuffle(parts)
        theta = log_probs.clone().requires_grad_()
        total, metrics = 0.0, {}
        for part in parts:
            assert part.values is not None
            new = theta[part.values.long()]
            loss, found = loss_fn(MicroBatchOutput(new, 2 * new), part)
            loss.backward()
            total += loss.item()
            metrics = {key: metrics.get(key, 0.0) + float(value) for key, value in found.items()}
        assert theta.grad is not None
        results.append((total, theta.grad.clone(), metrics))
    for total, gradient, metrics in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-9, abs=1e-9)
        assert torch.allclose(gradient, results[0][1], rtol=1e-9, atol=1e-12)
        assert metrics == pytest.approx(results[0][2], rel=1e-9, abs=1e-6)


def test_a_sequence_is_a_trajectory_with_all_its_segments():
    """GSPO's ratio is the mean over the trained tokens of both segments, tool tokens not counted; its neighbour has its own."""
    segments = [
        Segment([1], [2, 3], [1, 0], None, "g", "a", 1.0),
        Segment([1], [2], [1], None, "g", "b", 1.0),
        Segment([1], [2, 2], [0, 1], None, "g", "a", 1.0),
    ]
    batch = Batch.from_segments(segments)
    new = torch.tensor([0, 0.02, 9, 0, 0.1, 0, 9, 0.04], dtype=torch.float64)
    advantages = torch.where(batch.loss_mask, 1.0, 0.0).double()
    batch = with_loss_weights(batch.with_columns(old_log_probs=torch.zeros(8), advantages=advantages), "token-sum")
    loss, _ = policy_loss_fn(PolicyLossOptions(), "gspo")(MicroBatchOutput(new.requires_grad_(), None), batch)
    loss.backward()
    assert loss.item() == pytest.approx(-2 * math.exp(0.03) - math.exp(0.1))
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0, -math.exp(0.03), 0, 0, -math.exp(0.1), 0, 0, -math.exp(0.03)])


def test_weights_multiply_the_policy_term_alone():
    """Importance weights scale policy losses and their gradients, not the KL term; what stands outside the mask stays out."""
    new = torch.tensor([0.0, -1.0, 0, -2.0, 0, -1.0, -3.0]).double().requires_grad_()
    weights = torch.tensor([math.inf, 2.0, math.nan, 0.0, 1.0, 0.5, 1.0]).double()
    batch = ready_batch(rollout_is_weights=weights, ref_log_probs=new.detach() - 1.0)
    loss, metrics = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.5, kl_loss_type="k1"))(
        MicroBatchOutput(new, None), batch
    )
    loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0, -2 / 4 + 0.5 / 4, 0, 0.5 / 4, 0, 0.5 / 4 + 0.5 / 4, 1 / 4 + 0.5 / 4])
    assert float(metrics["actor/pg_loss"]) == pytest.approx((-2.0 + 0.5 + 1.0) / 4)


def test_an_own_loss_is_registered_by_name():
    """A user's loss sees the micro-batch; its name is given once; it says whether it needs whole trajectories."""

    def plain(log_probs, old_log_probs, batch, options):
        nowhere = torch.zeros_like(batch.loss_mask)
        return TokenLosses(-batch.advantages * log_probs, torch.zeros_like(log_probs), nowhere, nowhere)

    register_policy_loss("plain_for_test", whole_trajectories=True)(plain)
    assert policy_loss("plain_for_test") is plain
    assert needs_whole_trajectories("plain_for_test")
    assert not needs_whole_trajectories("vanilla")
    with pytest.raises(AlgorithmError, match="must be unique, got 'plain_for_test' twice"):
        register_policy_loss("plain_for_test")(plain)


def test_an_own_loss_comes_from_a_file(tmp_path):
    """file.py:function is a loss; a file that is not there is named with the key."""
    file = tmp_path / "my_losses.py"
    file.write_text("def mine(log_probs, old_log_probs, batch, options):\n    return None\n")
    assert policy_loss(f"{file}:mine").__name__ == "mine"
    assert not needs_whole_trajectories(f"{file}:mine")
    with pytest.raises(AlgorithmError, match=r"policy_loss\.loss_mode.* must be an existing Python file"):
        policy_loss(f"{tmp_path}/none.py:mine")


@pytest.mark.parametrize("what", ["tensor", "nothing", "sum", "column", "metric"])
def test_an_own_loss_that_is_not_one_of_tokens_is_refused(what):
    """A sum instead of one loss a token would be spread over the tokens; it and other types get an error that names the loss."""

    def own(new, old, batch, options):
        none = torch.zeros_like(new, dtype=torch.bool)
        losses = {"sum": -new.sum(), "column": -new[:, None]}.get(what, -new)
        kl = (old - new).mean() if what == "metric" else old - new
        return {"tensor": -new, "nothing": None}.get(what, TokenLosses(losses, kl, none, none))

    register_policy_loss(f"wrong_{what}_for_test")(own)
    batch = Batch.from_segments([Segment([1], [2, 3], [1, 1], None, "g", "t", 1.0)])
    batch = with_loss_weights(batch.with_columns(advantages=torch.ones(3, dtype=torch.float64)), "token-mean")
    loss_fn = policy_loss_fn(OPTIONS, f"wrong_{what}_for_test")
    with pytest.raises(AlgorithmError, match=f"wrong_{what}_for_test.* must "):
        loss_fn(MicroBatchOutput(log_probs=torch.zeros(3, requires_grad=True), entropy=None), batch)
