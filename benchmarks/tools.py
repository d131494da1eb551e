"""What a tool call and the reading of one cost, beside the least that either could cost.

    uv run python -m benchmarks.tools [--rounds N] [--formats NAME ...]

Everything is measured in rounds that take both sides in turn, so that a busy machine disturbs both; figures are medians of
ratios. What only computes is measured in processor time, what also waits by the clock on the wall.

- `call_over_bare`: a call of an async function tool through the executor, its argument checked and its deadline set, over
  awaiting a bare task around the function. `call_policies_over_bare`: the same with a deadline of its own, nested
  arguments, and a result that is checked against a schema.
- `sleepers_over_bare`: 10,000 tools that each wait a second, over 10,000 bare tasks that do; the worse of one trajectory
  that calls them all in one turn and of 10,000 trajectories.
- `parser_json_min`, `parser_other_min`: throughput of the slowest format, in characters, over that of `json.loads` on
  a text of equal length that holds the same calls; on a turn of three short calls and on one of a long one.
- `parser_growth_max`: time(2n) over time(n), the worst of all formats and hostile texts. Each side is its best time, and
  what looks worse than linear is measured again.
"""

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.tool_turns import JSON_FORMATS, TOOL, example_calls, hostile_texts, render
from ostinato_tools import FunctionTool, ToolCall, ToolExecutor, ToolPolicy, ToolRegistry, function_tool, get_parser
from ostinato_tools.parsers import PARSERS

NUM_SLEEPERS = 10_000
NUM_CALLS = 1000
HOSTILE_CHARACTERS = 16_000
ENOUGH_GROWTH = 2.15
"""A growth below this is not measured again: it would have to be wrong by more than 1.8 to hide a square."""

ECHO_SCHEMA = {
    "type": "function",
    "function": {
        "name": "echo",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
SEARCH_SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "minLength": 1},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                "where": {
                    "type": "object",
                    "properties": {"sites": {"type": "array", "items": {"type": "string"}}},
                    "required": ["sites"],
                },
                "kind": {"type": "string", "enum": ["web", "news"]},
            },
            "required": ["query"],
        },
    },
}
SEARCH_RESULT = {
    "type": "object",
    "properties": {"hits": {"type": "array", "items": {"type": "string"}}, "more": {"type": "boolean"}},
    "required": ["hits"],
}
SEARCH_POLICY = ToolPolicy(timeout_s=30, result_schema=SEARCH_RESULT)
SEARCH_ARGUMENTS = {"query": "tides", "limit": 3, "where": {"sites": ["a.org", "b.org"]}, "kind": "web"}


@function_tool(schema=ECHO_SCHEMA)
async def echo(text: str) -> str:
    """Return the text."""
    return text


@function_tool(schema=SEARCH_SCHEMA, policy=SEARCH_POLICY)
async def search(query: str, limit: int, where: dict, kind: str) -> dict:
    """Return what was found before."""
    return {"hits": [query, kind], "more": False}


@function_tool(schema={"type": "function", "function": {"name": "sleeper"}})
async def sleeper() -> str:
    """Wait a second."""
    await asyncio.sleep(1)
    return "awake"


async def seconds_of(work: Callable[[], Awaitable[object]], clock: Callable[[], float]) -> float:
    """Seconds that some work takes, without the garbage of what came before."""
    gc.collect()
    started = clock()
    await work()
    return clock() - started


def call_of(name: str, arguments: dict) -> ToolCall:
    """A call as a parser gives it."""
    return ToolCall(name=name, arguments=arguments, raw_arguments=json.dumps(arguments), id="call_0")


async def call_ratio(tool: FunctionTool, arguments: dict, rounds: int) -> float:
    """Time of a call through the executor over that of a bare task around the function."""
    executor, name = ToolExecutor(ToolRegistry([tool])), tool.name
    call = call_of(name, arguments)
    async with executor.open("bench") as tools:

        async def bare() -> None:
            for _ in range(NUM_CALLS):
                await asyncio.create_task(tool.function(**arguments))

        async def ours() -> None:
            for _ in range(NUM_CALLS):
                await tools.run([call])

        times = [[await seconds_of(work, time.process_time) for work in (bare, ours)] for _ in range(rounds)]
    if set(executor.stats[name].outcomes) != {"ok"}:
        raise SystemExit(f"every call must be ok, got {executor.stats[name].outcomes}")
    bare_us, our_us = (1e6 * statistics.median(side) / NUM_CALLS for side in zip(*times, strict=True))
    print(f"{name:>10}: {our_us:6.1f} us a call, bare task {bare_us:5.1f} us")
    return statistics.median(ours / bare for bare, ours in times)


async def sleepers_ratio(rounds: int) -> float:
    """Time of waiting tools over that of waiting tasks."""
    calls = [call_of("sleeper", {})] * NUM_SLEEPERS
    executor = ToolExecutor(ToolRegistry([sleeper]))

    async def bare() -> None:
        await asyncio.gather(*(asyncio.create_task(sleeper.function()) for _ in range(NUM_SLEEPERS)))

    async def one_turn() -> None:
        async with executor.open("bench") as tools:
            await tools.run(calls)

    async def trajectory(index: int) -> None:
        async with executor.open(f"bench-{index}") as tools:
            await tools.run([calls[index]])

    async def trajectories() -> None:
        await asyncio.gather(*(trajectory(index) for index in range(NUM_SLEEPERS)))

    times = [
        [await seconds_of(work, time.perf_counter) for work in (bare, one_turn, trajectories)] for _ in range(rounds)
    ]
    medians = [statistics.median(side) for side in zip(*times, strict=True)]
    print("{:>10}: bare {:.2f} s, one turn {:.2f} s, trajectories {:.2f} s".format("sleepers", *medians))
    return max(statistics.median(row[side] / row[0] for row in times) for side in (1, 2))


def cpu_seconds(work: Callable[[], object], least_s: float = 2e-3) -> float:
    """Processor seconds of one run, from enough runs in a row that the clock does not matter."""
    num_runs = 1
    while True:
        started = time.process_time()
        for _ in range(num_runs):
            work()
        seconds = time.process_time() - started
        if seconds >= least_s:
            return seconds / num_runs
        num_runs *= 4


def throughput_ratio(name: str, rounds: int) -> float:
    """Characters a second of a format over those of `json.loads`; the worse of short calls and of a long one."""
    parser = get_parser(name)
    ratios = []
    for calls in (example_calls(3, 6), example_calls(1, 1000)):
        text = render(name, calls)
        document = json.dumps([{"name": tool, "arguments": given} for tool, given in calls], ensure_ascii=False)
        turn = parser.parse(text, [TOOL])
        if [(call.name, call.arguments) for call in turn.tool_calls] != calls or turn.errors:
            raise SystemExit(f"{name} must read the calls that it is timed on, got {turn!r:.300}")
        times = [
            (
                cpu_seconds(lambda document=document: json.loads(document)) / len(document),
                cpu_seconds(lambda text=text: parser.parse(text, [TOOL])) / len(text),
            )
            for _ in range(rounds)
        ]
        ratios.append(statistics.median(theirs / ours for theirs, ours in times))
    return min(ratios)


def growth(name: str) -> tuple[float, str]:
    """The worst time(2n) / time(n) of a format, and on which text."""
    parser = get_parser(name)
    worst, where = 0.0, ""
    longer = hostile_texts(name, 2 * HOSTILE_CHARACTERS)
    for (label, short), (_, long) in zip(hostile_texts(name, HOSTILE_CHARACTERS), longer, strict=True):
        best = [float("inf"), float("inf")]
        for _ in range(40):
            for side, text in enumerate((short, long)):
                best[side] = min(best[side], cpu_seconds(lambda text=text: parser.parse(text, [TOOL]), 1e-3))
            ratio = best[1] / best[0] / (len(long) / len(short) / 2)
            if ratio < ENOUGH_GROWTH:
                break
        if ratio > worst:
            worst, where = ratio, label
    return worst, where


def parser_figures(names: Sequence[str], rounds: int) -> dict[str, float]:
    """The figures of all formats."""
    ratios, growths = {}, {}
    for name in names:
        ratios[name] = throughput_ratio(name, rounds)
        growths[name], where = growth(name)
        print(
            f"{name:>12}: {ratios[name]:.3f} of json.loads, growth at most {growths[name]:.2f} on {where}", flush=True
        )
    groups = {
        "parser_json_min": [ratio for name, ratio in ratios.items() if name in JSON_FORMATS],
        "parser_other_min": [ratio for name, ratio in ratios.items() if name not in JSON_FORMATS],
    }
    figures = {key: round(min(group), 4) for key, group in groups.items() if group}
    return {**figures, "parser_growth_max": round(max(growths.values()), 3)}


async def call_figures(rounds: int) -> dict[str, float]:
    """The figures of calls."""
    return {
        "call_over_bare": round(await call_ratio(echo, {"text": "hello"}, 5 * rounds), 3),
        "call_policies_over_bare": round(await call_ratio(search, SEARCH_ARGUMENTS, 5 * rounds), 3),
        "sleepers_over_bare": round(await sleepers_ratio(max(3, rounds // 2)), 3),
    }


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", nargs="*", default=sorted(PARSERS), choices=sorted(PARSERS))
    arguments = parser.parse_args()
    figures = asyncio.run(call_figures(arguments.rounds))
    print(json.dumps(figures | parser_figures(arguments.formats, arguments.rounds)))


if __name__ == "__main__":
    main()
