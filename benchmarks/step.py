"""A whole GRPO step on one device, engine and training in turn on it, beside TRL's.

    python -m benchmarks.step [--shape NAME ...] [--parts ours,trl,loss] [--engine-mode compiled|graphs|eager] [--no-sleep]

Random weights of a shape (`135M`, SmolLM2's; `1.7B`, Qwen3's) sample 16 prompts x 8 answers of up to two turns with calls of a tool. These are
scored and trained on: log-probabilities before the update, one optimizer step, 16 sequences a pass; then the engine gets the new weights. Engine
and training take turns: the engine sleeps while the policy is trained. Ours is a run by configuration (`step_run`); beside it `GRPOTrainer` of TRL
with vLLM in its process (`vllm_mode="colocate"`, sleep mode) on the same files, with the same engine arguments (`step_peer`). Each run is a process
of its own; all load their packages at the beginning, and then come one after the other. vLLM compiles its model and has CUDA graphs in both, as
is its default; the model that is trained is compiled in ours, and in TRL's on request (`--compile both`). Two steps warm a run; in the next three
each call of the tool takes 30 ms, in the last two nothing. Without a GPU or vLLM the shape is tiny, the engine ours, and TRL is left out.

- `ratio_vs_trl`: TRL's seconds of a step with the tool's latency over ours, of the largest shape; `ratio_without_latency`: of a step without it;
- `loss_difference`: of ours and TRL's losses on a recorded batch (`benchmarks.trainer`, on the CPU);
- `shapes`: for each shape and system the seconds of a step, of its phases and of sleeping and waking, tokens per second, and the device's memory by
  phase; for ours `bounds_s` too: what the step must take on such a device at the least. The rollout has the larger of `critical_path` (the
  longest trajectory alone: its prompt, each token a pass over the weights, and its tools) and `work` (all prompts, and all tokens a pass over the
  weights for as many as there are at a time, and over their cache); the update has 6 N FLOPs a token and the attention, the log-probabilities a
  third of that; the new weights are copied once. `over_bound` is the step's seconds over the sum.

`gen` of ours contains rewards, and sleep and wake; `update_weights` contains the wake of the weights' memory. `gen` of TRL contains `engine`,
`tool_loop`, `update_weights`, sleep and wake.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers import python_of
from benchmarks.step_task import SHAPES, WORK

REPO = Path(__file__).resolve().parent.parent
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 16, 32, 48, 64, 96, 128]}
"""Starts sooner than with compilation, but a step with a prompt in it has no graph."""
_ENGINE_MODES: dict[str, tuple[bool, dict[str, Any]]] = {
    "compiled": (False, {}),
    "graphs": (False, {"compilation_config": GRAPHS}),
    "eager": (True, {}),
}
_MAKE_S = 600.0


class Side:
    """A run in a process of its own: it loads its packages, waits, and answers with its figures."""

    def __init__(self, name: str, python: Path, folder: Path, shape: str, options: Mapping[str, Any]) -> None:
        module = {"ours": "step_run", "trl": "step_peer"}[name]
        self.name = f"{name} {shape}"
        self.log = folder / f"{name}.log"
        code = f"from benchmarks.{module} import main; main()"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-c", code, str(folder), shape, json.dumps(options)],
                cwd=REPO,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), *_paths()])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def run(self, timeout_s: float) -> dict[str, Any]:
        """Its figures, or with `error` why there are none."""
        process, began = self._process, time.perf_counter()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, self.end)
        timer.start()
        answer: dict[str, Any] = {}
        try:
            process.stdin.write("go\n")
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                break  # it may have children that keep its output open
        except (OSError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            timer.cancel()
            self.end()
        if "step_s" not in answer:
            tail = self.log.read_text(errors="replace")[-3000:]
            print(tail, file=sys.stderr)
            last = next((line for line in reversed(tail.splitlines()) if line.strip()), "nothing")
            answer = {
                "error": answer.get("error", f"it ended with status {process.returncode}, and said last: {last[-300:]}")
            }
        return answer | {"wall_s": round(time.perf_counter() - began, 1)}

    def end(self) -> None:
        """End it and all that it started."""
        if self._process.returncode is None:  # later its number may be another's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _paths() -> list[str]:
    """Where our packages are, installed or not, and what this process was given."""
    given = os.environ.get("PYTHONPATH", "")
    return [*(str(path) for path in sorted(REPO.glob("packages/*/src"))), *([given] if given else [])]


def bounds(run: Mapping[str, Any], which: int, latency_s: float, *, flops: float, bandwidth: float) -> dict[str, float]:
    """The least that a step can take on a device with so many FLOP/s and bytes per second, in bfloat16; see the module's docstring."""
    shape, rows = run["parameters"], run["trajectories"][which]
    layers, width = shape["num_hidden_layers"], shape["num_attention_heads"] * shape["head_dim"]
    num_parameters = parameters_of(shape)
    weights = 2.0 * num_parameters
    cache_per_token = 4.0 * layers * shape["num_key_value_heads"] * shape["head_dim"]
    prefill = 2.0 * num_parameters / flops
    critical = max(
        row["prompt"] * prefill + row["sampled"] * weights / bandwidth + row["turns_with_calls"] * latency_s
        for row in rows
    )
    work = sum(
        row["prompt"] * prefill
        + row["sampled"] * (weights / len(rows) + cache_per_token * (row["prompt"] + row["response"] / 2)) / bandwidth
        for row in rows
    )
    lengths = [row["prompt"] + row["response"] for row in rows]
    update = sum(6.0 * num_parameters * length + 6.0 * layers * width * length**2 for length in lengths) / flops
    parts = {
        "critical_path": critical,
        "work": work,
        "rollout": max(critical, work),
        "old_log_prob": update / 3,
        "update_actor": update,
        "update_weights": 2.0 * weights / bandwidth,
    }
    total = sum(parts[name] for name in ("rollout", "old_log_prob", "update_actor", "update_weights"))
    return {name: round(seconds, 5) for name, seconds in (parts | {"step": total}).items()}


def parameters_of(shape: Mapping[str, int]) -> int:
    """All weights; the output layer is the embeddings."""
    width, head = shape["hidden_size"], shape["head_dim"]
    attention = width * head * (2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"])
    layer = attention + 3 * width * shape["intermediate_size"] + 2 * width
    return shape["vocab_size"] * width + shape["num_hidden_layers"] * layer + width


def completed(run: dict[str, Any], shape: str, options: argparse.Namespace, *, is_ours: bool) -> dict[str, Any]:
    """The figures of a run with those that follow from them, without what is only for these."""
    if "error" in run:
        return run
    for kind in ("", "_without_latency"):
        run[f"tokens_per_s{kind}"] = round(run["tokens"] / run[f"step_s{kind}"])
    if is_ours and shape != "tiny":
        device = {"flops": options.flops, "bandwidth": options.bandwidth}
        for kind, which, latency_s in (("", 0, WORK[shape].latency_s), ("_without_latency", 1, 0.0)):
            found = bounds(run, which, latency_s, **device)
            run[f"bounds_s{kind}"] = found
            run[f"over_bound{kind}"] = round(run[f"step_s{kind}"] / found["step"], 2)
    return {name: value for name, value in run.items() if name not in ("trajectories", "parameters")}


def ratios(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """TRL's seconds over ours, where both have any."""
    ours, trl = runs.get("ours", {}), runs.get("trl", {})
    kinds = {"ratio_vs_trl": "step_s", "ratio_without_latency": "step_s_without_latency"}
    return {name: round(trl[key] / ours[key], 3) for name, key in kinds.items() if key in ours and key in trl}


def loss_difference(python: Path) -> float | None:
    """Of the losses on a recorded batch, on the CPU."""
    command = [sys.executable, "-m", "benchmarks.trainer", "--rounds", "1", "--peer", str(python)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(REPO), *_paths()])}
    done = subprocess.run(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return None
    return json.loads(done.stdout.splitlines()[-1]).get("loss_difference")


def measure(home: Path, shapes: Sequence[str], parts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """All figures; what fails says why and does not take the others along."""
    eager, vllm_args = _ENGINE_MODES[options.engine_mode]
    settings = {
        "engine": options.engine,
        "sleep": not options.no_sleep,
        "eager": eager,
        "vllm_args": vllm_args,
        "compile": options.compile != "none" and options.engine == "vllm",
        "compile_trl": options.compile == "both",
        "gpu_memory_utilization": options.gpu_memory_utilization,
    }
    sides: dict[tuple[str, str], Side] = {}
    makers = []
    found: dict[str, dict[str, Any]] = {shape: {} for shape in shapes}
    try:
        for shape in shapes:
            folder = home / shape
            folder.mkdir(parents=True, exist_ok=True)
            makers.append(
                subprocess.Popen([sys.executable, "-m", "benchmarks.step_task", str(folder), shape], cwd=REPO)
            )
            for name in ("ours", "trl"):
                if name in parts:
                    python = options.trl_python if name == "trl" else Path(sys.executable)
                    sides[shape, name] = Side(name, python, folder, shape, settings)
        if any(maker.wait(_MAKE_S) for maker in makers):
            raise SystemExit("the models must be made, but they could not be; see above")
        for (shape, name), side in sides.items():
            run = completed(side.run(options.timeout_s), shape, options, is_ours=name == "ours")
            found[shape][name] = run
            print(f"{side.name}: {json.dumps(run)}", flush=True)
    finally:
        for maker in makers:
            maker.kill()
        for side in sides.values():
            side.end()
    for runs in found.values():
        runs.update(ratios(runs))
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, help="by default tiny, or where vLLM has a GPU 135M and 1.7B"
    )
    parser.add_argument("--parts", default="ours,trl,loss", help="of ours, trl and loss, with commas between")
    parser.add_argument(
        "--engine", choices=("vllm", "transformers"), help="of ours; by default vLLM where it can be had"
    )
    parser.add_argument("--engine-mode", choices=_ENGINE_MODES, default="compiled", help="of vLLM, for both systems")
    parser.add_argument(
        "--compile",
        choices=("none", "ours", "both"),
        default="ours",
        help="whose model torch.compile fuses for training (actor.use_torch_compile, torch_compile)",
    )
    parser.add_argument(
        "--no-sleep", action="store_true", help="the engine keeps its memory while the policy is trained"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.35)
    parser.add_argument("--directory", type=Path, help="where models and logs lie; by default a temporary folder")
    parser.add_argument(
        "--trl-python", type=Path, help="an interpreter with TRL and vLLM; by default this one, if it has them"
    )
    parser.add_argument("--timeout-s", type=float, default=150.0, help="of one run")
    parser.add_argument("--flops", type=float, default=989e12, help="FLOP/s of the device in bfloat16, for the bounds")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes per second of its memory")
    return parser.parse_args()


def main() -> int:
    """Prints one JSON line last."""
    options = arguments()
    parts = options.parts.split(",")
    if unknown := set(parts) - {"ours", "trl", "loss"}:
        raise SystemExit(f"--parts must be of ours, trl and loss, got {', '.join(sorted(unknown))}; mend it")
    has_vllm, has_trl = (importlib.util.find_spec(name) is not None for name in ("vllm", "trl"))
    options.engine = options.engine or ("vllm" if has_vllm else "transformers")
    shapes = options.shape or (["135M", "1.7B"] if has_vllm and has_gpu() else ["tiny"])
    if options.trl_python is None and has_vllm and has_trl:
        options.trl_python = Path(sys.executable)
    if "trl" in parts and options.trl_python is None:
        print(
            "TRL's step is left out: there is no interpreter with TRL and vLLM; name one by --trl-python",
            file=sys.stderr,
        )
        parts.remove("trl")
    figures: dict[str, Any] = {}
    if "loss" in parts:
        peer = options.trl_python or python_of("trl")
        if peer is None:
            print("the losses are left out: there is no interpreter with TRL", file=sys.stderr)
        else:
            figures["loss_difference"] = loss_difference(peer)
    if parts == ["loss"]:
        print(json.dumps(figures))
        return int(figures.get("loss_difference") is None)
    with tempfile.TemporaryDirectory(prefix="step-") as temporary:
        found = measure((options.directory or Path(temporary)).resolve(), shapes, parts, options)
    figures |= {
        name: found[shapes[-1]][name] for name in ("ratio_vs_trl", "ratio_without_latency") if name in found[shapes[-1]]
    }
    print(json.dumps({**figures, "engine": options.engine, "engine_mode": options.engine_mode, "shapes": found}))
    return int(any("error" in run for runs in found.values() for run in runs.values() if isinstance(run, dict)))


def has_gpu() -> bool:
    """Whether there is one, without a word to it: engines start in processes of their own."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


if __name__ == "__main__":
    sys.exit(main())
