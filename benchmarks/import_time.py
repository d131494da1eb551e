"""Seconds to import our light packages, as ratios to `import transformers` in the same run.

Every import happens in a fresh interpreter, in turns, and the fastest of several counts: the machine may be shared.
"""

import json
import subprocess
import sys
import time

OURS = ("ostinato_tokenization", "ostinato_tools", "ostinato_rollout")
REPETITIONS = 5


def seconds(module: str | None) -> float:
    """Wall time of an interpreter that imports `module`, or nothing."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}" if module else "pass"], check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print a table, and one JSON line last."""
    best = dict.fromkeys((None, "transformers", *OURS), float("inf"))
    for _ in range(REPETITIONS):
        for module in best:
            best[module] = min(best[module], seconds(module))
    empty = best.pop(None)
    ratios = {}
    for module, taken in best.items():
        ratios[module] = (taken - empty) / (best["transformers"] - empty)
        print(f"{module:24} {taken - empty:6.3f} s   {ratios[module]:5.2f} of transformers")
    print(
        json.dumps(
            {f"{module.removeprefix('ostinato_')}_over_transformers": round(ratios[module], 3) for module in OURS}
        )
    )


if __name__ == "__main__":
    main()
