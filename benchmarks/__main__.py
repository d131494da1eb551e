"""Run benchmarks one after the other: `python -m benchmarks [NAME ...]`; without a name, all of them."""

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = {
    "__init__",
    "__main__",
    "agent_loop_peer",
    "dataset_peer",
    "makespan_replica",
    "peers",
    "matrix_script",
    "matrix_templates",
    "shapes",
    "step_peer",
    "step_run",
    "step_task",
    "telling_engines",
    "tokenization_peer",
    "tool_turns",
    "trainer_peer",
    "transport_peer",
    "updates",
    "virtual_time",
    "weight_digests",
}

RUN_BY_ENGINES = {"sglang_server", "vllm_server"}
"""They need environments of their own; `engines` runs them where those are."""


RUN_ALONE = {"fsdp2", "gsm8k", "learning", "megatron", "trainer_gpu"}
"""They take half an hour, or need a model or GPUs: they run where they are named."""


def benchmarks() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def main() -> int:
    """Run each module in a process of its own; the status is that of the worst."""
    known = benchmarks()
    names = sys.argv[1:] or [name for name in known if name not in RUN_BY_ENGINES | RUN_ALONE]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    status = 0
    for name in names:
        print(f"\n== {name}", flush=True)
        status = max(status, subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode)
    return status


if __name__ == "__main__":
    sys.exit(main())
