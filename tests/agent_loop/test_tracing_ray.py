"""Workers on a real Ray cluster record their trajectories themselves, each with a tracer of its own."""

import asyncio

import pytest

from ostinato_agent_loop import AgentConfig, MultiTurnConfig, RolloutConfig, TrajectoryTask
from ostinato_engines import SamplingParams
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_rollout.tracing import SpanKind, TraceBackend, TraceConfig, completed, read_spans
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import ToolExecutor, ToolRegistry
from ostinato_tools.testing import echo

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_agent_loop.ray_workers import RayWorkers, WorkerSpec
from ostinato_rollout.ray_cluster import ActorPlacement, RayReplica
from ostinato_rollout.ray_cluster.testing import local_cluster

pytestmark = pytest.mark.slow

SMALL = ActorPlacement(num_cpus=0.1)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster for this module."""
    with local_cluster():
        yield


async def test_each_worker_records_what_it_runs(tmp_path):
    """Two workers write two files; together they hold every trajectory as it came back, and rows beyond the sample are not there."""
    trace = TraceConfig(backend=TraceBackend.JSONL, max_samples_per_step_per_worker=2)
    config = RolloutConfig(
        multi_turn=MultiTurnConfig(enable=True),
        agent=AgentConfig(num_workers=2, default_agent_loop="tool_agent"),
        trace=completed(trace, project_name="p", experiment_name="e", folder=tmp_path),
    )
    spec = WorkerSpec(
        config=config,
        tokens=ContinuousTokens(tiny_chat_tokenizer()),
        budget=SessionBudget(600, 400),
        make_tools=lambda: ToolExecutor(ToolRegistry([echo])),
    )
    tasks = [
        TrajectoryTask(
            {"raw_prompt": [{"role": "user", "content": f"Question {index}."}]},
            "tool_agent",
            f"g{index}",
            f"g{index}/0",
            index,
            step=3,
            sample_index=index,
        )
        for index in range(6)
    ]
    pool = ServerPool([RayReplica("ostinato_rollout.ray_cluster.testing:CallingServer", "model", placement=SMALL)])
    await pool.start()
    try:
        async with RayWorkers(spec, pool, placements=[SMALL] * 2) as workers:
            ran = await asyncio.gather(
                *(workers.workers[place % 2].run_trajectory(task, SamplingParams()) for place, task in enumerate(tasks))
            )
    finally:
        await pool.shutdown()
    spans = list(read_spans(tmp_path / "traces"))
    assert len(list((tmp_path / "traces").iterdir())) == 2
    roots = {span.labels.trajectory_id: span for span in spans if span.kind is SpanKind.LOOP}
    assert sorted(roots) == [f"g{index}/0" for index in range(4)]
    for trajectory in ran[:4]:
        (segment,) = trajectory.segments
        root = roots[trajectory.trajectory_id]
        mine = sorted((span for span in spans if span.trace_id == root.trace_id), key=lambda span: span.start_ns)
        generations = [span for span in mine if span.kind is SpanKind.GENERATION]
        ids = [token for span in generations for token in (*span.inputs["prompt_ids"], *span.outputs["token_ids"])]
        assert ids == segment.prompt_ids + segment.response_ids
        assert len([span for span in mine if span.kind is SpanKind.TOOL]) == segment.metrics.num_tool_calls > 0
        assert (root.labels.step, root.experiment_name) == (3, "e")
