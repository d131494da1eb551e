"""Our side of `benchmarks.step`: a run by configuration, watched from outside, in a process of its own.

Not a benchmark: `benchmarks.step` starts it. It loads what it needs, waits for a line, trains, and prints one JSON line.
"""

import functools
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.step_task import LATENCY, SHAPES, WORK, Work

_PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")
_ENGINE_CALLS = {"sleep": "sleep", "wake_up": "wake", "update_weights": "take_weights"}
_GIB = 1 << 30


class DeviceWatch:
    """The most memory of the device that all its processes held, by phase; nothing where there is no such device."""

    def __init__(self) -> None:
        self.phase = "start"
        self.most: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on."""
        import torch

        if torch.cuda.is_available():
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def _look(self) -> None:
        import torch

        while not self._ended.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            phase = self.phase
            self.most[phase] = max(self.most.get(phase, 0.0), (total - free) / _GIB)

    def stop(self) -> None:
        """No longer."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


class Record:
    """What a run has shown, step by step."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.begins: list[float] = []
        self.metrics: list[Mapping[str, float]] = []
        self.engine_seconds: list[dict[str, float]] = []
        self.trajectories: list[list[dict[str, int]]] = []
        self.device = DeviceWatch()


RECORD: Record
"""Of this process's run."""


class Watch:
    """A callback of the run: fills `RECORD`, and sets how long the tool takes."""

    def on_train_begin(self, step: int, total_steps: int) -> None:
        """The device is looked at from here on."""
        RECORD.device.start()

    def on_step_begin(self, step: int) -> None:
        """A step ends where the next one begins."""
        os.environ[LATENCY] = str(RECORD.work.latency_of(step))
        RECORD.begins.append(time.perf_counter())
        RECORD.engine_seconds.append({})
        RECORD.device.phase = "generate" if step > RECORD.work.warm_up else "start"

    def on_sample_end(self, step: int, trajectories: Sequence[Any], validate: bool) -> None:
        """What was sampled, for the bounds."""
        RECORD.device.phase = "train" if step > RECORD.work.warm_up else "start"
        RECORD.trajectories.append(
            [
                {
                    "prompt": len(segment.prompt_ids),
                    "response": len(segment.response_ids),
                    "sampled": sum(segment.response_mask),
                    "calls": segment.metrics.num_tool_calls,
                    "turns_with_calls": int(segment.metrics.num_tool_calls > 0),
                }
                for trajectory in trajectories
                for segment in trajectory.segments
            ]
        )

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """The run's own figures."""
        RECORD.metrics.append(dict(metrics))

    def on_train_end(self, step: int, error: BaseException | None) -> None:
        """The last step ends here."""
        RECORD.begins.append(time.perf_counter())
        RECORD.device.stop()


def watch_engine(engine_class: type) -> None:
    """Note the seconds of the engine's calls that take turns with training."""
    for method, name in _ENGINE_CALLS.items():
        setattr(engine_class, method, _timed(getattr(engine_class, method), name))


def _timed(method: Any, name: str) -> Any:
    @functools.wraps(method)
    async def call(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return await method(*arguments, **named)
        finally:
            if RECORD.engine_seconds:
                seconds = RECORD.engine_seconds[-1]
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    return call


def settings(folder: Path, shape: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The run's configuration."""
    work = WORK[shape]
    longest = work.max_prompt_tokens + work.max_response_tokens
    engine = options["engine"]
    rollout: dict[str, Any] = {
        "name": engine,
        "n": work.group_size,
        "max_num_seqs": work.num_trajectories,
        "max_model_len": longest,
        "free_cache_engine": options["sleep"],
        "multi_turn": {
            "enable": True,
            "format": "hermes",
            "max_assistant_turns": 2,
            "max_parallel_calls": 64,
            "function_tool_path": str(folder / "tools.py"),
        },
        "agent": {"default_agent_loop": "tool_agent"},
    }
    if engine == "vllm":
        rollout["gpu_memory_utilization"] = options["gpu_memory_utilization"]
        rollout["enforce_eager"] = options["eager"]
        rollout["engine_kwargs"] = {"vllm": options["vllm_args"]}
    return {
        "data": {
            "train_files": str(folder / "rows.parquet"),
            "max_prompt_length": work.max_prompt_tokens,
            "max_response_length": work.max_response_tokens,
            "train_batch_size": work.prompts,
            "shuffle": False,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {
                "dtype": "float32" if shape == "tiny" else "bfloat16",
                "use_torch_compile": options["compile"],
                "optim": {"lr": 1e-8, "weight_decay": 0.0},
                "ppo_mini_batch_size": work.prompts,
                "ppo_micro_batch_size_per_gpu": work.micro_batch,
                "ppo_max_token_len_per_gpu": work.micro_batch * longest,
            },
            "rollout": rollout,
        },
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {"custom_reward_function": {"path": str(folder / "reward.py"), "name": "compute_score"}},
        "trainer": {
            "total_training_steps": work.num_steps,
            "save_freq": 0,
            "val_before_train": False,
            "resume_mode": "disable",
            "logger": ["jsonl"],
            "callbacks": ["benchmarks.step_run:Watch"],
            "default_local_dir": str(folder / "ours"),
        },
    }


def figures(record: Record, shape: str) -> dict[str, Any]:
    """Medians over the steps that count."""
    work = record.work
    steps = [later - begin for begin, later in zip(record.begins, record.begins[1:], strict=False)]
    first = work.warm_up + work.with_latency
    waiting, rest = range(work.warm_up, first), range(first, work.num_steps)

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 6)

    def phases(chosen: range) -> dict[str, float]:
        own = {name: median([record.metrics[k].get(f"timing_s/{name}", 0.0) for k in chosen]) for name in _PHASES}
        engine = {
            name: median([record.engine_seconds[k].get(name, 0.0) for k in chosen]) for name in _ENGINE_CALLS.values()
        }
        return own | engine

    counted = [*waiting, *rest]
    return {
        "step_s": median([steps[k] for k in waiting]),
        "step_s_without_latency": median([steps[k] for k in rest]),
        "steps_s": [round(step, 4) for step in steps],
        "phases_s": phases(waiting),
        "phases_s_without_latency": phases(rest),
        "sampled_tokens": median([sum(each["sampled"] for each in record.trajectories[k]) for k in counted]),
        "tokens": median([record.metrics[k]["perf/total_num_tokens"] for k in counted]),
        "calls": median([sum(each["calls"] for each in record.trajectories[k]) for k in counted]),
        "failed": sum(metrics["training/num_failed_trajectories"] for metrics in record.metrics),
        "log_prob_difference": record.metrics[-1].get("training/rollout_probs_diff_mean"),
        "memory_gib": {phase: round(most, 1) for phase, most in record.device.most.items()},
        "trajectories": [record.trajectories[waiting[-1]], record.trajectories[-1]],
        "parameters": SHAPES[shape],
    }


def main() -> None:
    """One run, told by the arguments; its figures are the last line of the standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, shape, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    global RECORD
    RECORD = Record(WORK[shape])
    os.environ[LATENCY] = "0"
    from ostinato_engines.loading import engine_class
    from ostinato_trainer.assembly import run_training
    from ostinato_trainer.config.loading import load_config

    if options["engine"] == "vllm":
        with suppress(ImportError):  # whatever is amiss is told when the engine starts
            importlib.import_module("vllm.v1.engine.async_llm")
    watch_engine(engine_class(options["engine"]))
    if not sys.stdin.readline():
        return  # whoever has started this is gone
    began = time.perf_counter()
    shutil.rmtree(folder / "ours", ignore_errors=True)  # of an earlier run
    (folder / "ours.json").write_text(json.dumps(settings(folder, shape, options)))
    config = load_config([folder / "ours.json"], [])
    run_training(config)
    start_s = RECORD.begins[0] - began
    print(json.dumps(figures(RECORD, shape) | {"start_s": round(start_s, 1)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
