"""Sampling draws from the distribution that it reports."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import SamplingParams
from ostinato_engines.testing import reference_distribution

torch = pytest.importorskip("torch")

from ostinato_engines.sampling import SamplingRows, penalize, sample, stream_keys, uniforms  # noqa: E402


def rows_of(params, uniform):
    """The arrays that the sampler takes for these parameters."""
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        uniform=np.array(uniform, np.float64),
        filtered=np.array([p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params]),
        top_k=np.array([max(p.top_k, 0) for p in params]),
        top_p=np.array([p.top_p for p in params], np.float64),
        min_p=np.array([p.min_p for p in params], np.float64),
    )


def drawn_logprob(logits, params, wanted):
    """The logprob that the sampler reports when it draws the wanted token."""
    for uniform in np.linspace(1e-6, 1 - 1e-6, 400):
        token, logprob = sample(torch.tensor([logits]), rows_of([params], [uniform]))
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
    drawn = [sample(torch.tensor([logits]), rows_of([params], [u]))[0].item() for u in np.linspace(1e-9, 1 - 1e-9, 200)]
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
        st.tuples(PARAMS, st.floats(1e-12, 1 - 1e-12), st.integers(0, 2**32 - 1), st.sets(st.integers(0, 11))),
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
    for row, (param, uniform, _, seen) in enumerate(cases):
        wanted = reference_distribution(logits[row], param, seen)
        token = tokens[row].item()
        assert logprobs[row].item() == pytest.approx(wanted[token], abs=2e-5)
        alone = sample(tensor[row : row + 1], rows_of([param], [uniform]))
        assert alone[0].item() == token
        if param.temperature == 0:
            assert wanted[token] == wanted.max()


@settings(max_examples=30, deadline=None)
@given(PARAMS.filter(lambda p: p.temperature > 0), st.integers(0, 2**32 - 1))
def test_tokens_come_as_often_as_their_logprob_says(params, seed):
    """Evenly spaced uniform numbers draw each token in proportion to its reported probability."""
    logits = np.random.default_rng(seed).normal(0, 2, 10).astype(np.float32)
    count = 2000
    tensor = torch.from_numpy(logits).expand(count, -1)
    tokens, _ = sample(tensor, rows_of([params] * count, (np.arange(count) + 0.5) / count))
    frequency = np.bincount(tokens.numpy(), minlength=10) / count
    plain = SamplingParams(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p)
    assert np.abs(frequency - np.exp(reference_distribution(logits, plain))).max() <= 2 / count


def test_uniform_numbers_are_uniform_and_unrelated():
    """Neighbouring seeds and positions give numbers that pass a chi-square test and do not correlate."""
    keys = stream_keys(np.arange(300, dtype=np.uint64))
    grid = np.stack([uniforms(keys, np.full(300, position)) for position in range(300)])
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 160  # 99 degrees of freedom: beyond it once in ten thousand
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.015
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.015
    assert grid.min() > 0
    assert grid.max() < 1


def test_impossible_tokens_are_never_drawn():
    """A token of logit minus infinity is not drawn, not even at the ends of the unit interval."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(2, 1)
    tokens, logprobs = sample(logits, rows_of([SamplingParams()] * 2, [2.0**-53, 1 - 2.0**-53]))
    assert tokens.tolist() == [1, 3]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 2)
