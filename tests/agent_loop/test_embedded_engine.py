"""The tool agent over the real embedded engine with a tiny random model."""

from __future__ import annotations

import itertools
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ostinato_agent_loop import TrajectoryEnd  # noqa: E402  (the engine's extra is checked first)
from ostinato_engines import WeightManifest  # noqa: E402
from ostinato_rollout import StreamOptions  # noqa: E402


def tiny_model(vocab_size, seed=0):
    """A random causal model of two layers."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def make_server(vocab_size, **options):
    from ostinato_engines.transformers_server import TransformersServer

    return TransformersServer(
        tiny_model(vocab_size), device="cpu", max_model_len=1024, full_determinism=True, **options
    )


ROWS = [
    {"raw_prompt": [{"role": "user", "content": text}], "index": i}
    for i, text in enumerate(("Hi.", "What is 2 + 2?", "x"))
]


async def run(world, *, seed, num_workers=1):
    server = make_server(world.tokenizer.vocab_size)
    manager = world.build(
        [], server=server, prompt=800, response=24, num_workers=num_workers, seed=seed, colocated=True
    )
    await world.pool.start()
    try:
        return (await manager.generate_sequences(ROWS, n=2, step=3)).trajectories
    finally:
        await world.pool.shutdown()


async def test_the_same_seed_gives_the_same_trajectories(world):
    """Ids, log-probabilities and ends are bitwise those of another run with the same seed, and differ with another; the
    trajectories of one row differ among themselves."""

    def record(trajectories):
        return [
            (segment.response_ids, segment.response_mask, segment.response_logprobs, segment.stop_reason)
            for trajectory in trajectories
            for segment in trajectory.segments
        ]

    first = record(await run(world, seed=1))
    assert record(await run(world, seed=1)) == first
    assert record(await run(world, seed=2)) != first
    assert first[0] != first[1]


async def test_log_probabilities_are_those_of_the_model(world):
    """Each sampled token's log-probability is the model's own at that place of the recorded context."""
    model = tiny_model(world.tokenizer.vocab_size)
    for trajectory in await run(world, seed=5):
        assert trajectory.failure is None, trajectory.failure
        (segment,) = trajectory.segments
        assert segment.stop_reason in set(TrajectoryEnd)
        ids = torch.tensor([segment.prompt_ids + segment.response_ids])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0].double().log_softmax(-1)
        start = len(segment.prompt_ids)
        for place, (token_id, mask, logprob) in enumerate(
            zip(segment.response_ids, segment.response_mask, segment.response_logprobs, strict=True)
        ):
            expected = logprobs[start + place - 1, token_id].item() if mask else 0.0
            assert logprob == pytest.approx(expected, abs=1e-4)


async def test_new_weights_reach_the_engine_and_the_record(world):
    """After update_weights the next batch is sampled by, and marked with, the new policy version."""
    server = make_server(world.tokenizer.vocab_size)
    manager = world.build([], server=server, prompt=800, response=24, num_workers=1, colocated=True)
    await world.pool.start()
    try:
        before = await manager.generate_sequences(ROWS, n=1, step=0)
        weights = dict(tiny_model(world.tokenizer.vocab_size, seed=1).named_parameters())
        await world.pool.update_weights(WeightManifest.from_tensors(1, weights.items()), lambda: iter(weights.items()))
        assert (world.pool.policy_version, world.pool.lost) == (1, {})
        after = await manager.generate_sequences(ROWS, n=1, step=0)
    finally:
        await world.pool.shutdown()
    for old, new in zip(before.trajectories, after.trajectories, strict=True):
        assert {span.version for span in old.segments[0].policy_versions} == {0}
        assert {span.version for span in new.segments[0].policy_versions} == {1}
        assert old.segments[0].response_ids != new.segments[0].response_ids


async def test_a_stream_samples_what_a_batch_samples(world):
    """Sorted, the groups of a stream are bitwise the trajectories of the batch of the same seed and step."""
    batch = await run(world, seed=1)
    manager = world.build(
        [], server=make_server(world.tokenizer.vocab_size), prompt=800, response=24, num_workers=1, seed=1
    )
    await world.pool.start()
    try:
        async with manager.stream(ROWS, n=2, step=3) as stream:
            groups = sorted([group async for group in stream], key=lambda group: group.index)
    finally:
        await world.pool.shutdown()
    streamed = [trajectory for group in groups for trajectory in group.trajectories]
    for one, other in zip(streamed, batch, strict=True):
        (left,), (right,) = one.segments, other.segments
        assert (left.response_ids, left.response_logprobs) == (right.response_ids, right.response_logprobs)
        assert one.trajectory_id == other.trajectory_id


async def test_a_stream_goes_on_while_the_weights_change(world):
    """Over updates in the midst of turns, whoever takes in step gets groups of which no token is older than the bound, and the spans of
    each trajectory say which policy sampled what."""
    server = make_server(world.tokenizer.vocab_size)
    manager = world.build([], server=server, prompt=800, response=40, num_workers=1)
    options = StreamOptions(max_staleness=1, groups_per_version=2)
    await world.pool.start()
    versions: set[int] = set()
    try:
        async with manager.stream(itertools.cycle(ROWS), n=2, step=0, options=options) as stream:
            for version in range(1, 5):
                batch = await stream.take_batch(2)
                assert all(trajectory.failure is None for trajectory in batch.trajectories)
                spans = [span for one in batch.trajectories for span in one.segments[0].policy_versions]
                versions |= {span.version for span in spans}
                assert max(version - 1 - span.version for span in spans) <= 1
                assert batch.metrics["agent_loop/staleness/max"] <= 1
                weights = dict(tiny_model(world.tokenizer.vocab_size, seed=version).named_parameters())
                manifest = WeightManifest.from_tensors(version, weights.items())
                await world.pool.update_weights(manifest, lambda weights=weights: iter(weights.items()))
        counts = stream.counts()
    finally:
        await world.pool.shutdown()
    assert (len(versions) > 1, counts.fates["kept"], world.pool.lost) == (True, 8, {})
    assert set(world.client.num_in_flight.values()) <= {0}
