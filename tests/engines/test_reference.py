"""The float64 reference, and what rounding may make of it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import SamplingParams
from ostinato_engines.testing import logprob_bounds, reference_distribution, reference_logprobs

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    top_k=st.sampled_from([-1, 1, 3, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
)


def test_the_reference_by_hand():
    """Penalty, temperature, top_k, top_p and min_p apply in this order, and what is left is renormalised."""
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    cases = [
        (SamplingParams(), [0.5, 0.25, 0.15, 0.1]),
        (SamplingParams(temperature=0.5), np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345),
        (SamplingParams(top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (SamplingParams(top_p=0.8), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (SamplingParams(min_p=0.3), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (SamplingParams(top_k=2, top_p=0.6), [1, 0, 0, 0]),  # two thirds are over 0.6 already
        (SamplingParams(temperature=0, top_k=1), [0.5, 0.25, 0.15, 0.1]),
    ]
    for params, wanted in cases:
        assert np.exp(reference_distribution(logits, params)) == pytest.approx(wanted)
    penalized = reference_distribution(np.array([2.0, -1.0, 0.0]), SamplingParams(repetition_penalty=2.0), [0, 1])
    assert penalized[0] - penalized[2] == pytest.approx(1.0)
    assert penalized[1] - penalized[2] == pytest.approx(-2.0)


def test_output_tokens_are_penalised_too():
    """The penalty counts prompt and output tokens up to the one before."""
    logits = np.zeros((3, 4)) + np.array([1.0, 0.0, 0.0, 0.0])
    first, second = reference_logprobs(logits, [3], [0, 0], SamplingParams(repetition_penalty=2.0))
    assert first == pytest.approx(1 - math.log(math.e + 3))
    assert second == pytest.approx(0.5 - math.log(math.exp(0.5) + 3))


@settings(max_examples=200, deadline=None)
@given(PARAMS, st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 0.05]))
def test_rounding_stays_within_the_bounds(params, seed, slack):
    """Whatever a logprob is under logits that are off by rounding, the bounds of the true logits hold it."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, 9)
    noisy = logits + rng.uniform(-slack / 4, slack / 4, 9)
    seen = {int(token) for token in rng.integers(0, 9, 3)}
    sampled = reference_distribution(noisy, params, seen)
    for token in np.flatnonzero(np.isfinite(sampled)):
        low, high = logprob_bounds(logits, int(token), params, seen, slack=slack)
        assert low <= sampled[token] <= high


@pytest.mark.parametrize(
    ("asked", "given_"),
    [
        (SamplingParams(temperature=0.5), SamplingParams()),
        (SamplingParams(top_k=3), SamplingParams(top_k=4)),
        (SamplingParams(top_k=3), SamplingParams()),
        (SamplingParams(top_p=0.5), SamplingParams()),
        (SamplingParams(min_p=0.2), SamplingParams()),
        (SamplingParams(repetition_penalty=1.3), SamplingParams()),
    ],
)
def test_another_distribution_is_outside_the_bounds(asked, given_):
    """A logprob of a distribution that was not asked for, one token more in top_k included, is out of bounds."""
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5])
    wrong = reference_distribution(logits, given_, [0, 1])
    for token in range(2):
        low, high = logprob_bounds(logits, token, asked, [0, 1], slack=1e-3)
        assert not low <= wrong[token] <= high


def test_a_token_that_cannot_come_has_no_bounds():
    """A token beyond top_k cannot have been sampled, unless rounding could have put it in front."""
    logits = np.array([2.0, 1.0, 0.999, -3.0])
    assert logprob_bounds(logits, 3, SamplingParams(top_k=2), slack=1e-2) == (math.inf, -math.inf)
    low, high = logprob_bounds(logits, 2, SamplingParams(top_k=2), slack=1e-2)
    assert low < high


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)])
def test_a_runner_up_may_have_been_the_only_choice(params):
    """Where rounding can put another token first, that token may have been kept alone, with logprob zero."""
    logits = np.array([2.0, 1.9, -3.0])
    for token in range(2):
        low, high = logprob_bounds(logits, token, params, slack=0.1)
        assert low <= 0.0 <= high
    assert logprob_bounds(logits, 2, params, slack=0.1) == (math.inf, -math.inf)
