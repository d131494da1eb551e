"""How long a batch of conversations takes over the time that nothing can beat, by how replicas are chosen and places are given.

    python -m benchmarks.makespan [--workload FOLDER] [--sessions N --replicas N]

The real RolloutScheduler, LLMServerClient, placement, admission and policies drive simulated replicas (`benchmarks.makespan_replica`) on
an event loop with a virtual clock, over the frozen workload of `../shared/data/makespan` (`within.json`: 512 conversations, whose state
fits the replicas' memory, `over.json`: 2,048, which do not fit), three seeds each. A run is repeated exactly by its seed. What is
learned in a run is forgotten after it: each begins as the first step of a training does.

The bound is the largest of: the longest conversation alone on a replica, and the work of all, evenly spread over replicas whose memory is
full of what they sample for. Nothing reaches it: tools keep memory that then serves nobody, and lengths are not known beforehand.

- `within_vs_hindsight`: makespan of the default settings over that of longest-first placement, which knows all lengths beforehand: the
  conversations in order of the memory that they read, each placed where the sum of that is the least, where it stays.
- `over_vs_sticky`, `over_vs_bound`: makespan of the default settings over that of sticky routing without admission, and over the bound.

Each is the mean over the seeds, `*_worst` that of the worst one. `--sessions` instead runs a large batch drawn from the workload, by the
default settings, and tells how long the simulation itself takes.
"""

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.makespan_replica import ReplicaModel, SimulatedReplica
from benchmarks.virtual_time import run_in_virtual_time
from ostinato_engines import SamplingParams
from ostinato_rollout import (
    AdmissionConfig,
    Failure,
    LeastInFlight,
    LLMServerClient,
    ReplicaPolicy,
    RolloutScheduler,
    RoundRobin,
    RoutingConfig,
    StickyLeastInFlight,
    make_policy,
)

MAX_GROWTH = 65_536
"""What clients are told that a conversation may add: no setting knows more."""
NO_DEADLINE_S = 1e9
NO_ADMISSION = AdmissionConfig(enable=False)
CAP_512 = AdmissionConfig(max_sessions=64, kv_capacity_tokens=10**12)


class Conversation(msgspec.Struct, frozen=True):
    """One of the workload."""

    prompt_tokens: int
    turns: list[tuple[int, float, int]]
    """Tokens sampled, seconds of the tool after them, tokens of its result."""

    def alone_s(self, model: ReplicaModel) -> float:
        """Seconds that it takes with a replica for itself whose steps read the weights only."""
        num_new, seconds = self.prompt_tokens, 0.0
        for num_sampled, tool_s, num_observed in self.turns:
            seconds += num_new / model.prefill_tokens_per_s + model.steps_s(num_sampled, 0, 0) + tool_s
            num_new = num_observed
        return seconds

    def tokens_read(self) -> int:
        """The sum of its context over all tokens that it samples."""
        length, total = self.prompt_tokens, 0
        for num_sampled, _, num_observed in self.turns:
            total += num_sampled * length + num_sampled * (num_sampled - 1) // 2
            length += num_sampled + num_observed
        return total

    def num_prefilled(self) -> int:
        """Tokens to be computed if nothing is computed twice; nobody reads the last result."""
        return self.prompt_tokens + sum(num_observed for _, _, num_observed in self.turns[:-1])


class Workload(msgspec.Struct, frozen=True):
    """A file of the workload."""

    replica: ReplicaModel
    seeds: list[list[Conversation]]

    def bound_s(self, seed: int) -> float:
        """Seconds that no schedule can beat."""
        model, conversations = self.replica, self.seeds[seed]
        longest_s = max(conversation.alone_s(model) for conversation in conversations)
        per_token = (
            model.weight_bytes / model.kv_capacity_tokens + model.kv_bytes_per_token
        ) / model.bandwidth_bytes_per_s
        work_s = sum(conversation.tokens_read() for conversation in conversations) * per_token
        work_s += sum(conversation.num_prefilled() for conversation in conversations) / model.prefill_tokens_per_s
        return max(longest_s, work_s / model.count)


def read_workload(path: Path) -> Workload:
    """Read a file of the workload."""
    return msgspec.json.decode(path.read_bytes(), type=Workload)


class LongestFirst:
    """With hindsight: a new conversation goes where the known work is the least, and stays there."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._work = {str(index): conversation.tokens_read() for index, conversation in enumerate(conversations)}
        self._placed: dict[int, int] = {}

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """See ReplicaPolicy."""
        if previous is not None:
            return previous
        replica = min(in_flight, key=lambda replica: self._placed.get(replica, 0))
        self._placed[replica] = self._placed.get(replica, 0) + self._work[request_id]
        return replica


class Way(msgspec.Struct, frozen=True):
    """A way to run a batch."""

    name: str
    make_policy: Callable[[int, Sequence[Conversation]], ReplicaPolicy]
    admission: AdmissionConfig
    longest_first: bool = False


DEFAULT = Way("default", lambda seed, _: make_policy(RoutingConfig(), seed=seed), AdmissionConfig())
STICKY = Way("sticky", lambda seed, _: StickyLeastInFlight(seed, None), NO_ADMISSION)
HINDSIGHT = Way("hindsight", lambda _, batch: LongestFirst(batch), NO_ADMISSION, longest_first=True)
WAYS = (
    DEFAULT,
    HINDSIGHT,
    STICKY,
    Way("sticky, margin 8", lambda seed, _: StickyLeastInFlight(seed, 8), NO_ADMISSION),
    Way("default without admission", lambda seed, _: make_policy(RoutingConfig(), seed=seed), NO_ADMISSION),
    Way("least in flight", lambda seed, _: LeastInFlight(seed), NO_ADMISSION),
    Way("round robin", lambda _seed, _batch: RoundRobin(), NO_ADMISSION),
)
CAPPED = (
    Way("sticky, 512 at once", lambda seed, _: StickyLeastInFlight(seed, None), CAP_512),
    Way("hindsight, 512 at once", lambda _, batch: LongestFirst(batch), CAP_512, longest_first=True),
)


class Run(msgspec.Struct, frozen=True):
    """What came of a batch."""

    makespan_s: float
    num_decoded: int
    num_prefilled: int
    num_evicted: int
    num_preempted: int
    busy: float
    """Part of the time that replicas compute."""


async def converse(client: LLMServerClient, request_id: str, conversation: Conversation) -> None:
    """One conversation, as a session has it with a client."""
    length = conversation.prompt_tokens
    await client.admit(request_id, num_prompt_tokens=length, max_growth=MAX_GROWTH)
    try:
        for number, (num_sampled, tool_s, num_observed) in enumerate(conversation.turns, 1):
            output = await client.generate(request_id, range(length), SamplingParams(max_tokens=num_sampled))
            length += len(output.token_ids)
            if number < len(conversation.turns):
                await asyncio.sleep(tool_s)
                length += num_observed
    finally:
        await client.release(request_id)


async def run_batch(way: Way, seed: int, model: ReplicaModel, batch: Sequence[Conversation]) -> Run:
    """Run a batch to its end; every conversation must succeed."""
    replicas = [SimulatedReplica(model) for _ in range(model.count)]
    client = LLMServerClient(
        replicas,
        policy=way.make_policy(seed, batch),
        admission=msgspec.structs.replace(way.admission, timeout_s=NO_DEADLINE_S),
        timeout_s=NO_DEADLINE_S,
    )
    order = list(range(len(batch)))
    if way.longest_first:
        order.sort(key=lambda index: -batch[index].tokens_read())
    results = await RolloutScheduler().run(
        order, lambda index: converse(client, str(index), batch[index]), concurrency=len(batch)
    )
    failures = [result for result in results if isinstance(result, Failure)]
    if failures:
        raise SystemExit(f"all conversations must succeed, got {len(failures)} failures; the first: {failures[0]}")
    num_decoded = sum(replica.num_decoded for replica in replicas)
    if num_decoded != sum(turn[0] for conversation in batch for turn in conversation.turns) or client.num_sticky:
        raise SystemExit("every token must be sampled once, and every conversation released; the simulation is wrong")
    makespan_s = asyncio.get_running_loop().time()
    return Run(
        makespan_s=makespan_s,
        num_decoded=num_decoded,
        num_prefilled=sum(replica.num_prefilled for replica in replicas),
        num_evicted=sum(replica.num_evicted for replica in replicas),
        num_preempted=sum(replica.num_preempted for replica in replicas),
        busy=sum(replica.busy_s for replica in replicas) / (makespan_s * len(replicas)),
    )


def run_seeds(way: Way, workload: Workload) -> list[Run]:
    """Run a way on every seed of a workload."""
    return [
        run_in_virtual_time(run_batch(way, seed, workload.replica, batch)) for seed, batch in enumerate(workload.seeds)
    ]


def compare(name: str, workload: Workload, ways: Sequence[Way]) -> dict[str, list[float]]:
    """Print a line for each way; return its makespans, over the bound, by name."""
    bounds = [workload.bound_s(seed) for seed in range(len(workload.seeds))]
    ideal = sum(conversation.num_prefilled() for batch in workload.seeds for conversation in batch)
    print(f"{name}: {len(workload.seeds[0])} conversations, bounds " + ", ".join(f"{bound:.0f} s" for bound in bounds))
    ratios: dict[str, list[float]] = {}
    for way in ways:
        began = time.perf_counter()
        runs = run_seeds(way, workload)
        seconds = time.perf_counter() - began
        found = ratios[way.name] = [run.makespan_s / bound for run, bound in zip(runs, bounds, strict=True)]
        print(
            f"  {way.name:<26} {statistics.mean(found):.3f} of the bound ({', '.join(f'{ratio:.3f}' for ratio in found)}),"
            f" prefill {sum(run.num_prefilled for run in runs) / ideal:.2f} of ideal,"
            f" {sum(run.num_evicted for run in runs)} evicted, {sum(run.num_preempted for run in runs)} preempted,"
            f" busy {statistics.mean(run.busy for run in runs):.2f}; simulated in {seconds:.1f} s",
            flush=True,
        )
    return ratios


def over(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The mean of ours over the mean of theirs, and the worst seed's."""
    pairs = zip(ours, theirs, strict=True)
    return {
        "": round(statistics.mean(ours) / statistics.mean(theirs), 3),
        "_worst": round(max(our / their for our, their in pairs), 3),
    }


def figures(within: dict[str, list[float]], beyond: dict[str, list[float]], sessions_per_s: float) -> dict[str, object]:
    """What is claimed, and what it is made from."""
    named = {
        "within_vs_hindsight": over(within["default"], within["hindsight"]),
        "over_vs_sticky": over(beyond["default"], beyond["sticky"]),
        "over_vs_bound": over(beyond["default"], [1.0] * len(beyond["default"])),
    }
    return {
        **{
            name + suffix: value
            for suffix in ("", "_worst")
            for name, found in named.items()
            for value in [found[suffix]]
        },
        "within": {name: round(statistics.mean(ratios), 3) for name, ratios in within.items()},
        "over": {name: round(statistics.mean(ratios), 3) for name, ratios in beyond.items()},
        "sessions_simulated_per_s": round(sessions_per_s),
    }


def run_large(workload: Workload, num_sessions: int, num_replicas: int) -> dict[str, object]:
    """Run many conversations, drawn from a workload, over many replicas, and tell how long that takes."""
    draw = random.Random(0)
    pool = list(itertools.chain.from_iterable(workload.seeds))
    batch = [draw.choice(pool) for _ in range(num_sessions)]
    model = msgspec.structs.replace(workload.replica, count=num_replicas)
    bound_s = Workload(model, [batch]).bound_s(0)
    began = time.perf_counter()
    run = run_in_virtual_time(run_batch(DEFAULT, 0, model, batch))
    seconds = time.perf_counter() - began
    return {
        "sessions": num_sessions,
        "replicas": num_replicas,
        "over_bound": round(run.makespan_s / bound_s, 3),
        "makespan_s": round(run.makespan_s, 1),
        "simulated_in_s": round(seconds, 1),
        "sessions_simulated_per_s": round(num_sessions / seconds),
    }


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = os.environ.get("OSTINATO_SHARED", Path(__file__).resolve().parents[2] / "shared")
    parser.add_argument(
        "--workload",
        type=Path,
        default=Path(shared) / "data" / "makespan",
        help="the folder with within.json and over.json",
    )
    parser.add_argument("--sessions", type=int, help="run so many conversations once instead of the comparison")
    parser.add_argument("--replicas", type=int, default=64, help="with --sessions")
    options = parser.parse_args()
    for name in ("sessions", "replicas"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    try:
        within, beyond = (read_workload(options.workload / f"{name}.json") for name in ("within", "over"))
    except (OSError, msgspec.DecodeError) as error:
        parser.error(f"--workload must be the folder of the frozen workload, got {options.workload}: {error}")
    logging.basicConfig(level=logging.ERROR)
    if options.sessions is not None:
        print(json.dumps(run_large(beyond, options.sessions, options.replicas)))
        return
    began = time.perf_counter()
    ratios_within, ratios_over = compare("within", within, WAYS), compare("over", beyond, WAYS + CAPPED)
    num_sessions = len(WAYS) * sum(map(len, within.seeds)) + len(WAYS + CAPPED) * sum(map(len, beyond.seeds))
    print(json.dumps(figures(ratios_within, ratios_over, num_sessions / (time.perf_counter() - began))))


if __name__ == "__main__":
    main()
