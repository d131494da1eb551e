"""Importance weights, rejection and their metrics against plain loops; a log-probability that is unknown is counted, never taken for a ratio of 1."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.algorithms.rollout_correction import correct_rollout, sampler_log_probs
from ostinato_trainer.backends.base import MicroBatchOutput
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.algorithm import RolloutCorrectionConfig
from ostinato_trainer.errors import BatchError
from ostinato_trainer.segments import Segment

RULES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
LOG_PROB = st.one_of(st.floats(-3, 0), st.floats(-3, 0), st.sampled_from([-0.5, -30.0, -200.0]))


def log_prob_rows():
    """Trajectories of segments of tokens (mask, policy, sampler or None where it is unknown)."""
    token = st.tuples(st.integers(0, 1), LOG_PROB, st.one_of(LOG_PROB, LOG_PROB, LOG_PROB, st.none()))
    return st.lists(st.lists(st.lists(token, max_size=5), min_size=1, max_size=2), min_size=1, max_size=4)


def batch_of(rows):
    """The batch, with rubbish of the policy wherever nothing is trained on."""
    segments = [
        Segment(
            [1], [2] * len(tokens), [mask for mask, *_ in tokens],
            [math.nan if sampler is None else sampler for _, _, sampler in tokens], "g", f"t{row}", 1.0,
        )
        for row, row_segments in enumerate(rows)
        for tokens in row_segments
    ]  # fmt: skip
    policy = [
        p
        for segments_ in rows
        for tokens in segments_
        for p in (math.inf, *(t[1] if t[0] else math.nan for t in tokens))
    ]
    return Batch.from_segments(segments).with_columns(old_log_probs=torch.tensor(policy, dtype=torch.float64))


def known_of(rows):
    """Per trajectory the log-ratios policy - sampler of the trained tokens whose sampler is known, as the batch stores them."""
    single = [
        [(p, torch.tensor(s).item()) for tokens in segments for mask, p, s in tokens if mask and s is not None]
        for segments in rows
    ]
    return [[p - s for p, s in pairs] for pairs in single], single


def held(value):
    return min(max(value, -20.0), 20.0)


def expected_weights(rows, level, lower, upper):
    """One weight a token of the batch, in loops."""
    ratios, _ = known_of(rows)
    weights = []
    for row, segments in enumerate(rows):
        whole, count = math.exp(held(sum(ratios[row]))), iter(ratios[row])
        for tokens in segments:
            weights.append(1.0)
            for mask, _, sampler in tokens:
                if not mask or (sampler is None and (level == "token" or not ratios[row])):
                    weights.append(1.0)
                    continue
                mine = 0.0 if sampler is None else next(count)
                ratio = whole if level == "sequence" else math.exp(held(mine))
                weights.append(min(ratio, upper) if lower is None else ratio if lower <= ratio <= upper else 0.0)
    return weights


@settings(deadline=None)
@given(log_prob_rows(), st.sampled_from(["token", "sequence"]), st.sampled_from([2.0, "0.5_5.0", 1.5]))
def test_weights_are_their_loops(rows, level, threshold):
    """Cut at the upper bound, or zero outside the band, by token or by trajectory with all its segments and tokens; 1 where nothing is known."""
    batch = batch_of(rows)
    num_known = sum(len(ratios) for ratios in known_of(rows)[0])
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=threshold)
    if batch.num_loss_tokens and not num_known:
        with pytest.raises(BatchError, match="rollout_log_probs must be known for some trained token"):
            correct_rollout(batch, config)
        return
    corrected, metrics = correct_rollout(batch, config)
    assert corrected.loss_mask is batch.loss_mask
    if not batch.num_loss_tokens:
        assert metrics == {}
        return
    lower, upper = (None, threshold) if isinstance(threshold, float) else (0.5, 5.0)
    expected = expected_weights(rows, level, lower, upper)
    assert corrected.rollout_is_weights is not None
    assert corrected.rollout_is_weights.tolist() == pytest.approx(expected, rel=1e-9)
    assert metrics["rollout_corr/num_unknown_tokens"] == batch.num_loss_tokens - num_known
    counted = [
        expected[place] for place in (batch.loss_mask & ~torch.isnan(batch.rollout_log_probs)).nonzero().flatten()
    ]
    mean = sum(counted) / len(counted)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(mean)
    sum_of_squares = sum(weight * weight for weight in counted)
    size = sum(counted) ** 2 / sum_of_squares / len(counted) if sum_of_squares else 0.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(size)


def statistic(rule, ratios):
    """What a rule looks at: one number a token, or one for the trajectory."""
    kind = rule[-2:]
    each = [{"k1": -held(r), "k2": held(r) ** 2 / 2, "k3": math.exp(held(r)) - 1 - held(r)}[kind] for r in ratios]
    if rule.startswith("token"):
        return each
    return [{"sum": sum(each), "mean": sum(each) / len(each), "max": max(each)}[rule.split("_")[1]]] * len(each)


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=40)
@given(rows=log_prob_rows())
def test_rejection_is_its_loops(rule, rows):
    """What a rule does not let pass loses its place in the loss, alone or with all of its trajectory; unknown tokens go with the latter only."""
    batch = batch_of(rows)
    threshold = "0.6_1.5" if rule.endswith("k1") else 0.4
    ratios, _ = known_of(rows)
    num_known = sum(len(row) for row in ratios)
    if not num_known:
        return
    advantages = torch.ones(batch.num_tokens, dtype=torch.float64)
    corrected, metrics = correct_rollout(
        batch.with_columns(advantages=advantages),
        RolloutCorrectionConfig(rollout_rs=rule, rollout_rs_threshold=threshold),
    )
    low, high = (math.log(0.6), math.log(1.5)) if rule.endswith("k1") else (-math.inf, 0.4)
    mask, num_known_rejected, touched = [], 0, 0
    for row, segments in enumerate(rows):
        passes = [low <= value <= high for value in (statistic(rule, ratios[row]) if ratios[row] else [])]
        num_known_rejected += passes.count(False)
        touched += False in passes
        count, whole = iter(passes), rule.startswith("token") or False not in passes
        for tokens in segments:
            mask.append(False)
            mask += [bool(m) and (whole if s is None else next(count)) for m, _, s in tokens]
    assert corrected.loss_mask.tolist() == mask
    assert corrected.advantages is not None
    assert corrected.advantages.tolist() == [float(kept) for kept in mask]
    assert corrected.rollout_is_weights is None
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - sum(mask) / batch.num_loss_tokens)
    num_trajectories = sum(1 for row in ratios if row)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(touched / num_trajectories)
    assert metrics[f"rollout_corr/rollout_rs_{rule}_masked_fraction"] == pytest.approx(num_known_rejected / num_known)


@settings(deadline=None, max_examples=50)
@given(log_prob_rows())
def test_the_distance_is_its_loops(rows):
    """Divergences, perplexities and chi-squared over the known tokens and the trajectories that have any."""
    ratios, pairs = known_of(rows)
    ratios, pairs = [row for row in ratios if row], [row for row in pairs if row]
    _, metrics = correct_rollout(batch_of(rows), RolloutCorrectionConfig())
    if not ratios:
        assert set(metrics) <= {"rollout_corr/num_unknown_tokens"}
        return
    flat = [ratio for row in ratios for ratio in row]
    policy = [-sum(p for p, _ in row) / len(row) for row in pairs]
    sampler = [-sum(s for _, s in row) / len(row) for row in pairs]
    difference = [p - s for p, s in zip(policy, sampler, strict=True)]

    def mean(values):
        values = list(values)
        return sum(values) / len(values)

    expected = {
        "kl": -mean(flat),
        "k3_kl": mean(math.exp(held(r)) - 1 - held(r) for r in flat),
        "training_ppl": mean(math.exp(p) for p in policy),
        "rollout_ppl": mean(math.exp(s) for s in sampler),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean(abs(d) for d in difference),
        "ppl_ratio": mean(math.exp(d) for d in difference),
        "chi2_token": mean(math.exp(2 * held(r)) for r in flat) - 1,
        "chi2_seq": mean(math.exp(2 * held(sum(row))) for row in ratios) - 1,
    }
    got = {name: metrics[f"rollout_corr/{name}"] for name in expected}
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_several_rules_must_all_let_pass():
    """Rules with commas, each with a threshold of its own, mask what any of them masks."""
    rows = [[[(1, -1.0, -1.0), (1, -1.0, -3.0)]], [[(1, -1.0, -1.0), (1, -1.0, -1.1)]]]
    config = RolloutCorrectionConfig(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="1.05,1.0")
    corrected, _ = correct_rollout(batch_of(rows), config)
    assert corrected.loss_mask.tolist() == [False, False, False, False, True, False]


def test_weights_can_be_brought_to_a_mean_of_one():
    """By token over tokens, by trajectory over trajectories, however long they are."""
    rows = [[[(1, -1.0, -1.0 - math.log(2.0))]], [[(1, -1.0, -1.0)] * 3]]
    by_token, metrics = correct_rollout(
        batch_of(rows), RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True)
    )
    assert by_token.rollout_is_weights is not None
    assert by_token.rollout_is_weights.tolist() == pytest.approx([1, 1.6, 1, 0.8, 0.8, 0.8], rel=1e-6)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.25, rel=1e-6)
    by_trajectory, _ = correct_rollout(
        batch_of(rows), RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True)
    )
    assert by_trajectory.rollout_is_weights is not None
    assert by_trajectory.rollout_is_weights.tolist() == pytest.approx([1, 2 / 1.5, 1, *[1 / 1.5] * 3], rel=1e-6)


def test_a_trajectory_outside_the_band_trains_nothing():
    """By trajectory a weight of 0 holds for all its tokens, also for those of which the sampler's log-probability is unknown."""
    rows = [[[(1, -1.0, -9.0), (1, -1.0, None)], [(1, -1.0, None)]], [[(1, -1.0, -1.0), (1, -1.0, None)]]]
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold="0.5_2.0")
    corrected, _ = correct_rollout(batch_of(rows), config)
    assert corrected.rollout_is_weights is not None
    assert corrected.rollout_is_weights[corrected.loss_mask].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_band_that_holds_nothing_leaves_weights_of_zero():
    """All weights outside: the loss is 0, the effective sample size 0, and nothing is divided by nothing."""
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold="0.9_1.1", rollout_is_batch_normalize=True
    )
    corrected, metrics = correct_rollout(batch_of([[[(1, -1.0, -5.0), (1, -9.0, -1.0)]]]), config)
    assert corrected.rollout_is_weights is not None
    assert corrected.rollout_is_weights.tolist() == [1.0, 0.0, 0.0]
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0


def test_what_is_rejected_leaves_the_denominators_too():
    """The mean over tokens is one over those that are kept; the gradient of what is rejected is exactly 0."""
    batch = batch_of([[[(1, -1.0, -1.0), (1, -1.0, -9.0), (1, -1.0, -1.0)]]])
    batch = batch.with_columns(advantages=batch.loss_mask.double())
    config = RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=1.0)
    corrected = with_loss_weights(correct_rollout(batch, config)[0], "token-mean")
    new = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss_fn(PolicyLossOptions())(MicroBatchOutput(new, None), corrected)
    loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, -0.5, 0.0, -0.5]


def test_a_sampler_that_never_reports_is_only_counted_while_nothing_is_corrected():
    """Without weights and rejection the unknown tokens are a figure; with them they are an error that names the keys."""
    batch = batch_of([[[(1, -1.0, None), (1, -2.0, None)]]])
    assert correct_rollout(batch, RolloutCorrectionConfig())[1] == {"rollout_corr/num_unknown_tokens": 2.0}
    for config in (
        RolloutCorrectionConfig(rollout_is="token"),
        RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=2.0),
    ):
        with pytest.raises(BatchError, match=r"write algorithm\.rollout_correction\.rollout_is=null"):
            correct_rollout(batch, config)


def test_the_sampler_s_own_log_probabilities_say_where_they_are_unknown():
    """0 where nothing is trained on, NaN and a count where a trained token has none."""
    log_probs, num_unknown = sampler_log_probs(batch_of([[[(1, -1.0, -0.5), (0, -1.0, -9.0), (1, -1.0, None)]]]))
    assert log_probs[:3].tolist() == [0.0, -0.5, 0.0]
    assert math.isnan(log_probs[3])
    assert num_unknown == 1


def test_a_policy_that_gives_nan_is_not_hidden():
    """A log-probability of the policy that is NaN is neither rejected nor weighted away: it reaches the loss, whose step is then skipped."""
    batch = batch_of([[[(1, math.nan, -1.0), (1, -1.0, -1.0)]]])
    for config in (
        RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=2.0),
        RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.5_2.0"),
    ):
        corrected, metrics = correct_rollout(batch, config)
        assert corrected.loss_mask.tolist() == [False, True, True]
        assert math.isnan(metrics["rollout_corr/kl"])
        if corrected.rollout_is_weights is not None:
            assert math.isnan(corrected.rollout_is_weights[1])


def test_the_policy_s_log_probabilities_are_needed():
    """Without old_log_probs there is no ratio."""
    with pytest.raises(BatchError, match="old_log_probs must be set"):
        correct_rollout(batch_of([[[(1, -1.0, -1.0)]]]).with_columns(old_log_probs=None), RolloutCorrectionConfig())


def test_a_rejected_trajectory_takes_its_unknown_tokens_along():
    """By trajectory nothing of a rejected one is trained on, in none of its segments; by token, and in others, unknown tokens stay."""
    far = [[(1, -1.0, -9.0), (1, -1.0, None)], [(1, -1.0, None)]]
    batch = batch_of([far, [[(1, -1.0, -1.0), (1, -1.0, None)]]])
    for rule, num_trained in (("seq_sum_k1", 2), ("token_k1", 4), ("token_k1,seq_mean_k3", 2)):
        threshold = ",".join({"k1": "0.5_2.0", "k3": "0.5"}[name[-2:]] for name in rule.split(","))
        corrected, metrics = correct_rollout(
            batch, RolloutCorrectionConfig(rollout_rs=rule, rollout_rs_threshold=threshold)
        )
        assert corrected.num_loss_tokens == num_trained
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - num_trained / 5)
