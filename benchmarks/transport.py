"""What a generation costs between two processes, beside verl's client over Ray.

    python -m benchmarks.transport [--rounds N]

Each side has a client in one process and a server in another that answers at once, so all that is measured is the way there and back: ours
through LLMServerClient, RemoteServer and ReplicaService, verl's through its LLMServerClient, GlobalRequestLoadBalancer and a Ray actor (acquire,
generate, release). The same conversations, whose answers are checked, in rounds that take both sides in turn; medians over rounds count.

- `overhead_ratio`: verl's time for a later turn of a conversation of 1,000 tokens over ours, one conversation at a time.
- `growth_1k_to_64k`: our time for a later turn at 64,000 tokens over that at 1,000, the two conversations turn by turn.
- `throughput_ratio`: our calls per second over verl's, with 64 conversations of 1,000 tokens at once.

verl's part runs in its own environment (`python -m benchmarks.peers verl`); without it our own figures are printed, and null.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import python_of
from benchmarks.transport_peer import answer_to, obey
from ostinato_engines import AsyncServerBase, SamplingParams, StopReason, TokenOutput
from ostinato_rollout import LLMServerClient
from ostinato_rollout.transport import RemoteServer

SHORT, LONG, AT_ONCE = 1_000, 64_000, 64
PARAMS = SamplingParams(max_tokens=8)


class Instant(AsyncServerBase):
    """Answers at once."""

    def __init__(self, model: str) -> None:
        pass

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        request_id: str,
        media: Sequence[Any] = (),
    ) -> TokenOutput:
        return TokenOutput(answer_to(prompt_ids), [-0.5] * 3, StopReason.STOP)

    async def chat_completion(self, raw_request: Any) -> Any:
        raise NotImplementedError


async def our_side() -> None:
    """Our client, over a replica in another process."""
    replica = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ostinato_rollout.transport", f"{Path(__file__).resolve()}:Instant", "model"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert replica.stdout is not None
    remote = RemoteServer((await replica.stdout.readline()).decode().strip())
    await remote.start()
    client = LLMServerClient([remote])

    async def generate(name: str, prompt: "array[int]") -> list[int]:
        return (await client.generate(name, prompt, PARAMS)).token_ids

    try:
        await obey(generate, lambda ids: array("i", ids))
    finally:
        await remote.shutdown()
        await asyncio.wait_for(replica.wait(), 60)


class Side:
    """A side in a process of its own."""

    def __init__(self, *command: str | Path) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **command: Any) -> Any:
        """The answer to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a side must answer, got its end; see what it printed")
        return json.loads(line)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def one_round(sides: Mapping[str, Side], turns: int) -> dict[str, dict[str, float]]:
    """The figures of every side, taken in turn."""
    figures: dict[str, dict[str, float]] = {name: {} for name in sides}
    for name, side in sides.items():
        seconds = side.ask(what="turns", tokens=[SHORT, LONG], turns=turns)
        for tokens, values in zip((SHORT, LONG), seconds, strict=True):
            figures[name][f"us_{tokens}"] = 1e6 * statistics.median(values)
    for name, side in sides.items():
        figures[name]["calls_s"] = side.ask(what="many", tokens=[SHORT], turns=max(2, turns // 4), at_once=AT_ONCE)
    return figures


def report(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float | None]:
    """Medians over the rounds."""
    for name in rounds[0]:
        for figure in rounds[0][name]:
            values = sorted(found[name][figure] for found in rounds)
            print(
                f"{name:>5} {figure:>9}: median {statistics.median(values):9.1f}, {values[0]:.1f} to {values[-1]:.1f}"
            )

    def median_of(ratio: Any) -> float | None:
        return round(statistics.median(ratio(found) for found in rounds), 3) if "verl" in rounds[0] else None

    return {
        "overhead_ratio": median_of(lambda found: found["verl"][f"us_{SHORT}"] / found["ours"][f"us_{SHORT}"]),
        "growth_1k_to_64k": round(
            statistics.median(found["ours"][f"us_{LONG}"] / found["ours"][f"us_{SHORT}"] for found in rounds), 3
        ),
        "throughput_ratio": median_of(lambda found: found["ours"]["calls_s"] / found["verl"]["calls_s"]),
        "overhead_ratio_64k": median_of(lambda found: found["verl"][f"us_{LONG}"] / found["ours"][f"us_{LONG}"]),
    }


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=60, help="of one conversation")
    parser.add_argument("--side", action="store_true", help="be our side, for the benchmark itself")
    options = parser.parse_args()
    if options.side:
        asyncio.run(our_side())
        return
    sides = {"ours": Side(sys.executable, "-m", "benchmarks.transport", "--side")}
    if (python := python_of("verl")) is None:
        print("verl's environment is missing; make it with `python -m benchmarks.peers verl`")
    else:
        sides["verl"] = Side(python, Path(__file__).with_name("transport_peer.py"))
    try:
        one_round(sides, options.turns)  # warms up
        rounds = [one_round(sides, options.turns) for _ in range(options.rounds)]
    finally:
        for side in sides.values():
            side.close()
    print(json.dumps(report(rounds)))


if __name__ == "__main__":
    main()
