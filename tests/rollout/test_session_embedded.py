"""Conversations over the real embedded engine: what was sampled is what a plain forward of the recorded ids says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ostinato_engines import PauseMode, SamplingParams, WeightManifest  # noqa: E402  (the engine's extra is checked first)
from ostinato_engines.transformers_server import TransformersServer  # noqa: E402
from ostinato_rollout import ChatSession, LLMServerClient, SessionBudget, SessionConfig  # noqa: E402
from ostinato_tokenization import ContinuousTokens  # noqa: E402
from ostinato_tokenization.testing import tiny_chat_tokenizer  # noqa: E402

TOKENIZER = tiny_chat_tokenizer()
TOKENS = ContinuousTokens(TOKENIZER)


def make_model(seed):
    """A random model of two layers over the tiny tokenizer."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def open_session(client, name):
    budget = SessionBudget(max_prompt_tokens=100, max_response_tokens=400, max_model_len=512)
    return ChatSession(client=client, tokens=TOKENS, config=SessionConfig(), budget=budget, request_id=name)


async def start_server(seed=0, **options):
    options = {"max_num_seqs": 2, "prefill_chunk_tokens": 16, "full_determinism": True, **options}
    server = TransformersServer(make_model(seed), device="cpu", **options)
    await server.start()
    return server


async def update(server, seed, version):
    weights = dict(make_model(seed).named_parameters())
    await server.update_weights(WeightManifest.from_tensors(version, weights.items()), weights.items())


def check_record(session, models, temperature):
    """Every sampled token has the log-probability of a plain forward under the policy that its span names."""
    (ledger,) = session.segments
    ids, start = ledger.token_ids, len(ledger.prompt_ids)
    with torch.no_grad():
        known = {
            version: (model(input_ids=torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)
            for version, model in models.items()
        }
    spans = [*ledger.policy_versions, (len(ids), None)]
    assert spans[0][0] == 0
    assert [place for place, _ in spans] == sorted({place for place, _ in spans})
    number = 0
    for place, (token_id, mask, logprob) in enumerate(
        zip(ledger.response_ids, ledger.response_mask, ledger.response_logprobs, strict=True)
    ):
        while spans[number + 1][0] <= place:
            number += 1
        expected = known[spans[number][1]][start + place - 1, token_id].item() if mask else 0.0
        assert logprob == pytest.approx(expected, abs=5e-5)
    return ledger


async def test_every_turn_is_sampled_from_what_the_record_says():
    """Over turns with reused and evicted state, odd cuts, chunked prompts and new weights in mid-trajectory, each sampled
    token's log-probability is that of a plain forward of the recorded ids under the policy of its span."""
    server = await start_server()
    client = LLMServerClient([server])
    sessions = [open_session(client, str(number)) for number in range(5)]
    sampled = [[] for _ in sessions]
    cached = 0

    async def turn(number, text):
        session = sessions[number]
        await session.extend([{"role": "user", "content": text * (number + 1)}])
        before = session.segments[0].num_sampled
        params = SamplingParams(seed=number, max_tokens=3 + 4 * number, temperature=0.7 if number % 2 else 1.0)
        reply = await session.generate(params)
        assert session.segments[0].num_sampled == before + reply.num_tokens
        sampled[number].append(reply.num_tokens)

    for step, text in enumerate(("What is 2 + 2? ", "Why? ", "And é 3? ", "Go on. ")):
        if step == 2:
            await update(server, seed=1, version=3)
        if step % 2:  # one after the other: each finds the state of its last turn, or that it was pushed out
            for number in range(len(sessions)):
                await turn(number, text)
        else:
            await asyncio.gather(*(turn(number, text) for number in range(len(sessions))))
        await turn(0, "Once more. ")
    models = {0: make_model(0), 3: make_model(1)}
    for number, session in enumerate(sessions):
        await session.close()
        ledger = check_record(session, models, 0.7 if number % 2 else 1.0)
        assert ledger.num_sampled == sum(sampled[number]) == sum(ledger.response_mask)
        assert [version for _, version in ledger.policy_versions] == [0, 3]
        assert session.metrics.mismatch_reports == []
        cached += session.metrics.num_cached_tokens
    assert cached > 0
    await server.shutdown()


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.KEEP])
async def test_new_weights_in_mid_generation_are_placed_exactly(mode):
    """A turn that is aborted and resumed, or kept, over two weight updates holds every token once, within its budget, and
    its spans say from which token on which policy sampled; the next turn goes on from there."""
    server = await start_server()
    client = LLMServerClient([server])
    session = open_session(client, "a")
    await session.extend([{"role": "user", "content": "Count."}])
    # A seed under which no stop token is drawn before the second update.
    running = asyncio.ensure_future(session.generate(SamplingParams(seed=8, max_tokens=200)))
    for seed in (1, 2):
        for _ in range(60):
            await asyncio.sleep(0)
        assert not running.done()
        await server.pause(mode)
        await update(server, seed=seed, version=10 * seed)
        await server.resume()
    reply = await running
    assert reply.num_tokens <= 200
    await session.extend([{"role": "user", "content": "More."}])
    last = await session.generate(SamplingParams(seed=6, max_tokens=9))
    await session.close()
    ledger = check_record(session, {0: make_model(0), 10: make_model(1), 20: make_model(2)}, 1.0)
    assert ledger.num_sampled == reply.num_tokens + last.num_tokens
    assert [version for _, version in ledger.policy_versions] == [0, 10, 20]
    assert session.inexact_versions == set()
    assert session.metrics.mismatch_reports == []
    await server.shutdown()


async def digest():
    """A hash of all ids and all bits of all log-probabilities of some conversations."""
    server = await start_server(max_num_seqs=3)
    client = LLMServerClient([server])

    async def converse(number):
        session = open_session(client, str(number))
        for text in ("What is 2 + 2?", "Why?", "And then?"):
            await session.extend([{"role": "user", "content": text * (number + 1)}])
            await session.generate(SamplingParams(seed=number, max_tokens=5 + number))
        await session.close()
        return session.segments[0].to_bytes()

    records = await asyncio.gather(*map(converse, range(5)))
    await server.shutdown()
    return hashlib.sha256(b"".join(records)).hexdigest()


@pytest.mark.slow
async def test_full_determinism_holds_in_another_process():
    """The same program gives the same ids and bitwise the same log-probabilities again, here and in a new process whose
    strings hash otherwise."""
    here = await digest()
    assert await digest() == here
    code = (
        "import asyncio, importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('conversations', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps(asyncio.run(module.digest())))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(Path(__file__)), stdout=subprocess.PIPE, env=environment
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1]) == here
