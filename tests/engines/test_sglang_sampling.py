"""What the plugin puts in the place of SGLang's sampling, on the CPU and without SGLang."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ostinato_engines import SamplingParams, SamplingParamsError  # noqa: E402
from ostinato_engines.sglang_engine.plugin import hooks  # noqa: E402
from ostinato_engines.sglang_engine.plugin.exact_sampling import draw, filter_rows, race, row_keys  # noqa: E402
from ostinato_engines.sglang_engine.protocol import sampling_body  # noqa: E402
from ostinato_engines.testing import reference_distribution  # noqa: E402

VOCAB = 50
ALL = 1 << 30
"""SGLang's top_k that keeps everything."""


def logits_of(seed, rows=1):
    """float32 [rows, VOCAB], distinct."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([ALL, 2, 7, VOCAB]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_are_those_of_the_contract(seed, top_k, top_p, min_p):
    """What is left, renormalised, is the reference's distribution for every combination of filters."""
    scores = filter_rows(
        logits_of(seed), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    ).log_softmax(-1)[0]
    params = SamplingParams(top_k=-1 if top_k == ALL else top_k, top_p=top_p, min_p=min_p)
    wanted = reference_distribution(logits_of(seed)[0].double().numpy(), params)
    assert np.array_equal(np.isfinite(scores.numpy()), np.isfinite(wanted))
    kept = np.isfinite(wanted)
    np.testing.assert_allclose(scores.numpy()[kept], wanted[kept], atol=1e-5)


def test_draws_follow_the_probabilities():
    """Over 40,000 seeds each token comes as often as its probability says, within five standard deviations."""
    count = 40_000
    logprobs = (logits_of(3) * 0.5).log_softmax(-1)
    drawn = draw(logprobs.expand(count, -1), torch.arange(count), torch.full((count,), 9))
    often = torch.bincount(drawn, minlength=VOCAB).double()
    probs = logprobs[0].double().exp()
    deviation = (often - count * probs).abs() / (count * probs * (1 - probs)).sqrt()
    assert deviation.max() < 5


def test_draws_of_one_seed_follow_the_probabilities_over_positions():
    """The stream of one seed is as good as the first numbers of many seeds."""
    count = 40_000
    logprobs = torch.tensor([[0.7, 0.2, 0.1]]).log()
    drawn = draw(logprobs.expand(count, -1), torch.full((count,), 123), torch.arange(count))
    shares = torch.bincount(drawn, minlength=3) / count
    assert torch.allclose(shares, torch.tensor([0.7, 0.2, 0.1]), atol=0.012)


def test_nothing_is_drawn_that_cannot_be_sampled():
    """Tokens at -inf never win, whatever number they get."""
    logprobs = torch.full((20_000, VOCAB), -torch.inf)
    logprobs[:, 17] = -0.0
    assert set(race(logprobs, row_keys(torch.arange(20_000), torch.arange(20_000))).tolist()) == {17}


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 100_000), others=st.integers(0, 5))
def test_a_draw_does_not_depend_on_the_batch(seed, position, others):
    """The same logits, seed and position give the same token alone and among others."""
    logprobs = logits_of(1, 1 + others).log_softmax(-1)
    seeds, positions = torch.full((1 + others,), 5), torch.full((1 + others,), 7)
    seeds[-1], positions[-1] = seed, position
    alone = draw(logprobs[-1:], seeds[-1:], positions[-1:])
    assert draw(logprobs, seeds, positions)[-1] == alone[0]


def test_a_mixed_batch():
    """Greedy, plain and filtered rows of one batch get the logprobs of the contract, and greedy rows the best token."""
    asked = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5, top_p=0.8, min_p=0.05),
        SamplingParams(top_p=0.9),
    ]
    logits = logits_of(11, len(asked))
    info = SimpleNamespace(
        temperatures=torch.tensor([[p.temperature or 1.0] for p in asked]),
        top_ks=torch.tensor([1, ALL, 5, ALL], dtype=torch.int32),
        top_ps=torch.tensor([p.top_p for p in asked]),
        min_ps=torch.tensor([p.min_p for p in asked]),
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        sampling_seed=torch.arange(len(asked)),
    )
    logprobs, token_ids = hooks._sample(logits.clone(), info, torch.tensor([3, 4, 5, 6]), race)
    assert token_ids.dtype is torch.int32
    assert token_ids[0] == logits[0].argmax()
    for row, params in enumerate(asked):
        wanted = reference_distribution(logits[row].double().numpy(), params)
        kept = np.isfinite(wanted)
        np.testing.assert_allclose(logprobs[row].numpy()[kept], wanted[kept], atol=1e-5)
        assert kept[token_ids[row]]


def request(penalty=1.0, prompt=(), output=(), seed=None, rid="r"):
    """As much of SGLang's request as is read."""
    params = SimpleNamespace(repetition_penalty=penalty, sampling_seed=seed)
    return SimpleNamespace(sampling_params=params, origin_input_ids=list(prompt), output_ids=list(output), rid=rid)


def test_penalties_count_prompts_and_the_last_token():
    """Every token of prompt and output is penalised once: at the start, after a retraction, and right after it was sampled."""
    requests = [request(2.0, [1, 2], [3]), request(1.0, [4]), request(0.5, [5])]

    class Penalizer:
        orchestrator = SimpleNamespace(reqs=lambda: requests)

        def _prepare(self):
            self.cumulated_repetition_penalties = torch.ones(3, 8)
            self.repetition_penalties = torch.tensor([[r.sampling_params.repetition_penalty] for r in requests])

    class Orchestrator:
        def __init__(self, penalizer):
            self.penalizers = {Penalizer: penalizer}

        def accumulate_scaling_penalties(self):
            return self.penalizers[Penalizer].cumulated_repetition_penalties.clone()

    class Runner:
        def sample(self, logits_output, forward_batch):
            return forward_batch.sampling_info.acc_scaling_penalties

    hooks._count_prompts(Penalizer)
    hooks._remember_penalties(Orchestrator, Penalizer)
    hooks._count_the_last_token(Runner)
    penalizer = Penalizer()
    penalizer._prepare()
    info = SimpleNamespace(acc_scaling_penalties=Orchestrator(penalizer).accumulate_scaling_penalties())
    batch = SimpleNamespace(
        sampling_info=info,
        input_ids=torch.tensor([7, 7, 6], dtype=torch.int32),
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )
    wanted = torch.ones(3, 8)
    wanted[0, [1, 2, 3, 7]] = 2.0
    wanted[2, [5, 6]] = 0.5
    assert torch.equal(Runner().sample(None, batch), wanted)


def test_every_request_has_a_seed():
    """A request's own seed counts; one without gets a number that is the same in every process."""

    class Info:
        def adjusted_from_schedule_batch(self, batch, vocab_size):
            raise AssertionError("replaced")

    hooks._take_seeds(Info)
    info = Info()
    batch = SimpleNamespace(reqs=[request(seed=2**63 - 1), request(rid="a"), request(rid="b")], device="cpu")
    info.adjusted_from_schedule_batch(batch, VOCAB)
    first = info.sampling_seed.tolist()
    info.adjusted_from_schedule_batch(batch, VOCAB)
    assert info.sampling_seed.tolist() == first
    assert first[0] == 2**63 - 1
    assert len(set(first)) == 3


def test_a_place_that_is_not_there_is_no_silent_default():
    """A release of SGLang that has moved a place is refused instead of sampling otherwise."""
    with pytest.raises(AttributeError):
        hooks._take_seeds(type("Info", (), {}))
    with pytest.raises(AttributeError):
        hooks._count_prompts(type("Penalizer", (), {}))


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "ignore_eos": True, "stop_token_ids": []}),
        ({"temperature": 0, "top_p": 0.5, "min_p": 0.2}, {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1}),
        ({"temperature": 0.6, "top_k": 1}, {"temperature": 0.0, "top_k": -1}),
        ({"temperature": 1e-30}, {"temperature": 1e-6}),
        ({"top_k": 2**31 - 1}, {"top_k": -1}),
        ({"stop_token_ids": (3, 2**31 - 1)}, {"stop_token_ids": [3], "ignore_eos": False}),
    ],
)
def test_our_parameters_in_sglang_s_words(params, told):
    """What SGLang would read otherwise, clip or overflow is put so that it means the same."""
    body = sampling_body(SamplingParams(**params), max_new_tokens=9, seed=4, vocab_size=VOCAB)
    assert {name: body[name] for name in told} == told
    assert (body["max_new_tokens"], body["sampling_seed"]) == (9, 4)


def test_a_penalty_beyond_sglang_s_is_refused():
    """A penalty that SGLang does not take is refused before it is sent."""
    with pytest.raises(SamplingParamsError, match=r"at most 2 for sglang, got 2\.5"):
        sampling_body(SamplingParams(repetition_penalty=2.5), max_new_tokens=1, seed=0, vocab_size=VOCAB)
