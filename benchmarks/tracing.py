"""What recording costs a run: `uv run python -m benchmarks.tracing [--pairs N] [--shared DIR]`.

The tool agent over stubs that answer at once, as in `benchmarks.agent_loop`: a question, eight turns that call a tool, an answer, 256
conversations at the same time. This is the worst case: the loop's thread never rests, so that whatever another thread computes
meanwhile is missing (Python runs one at a time); beside an engine the loop waits most of the time. Each run with a backend is paired with
one without, in turns of who is first; figures are medians over the pairs of the one's time over the other's, the end of the run not counted.

- `off`: no backend in either run of the pair: what this machine's noise is;
- `jsonl`, `mlflow`: everything is recorded, text decoded, MLflow in a SQLite file that is open already;
- `hanging`: the backend never returns from its first write; `down`: every write fails. Both have been so for a batch already, and the
  queue is full (`*_first` is that first batch, of which spans are still made);
- `*_cpu`: seconds of the processor, over all threads; on a busy machine they do not count other processes. `*_loop`: those of the loop's
  thread, which is what a run with an idle processor beside it has to do more. `*_wall`: by the clock, to be believed on an idle machine;
- `*_dropped`: the part of the spans that were dropped before the run's end (4096 may wait).
"""

import argparse
import asyncio
import gc
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.agent_loop import CONVERSATIONS, LENGTHS, MAX_ANSWER, TOOL, StubServer, Workload, no_reward
from ostinato_agent_loop import AgentConfig, AgentLoopManager, MultiTurnConfig, RolloutConfig
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_rollout.tracing import JsonlSink, SpanSink, Tracer, TrajectoryLabels
from ostinato_rollout.tracing.mlflow_store import MlflowSink
from ostinato_rollout.tracing.testing import FailingSink, HangingSink
from ostinato_tokenization import ContinuousTokens
from ostinato_tools import ToolExecutor, ToolRegistry, function_tool

COPIES = 8
TROUBLED = ("hanging", "down")
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "loop": time.thread_time, "wall": time.perf_counter}
CONFIG = RolloutConfig(
    multi_turn=MultiTurnConfig(enable=True), agent=AgentConfig(num_workers=1, default_agent_loop="tool_agent")
)


class Runs:
    """Runs of the same conversations.

    Args:
        workload: The conversations and the tool's answers.
    """

    def __init__(self, workload: Workload) -> None:
        @function_tool(schema=TOOL)
        async def lookup(key: str) -> str:
            return workload.answers[key]

        self._registry, self._conversations = ToolRegistry([lookup]), workload.conversations(0)
        self._tokens, self.decoder = ContinuousTokens(workload.tokenizer), workload.tokenizer

    async def seconds(self, tracer: Tracer | None) -> dict[str, float]:
        """Time of a batch, by clock."""
        manager = AgentLoopManager(
            CONFIG,
            tokens=self._tokens,
            budget=SessionBudget(*LENGTHS[0]),
            pool=ServerPool([StubServer(self._conversations)]),
            tools=ToolExecutor(self._registry, max_response_length=MAX_ANSWER),
            reward_fn=no_reward,
            tracer=tracer,
        )
        rows = [{"raw_prompt": conversation["prompt"]} for conversation in self._conversations * COPIES]
        gc.collect()
        started = {name: clock() for name, clock in CLOCKS.items()}
        result = await manager.generate_sequences(rows, n=1, step=0)
        seconds = {name: clock() - started[name] for name, clock in CLOCKS.items()}
        assert result.metrics["agent_loop/failures"] == 0
        return seconds


def compare(runs: Runs, scratch: Path, num_pairs: int) -> dict[str, float]:
    """The figures of all backends and kinds of run."""
    hanging: list[HangingSink] = []

    def hang() -> SpanSink:
        hanging.append(HangingSink())
        return hanging[-1]

    backends = {
        "off": None,
        "jsonl": lambda: JsonlSink(scratch / "spans.jsonl"),
        "mlflow": lambda: MlflowSink(f"sqlite:///{scratch}/traces.db", "benchmark"),
        "hanging": hang,
        "down": FailingSink,
    }
    figures: dict[str, float] = {}
    with asyncio.Runner() as runner:
        for name, make in backends.items():
            readings = [pair for _, pair in zip(range(num_pairs + 1), _pairs(runner, runs, name, make), strict=False)]
            for clock in CLOCKS:
                ratios = [traced[clock] / plain[clock] for traced, plain, _ in readings]
                if name in TROUBLED:
                    figures[f"{name}_first_{clock}"] = round(ratios[0], 3)
                figures[f"{name}_{clock}"] = round(statistics.median(ratios[1:]), 3)  # the first pair warms
                print(f"{name} {clock}: {sorted(round(ratio, 3) for ratio in ratios[1:])}", flush=True)
            if make is not None and name not in TROUBLED:
                figures[f"{name}_dropped"] = round(statistics.median(dropped for _, _, dropped in readings), 3)
    for sink in hanging:
        sink.go_on.set()
    return figures


def _pairs(
    runner: asyncio.Runner, runs: Runs, name: str, make: Callable[[], SpanSink] | None
) -> Iterator[tuple[dict[str, float], dict[str, float], float]]:
    """Times of a run with the backend and of one without, and the part of the spans that was dropped, again and again."""
    lasting = Tracer(make(), decoder=runs.decoder) if make is not None and name in TROUBLED else None
    for first in itertools.cycle((True, False)):
        taken, dropped = {}, 0.0
        for traced in (first, not first):
            tracer = lasting if traced else None
            if traced and make is not None and lasting is None:
                tracer = Tracer(make(), decoder=runs.decoder)
            if tracer is not None and name == "mlflow":
                _warm(tracer)
            taken[traced] = runner.run(runs.seconds(tracer))
            if tracer is not None and tracer is not lasting:
                stats = tracer.stats
                dropped = stats.dropped / (stats.dropped + stats.written + stats.waiting)
                tracer.close(0.0)
        yield taken[True], taken[False], dropped


def _warm(tracer: Tracer) -> None:
    """Have the store opened: that is done once in a run, before its first step is over."""
    labels = TrajectoryLabels(sample_index=0, step=0, rollout_n=0, validate=False)
    trace = tracer.trajectory(labels)
    assert trace is not None
    trace.end({}, {})
    assert tracer.flush(60.0)


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=11)
    default = Path(__file__).resolve().parents[1].parent / "shared"
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("OSTINATO_SHARED", default)))
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.disable(logging.WARNING)  # backends in trouble are meant here
    with tempfile.TemporaryDirectory() as scratch:
        workload = Workload(Path(scratch), arguments.shared / "tokenizers" / "qwen25", 1)
        assert len(workload.conversations(0)) == CONVERSATIONS
        print(json.dumps(compare(Runs(workload), Path(scratch), arguments.pairs)))


if __name__ == "__main__":
    main()
