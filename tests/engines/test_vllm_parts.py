"""The parts of the vLLM adapter that need no vLLM: what a log says, what a checkpoint holds, what is sampled from."""

import asyncio
import hashlib
import itertools
import json
import logging
import os
import pickle
import struct
import threading
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import (
    EngineClosedError,
    EngineCrashedError,
    EngineError,
    EngineInputError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStartError,
    EngineState,
    ManifestError,
    MissingDependencyError,
    PauseMode,
    SamplingParams,
    SocketRoute,
    StopReason,
    TensorSpec,
    UnsupportedError,
    WeightManifest,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)
from ostinato_engines.testing import reference_distribution
from ostinato_engines.vllm_engine.diagnosis import explain, last_lines_that_matter, likely_cure
from ostinato_engines.vllm_engine.engine_log import VARIABLE, EngineLog
from ostinato_engines.vllm_engine.probe import find_vllm

torch = pytest.importorskip("torch")

from ostinato_engines.sampling import exponentials, position_keys, stream_keys  # noqa: E402
from ostinato_engines.vllm_engine.answers import Conversing, to_token_output, until_gone  # noqa: E402
from ostinato_engines.vllm_engine.batch_rows import BatchRows  # noqa: E402
from ostinato_engines.vllm_engine.checkpoint import CheckpointTensors  # noqa: E402
from ostinato_engines.vllm_engine.fan_out import memory_for, send_to_all  # noqa: E402
from ostinato_engines.vllm_engine.filtering import filtered  # noqa: E402
from ostinato_engines.vllm_engine.held import HOLD_KEY, Held, decode_answer  # noqa: E402
from ostinato_engines.vllm_engine.launch import engine_arguments, start_engine  # noqa: E402
from ostinato_engines.vllm_engine.race import race  # noqa: E402
from ostinato_engines.vllm_engine.running import RunningEngine  # noqa: E402
from ostinato_engines.vllm_engine.sampling import FILTERS_KEY, OUR_PROCESSORS, to_vllm  # noqa: E402
from ostinato_engines.vllm_engine.traffic import Traffic  # noqa: E402
from ostinato_engines.vllm_engine.worker import WeightExtension  # noqa: E402
from ostinato_engines.vllm_server import VLLMServer  # noqa: E402
from ostinato_engines.weight_blocks import whole_blocks  # noqa: E402
from ostinato_engines.weight_transfer import MemoryKind, WeightListener, WeightReceiver, connect  # noqa: E402

LOG = """(EngineCore 10) INFO Initializing an engine
(Worker 11) ERROR WorkerProc hit an exception.
Traceback (most recent call last):
  File "worker.py", line 5, in load
    raise ValueError("no")
ValueError: The model's max seq len (40960) is larger than the maximum number of tokens in the cache (512).
(EngineCore 10) ERROR EngineCore failed to start.
RuntimeError: Worker failed with error 'The model ...', please check the stack trace above for the root cause
"""


def test_the_cause_is_found_in_a_log():
    """The error that began it is shown, those that only report it are not, and the cure fits the cause."""
    assert last_lines_that_matter(LOG) == [
        "ValueError: The model's max seq len (40960) is larger than the maximum number of tokens in the cache (512)."
    ]
    text = explain(LOG, RuntimeError("Engine core initialization failed. See root cause above."))
    assert "max seq len" in text
    assert "lower max_model_len" in text
    assert "initialization failed" not in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "lower gpu_memory_utilization"),
        (
            "ValueError: Available memory on node 0 is less than desired CPU memory utilization",
            "VLLM_CPU_KVCACHE_SPACE",
        ),
        ("ValueError: No common block size for 16", "leave block_size out"),
        ("ImportError: _C.abi3.so: undefined symbol: _ZN3c10", "do not fit each other"),
        ("RuntimeError: The NVIDIA CUDA driver version is insufficient", "fits this machine's driver"),
        ("ValueError: loading it requires trust_remote_code=True", "trust_remote_code"),
        ("OSError: the port 8000 is taken", "choose its ports"),
        ("UserError: this is natively supported\nEngineError: no answer within 240 s", "give it more time"),
        ("KeyError: 'something else'", "see the whole log"),
    ],
)
def test_each_cause_has_its_cure(line, words):
    """What users meet most has a cure; the rest points at the log."""
    assert words in likely_cure(last_lines_that_matter(line))


def test_a_log_without_errors_and_no_log_at_all():
    """Without an error the last lines are shown; without a log the usual reason is told."""
    assert last_lines_that_matter("one\n\ntwo\n") == ["one", "two"]
    assert "__main__" in explain("", RuntimeError("Engine core initialization failed"))
    assert "OSError: no such model" in explain("", OSError("no such model"))


def test_the_log_of_an_engine_is_kept_only_while_it_lives(monkeypatch):
    """The log lies in a folder of its own, its end can be read, and closing removes it; the user's own setting counts."""
    monkeypatch.delenv(VARIABLE, raising=False)
    log = EngineLog()
    config = json.loads(Path(log.environment[VARIABLE]).read_text())
    assert log.tail() == ""
    Path(config["handlers"]["file"]["filename"]).write_text("x" * 500_000 + "the end")
    assert log.tail().endswith("the end")
    assert len(log.tail()) < 300_000
    log.close()
    assert log.tail() == ""
    monkeypatch.setenv(VARIABLE, "mine.json")
    theirs = EngineLog()
    assert theirs.environment == {}
    assert theirs.tail() == ""


def test_the_start_error_pickles():
    """It crosses processes like the others."""
    error = pickle.loads(pickle.dumps(EngineStartError("why\ncure")))
    assert str(error) == "why\ncure"
    assert isinstance(error, RuntimeError)


def write_safetensors(path, tensors):
    """A file with these names, shapes and types, and no bytes behind them."""
    head = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()}
    head["__metadata__"] = {"format": "pt"}
    body = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two files with a tied head."""
    write_safetensors(tmp_path / "a.safetensors", {"model.embed_tokens.weight": ("BF16", [8, 4])})
    write_safetensors(
        tmp_path / "b.safetensors",
        {"model.norm.weight": ("BF16", [4]), "model.rotary_emb.inv_freq": ("F32", [2]), "steps": ("I64", [1])},
    )
    return tmp_path


def manifest_of(*, extra=(), without=(), **changes):
    """The fixture's checkpoint as a manifest, changed."""
    specs = {
        "model.embed_tokens.weight": TensorSpec("model.embed_tokens.weight", (8, 4), "bfloat16"),
        "model.norm.weight": TensorSpec("model.norm.weight", (4,), "bfloat16"),
        "steps": TensorSpec("steps", (1,), "int64"),
        **changes,
    }
    return WeightManifest(1, (*(spec for name, spec in specs.items() if name not in without), *extra))


def test_a_part_holds_whole_blocks(folder):
    """Of what vLLM joins a part must bring all or nothing, else it would fill the gap with what lay in its memory; a tied head need not come."""
    tensors = CheckpointTensors(folder, dtype="bfloat16", tied=True, cast=False)
    whole = manifest_of()
    for spec in whole.tensors:
        block = whole.resting_on("base", [spec.name]).partial()
        if block is not None:
            tensors.check(block)
    gap = WeightManifest(1, whole.tensors[:1], ("model.embed_tokens.weight",), "base", True)
    assert whole_blocks([whole.tensors[0].name], [spec.name for spec in whole.tensors]) != (whole.tensors[0].name,)
    with pytest.raises(ManifestError, match="send the whole model"):
        tensors.check(gap)


def test_a_manifest_is_held_to_the_checkpoint(folder):
    """Names, shapes and types must be the checkpoint's; a tied head may come, computed tensors do not count."""
    tensors = CheckpointTensors(folder, dtype="bfloat16", tied=True, cast=False)
    head = TensorSpec("lm_head.weight", (8, 4), "bfloat16")
    tensors.check(manifest_of())
    tensors.check(manifest_of(extra=[head]))
    norm = TensorSpec("model.norm.weight", (4,), "float32")
    wrong = {
        "twice": manifest_of(extra=[TensorSpec("steps", (1,), "int64")]),
        "without model.norm.weight": manifest_of(without=["model.norm.weight"]),
        "got 'other'": manifest_of(extra=[TensorSpec("other", (1,), "bfloat16")]),
        "must have shape (4,)": manifest_of(**{"model.norm.weight": TensorSpec("model.norm.weight", (5,), "bfloat16")}),
        "must have dtype bfloat16": manifest_of(**{"model.norm.weight": norm}),
        "must have dtype int64": manifest_of(steps=TensorSpec("steps", (1,), "float32")),
    }
    for words, manifest in wrong.items():
        with pytest.raises(ManifestError) as caught:
            tensors.check(manifest)
        assert words in str(caught.value)
    CheckpointTensors(folder, dtype="bfloat16", tied=True, cast=True).check(manifest_of(**{"model.norm.weight": norm}))
    with pytest.raises(ManifestError, match="lm_head"):
        CheckpointTensors(folder, dtype="bfloat16", tied=False, cast=False).check(manifest_of(extra=[head]))


def test_a_checkpoint_that_cannot_be_read(tmp_path):
    """No safetensors file, and a damaged one, are told apart."""
    with pytest.raises(UnsupportedError, match="folder with safetensors"):
        CheckpointTensors(tmp_path, dtype="float32", tied=False, cast=False)
    for content in (b"", b"\xff" * 8, struct.pack("<Q", 4) + b"[1]]", struct.pack("<Q", 2) + b"[]"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(EngineLoadError, match="must be a safetensors file"):
            CheckpointTensors(tmp_path, dtype="float32", tied=False, cast=False)


@settings(deadline=None)
@given(
    st.lists(st.floats(-12, 12, width=32), min_size=2, max_size=24, unique=True),
    st.sampled_from([1e-30, 0.003, 0.5, 1.0, 2.5]),
    st.integers(0, 8),
    st.floats(0.05, 1.0),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_the_filters_are_the_reference_s(scores, temperature, top_k, top_p, min_p):
    """What `exact_filters` leaves is the distribution of the float64 reference."""
    logits = torch.tensor(scores, dtype=torch.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = reference_distribution(logits.numpy(), params)
    got = filtered(logits, temperature, top_k, top_p, min_p).double().log_softmax(-1).numpy()
    sure = reference_distribution(logits.numpy(), SamplingParams(temperature=temperature, top_k=top_k))
    mass = np.cumsum(np.sort(np.exp(sure))[::-1])
    if top_p < 1 and np.abs(mass - top_p).min() < 1e-5:
        return  # rounding may decide about the token at the edge
    if min_p and np.abs(sure[np.isfinite(sure)] - sure.max() - np.log(min_p)).min() < 1e-5 and min_p < 1:
        return
    assert np.array_equal(np.isfinite(got), np.isfinite(wanted))
    kept = np.isfinite(wanted)
    assert np.allclose(got[kept], wanted[kept], atol=1e-5, rtol=1e-6)


def test_only_what_vllm_would_change_goes_through_our_filters():
    """Each parameter reaches vLLM as it is, or, where vLLM's order or limits differ, our filters."""
    parts = SimpleNamespace(sampling_params=dict, final_only="final")

    def asked(hold=None, **params):
        return to_vllm(SamplingParams(**params), max_tokens=5, parts=parts, hold=hold)

    plain = asked(temperature=0.7, top_p=0.9, top_k=20, seed=3, stop_token_ids=(4, 5), repetition_penalty=1.2)
    assert plain["temperature"] == 0.7
    assert (plain["top_p"], plain["top_k"], plain["min_p"]) == (0.9, 20, 0.0)
    assert (plain["seed"], plain["stop_token_ids"], plain["repetition_penalty"]) == (3, [4, 5], 1.2)
    assert (plain["max_tokens"], plain["logprobs"], plain["flat_logprobs"]) == (5, 0, True)
    assert (plain["ignore_eos"], plain["detokenize"], plain["output_kind"]) == (True, False, "final")
    assert "extra_args" not in plain
    assert asked(logprobs=False)["logprobs"] is None
    for params in ({"temperature": 0}, {"min_p": 0.1, "top_k": 3}, {"top_p": 0.5}, {"temperature": 0, "min_p": 0.1}):
        assert "extra_args" not in asked(**params)
    assert asked(temperature=0.8, top_p=0.5, min_p=0.1)["extra_args"] == {FILTERS_KEY: [0.8, 0, 0.5, 0.1]}
    low = asked(temperature=0.001, top_k=7)
    assert (low["temperature"], low["extra_args"]) == (1.0, {FILTERS_KEY: [0.001, 7, 1.0, 0.0]})
    assert "top_p" not in low
    assert asked(hold="a#1", temperature=0.5)["extra_args"] == {HOLD_KEY: "a#1"}


def result_of(token_ids, reason, *, logprobs=None, spans=None):
    """What vLLM returns for one request."""
    flat = None if logprobs is None else SimpleNamespace(logprobs=logprobs)
    versions = None if spans is None else [SimpleNamespace(start=start, version=str(v)) for start, v in spans]
    completion = SimpleNamespace(token_ids=token_ids, finish_reason=reason, logprobs=flat, weight_versions=versions)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=32)


def test_outputs_in_the_contract_s_words():
    """Stops, limits and aborts, absent logprobs, and spans with and without vLLM's own account."""
    params = SamplingParams()
    out = to_token_output(
        result_of([1, 2, 9], "stop", logprobs=[-1.0, -2.0, -0.5], spans=[(0, 3), (2, 4)]),
        params,
        Conversing("a#0", [3, 4]),
        exact=True,
    )
    assert (out.token_ids, out.stop_reason, out.stop_token_id) == ([1, 2, 9], StopReason.STOP, 9)
    assert [(span.start, span.version, span.exact) for span in out.policy_versions] == [(0, 3, True), (2, 4, True)]
    assert (out.logprobs, out.num_cached_tokens) == ([-1.0, -2.0, -0.5], 32)
    inexact = to_token_output(result_of([1], "abort", logprobs=[-1.0]), params, Conversing("a#1", [3, 4]), exact=False)
    assert [(span.start, span.version, span.exact) for span in inexact.policy_versions] == [(0, 3, False)]
    nothing = to_token_output(result_of([], "abort"), params, Conversing("a#2", [3, 4]), exact=True)
    assert (nothing.token_ids, nothing.logprobs, nothing.policy_versions[0].version) == ([], [], 4)
    silent = to_token_output(
        result_of([1], "length"), SamplingParams(logprobs=False), Conversing("a#3", [0]), exact=False
    )
    assert (silent.logprobs, silent.policy_versions[0].exact) == (None, True)


STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-50, 0, width=32)), max_size=3), st.integers(0, 3)
    ),
    max_size=12,
)


@given(steps=STEPS, logprobs=st.booleans())
def test_what_is_held_comes_over_whole(steps, logprobs):
    """Tokens, logprobs to the last bit, and which of them came from which version, as the steps gave them."""
    held = Held("a#1", logprobs=logprobs)
    for sampled, version in steps:
        held.add([token for token, _ in sampled], [value for _, value in sampled] if logprobs else [], version)
    answer = decode_answer(held.encode())
    token_ids, values = answer.to_lists()
    assert token_ids == [token for sampled, _ in steps for token, _ in sampled]
    assert values == ([value for sampled, _ in steps for _, value in sampled] if logprobs else None)
    per_token = [version for sampled, version in steps for _ in sampled]
    ends = [start for start, _ in answer.versions[1:]] + [len(per_token)]
    spread = [
        version
        for (start, version), end in zip(answer.versions, ends, strict=bool(per_token))
        for _ in range(start, end)
    ]
    assert spread == per_token
    versions = [version for _, version in answer.versions]
    assert all(one != two for one, two in itertools.pairwise(versions))


def test_an_answer_that_was_held():
    """It counts, and not what vLLM's own output says; a request that was ended before its first token has a version too."""
    held = Held("a#1", logprobs=True)
    held.prefill_stats = SimpleNamespace(num_cached_tokens=16)
    held.add([4, 5], [-1.5, -0.25], 3)
    held.add([9], [-2.0], 4)
    out = to_token_output(
        result_of([], "stop"),
        SamplingParams(),
        Conversing("a#1", [3, 4]),
        exact=True,
        answer=decode_answer(held.encode()),
    )
    assert (out.token_ids, out.logprobs, out.num_cached_tokens) == ([4, 5, 9], [-1.5, -0.25, -2.0], 16)
    assert (out.stop_reason, out.stop_token_id) == (StopReason.STOP, 9)
    assert [(span.start, span.version, span.exact) for span in out.policy_versions] == [(0, 3, True), (2, 4, True)]
    empty = decode_answer(Held("b#1", logprobs=True).encode())
    params, request = SamplingParams(), Conversing("b#1", [3, 4])
    nothing = to_token_output(result_of([], "abort"), params, request, exact=True, answer=empty)
    assert (nothing.token_ids, nothing.logprobs, nothing.policy_versions[0].version) == ([], [], 4)
    assert nothing.num_cached_tokens is None


def take_all(path, tensors, *, fail_after=None):
    """A worker: copies what comes, or gives up."""
    receiver = WeightReceiver(connect(path))
    update = receiver.next_update()
    try:
        for name, tensor in update:
            tensors[name] = tensor.clone()
            if len(tensors) == fail_after:
                raise MemoryError("this worker is full")
        update.finish()
    except Exception as error:
        with suppress(WeightUpdateError):
            update.fail(error)
    with suppress(WeightUpdateError):
        receiver.next_update()
    receiver.close()


async def fan_out(weights, *, num_workers=3, fail_after=None):
    """Sends to some workers, the last of which may fail; returns what each got."""
    named = [(f"w{index}", torch.full((index + 1, 3), float(index))) for index in range(5)]
    got = [{} for _ in range(num_workers)]
    with ExitStack() as stack:
        listeners = [stack.enter_context(WeightListener()) for _ in got]
        works = [
            asyncio.ensure_future(
                asyncio.to_thread(
                    take_all, listener.path, tensors, fail_after=fail_after if tensors is got[-1] else None
                )
            )
            for listener, tensors in zip(listeners, got, strict=True)
        ]
        try:
            await send_to_all(listeners, WeightManifest.from_tensors(1, named), weights(named))
        finally:
            await asyncio.gather(*works)
    return named, got


async def test_every_worker_gets_every_tensor():
    """One stream reaches all workers whole, and is read once."""
    reads = []

    def weights(named):
        for name, tensor in named:
            reads.append(name)
            yield name, tensor.clone()

    named, got = await fan_out(weights)
    assert reads == [name for name, _ in named]
    for tensors in got:
        assert list(tensors) == reads
        assert all(torch.equal(tensors[name], tensor) for name, tensor in named)


async def test_a_failure_ends_the_stream_for_all():
    """A worker that fails, and a source that breaks off, end everybody's update with the error that began it."""
    with pytest.raises(WeightUpdateError, match="this worker is full"):
        await fan_out(iter, fail_after=2)

    def broken(named):
        yield named[0]
        raise OSError("the disk is gone")

    with pytest.raises(WeightUpdateError, match="the disk is gone"):
        await fan_out(broken)

    def broken_at_once(named):
        raise OSError("there is no disk")
        yield

    with pytest.raises(WeightUpdateError, match="there is no disk"):
        await fan_out(broken_at_once)
    with pytest.raises(WeightUpdateError, match="w4"):
        await fan_out(lambda named: iter(named[:-1]))
    with pytest.raises(WeightUpdateError, match="w0"):
        await fan_out(lambda named: iter(()))


def test_weights_on_the_host_go_through_its_memory():
    """A device's memory is for weights that lie on a device, and it is not asked for where there are none."""
    assert memory_for(torch.ones(2)) == memory_for(None) == (MemoryKind.SHARED, "cpu")


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({"num_gpu_blocks": 100, "block_size": 16}, 1600),
        ({"num_gpu_blocks": 100, "block_size": 16, "kv_cache_size_tokens": 800}, 800),
        ({"num_gpu_blocks": None, "block_size": 16, "kv_cache_size_tokens": None}, None),
    ],
)
def test_the_capacity_of_the_cache(cache, expected):
    """vLLM's own figure counts where it tells one, else its blocks; nothing is claimed where neither is known."""
    llm = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=SimpleNamespace(**cache)))
    assert RunningEngine.kv_capacity_tokens.fget(SimpleNamespace(llm=llm)) == expected


def test_lost_logprobs_are_the_engine_s_fault():
    """An answer with fewer logprobs than tokens is an error that says so, and nothing is made up."""
    held = Held("a#1", logprobs=True)
    held.add([4, 5], [-1.5], 0)
    with pytest.raises(EngineCrashedError, match="a logprob for each of its 2 tokens, got 1"):
        to_token_output(
            result_of([], "length"),
            SamplingParams(),
            Conversing("a#1", [0]),
            exact=True,
            answer=decode_answer(held.encode()),
        )


@pytest.mark.parametrize(
    ("processors", "reasoning", "waits"),
    [
        (OUR_PROCESSORS, None, False),
        (["their.module:Processor", *OUR_PROCESSORS], None, True),
        (OUR_PROCESSORS, "thinking", True),
    ],
)
def test_steps_run_ahead_unless_somebody_reads_tokens(processors, reasoning, waits):
    """Only where all logits processors are ours do vLLM's workers not wait for the tokens of the step before."""
    batch = SimpleNamespace(logitsprocs_need_output_token_ids=True)
    config = SimpleNamespace(model_config=SimpleNamespace(logits_processors=processors), reasoning_config=reasoning)
    worker = SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(input_batch=batch))
    WeightExtension._ostinato_run_ahead(worker)
    assert batch.logitsprocs_need_output_token_ids is waits


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "ieee"), (torch.bfloat16, None)])
async def test_float32_is_not_rounded(dtype, precision, monkeypatch, tmp_path):
    """Processes of an engine in float32 are told that Triton must multiply in float32; others, and ours, are not."""
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    seen = []

    def started(config, **_):
        seen.append(os.environ.get("TRITON_F32_DEFAULT"))
        return "engine"

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=2), model_config=SimpleNamespace(dtype=dtype)
    )
    args = SimpleNamespace(
        create_engine_config=lambda context: config, enable_log_requests=False, disable_log_stats=True
    )
    parts = SimpleNamespace(
        arg_names={"model"},
        device_type="cpu",
        usage_context="test",
        engine_args=lambda **_: args,
        async_llm=SimpleNamespace(from_vllm_config=started),
    )
    log = EngineLog()
    llm, why_no_hold = await start_engine(options_for(tmp_path), parts, log)
    log.close()
    assert (llm, seen) == ("engine", [precision])
    assert "data_parallel_size" in why_no_hold
    assert "TRITON_F32_DEFAULT" not in os.environ


def options_for(model, **more):
    """What a server of this model is started with."""
    return VLLMServer(model, **more)._options


@pytest.mark.parametrize(
    ("settings", "executor"),
    [
        ({}, "mp"),
        ({"engine_args": {"distributed_executor_backend": "uni"}}, "uni"),
        ({"tensor_parallel_size": 2}, None),
        ({"engine_args": {"pipeline_parallel_size": 2}}, None),
    ],
)
def test_the_model_has_a_process_of_its_own(settings, executor, tmp_path):
    """A model on one device runs beside the scheduler, not in its process, unless the user says so; on several vLLM decides."""
    known = {"distributed_executor_backend", "pipeline_parallel_size"}
    parts = SimpleNamespace(arg_names=known, device_type="cuda", device_count=2, version="0")
    arguments = engine_arguments(options_for(tmp_path, **settings), parts)
    assert arguments.get("distributed_executor_backend") == executor


async def test_a_server_that_was_never_started():
    """It says so, can be shut down, and does not come back."""
    server = VLLMServer("no-such-model", max_model_len=64)
    assert (await server.health()).state is EngineState.NEW
    assert server.max_model_len == 64
    assert not server.capabilities().weight_update
    with pytest.raises(EngineNotReadyError, match="call start"):
        await server.generate([1], {}, "a")
    with pytest.raises(EngineNotReadyError):
        await server.pause()
    await server.shutdown()
    await server.shutdown()
    with pytest.raises(EngineClosedError):
        await server.start()


class Mute:
    """An engine that answers no order any more."""

    is_dead, num_orders, was_shut_down = False, 0, False

    async def abort(self, engine_ids) -> None:
        self.num_orders += 1
        await asyncio.Event().wait()

    async def shutdown(self) -> None:
        self.was_shut_down = True


@pytest.mark.parametrize("num_requests", [0, 1])
async def test_an_engine_that_does_not_answer_is_shut_down_all_the_same(num_requests, monkeypatch, caplog):
    """Its processes end, though it says nothing of the requests that it has; without any it is not even asked."""
    monkeypatch.setattr("ostinato_engines.vllm_server._LAST_ANSWERS_S", 0.05)
    server, engine = VLLMServer("no-such-model"), Mute()
    server._engine, server._traffic = engine, Traffic(engine, server._status, server._log, version=0)
    server._traffic.requests = {f"r{number}": Conversing(f"r{number}#1", [0]) for number in range(num_requests)}
    await server.shutdown()
    assert engine.was_shut_down
    assert engine.num_orders == num_requests
    assert ("does not answer at its shutdown" in caplog.text) is bool(num_requests)


class Receiving:
    """An LLM of workers that take updates as vLLM's do, each in a thread; `comes` says which of them come, `dies` that all end then."""

    def __init__(self, num_workers: int, comes=(True,), dies: bool = False) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=num_workers))
        self.errored, self._comes, self._dies, self.arrived = False, comes, dies, threading.Event()

    def _work(self, rank: int, path: str) -> str:
        if not self._comes[rank]:
            return "ConnectionError: it could not come"
        if self._dies:
            connect(path).close()
            self.errored = True
            return "never told"
        worker = SimpleNamespace(rank=rank, _ostinato_apply=lambda update: (list(update), update.finish()))
        self.arrived.set()
        return WeightExtension.ostinato_receive_weights(worker, [*["", ""][:rank], path])

    async def collective_rpc(self, name, args):
        (paths,) = args
        answers = await asyncio.gather(*(asyncio.to_thread(self._work, *each) for each in enumerate(paths)))
        if self.errored:
            await asyncio.Event().wait()
        return answers


def sending(llm, weights):
    """An update of one tensor under way."""
    manifest = WeightManifest.from_tensors(1, [("a", torch.zeros(4))])
    return asyncio.ensure_future(running_on(llm)._send(manifest, weights))


def running_on(llm):
    """A running engine over this LLM."""
    silent = {"why_no_update": "", "why_no_hold": "", "why_row_by_row": "", "workers": ()}
    return RunningEngine(llm=llm, parts=None, chat=None, lora=None, tensors=None, **silent)


async def test_an_engine_that_dies_in_an_update_ends_it():
    """vLLM leaves the call unanswered then; the sender learns that nobody reads."""
    update = sending(Receiving(1, dies=True), iter([("a", torch.zeros(4))]))
    with pytest.raises(EngineError):
        await asyncio.wait_for(update, 60)


async def test_a_cancelled_update_lets_the_workers_go():
    """Also where one has come and the source has given nothing yet: it would wait, and the engine with it."""
    release, llm = threading.Event(), Receiving(1)

    def source():
        release.wait(120)
        yield "a", torch.zeros(4)

    update = sending(llm, source())
    assert await asyncio.to_thread(llm.arrived.wait, 60)
    update.cancel()
    try:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(update, 60)
    finally:
        release.set()


async def test_a_worker_that_came_alone_is_let_go(monkeypatch):
    """Where another does not come, there is no update; who waits for one learns it, and the error says who is missing."""
    monkeypatch.setattr("ostinato_engines.vllm_engine.fan_out.CONNECT_S", 0.5)
    update = sending(Receiving(2, comes=(False, True)), iter([("a", torch.zeros(4))]))
    with pytest.raises(WeightUpdateTimeoutError, match="got nobody"):
        await asyncio.wait_for(update, 60)


async def test_a_worker_is_let_go_while_somebody_keeps_the_error(monkeypatch):
    """Its connection is closed where sending ends, not when the error that holds on to it is forgotten."""
    monkeypatch.setattr("ostinato_engines.vllm_engine.fan_out.CONNECT_S", 0.5)
    with ExitStack() as stack:
        listeners = [stack.enter_context(WeightListener()) for _ in range(2)]
        paths = [str(listener.path) for listener in listeners]
        llm = Receiving(2, comes=(False, True))
        receiving = asyncio.ensure_future(llm.collective_rpc("ostinato_receive_weights", (paths,)))
        tensors = [("a", torch.zeros(4))]
        with pytest.raises(WeightUpdateTimeoutError) as kept:
            await send_to_all(listeners, WeightManifest.from_tensors(1, tensors), iter(tensors))
        assert await asyncio.wait_for(receiving, 60) == ["ConnectionError: it could not come", ""]
        del kept


async def test_answers_that_do_not_come_are_an_error_that_says_so(monkeypatch):
    """Whoever waits for vLLM's last words is told what was waited for."""
    monkeypatch.setattr("ostinato_engines.vllm_engine.answers._ANSWER_S", 0.05)
    with pytest.raises(EngineCrashedError, match=r"requests must be answered within 0\.05 s"):
        await until_gone([Conversing("a#1", [0])])


class Sleeper:
    """An engine with memory to free and requests that end where they are computed."""

    is_dead = False
    parts = SimpleNamespace(device_type="cuda", arg_names={"enable_sleep_mode"}, version="0")

    def __init__(self) -> None:
        self.computes = asyncio.Event()
        self.computes.set()
        self.has_weights = True

    async def sleep(self, level) -> None:
        self.has_weights = level < 2
        await asyncio.Event().wait()

    async def wake_up(self, tags) -> None: ...

    async def pause(self, mode) -> None:
        self.computes.clear()

    async def resume(self) -> None:
        self.computes.set()


def served_by(engine, *requests):
    """A started server over an engine."""
    server = VLLMServer("no-such-model")
    server._engine, server._traffic = engine, Traffic(engine, server._status, server._log, version=0)
    server._traffic.requests = {request.engine_id: request for request in requests}
    server._status.loaded, server._status.base = True, "whole"
    return server


async def test_weights_that_a_cancelled_sleep_has_freed_are_not_served():
    """Nobody waits for the answer to the order to free them; the engine wakes without weights, and takes a whole update alone."""
    server = served_by(engine := Sleeper())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.sleep(2), 0.2)
    assert not engine.has_weights
    await server.wake_up()
    assert (await server.health()).state is EngineState.STALE
    with pytest.raises(ManifestError, match="send the whole model"):
        server._status.require_base(WeightManifest(1, (), changing=("a",), base="whole", is_partial=True))


@pytest.mark.parametrize(
    ("cause", "raised"), [(WeightUpdateError("no room"), "no room"), (OSError("torn"), "OSError: torn")]
)
async def test_why_an_update_failed_is_raised_though_requests_stay_unanswered(cause, raised, monkeypatch, caplog):
    """vLLM that does not end what was in flight is a second error: it is told with the first one, and not in its place."""
    monkeypatch.setattr("ostinato_engines.vllm_engine.answers._ANSWER_S", 0.05)

    class Failing:
        is_dead = False

        def check_manifest(self, manifest): ...

        async def abort(self, engine_ids): ...

        async def replace_weights(self, manifest, weights, *, is_awake):
            raise cause

    server = served_by(Failing(), Conversing("a#1", [0]))
    with pytest.raises(WeightUpdateError, match=raised) as found:
        await server.update_weights(WeightManifest(1, ()), iter(()))
    told = (found.value.__cause__ or found.value).__notes__
    assert "answering the requests in flight failed, too: EngineCrashedError: requests must be answered" in told[0]
    assert told[0] in caplog.text
    assert (await server.health()).state is EngineState.STALE


async def test_why_workers_refuse_weights_is_raised_though_vllm_does_not_pause():
    """What is in flight is ended after a failed update; where that fails as well, the workers' word is the one to hear."""

    class Stubborn:
        errored = False

        async def collective_rpc(self, name, args):
            return ["ValueError: no room"]

        async def pause_generation(self, **mode):
            raise RuntimeError("it cannot pause")

    engine = running_on(Stubborn())
    engine.why_no_hold = "it holds nothing"
    with pytest.raises(WeightUpdateError, match="ValueError: no room") as found:
        await engine.replace_weights(WeightManifest(1, ()), SocketRoute(("/nowhere",)), is_awake=False)
    assert found.value.__notes__ == ["ending what is in flight failed, too: RuntimeError: it cannot pause"]


async def test_why_vllm_cannot_be_used_is_raised_though_it_does_not_end():
    """A start that fails ends vLLM; that this fails as well does not hide why."""

    class Unfit:
        async def get_supported_tasks(self):
            raise ValueError("no such task")

        def shutdown(self):
            raise OSError("it is stuck")

    with pytest.raises(ValueError, match="no such task") as found:
        await RunningEngine.of(Unfit(), None, None, "")
    assert found.value.__notes__ == ["ending vllm failed, too: OSError: it is stuck"]


def test_a_worker_says_why_it_took_no_weights_though_it_cannot_forget_them():
    """Its answer and what its sender hears are the first error, whatever becomes of the parts of layers that had come."""

    def fails(text):
        def fail(*args, **kwargs):
            raise ValueError(text)

        return fail

    heard = []
    update = SimpleNamespace(manifest=WeightManifest(1, ()), fail=heard.append)
    worker = SimpleNamespace(
        _ostinato_config=nullcontext,
        _ostinato_quiet=lambda manifest: nullcontext(),
        _ostinato_copies=lambda update: iter(()),
        reload_weights=fails("no such layer"),
        _ostinato_forget_parts=fails("no such part"),
    )
    with pytest.raises(ValueError, match="no such layer") as found:
        WeightExtension._ostinato_apply(worker, update)
    assert heard == [found.value]
    assert found.value.__notes__ == ["forgetting the parts that came failed, too: ValueError: no such part"]


@pytest.mark.parametrize("way", ["stream", "route"])
def test_a_worker_waits_for_its_sender_as_long_as_others_may_load(way, monkeypatch):
    """One that says nothing is given up after the time that its way has, and the worker's answer says so."""
    monkeypatch.setattr("ostinato_engines.vllm_engine.worker.LOADING_S", 0.125)
    monkeypatch.setattr("ostinato_engines.weight_transfer.along.SENDING_S", 0.25)
    worker = SimpleNamespace(rank=0, device="cpu", _ostinato_follower=None)
    with WeightListener() as listener:
        path = str(listener.path)
        if way == "stream":
            answer = WeightExtension.ostinato_receive_weights(worker, [path])
        else:
            manifest, route = (
                msgspec.json.encode(part).decode() for part in (WeightManifest(1, ()), SocketRoute((path,)))
            )
            answer = WeightExtension.ostinato_follow_route(worker, manifest, route)
    limit = {"stream": "0.125", "route": "0.25"}[way]
    assert answer.startswith(f"WeightUpdateTimeoutError: sender of weights must answer within {limit} s")


async def test_workers_that_follow_a_route_take_as_long_as_their_source(monkeypatch):
    """Each of their waits has a limit of its own; what one reply of vLLM may take is none for the whole."""
    monkeypatch.setitem(RunningEngine._reply.__kwdefaults__, "limit_s", -1.0)
    answers = asyncio.Event()

    class Following:
        errored = False

        async def collective_rpc(self, name, args):
            await answers.wait()
            return [""]

    following = asyncio.ensure_future(running_on(Following())._follow(WeightManifest(1, ()), SocketRoute(("/here",))))
    await asyncio.wait([following], timeout=0.1)
    answers.set()
    await following


async def test_what_a_pause_keeps_ends_in_one_that_waits():
    """An engine that is to finish what is under way computes it, also where it was frozen before."""
    request = Conversing("a#1", [0])
    server = served_by(engine := Sleeper(), request)

    async def computed() -> None:
        await engine.computes.wait()
        request.gone.set()

    await server.pause(PauseMode.KEEP)
    computing = asyncio.create_task(computed())
    await asyncio.wait_for(server.pause(PauseMode.WAIT), 30)
    await computing
    assert not engine.computes.is_set()


async def test_who_still_waits_at_shutdown_is_told():
    """vLLM's own streams end with its error before its processes do, since nobody reads their outputs any more."""
    told = []

    class Dead(Exception):
        """vLLM's."""

    async def outputs():
        await asyncio.Event().wait()

    llm = SimpleNamespace(
        output_handler=asyncio.ensure_future(outputs()),
        output_processor=SimpleNamespace(propagate_error=told.append),
        shutdown=lambda: told.append("shut down"),
    )
    await RunningEngine.shutdown(SimpleNamespace(llm=llm, parts=SimpleNamespace(dead_error=Dead)))
    assert [type(told[0]), told[1]] == [Dead, "shut down"]
    assert llm.output_handler.cancelled()


async def test_without_vllm_the_install_line_is_told(monkeypatch):
    """Where vLLM is not installed, starting says what to install."""
    find_vllm.cache_clear()
    monkeypatch.setattr("ostinato_engines.vllm_engine.probe.import_module", _no_vllm)
    server = VLLMServer("no-such-model")
    with pytest.raises(MissingDependencyError, match=r"pip install 'ostinato-engines\[vllm\]'"):
        await server.start()
    await server.shutdown()


def _no_vllm(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 0}, {"max_num_seqs": 0}, {"max_model_len": -1}, {"lora": "nowhere"}]
)
def test_wrong_options_are_refused(options):
    """A number below 1 and an adapter that is not there are errors that name them."""
    with pytest.raises(EngineInputError, match=next(iter(options))):
        VLLMServer("model", **options)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_are_followed_wherever_they_go(data):
    """After any changes of a batch as vLLM makes them, each row is known by the request that is in it."""
    known = BatchRows(lambda params: params.seed)
    batch, serial = [], itertools.count()
    for _ in range(data.draw(st.integers(1, 6))):
        gone = sorted(data.draw(st.sets(st.integers(0, len(batch) - 1))) if batch else [], reverse=True)
        slots = {row: None if row in gone else each for row, each in enumerate(batch)}
        update = SimpleNamespace(removed=gone, added=[], moved=[])
        for _ in range(data.draw(st.integers(0, 4))):
            # A new request takes the first row that became free, or the next one after the last.
            row = update.removed.pop() if update.removed else len(slots)
            params = SimpleNamespace(seed=data.draw(st.sampled_from([None, next(serial)])))
            update.added.append((row, params, None, []))
            slots[row] = params
        for hole in sorted(update.removed):
            last = max((row for row, each in slots.items() if each is not None), default=-1)
            if last > hole:
                slots[hole], slots[last] = slots[last], None
                update.moved.append((last, hole, SimpleNamespace(name="UNIDIRECTIONAL")))
        batch = [slots[row] for row in sorted(slots) if slots[row] is not None]
        if len(batch) > 1:
            one, other = data.draw(st.permutations(range(len(batch))))[:2]
            batch[one], batch[other] = batch[other], batch[one]
            update.moved.append((one, other, SimpleNamespace(name="SWAP")))
        known.follow(update)
        assert known.by_row == {row: each.seed for row, each in enumerate(batch) if each.seed is not None}


def bits_of(seeds):
    """What `race` takes for seeds."""
    return torch.from_numpy(stream_keys(np.array(seeds, np.uint64)).view(np.int64))


def test_a_race_is_that_of_the_embedded_engine():
    """Tokens are drawn by the same random numbers as in the embedded engine, whatever else is in the batch."""
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 10:20] = -torch.inf
    seeds, positions = np.array([0, 1, 7, 7, 2**62, 2**63 - 1], np.uint64), np.array([0, 5, 5, 6, 5, 9])
    noise = exponentials(position_keys(stream_keys(seeds), positions), 1000, "cpu")
    wanted = (logits.double().softmax(-1) / noise.double()).argmax(-1)
    drawn = race(logits, bits_of(seeds), torch.from_numpy(positions).int())
    assert torch.equal(drawn, wanted)
    for row in range(len(logits)):
        alone = race(logits[row : row + 1], bits_of(seeds[row : row + 1]), torch.tensor(positions[row : row + 1]))
        assert alone == drawn[row]


def test_races_follow_the_distribution():
    """Over many seeds tokens come as often as their probabilities say, and none of probability 0 comes."""
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.125])
    count = 20_000
    drawn = race(probs.log().expand(count, -1), bits_of(np.arange(count)), torch.full((count,), 3, dtype=torch.int32))
    found = torch.bincount(drawn, minlength=5).double() / count
    assert found[3] == 0
    assert float(((found - probs).abs() / (probs.clamp(min=1e-9) / count).sqrt())[probs > 0].max()) < 4.5


def test_vllm_says_nothing_of_what_a_part_leaves_out(caplog):
    """During an update in part vLLM's warnings of layers without new weights are not logged, and afterwards they are; a whole one keeps them."""
    layers = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload_weights = SimpleNamespace(__module__="vllm.v1.worker.gpu_model_runner")
    worker = SimpleNamespace(model_runner=SimpleNamespace(reload_weights=reload_weights))
    part = WeightManifest(1, manifest_of().tensors, ("a",), "base", True)
    for manifest, is_heard in ((part, False), (manifest_of(), True)):
        caplog.clear()
        with WeightExtension._ostinato_quiet(worker, manifest):
            layers.warning("Failed to load weights")
            logging.getLogger(reload_weights.__module__).warning("Following weights were not loaded")
        assert len(caplog.records) == 2 * is_heard
        layers.warning("Failed to load weights")
        assert len(caplog.records) == 2 * is_heard + 1


def test_a_worker_s_weights_can_be_compared_by_their_bits():
    """Each parameter's digest is that of its bytes, whatever its type, and a tied one is there once."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)).to(torch.bfloat16)
    model[1].weight = model[0].weight
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    raw = model[0].weight.detach().view(torch.int16).numpy().tobytes()
    assert WeightExtension.ostinato_weight_digests(worker) == {"0.weight": hashlib.sha256(raw).hexdigest()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_worker_copies_what_comes_to_its_device(device):
    """What vLLM keeps of a stream is a copy on the worker's device, whose values stay when the stream's memory is used again."""
    shared = torch.arange(6.0)
    worker = SimpleNamespace(device=torch.device(device))
    kept = dict(WeightExtension._ostinato_copies(worker, [("a", shared[:3]), ("b", shared[3:])]))
    shared.zero_()
    assert all(tensor.device.type == device for tensor in kept.values())
    if device == "cpu":
        assert torch.equal(torch.cat(list(kept.values())), torch.arange(6.0))
