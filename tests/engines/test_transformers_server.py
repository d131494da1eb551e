"""The embedded engine, beyond what the public suite asks of every engine."""

import asyncio
import json
import math
import threading

import numpy as np
import pytest

from ostinato_engines import (
    EngineClosedError,
    EngineCrashedError,
    EngineInputError,
    EngineLoadError,
    EngineNotReadyError,
    EngineState,
    NonFiniteLogitsError,
    PauseMode,
    PolicySpan,
    SamplingParams,
    StopReason,
    UnsupportedError,
    WeightManifest,
    WeightUpdateError,
)
from ostinato_engines.testing import reference_logprobs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ostinato_engines.transformers_server import TransformersServer  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = [3, 14, 15, 92, 65, 35]


@pytest.fixture
async def serve():
    """Starts servers and shuts them down."""
    servers = []

    async def start(model, **settings):
        server = TransformersServer(model, **{"device": "cpu", **settings})
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.shutdown()


@pytest.fixture
def weights_of(make_model):
    """A manifest and a maker of weights, by seed."""

    def make(seed, version):
        tensors = dict(make_model(seed=seed).named_parameters())
        return WeightManifest.from_tensors(version, tensors.items()), tensors

    return make


async def test_over_length_prompts(serve, make_model):
    """With max_model_len 16, prompts of 10, 15 and 16 tokens get 6, 1 and 0 tokens of 8; 17 is refused."""
    server = await serve(make_model(), max_model_len=16)
    for length, wanted in ((10, 6), (15, 1), (16, 0)):
        out = await server.generate([1] * length, SamplingParams(max_tokens=8, temperature=0), "a")
        assert (len(out.token_ids), out.stop_reason) == (wanted, StopReason.LENGTH)
        assert out.policy_versions == (PolicySpan(0, 0),)
    with pytest.raises(EngineInputError, match="at most max_model_len=16"):
        await server.generate([1] * 17, GREEDY, "a")


async def test_a_full_prompt_costs_no_forward(serve, make_model):
    """A prompt without room is answered without asking the model."""
    model = make_model()
    server = await serve(model, max_model_len=16)
    calls = []
    model.register_forward_pre_hook(lambda *args: calls.append(1))
    await server.generate([1] * 16, GREEDY, "a")
    await server.generate([1], SamplingParams(max_tokens=0), "a")
    assert calls == []


@pytest.mark.parametrize("prompt", [[], [[1, 2]], [1.5], ["a"], "text", None, [[1], [2, 3]], [2**80], [True, False]])
async def test_a_prompt_that_is_none_is_refused(serve, make_model, prompt):
    """What is not a flat, non-empty sequence of integers is refused by name."""
    server = await serve(make_model())
    with pytest.raises(EngineInputError, match="prompt_ids must"):
        await server.generate(prompt, GREEDY, "a")


async def test_every_legal_value_is_sampled_from(serve, make_model):
    """The largest and smallest parameters that a request may have, alone and together, end no request and no engine."""
    edges = {
        "temperature": (5e-324, 1e30),
        "top_p": (5e-324, 1.0),
        "top_k": (1, 2**31 - 1),
        "min_p": (5e-324, 1.0),
        "repetition_penalty": (1e-30, 1e30),
        "max_tokens": (1, 2**70),
        "seed": (0, 2**63 - 1),
        "stop_token_ids": ((), (0, 2**31 - 1)),
    }
    alone = [{name: value} for name, values in edges.items() for value in values]
    together = [{name: values[at] for name, values in edges.items()} for at in (0, 1)]
    server = await serve(make_model())
    for given in [*alone, *together]:
        output = await server.generate([1, 2, 3], SamplingParams(**{"max_tokens": 2, **given}), "edges")
        assert all(math.isfinite(logprob) for logprob in output.logprobs), given
    assert (await server.health()).ready


async def test_the_checkpoints_generation_config_is_ignored(serve, make_model, forward_of, tmp_path):
    """Penalty, top_k and temperature of a checkpoint's generation config do not touch a request that leaves them out."""
    model = make_model()
    model.generation_config.update(repetition_penalty=1.5, top_k=2, temperature=0.5, do_sample=True, eos_token_id=5)
    model.save_pretrained(tmp_path)
    server = await serve(tmp_path)
    out = await server.generate(PROMPT, SamplingParams(max_tokens=40), "a")
    wanted = reference_logprobs(
        forward_of(model)([*PROMPT, *out.token_ids]), PROMPT, out.token_ids, SamplingParams(temperature=1)
    )
    assert out.logprobs == pytest.approx(wanted, abs=1e-4)
    assert len(out.token_ids) == 40


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
async def test_nothing_is_used_that_transformers_will_remove(serve, make_model, kind):
    """Computing a turn makes transformers announce no removal, whichever of its versions is installed."""
    server = await serve(make_model(kind))
    assert len((await server.generate(PROMPT, GREEDY, "a")).token_ids) == 12


async def test_a_later_turn_computes_only_its_new_tokens(serve, make_model):
    """The second turn feeds the model the tokens after the first turn's computed ones, and nothing else."""
    model = make_model()
    server = await serve(model)
    first = await server.generate(PROMPT, GREEDY, "a")
    widths = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    second = [*PROMPT, *first.token_ids, 1, 2, 3]
    out = await server.generate(second, SamplingParams(temperature=0, max_tokens=2), "a")
    assert out.num_cached_tokens == len(PROMPT) + 11  # the last sampled token was never fed
    assert widths == [(1, 4), (1, 1)]


async def test_conversations_beyond_the_slots_give_way(serve, make_model):
    """With two slots and five conversations every answer is right, and the ones pushed out start over."""
    server = await serve(make_model(), max_num_seqs=2)
    prompts = {name: [index + 1, 2, 3, 4] for index, name in enumerate("abcde")}
    outs = await asyncio.gather(*(server.generate(prompt, GREEDY, name) for name, prompt in prompts.items()))
    cached = []
    for (name, prompt), out in zip(prompts.items(), outs, strict=True):
        again = await server.generate(prompt, GREEDY, name)
        assert again.token_ids == out.token_ids
        cached.append(again.num_cached_tokens)
    assert cached[0] == 0
    await server.release("e")
    assert (await server.generate(prompts["e"], GREEDY, "e")).num_cached_tokens == 0
    assert (await server.generate(prompts["e"], GREEDY, "e")).num_cached_tokens == 3
    await server.reset_prefix_cache()
    assert (await server.generate(prompts["e"], GREEDY, "e")).num_cached_tokens == 0


async def test_it_says_how_many_conversations_keep_their_state(serve, make_model):
    """The capacity is that of its rows, of which a conversation takes one whatever its length."""
    server = await serve(make_model(), max_num_seqs=3)
    assert server.capabilities().kv_capacity_sessions == 3
    assert server.capabilities().kv_capacity_tokens is None


async def test_one_turn_at_a_time(serve, make_model):
    """A second request under an id in flight is refused and leaves the first alone."""
    server = await serve(make_model())
    first = asyncio.ensure_future(server.generate(PROMPT, GREEDY, "a"))
    await asyncio.sleep(0)
    with pytest.raises(EngineInputError, match="must not be in flight"):
        await server.generate(PROMPT, GREEDY, "a")
    assert len((await first).token_ids) == 12


async def test_chunks_and_batches_do_not_change_logprobs(serve, make_model, forward_of):
    """Prompts of many lengths, prefilled in small chunks among decoding rows, report true logprobs."""
    model = make_model("llama", tied=False)
    server = await serve(model, prefill_chunk_tokens=7, max_num_seqs=5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, size=int(size)).tolist() for size in rng.integers(1, 60, size=20)]
    outs = await asyncio.gather(
        *(server.generate(prompt, SamplingParams(max_tokens=1 + i), str(i)) for i, prompt in enumerate(prompts))
    )
    forward = forward_of(model)
    for prompt, out in zip(prompts, outs, strict=True):
        wanted = reference_logprobs(forward([*prompt, *out.token_ids]), prompt, out.token_ids, SamplingParams())
        assert out.logprobs == pytest.approx(wanted, abs=1e-4)


async def test_full_determinism_is_bitwise(make_model):
    """With full determinism two runs of the same program agree in every token and every bit of every logprob."""

    async def program():
        async with TransformersServer(make_model(), device="cpu", full_determinism=True, seed=11) as server:

            async def agent(index):
                prompt = [index + 1, 5, 9]
                outs = []
                for turn in range(3):
                    out = await server.generate(prompt, {"max_tokens": 4 + (index + turn) % 5}, f"agent-{index}")
                    outs.append((out.token_ids, out.logprobs))
                    for _ in range(index % 4):
                        await asyncio.sleep(0)
                    prompt = [*prompt, *out.token_ids, 7]
                return outs

            return await asyncio.gather(*(agent(index) for index in range(9)))

    assert await program() == await program()


async def test_a_resumed_request_draws_as_if_never_aborted(serve, make_model):
    """A seeded request that is aborted and sent again with its tokens ends with the tokens of an undisturbed one."""
    server = await serve(make_model())
    whole = await server.generate(PROMPT, SamplingParams(max_tokens=20, seed=5), "whole")
    head = whole.token_ids[:8]
    rest = await server.generate([*PROMPT, *head], SamplingParams(max_tokens=12, seed=5), "rest")
    assert head + rest.token_ids == whole.token_ids


async def test_an_update_in_flight_is_placed_exactly(serve, make_model, weights_of, forward_of):
    """A request kept over a weight update continues under the new weights, and its spans say from which token on."""
    model = make_model()
    server = await serve(model)
    old = forward_of(model)
    task = asyncio.ensure_future(server.generate(PROMPT, SamplingParams(max_tokens=60, seed=1), "a"))
    while not server._engine or not server._engine.batcher.num_running:  # noqa: ASYNC110  the engine tells no event for a first step
        await asyncio.sleep(0)
    await server.pause(PauseMode.KEEP)
    manifest, tensors = weights_of(1, 4)
    await server.update_weights(manifest, tensors.items())
    assert server.policy_version == 4
    await server.resume()
    out = await task
    new = forward_of(model)
    switch = next((span.start for span in out.policy_versions if span.version == 4), None)
    assert switch is not None
    params = SamplingParams()
    ids = [*PROMPT, *out.token_ids]
    under_old = reference_logprobs(old(ids), PROMPT, out.token_ids, params)
    under_new = reference_logprobs(new(ids), PROMPT, out.token_ids, params)
    assert out.logprobs == pytest.approx(under_old[:switch] + under_new[switch:], abs=1e-4)
    assert [span.version for span in out.policy_versions] == ([0, 4] if switch else [4])
    assert out.num_preempted == 1


async def test_nothing_old_is_served_after_an_update(serve, make_model, weights_of):
    """The first answer after an update equals that of a cold engine with the new weights; nothing cached is reported."""
    server = await serve(make_model())
    cold = await serve(make_model(seed=1))
    await server.generate(PROMPT, GREEDY, "a")
    manifest, tensors = weights_of(1, 1)
    await server.update_weights(manifest, tensors.items())
    out = await server.generate(PROMPT, GREEDY, "a")
    assert out.num_cached_tokens == 0
    assert out.token_ids == (await cold.generate(PROMPT, GREEDY, "a")).token_ids
    assert out.policy_versions == (PolicySpan(0, 1),)


async def test_a_failed_update_fails_those_in_flight(serve, make_model, weights_of):
    """Requests in flight when a stream breaks end with an error that says so; none hangs."""
    server = await serve(make_model())
    task = asyncio.ensure_future(server.generate(PROMPT, SamplingParams(max_tokens=100), "a"))
    await asyncio.sleep(0)
    await server.pause(PauseMode.KEEP)
    manifest, _ = weights_of(1, 1)
    with pytest.raises(WeightUpdateError, match="missing"):
        await server.update_weights(manifest, [])
    with pytest.raises(EngineNotReadyError, match="failed update"):
        await task
    assert (await server.health()).state is EngineState.STALE


async def test_a_cancelled_update_leaves_the_engine_not_ready(serve, make_model, weights_of):
    """Cancelling an update stops the writing and leaves the engine not ready; a complete update heals it."""
    server = await serve(make_model())
    manifest, tensors = weights_of(1, 1)
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow():
        for index, pair in enumerate(tensors.items()):
            if index == 1:
                loop.call_soon_threadsafe(reached.set)
                go_on.wait(10)
            yield pair

    task = asyncio.ensure_future(server.update_weights(manifest, slow()))
    await reached.wait()
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await server.health()).state is EngineState.STALE
    await server.update_weights(manifest, tensors.items())
    assert (await server.health()).ready


async def test_sleep_frees_memory(serve, make_model, weights_of):
    """Level 1 frees the cache, level 2 the weights too; a sleeping engine refuses, and serves after what it needs."""
    model = make_model()
    server = await serve(model)
    before = await server.generate(PROMPT, GREEDY, "a")
    cache = server._engine.runner.cache
    assert cache.num_bytes > 0
    await server.sleep(1)
    assert cache.num_bytes == 0
    with pytest.raises(EngineNotReadyError, match=r"asleep \(kv_cache\); call wake_up"):
        await server.generate(PROMPT, GREEDY, "a")
    await server.wake_up()
    again = await server.generate(PROMPT, GREEDY, "a")
    assert (again.token_ids, again.num_cached_tokens) == (before.token_ids, 0)

    await server.sleep(2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    manifest, tensors = weights_of(0, 1)
    with pytest.raises(EngineNotReadyError, match="weights must be awake"):
        await server.update_weights(manifest, tensors.items())
    await server.wake_up(["weights"])
    await server.wake_up(["kv_cache"])
    with pytest.raises(EngineNotReadyError, match="update_weights"):
        await server.generate(PROMPT, GREEDY, "a")
    await server.update_weights(manifest, tensors.items())
    assert (await server.generate(PROMPT, GREEDY, "a")).token_ids == before.token_ids
    with pytest.raises(EngineInputError, match="'everything'"):
        await server.wake_up(["everything"])
    with pytest.raises(EngineInputError, match="level must be 1 or 2"):
        await server.sleep(3)


async def test_sleep_ends_requests_in_flight(serve, make_model):
    """A request in flight when the engine goes to sleep ends aborted with its tokens so far."""
    server = await serve(make_model())
    task = asyncio.ensure_future(server.generate(PROMPT, SamplingParams(max_tokens=100), "a"))
    await asyncio.sleep(0)
    await server.sleep()
    assert (await task).stop_reason is StopReason.ABORTED


@pytest.mark.parametrize("inline", [False, True])
async def test_a_crash_reaches_everyone(serve, make_model, inline):
    """When a forward raises, running and waiting requests fail with the cause, later ones too, and health says so."""
    model = make_model()
    server = await serve(model, max_num_seqs=1, full_determinism=inline)

    def explode(*args):
        raise RuntimeError("the GPU fell off")

    model.register_forward_pre_hook(explode)
    outcomes = await asyncio.gather(
        *(server.generate(PROMPT, GREEDY, str(index)) for index in range(3)), return_exceptions=True
    )
    assert all(isinstance(outcome, EngineCrashedError) and "the GPU fell off" in str(outcome) for outcome in outcomes)
    with pytest.raises(EngineCrashedError, match="the GPU fell off"):
        await server.generate(PROMPT, GREEDY, "later")
    assert (await server.health()).state is EngineState.FAILED


async def test_poisoned_weights_fail_the_request_only(serve, make_model, weights_of):
    """NaN weights give an error per request, not tokens; sound weights heal the engine."""
    server = await serve(make_model())
    manifest, tensors = weights_of(1, 1)
    poisoned = {name: tensor * float("nan") for name, tensor in tensors.items()}
    await server.update_weights(manifest, poisoned.items())
    for params in (GREEDY, SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, top_k=2, repetition_penalty=2)):
        with pytest.raises(NonFiniteLogitsError, match="logits must be finite"):
            await server.generate(PROMPT, params, "a")
    await server.update_weights(manifest, tensors.items())
    assert len((await server.generate(PROMPT, GREEDY, "a")).token_ids) == 12


async def test_poisoned_states_do_not_linger(serve, make_model, weights_of):
    """After NaN weights the rows that they touched serve short requests beside long ones as a new engine would."""
    server = await serve(make_model(), max_num_seqs=2)
    manifest, tensors = weights_of(1, 1)
    poisoned = {name: tensor * float("nan") for name, tensor in tensors.items()}
    await server.update_weights(manifest, poisoned.items())
    outcomes = await asyncio.gather(
        *(server.generate([1 + i] * 50, GREEDY, str(i)) for i in range(2)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [NonFiniteLogitsError] * 2
    await server.update_weights(manifest, tensors.items())
    cold = await serve(make_model(seed=1))
    for prompts in ([PROMPT, PROMPT * 4], [PROMPT * 4, PROMPT]):
        outs = await asyncio.gather(*(server.generate(p, GREEDY, f"x{i}") for i, p in enumerate(prompts)))
        for prompt, out in zip(prompts, outs, strict=True):
            assert out.token_ids == (await cold.generate(prompt, GREEDY, "a")).token_ids
            await cold.release("a")


async def test_shutdown_hangs_nobody(make_model):
    """Running, waiting and paused requests fail at shutdown, each with an error that names it."""
    server = TransformersServer(make_model(), device="cpu", max_num_seqs=1)
    await server.start()
    tasks = [asyncio.ensure_future(server.generate(PROMPT, {"max_tokens": 100}, f"r{i}")) for i in range(3)]
    await asyncio.sleep(0)
    await server.pause(PauseMode.KEEP)
    await server.shutdown()
    for index, outcome in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
        assert isinstance(outcome, EngineClosedError)
        assert f"'r{index}'" in str(outcome)
    with pytest.raises(EngineClosedError):
        await server.start()


def test_one_event_loop_after_another(make_model):
    """A server serves under one asyncio.run and then under another."""
    server = TransformersServer(make_model(), device="cpu")
    asyncio.run(server.start())
    first = asyncio.run(server.generate(PROMPT, GREEDY, "a"))
    second = asyncio.run(server.generate(PROMPT, GREEDY, "a"))
    assert first.token_ids == second.token_ids
    asyncio.run(server.shutdown())


async def test_not_started(make_model):
    """A request before start is refused with the cure."""
    with pytest.raises(EngineNotReadyError, match=r"call start\(\) first"):
        await TransformersServer(make_model(), device="cpu").generate(PROMPT, GREEDY, "a")


async def test_a_path_that_is_no_model(serve, tmp_path):
    """An empty directory and a missing path are errors that name them."""
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(EngineLoadError, match=path.name):
            await serve(path)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("mistral", {"sliding_window": 16}, "sliding_attention"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type dynamic",
        ),
    ],
)
async def test_models_with_other_state_are_refused(serve, make_model, kind, overrides, message):
    """A model whose layers are not all of full attention is refused at start, by what it has."""
    with pytest.raises(UnsupportedError, match=message):
        await serve(make_model(kind, **overrides))


async def test_settings_out_of_range(serve, make_model):
    """Limits that make no sense are refused by name."""
    with pytest.raises(EngineInputError, match="max_num_seqs"):
        TransformersServer(make_model(), max_num_seqs=0)
    with pytest.raises(EngineInputError, match="max_model_len must be in"):
        await serve(make_model(), max_model_len=1000)
    with pytest.raises(EngineInputError, match="dtype must be one of"):
        await serve(make_model(), dtype="float7")


class Codec:
    """Messages of digits."""

    stop_token_ids = (95,)

    def render(self, messages, tools):
        """Every character's code, modulo the vocabulary."""
        return [ord(char) % 90 for message in messages for char in message["content"]]

    def parse(self, token_ids):
        """The ids as text."""
        return {"role": "assistant", "content": " ".join(map(str, token_ids))}


class WebRequest:
    """What a web framework hands over."""

    def __init__(self, body):
        self.body = body

    async def json(self):
        """The decoded body."""
        return json.loads(self.body)


async def test_an_aborted_chat_says_so(serve, make_model):
    """A chat request that is aborted ends with a finish reason of its own, not with that of a limit."""
    server = await serve(make_model(), chat_codec=Codec())
    await server.pause(PauseMode.KEEP)
    task = asyncio.ensure_future(server.chat_completion({"messages": [{"role": "user", "content": "hello"}]}))
    await asyncio.sleep(0)
    assert await server.abort() == 1
    assert (await task)["choices"][0]["finish_reason"] == "abort"


async def test_an_abort_takes_one_step(serve, make_model):
    """Between the call of abort and its return the model computes at most the step that was under way."""
    model = make_model()
    server = await serve(model)
    running, computed = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def watch(*args):
        computed.append(1)
        loop.call_soon_threadsafe(running.set)

    model.register_forward_pre_hook(watch)
    task = asyncio.ensure_future(server.generate(PROMPT, SamplingParams(max_tokens=120), "a"))
    await running.wait()
    before = len(computed)
    assert await server.abort(["a"]) == 1
    assert len(computed) - before <= 2  # a step is a prefill and a decode
    out = await task
    assert out.stop_reason is StopReason.ABORTED
    assert len(out.token_ids) <= len(computed)


async def test_chat_needs_a_codec(serve, make_model):
    """chat_completion says what is missing, answers through a codec, and refuses what it does not support."""
    request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
    with pytest.raises(UnsupportedError, match="ChatCodec"):
        await (await serve(make_model())).chat_completion(request)
    server = await serve(make_model(), chat_codec=Codec())
    answer = await server.chat_completion(request)
    ids = [ord(char) % 90 for char in "hello"]
    out = await server.generate(ids, SamplingParams(max_tokens=5, temperature=0, stop_token_ids=(95,)), "a")
    assert answer["choices"][0]["message"]["content"] == " ".join(map(str, out.token_ids))
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert json.loads(json.dumps(answer)) == answer
    same = await server.chat_completion(WebRequest(json.dumps(request)))
    assert same["choices"] == answer["choices"]
    with pytest.raises(EngineInputError, match="must be JSON"):
        await server.chat_completion(WebRequest("{"))
    with pytest.raises(EngineInputError, match="must not differ"):
        await server.chat_completion({**request, "max_completion_tokens": 6})
    for bad in ({**request, "stop": ["x"]}, {**request, "n": 2}, {**request, "stream": True}, {"messages": []}, "text"):
        with pytest.raises(EngineInputError):
            await server.chat_completion(bad)
