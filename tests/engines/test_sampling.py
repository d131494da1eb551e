"""Sampling draws from the distribution that it reports."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import SamplingParams
from ostinato_engines.testing import reference_distribution

torch = pytest.importorskip("torch")

from ostinato_engines.sampling import SamplingRows, exponentials, penalize, position_keys, sample, stream_keys  # noqa: E402


def rows_of(params, seeds):
    """The arrays that the sampler takes for these parameters and seeds."""
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        keys=stream_keys(np.array(seeds, np.uint64)),
        filtered=np.array([p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params]),
        top_k=np.array([max(p.top_k, 0) for p in params]),
        top_p=np.array([p.top_p for p in params], np.float64),
        min_p=np.array([p.min_p for p in params], np.float64),
    )


def drawn_logprob(logits, params, wanted):
    """The logprob that the sampler reports when it draws the wanted token."""
    for seed in range(400):
        token, logprob = sample(torch.tensor([logits]), rows_of([params], [seed]))
        if token.item() == wanted:
            return logprob.item()
    raise AssertionError(f"{wanted} was never drawn")


def test_temperature_is_part_of_the_logprob():
    """At temperature 0.5 the token of logit ln 3 beside 0 has logprob -0.1054, neither raw nor divided afterwards."""
    assert drawn_logprob([0.0, math.log(3)], SamplingParams(temperature=0.5), 1) == pytest.approx(-0.1054, abs=1e-4)


def test_top_p_renormalises():
    """At top_p 0.9 of (.6, .3, .1) the third token is never drawn and the first has logprob ln(.6 / .9)."""
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    params = SamplingParams(top_p=0.9)
    assert drawn_logprob(logits, params, 0) == pytest.approx(-0.4055, abs=1e-4)
    drawn = [sample(torch.tensor([logits]), rows_of([params], [seed]))[0].item() for seed in range(200)]
    assert set(drawn) == {0, 1}


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    top_k=st.sampled_from([-1, 1, 3, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(PARAMS, st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1), st.sets(st.integers(0, 11))),
        min_size=1,
        max_size=6,
    )
)
def test_every_row_reports_its_own_distribution(cases):
    """Whatever rows are sampled together, each logprob equals a float64 reference of that row's parameters alone."""
    logits = np.stack([np.random.default_rng(seed).normal(0, 3, 12) for _, _, seed, _ in cases]).astype(np.float32)
    params = [case[0] for case in cases]
    tensor = torch.from_numpy(logits.copy())
    penalize(
        tensor,
        [torch.tensor(sorted(seen), dtype=torch.int64) for *_, seen in cases],
        [p.repetition_penalty for p in params],
    )
    tokens, logprobs = sample(tensor, rows_of(params, [case[1] for case in cases]))
    for row, (param, draw, _, seen) in enumerate(cases):
        wanted = reference_distribution(logits[row], param, seen)
        token = tokens[row].item()
        assert logprobs[row].item() == pytest.approx(wanted[token], abs=2e-5)
        alone = sample(tensor[row : row + 1], rows_of([param], [draw]))
        assert alone[0].item() == token
        if param.temperature == 0:
            assert wanted[token] == wanted.max()


@settings(max_examples=30, deadline=None)
@given(PARAMS.filter(lambda p: p.temperature > 0), st.integers(0, 2**32 - 1))
def test_tokens_come_as_often_as_their_logprob_says(params, seed):
    """Over many seeds each token is drawn in proportion to its reported probability."""
    logits = np.random.default_rng(seed).normal(0, 2, 10).astype(np.float32)
    count = 20_000
    tensor = torch.from_numpy(logits).expand(count, -1)
    tokens, _ = sample(tensor, rows_of([params] * count, np.arange(count, dtype=np.uint64) + np.uint64(seed)))
    frequency = np.bincount(tokens.numpy(), minlength=10) / count
    plain = SamplingParams(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p)
    wanted = np.exp(reference_distribution(logits, plain))
    assert (
        np.abs(frequency - wanted) <= 6 * np.sqrt(wanted * (1 - wanted) / count) + 1e-9 + (wanted > 0) * 3 / count
    ).all()


def test_random_numbers_are_exponential_and_unrelated():
    """Neighbouring seeds, positions and tokens give numbers that pass a chi-square test and do not correlate."""
    keys = stream_keys(np.arange(60, dtype=np.uint64))
    grid = np.stack([exponentials(position_keys(keys, np.full(60, p)), 40, "cpu").numpy() for p in range(60)])
    uniform = np.exp(-grid.astype(np.float64))
    counts = np.histogram(uniform, bins=100, range=(0, 1))[0]
    assert ((counts - 1440) ** 2 / 1440).sum() < 160  # 99 degrees of freedom: beyond it once in ten thousand
    for axis in range(3):
        one, other = (np.take(uniform, index, axis).ravel() for index in (range(39), range(1, 40)))
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.015
    assert grid.min() > 0
    assert np.isfinite(grid).all()


def test_rounding_of_the_logits_rarely_changes_a_draw():
    """With noise as of bfloat16 in the logits of a large, flat vocabulary, nine draws in ten stay the same."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 1.5, (100, 20_000)).astype(np.float32))
    noisy = logits + torch.from_numpy(rng.normal(0, 0.05, logits.shape).astype(np.float32))
    rows = rows_of([SamplingParams()] * 100, range(100))
    assert (sample(logits, rows)[0] == sample(noisy, rows)[0]).float().mean() >= 0.9


def test_impossible_tokens_are_never_drawn():
    """A token of logit minus infinity is not drawn, under no seed."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(500, 1)
    tokens, logprobs = sample(logits, rows_of([SamplingParams()] * 500, range(500)))
    assert set(tokens.tolist()) == {1, 3}
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 500)


FORCED = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1e-4),
    SamplingParams(temperature=100.0),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=1.0),
    SamplingParams(repetition_penalty=5.0),
    SamplingParams(temperature=0.1, top_p=0.5, top_k=2, min_p=0.5, repetition_penalty=0.2),
]


@pytest.mark.parametrize("params", FORCED)
@pytest.mark.parametrize("only", [0, 3, 6])
def test_a_forced_token_has_logprob_zero(params, only):
    """Where a mask or a huge logit leaves one token, it is drawn with logprob exactly 0, under every parameter."""
    masked = torch.full((7,), -math.inf)
    masked[only] = -40.0
    huge = torch.zeros(7)
    huge[only] = 1e30
    logits = torch.stack([masked, huge])
    penalize(logits, [torch.tensor([only])] * 2, [params.repetition_penalty] * 2)
    tokens, logprobs = sample(logits, rows_of([params] * 2, [1, 2]))
    assert tokens.tolist() == [only, only]
    assert logprobs.tolist() == [0.0, 0.0]
