"""VLLMServer with the real vLLM on the CPU: one engine for all tests but those about its birth and death."""

import asyncio
import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import tempfile
from types import SimpleNamespace

import pytest
import pytest_asyncio

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed: it needs an environment of its own", allow_module_level=True)

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_engines import (
    CollectiveRoute,
    EngineCrashedError,
    EngineInputError,
    EngineNotReadyError,
    EngineStartError,
    EngineState,
    PauseMode,
    SamplingParams,
    SocketRoute,
    StopReason,
    UnsupportedError,
    WeightManifest,
    WeightUpdateError,
)
from ostinato_engines.testing import Scope, WeightUpdate, check_server, reference_distribution
from ostinato_engines.vllm_engine.hold_choice import hold_outputs
from ostinato_engines.vllm_server import VLLMServer
from ostinato_engines.weight_routes import host_name
from ostinato_engines.weight_transfer import BroadcastSender, KeptGroup, WeightListener, WeightSender

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

VOCAB = 96
MAX_LEN = 10_240
OPTIONS = {"dtype": "float32", "max_model_len": MAX_LEN, "enforce_eager": True, "engine_args": {"block_size": 32}}
TEMPLATE = "{% for m in messages %}w3 {{ m['content'] }} w4 {% endfor %}{% if add_generation_prompt %}w5{% endif %}"


def new_model(seed):
    """A tiny random Qwen3; the same seed gives the same weights."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def forward_of(model):
    """Ids to float64 logits [n, vocab]."""

    def forward(ids):
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(ids)])).logits[0].double().numpy()

    return forward


def save_tokenizer(folder):
    """One word per id, a chat template, and a generation config that must not count."""
    words = Tokenizer(models.WordLevel({f"w{index}" if index else "<unk>": index for index in range(VOCAB)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="w2")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    transformers.GenerationConfig(
        do_sample=True, temperature=0.3, top_k=2, repetition_penalty=1.5, eos_token_id=list(range(40))
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with tokenizer and chat template."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    new_model(0).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(checkpoint):
    """The one engine."""
    torch.ones(64, 64) @ torch.ones(64, 64)  # work before the start must do no harm
    server = VLLMServer(checkpoint, **OPTIONS)
    await server.start()
    yield server
    await server.shutdown()


def update_to(seed, version):
    """A weight update to another model."""
    model = new_model(seed)
    named = list(model.named_parameters())
    manifest = WeightManifest.from_tensors(version, named)
    return WeightUpdate(manifest, lambda: ((name, tensor.detach()) for name, tensor in named), forward_of(model))


async def test_what_is_installed_is_told(server):
    """A started server is ready and says which versions it found."""
    health = await server.health()
    assert health.ready
    assert health.detail.startswith("vllm ")
    assert "torch" in health.detail
    assert "slower" not in health.detail
    assert server.capabilities().engine in health.detail
    assert server.capabilities().sleep_levels == ()
    assert server.capabilities().kv_capacity_tokens > 0
    with pytest.raises(UnsupportedError, match="cannot sleep"):
        await server.sleep()


async def test_conformance(server):
    """The whole suite passes, with true logprobs in float32, before the shutdown check that comes last."""
    report = await check_server(
        server,
        vocab_size=VOCAB,
        forward=forward_of(new_model(0)),
        weight_update=update_to(1, 1),
        scope=Scope.FULL,
        logprob_tolerance=1e-4,
        deadline_s=60.0,
        end_with_shutdown=False,
    )
    assert {result.name for result in report.results if result.skipped} == {"sleep"}, report


async def test_a_later_turn_reuses_whole_blocks(server):
    """State is shared by all prompts that begin alike, in blocks of 32 tokens; after an update nothing is left of it."""
    prompt = [index % VOCAB for index in range(70)]
    params = SamplingParams(max_tokens=4, temperature=0)
    await server.reset_prefix_cache()
    first = await server.generate(prompt, params, "one")
    again = await server.generate([*prompt, *first.token_ids], params, "one")
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
    update = update_to(3, server.policy_version + 1)
    await server.update_weights(update.manifest, update.make_weights())
    assert (await server.generate(prompt, params, "two")).num_cached_tokens == 0


async def test_the_checkpoint_s_generation_config_does_not_count(server):
    """What a request leaves out is neutral, and the model's own end of text stops nothing."""
    update = update_to(0, server.policy_version + 1)
    await server.update_weights(update.manifest, update.make_weights())
    forward = forward_of(new_model(0))
    prompt = [7, 8, 9]
    out = await server.generate(prompt, {"max_tokens": 60, "seed": 4}, "neutral")
    assert len(out.token_ids) == 60
    assert out.stop_reason is StopReason.LENGTH
    logits = forward([*prompt, *out.token_ids])
    for place, (token, logprob) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        truth = reference_distribution(logits[len(prompt) + place - 1], SamplingParams())
        assert logprob == pytest.approx(float(truth[token]), abs=1e-4)


async def test_filters_in_our_order(server):
    """Where vLLM would filter in another order, or raise a low temperature, the sampled distribution is ours."""
    forward = forward_of(new_model(0))
    prompt = [11, 12, 13, 14]
    logits = forward(prompt)[-1]
    for params in (
        {"top_p": 0.6, "min_p": 0.08},
        {"temperature": 0.004},
        {"temperature": 0.3, "top_p": 0.8, "min_p": 0.2},
    ):
        wanted = reference_distribution(logits, SamplingParams(**params))
        asked = SamplingParams(max_tokens=1, **params)
        outs = await asyncio.gather(*(server.generate(prompt, asked, f"filters-{index}") for index in range(40)))
        for out in outs:
            assert out.logprobs[0] == pytest.approx(float(wanted[out.token_ids[0]]), abs=1e-3), params


async def test_kept_requests_go_on_with_exact_spans(server):
    """A request over an update says from which token on it comes from the new weights, and all its logprobs are true."""
    old, new = forward_of(new_model(0)), update_to(5, server.policy_version + 1)
    prompt = [21, 22, 23]
    task = asyncio.ensure_future(server.generate(prompt, {"max_tokens": 200, "seed": 1}, "kept"))
    await server.generate(prompt, {"max_tokens": 20}, "beside it")
    await server.pause(PauseMode.KEEP)
    await server.update_weights(new.manifest, new.make_weights())
    await server.resume()
    out = await task
    versions = [span.version for span in out.policy_versions]
    assert versions[-1] == new.manifest.version
    assert all(span.exact for span in out.policy_versions)
    switch = out.policy_versions[-1].start
    ids = [*prompt, *out.token_ids]
    before, after = old(ids), new.forward(ids)
    for place, token in enumerate(out.token_ids):
        logits = (before if place < switch else after)[len(prompt) + place - 1]
        truth = float(reference_distribution(logits, SamplingParams())[token])
        assert out.logprobs[place] == pytest.approx(truth, abs=1e-4), (place, switch)


async def test_seeds_of_more_prompts_than_a_step_takes(server):
    """Seeded requests whose prompts do not fit into one step together draw what they draw alone."""
    prompts = [[(7 * index + place) % VOCAB for place in range(3000)] for index in range(8)]
    asked = SamplingParams(max_tokens=4, seed=11)
    crowd = await asyncio.gather(
        *(server.generate(prompt, asked, f"long-{index}") for index, prompt in enumerate(prompts))
    )
    for prompt, out in zip(prompts, crowd, strict=True):
        assert (await server.generate(prompt, asked, "alone")).token_ids == out.token_ids


async def test_chat_through_vllm(server):
    """`chat_completion` is vLLM's own endpoint: it renders the checkpoint's template; what it does not know is refused."""
    request = {
        "messages": [{"role": "user", "content": "w10 w11"}],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await server.chat_completion(request)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 5
    ids = (await server.generate([3, 10, 11, 4, 5], {"max_tokens": 3, "temperature": 0}, "same")).token_ids
    assert answer["choices"][0]["message"]["content"].split() == [f"w{index}" for index in ids]
    for wrong in (
        {"tempertaure": 1.0},
        {"stream": True},
        {"messages": []},
        {"max_tokens": -1},
        {"messages": [{"role": "user", "content": "w1 " * MAX_LEN}]},
    ):
        with pytest.raises(EngineInputError):
            await server.chat_completion({**request, **wrong})
    with pytest.raises(EngineInputError, match="must be a mapping"):
        await server.chat_completion("hello")


async def test_one_output_crosses_for_each_request(server, monkeypatch):
    """Whatever a request samples, its tokens and logprobs leave the engine core together, when it ends."""
    processor = server._engine.llm.output_processor
    process, crossed = processor.process_outputs, []

    def counting(outputs, *args, **kwargs):
        crossed.extend(output.request_id.partition("#")[0] for output in outputs)
        return process(outputs, *args, **kwargs)

    monkeypatch.setattr(processor, "process_outputs", counting)
    names = [f"counted-{index}" for index in range(6)]
    outs = await asyncio.gather(*(server.generate([1, 2, 3], {"max_tokens": 20}, name) for name in names))
    assert all(len(out.token_ids) == len(out.logprobs) == 20 for out in outs)
    assert sorted(crossed) == names


async def test_what_is_held_comes_out(server):
    """An abort, and an abort under a pause while nothing is computed, give the tokens so far with true logprobs."""
    manifest = update_to(4, server.policy_version + 1)
    await server.update_weights(manifest.manifest, manifest.make_weights())
    forward, prompt = manifest.forward, [31, 32, 33]
    for paused in (False, True):
        task = asyncio.ensure_future(server.generate(prompt, {"max_tokens": 2000, "seed": 2}, "held"))
        await server.generate(prompt, {"max_tokens": 12}, "beside it")
        if paused:
            await server.pause(PauseMode.KEEP)
        assert await server.abort(["held"]) == 1
        out = await task
        if paused:
            await server.resume()
        assert out.stop_reason is StopReason.ABORTED
        assert 5 <= len(out.token_ids) == len(out.logprobs) < 2000
        assert [(span.start, span.version, span.exact) for span in out.policy_versions] == [
            (0, manifest.manifest.version, True)
        ]
        logits = forward([*prompt, *out.token_ids])
        for place, token in enumerate(out.token_ids):
            truth = float(reference_distribution(logits[len(prompt) + place - 1], SamplingParams())[token])
            assert out.logprobs[place] == pytest.approx(truth, abs=1e-4)


async def test_chat_beside_what_is_held(server):
    """Requests of vLLM's own endpoint get vLLM's own outputs, with logprobs, in the same steps as requests that are held."""
    held = [
        asyncio.ensure_future(server.generate([40 + index], {"max_tokens": 60, "temperature": 0}, f"held-{index}"))
        for index in range(3)
    ]
    request = {"messages": [{"role": "user", "content": "w10"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = await server.chat_completion({**request, "logprobs": True, "top_logprobs": 2})
    entries = answer["choices"][0]["logprobs"]["content"]
    alone = await server.generate([3, 10, 4, 5], {"max_tokens": 8, "temperature": 0}, "alone")
    assert [entry["token"] for entry in entries] == [f"w{index}" for index in alone.token_ids]
    assert [entry["logprob"] for entry in entries] == pytest.approx(alone.logprobs, abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    for index, task in enumerate(held):
        again = await server.generate([40 + index], {"max_tokens": 60, "temperature": 0}, "again")
        assert (await task).token_ids == again.token_ids
        assert (await task).logprobs == pytest.approx(again.logprobs, abs=1e-4)


async def test_types_of_updates(server):
    """Weights in another type are refused unless the server casts, and the head of a tied model may come too, or not."""
    model = new_model(6)
    named = [(name, tensor.detach().bfloat16()) for name, tensor in model.named_parameters()]
    with pytest.raises(EngineInputError, match="must have dtype float32, got bfloat16"):
        await server.update_weights(WeightManifest.from_tensors(server.policy_version + 1, named), named)
    tied = [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight)]
    whole = [(name, tensor.detach()) for name, tensor in tied]
    await server.update_weights(WeightManifest.from_tensors(server.policy_version + 1, whole), whole)
    out = await server.generate([1, 2], {"max_tokens": 5, "temperature": 0}, "tied")
    assert out.token_ids[0] == int(forward_of(model)([1, 2])[-1].argmax())


async def test_an_update_that_breaks_off_within_a_layer_leaves_nothing(server):
    """Parts of a layer that came before a failure do not meet those of the next update: its logprobs are the new model's."""
    broken, whole = update_to(8, server.policy_version + 1), update_to(9, server.policy_version + 1)

    def breaking_off():
        for name, tensor in broken.make_weights():
            yield name, tensor
            if name.endswith("q_proj.weight"):
                raise OSError("the sender went away")

    with pytest.raises(WeightUpdateError, match="the sender went away"):
        await server.update_weights(broken.manifest, breaking_off())
    with pytest.raises(EngineNotReadyError):
        await server.generate([1, 2], {"max_tokens": 2}, "between")
    await server.update_weights(whole.manifest, whole.make_weights())
    await check_server(server, vocab_size=VOCAB, forward=whole.forward, checks=("logprobs",), end_with_shutdown=False)


async def test_the_worker_fetches_weights_along_a_route(server):
    """From a socket, and from two broadcasts of one group, whose sender fails in a third: what is sampled comes from the weights that were sent
    last, and an update that breaks off is told at both ends."""
    assert [place.host for place in server.capabilities().weight_workers] == [host_name()]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    route = CollectiveRoute(
        host="127.0.0.1", port=store.port, name="g", world_size=2, first_rank=1, bucket_bytes=8192, interface="lo"
    )
    kept = KeptGroup("cpu")
    with WeightListener() as listener:

        def over_socket(update):
            sender = WeightSender(listener.accept())
            try:
                sender.send(update.manifest, update.make_weights())
            finally:
                sender.close()

        def broadcast(update):
            BroadcastSender(route, kept).send(update.manifest, update.make_weights())

        ways = ((SocketRoute((str(listener.path),)), over_socket), (route, broadcast), (route, broadcast))
        for seed, (way, send) in enumerate(ways, 20):
            update = update_to(seed, server.policy_version + 1)
            sending = asyncio.ensure_future(asyncio.to_thread(send, update))
            await server.receive_weights(update.manifest, way)
            await sending
            assert server.policy_version == update.manifest.version
            await check_server(
                server, vocab_size=VOCAB, forward=update.forward, checks=("logprobs",), end_with_shutdown=False
            )
    other = update_to(30, server.policy_version + 1)
    broken = WeightUpdate(other.manifest, lambda: itertools.islice(other.make_weights(), 5), other.forward)
    sending = asyncio.ensure_future(asyncio.to_thread(broadcast, broken))
    with pytest.raises(WeightUpdateError, match="rank 0: weights must hold every tensor"):
        await server.receive_weights(other.manifest, route)
    with pytest.raises(WeightUpdateError, match="weights must hold every tensor"):
        await sending
    await server.update_weights(other.manifest, other.make_weights())
    await check_server(server, vocab_size=VOCAB, forward=other.forward, checks=("logprobs",), end_with_shutdown=False)
    kept.close()


async def test_the_last_check(server):
    """Requests in flight at shutdown end with the error that says so."""
    await check_server(server, vocab_size=VOCAB, checks=("shutdown",))
    assert (await server.health()).state is EngineState.CLOSED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cramped(checkpoint):
    """An engine whose cache holds three of the longest requests."""
    before = set(multiprocessing.active_children())
    engine_args = {**OPTIONS["engine_args"], "num_gpu_blocks_override": 30}
    server = VLLMServer(checkpoint, **{**OPTIONS, "max_model_len": 320, "engine_args": engine_args})
    await server.start()
    (process,) = set(multiprocessing.active_children()) - before
    yield server, process
    await server.shutdown()


@pytest.mark.parametrize("sampled", [{"temperature": 0}, {"seed": 5}])
async def test_requests_that_lose_their_place(cramped, sampled):
    """Where the cache is too small for all, some are computed anew: their tokens and logprobs are those of undisturbed ones."""
    server, _ = cramped
    asked = SamplingParams(max_tokens=250, **sampled)
    prompts = [[50 + index, 7, 8] for index in range(8)]
    alone = [await server.generate(prompt, asked, "alone") for prompt in prompts]
    await server.reset_prefix_cache()
    together = await asyncio.gather(
        *(server.generate(prompt, asked, f"crowd-{index}") for index, prompt in enumerate(prompts))
    )
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_a_dead_engine(cramped):
    """Where vLLM's processes die, everything in flight fails with the cause, and so does whatever comes later."""
    server, process = cramped
    tasks = [
        asyncio.ensure_future(server.generate([1, 2, 3], {"max_tokens": 200}, f"doomed-{index}")) for index in range(8)
    ]
    await server.generate([1, 2, 3], {"max_tokens": 5}, "beside them")
    os.kill(process.pid, signal.SIGKILL)
    for outcome in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
        assert isinstance(outcome, EngineCrashedError), outcome
        assert "must not crash" in str(outcome)
    assert (await server.health()).state is EngineState.FAILED
    with pytest.raises(EngineCrashedError):
        await server.generate([1, 2, 3], {"max_tokens": 2}, "late")


async def test_a_dead_engine_answers_no_order(cramped):
    """What waits for a reply of processes that are gone is told so, and does not wait for ever."""
    server, _ = cramped
    with pytest.raises(EngineCrashedError, match="processes are gone"):
        await asyncio.wait_for(server._engine.pause(PauseMode.KEEP), 30)


async def test_a_vllm_whose_scheduler_is_another(checkpoint, monkeypatch):
    """Where outputs cannot be held, every token comes over by itself: the contract is kept, the server says so, and nothing of it stays."""
    before = set(os.listdir(tempfile.gettempdir()))
    monkeypatch.setattr("ostinato_engines.vllm_engine.launch.hold_outputs", lambda config: "the scheduler is another")
    server = VLLMServer(checkpoint, **OPTIONS)
    await server.start()
    assert (await server.health()).detail.endswith("; slower, since the scheduler is another")
    assert server.capabilities().exact_policy_spans == server._engine.parts.weight_versions
    update = update_to(1, 1)
    await check_server(
        server,
        vocab_size=VOCAB,
        forward=forward_of(new_model(0)),
        weight_update=update,
        logprob_tolerance=1e-4,
        deadline_s=60.0,
    )
    left = set(os.listdir(tempfile.gettempdir())) - before
    assert not {name for name in left if name.startswith("ostinato-vllm-") or name.count("-") == 4}


async def test_which_schedulers_can_hold():
    """Those of vLLM that ours does the work of; with several engine cores, or with another scheduler, it is said why not."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    def outcome(scheduler, *, cores=1):
        chosen = SimpleNamespace(get_scheduler_cls=lambda: scheduler, scheduler_cls=None)
        config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=cores), scheduler_config=chosen)
        return hold_outputs(config), (chosen.scheduler_cls or "").rpartition(".")[2]

    class Another(Scheduler):
        pass

    assert outcome(Scheduler) == ("", "HoldingScheduler")
    assert outcome(AsyncScheduler) == ("", "AsyncHoldingScheduler")
    why, chosen = outcome(Another)
    assert ("Another" in why, chosen) == (True, "")
    why, chosen = outcome(Scheduler, cores=2)
    assert ("data_parallel_size" in why, chosen) == (True, "")


def save_adapter(folder, seed):
    """A LoRA adapter on queries and values of the tiny model, in PEFT's format; what adds it to a model."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, parameter in new_model(0).named_parameters():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            rows, columns = parameter.shape
            down, up = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
            of = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{of}.lora_A.weight": 0.3 * down, f"{of}.lora_B.weight": 0.3 * up}
            added[name] = 2.0 * (0.3 * up) @ (0.3 * down)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "tiny"}))

    def add(model):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += added.get(name, 0.0)
        return model

    return add


async def test_an_adapter_takes_part_in_every_answer(checkpoint, tmp_path):
    """Turns and chat come from the model with the adapter, before and after an update of what is beneath it."""
    add = save_adapter(tmp_path / "adapter", seed=1)
    server = VLLMServer(checkpoint, lora=tmp_path / "adapter", **OPTIONS)
    await server.start()
    try:
        prompt, greedy = [3, 10, 11, 4, 5], {"max_tokens": 6, "temperature": 0}
        request = {"messages": [{"role": "user", "content": "w10 w11"}], "ignore_eos": True, **greedy}
        for seed in (0, 1):
            if seed:
                update = update_to(seed, 1)
                await server.update_weights(update.manifest, update.make_weights())
            output = await server.generate(prompt, greedy, f"turn-{seed}")
            ids = prompt + list(output.token_ids)
            wanted, without = (
                torch.from_numpy(forward_of(model)(ids)[len(prompt) - 1 : -1]).argmax(-1).tolist()
                for model in (add(new_model(seed)), new_model(seed))
            )
            assert list(output.token_ids) == wanted != without
            for named in ({}, {"model": str(checkpoint)}, {"model": "adapter"}):
                answer = await server.chat_completion({**request, **named})
                assert answer["choices"][0]["message"]["content"].split() == [f"w{index}" for index in wanted]
    finally:
        await server.shutdown()


async def test_an_engine_that_does_not_start(checkpoint):
    """The error holds the cause out of the engine's own log, and the likely cure; another start may follow."""
    options = {**OPTIONS, "engine_args": {"block_size": 48}}
    server = VLLMServer(checkpoint, **options)
    with pytest.raises(EngineStartError, match=r"(?s)block size.*leave block_size out"):
        await server.start()
    assert (await server.health()).state is EngineState.NEW
    with pytest.raises(EngineNotReadyError):
        await server.generate([1], {}, "early")
    await server.shutdown()


async def test_wrong_options(checkpoint, tmp_path):
    """What vLLM cannot do, or what the contract decides, is refused by name before anything starts."""
    with pytest.raises(EngineInputError, match="tensor_parallel_size must be an integer of at least 1"):
        VLLMServer(checkpoint, tensor_parallel_size=0)
    with pytest.raises(EngineInputError, match=r"adapter_config\.json"):
        VLLMServer(checkpoint, lora=tmp_path)
    for name, words in (("logprobs_mode", "leave logprobs_mode to VLLMServer"), ("blocksize", "must be known to vllm")):
        server = VLLMServer(checkpoint, engine_args={name: 1})
        with pytest.raises(EngineInputError, match=words):
            await server.start()
        await server.shutdown()


async def test_a_model_runner_that_draws_elsewhere():
    """Where a model runner of vLLM has no such parts, vLLM draws as it does, and it is told why."""
    seeded_draw = importlib.import_module("ostinato_engines.vllm_engine.seeded_draw")
    assert "draws elsewhere" in seeded_draw.draw_by_seeds(SimpleNamespace())
    config = SimpleNamespace(model_config=SimpleNamespace(seed=0))
    rows = seeded_draw.RowSeeds(config, torch.device("cpu"), False)
    theirs = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").TopKTopPSampler("processed_logprobs")
    runner = SimpleNamespace(
        sampler=SimpleNamespace(topk_topp_sampler=theirs),
        device=torch.device("cpu"),
        model_config=SimpleNamespace(get_vocab_size=lambda: 10),
        input_batch=SimpleNamespace(logitsprocs=SimpleNamespace(all=[rows])),
        seq_lens=None,
    )
    assert "counts lengths elsewhere" in seeded_draw.draw_by_seeds(runner)
    assert runner.sampler.topk_topp_sampler is theirs
    runner.seq_lens = torch.tensor([4, 4, 5])
    assert seeded_draw.draw_by_seeds(runner) == ""
    assert runner.sampler.topk_topp_sampler is not theirs


async def test_requests_without_a_seed_get_one_each():
    """Requests without a seed draw differently, and the same again from an engine of the same seed."""
    seeded_draw = importlib.import_module("ostinato_engines.vllm_engine.seeded_draw")
    added = [(row, SimpleNamespace(seed=3 if row == 1 else None), None, []) for row in range(3)]
    update = SimpleNamespace(batch_size=3, removed=[], added=added, moved=[])

    def keys_of(seed):
        config = SimpleNamespace(model_config=SimpleNamespace(seed=seed))
        rows = seeded_draw.RowSeeds(config, torch.device("cpu"), False)
        rows.update_state(update)
        rows.update_state(None)
        return rows.keys.tolist()

    first, again, other = keys_of(0), keys_of(0), keys_of(1)
    assert first == again
    assert len(set(first)) == 3
    assert [a == b for a, b in zip(first, other, strict=True)] == [False, True, False]
