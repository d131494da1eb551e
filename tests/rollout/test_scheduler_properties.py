"""Streams under random durations, failures, verdicts, consumers and policy versions, against what must hold for each prompt."""

from __future__ import annotations

import asyncio

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_rollout import GroupFate, GroupStream, Leftover, OnFailure, RolloutScheduler, Run, StreamOptions

MAX_PROMPTS = 12


class World(msgspec.Struct, kw_only=True):
    """What runs and verdicts do; a function of indices, durations apart."""

    n: int
    num_prompts: int
    durations: list[int]
    num_failures: list[int]
    verdicts: list[object]
    concurrency: int
    is_async: bool

    version: int = 0
    running: int = 0
    peak: int = 0
    num_begun: int = 0

    def duration(self, *where: int) -> int:
        """Steps of the event loop that something takes."""
        return self.durations[hash(where) % len(self.durations)]

    def failures(self, index: int, number: int) -> int:
        """How often a run fails before it succeeds."""
        return self.num_failures[(index * 7 + number) % len(self.num_failures)]

    def verdict(self, index: int) -> object:
        """What `keep_group` does with a group."""
        return self.verdicts[index % len(self.verdicts)]

    def fate(self, index: int, options: StreamOptions) -> GroupFate:
        """What becomes of a prompt that is finished while it is fresh."""
        fails = any(self.failures(index, number) > options.max_reruns for number in range(self.n))
        if fails and options.on_failure is OnFailure.DROP:
            return GroupFate.FAILED
        return {True: GroupFate.KEPT, "raise": GroupFate.FAILED}.get(self.verdict(index), GroupFate.FILTERED)

    async def run_one(self, run: Run[str]) -> dict:
        """Take a while, then fail or return who it was and at which version it began."""
        assert run.prompt == f"p{run.index}"
        version = self.version
        self.running += 1
        self.num_begun += 1
        self.peak = max(self.peak, self.running)
        try:
            for _ in range(self.duration(run.index, run.number, run.attempt)):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        if run.attempt < self.failures(run.index, run.number):
            raise ValueError("as told")
        return {"who": [run.index, run.number], "version": version}

    async def keep_group(self, group) -> object:
        """Take a while, then do as told."""
        for _ in range(self.duration(group.index)):
            await asyncio.sleep(0)
        verdict = self.verdict(group.index)
        if verdict == "raise":
            raise LookupError("as told")
        return verdict

    def prompts(self, first: int = 0):
        """All prompts from `first` on, some of them to be awaited."""
        names = [f"p{index}" for index in range(first, self.num_prompts)]

        async def later():
            for index, name in enumerate(names):
                for _ in range(self.duration(index)):
                    await asyncio.sleep(0)
                yield name

        return later() if self.is_async else names

    def stream(self, options: StreamOptions, state=None) -> GroupStream:
        """A stream over what `state` has not drawn."""
        return RolloutScheduler().stream(
            self.prompts(0 if state is None else state.num_drawn),
            self.run_one,
            n=self.n,
            concurrency=self.concurrency,
            options=options,
            keep_group=self.keep_group,
            current_version=lambda: self.version,
            oldest_version=lambda result: result["version"],
            state=state,
        )

    def check_group(self, group, options: StreamOptions) -> None:
        """A group holds its own results, failures in their places, and is fresh enough."""
        for number, result in enumerate(group.results):
            if self.failures(group.index, number) > options.max_reruns:
                assert result.message == "ValueError: as told"
            else:
                assert result["who"] == [group.index, number]
                if options.max_staleness is not None:
                    assert self.version - result["version"] <= options.max_staleness


worlds = st.builds(
    World,
    n=st.integers(1, 3),
    num_prompts=st.integers(0, MAX_PROMPTS),
    durations=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    num_failures=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=5),
    verdicts=st.lists(st.sampled_from([True, True, False, "dull", "raise"]), min_size=1, max_size=5),
    concurrency=st.integers(1, 5),
    is_async=st.booleans(),
)


@st.composite
def stream_options(draw, *, timeless: bool = False) -> StreamOptions:
    """Any options; timeless: those under which time has no say in what is kept."""
    num_groups = draw(st.none() | st.integers(1, 5))
    max_staleness = None if timeless else draw(st.none() | st.integers(0, 2))
    return StreamOptions(
        queue_size=draw(st.none() | st.integers(1, 4)),
        in_order=draw(st.booleans()),
        max_reruns=draw(st.integers(0, 2)),
        on_failure=draw(st.sampled_from(OnFailure)),
        num_groups=num_groups,
        oversample=0 if num_groups is None or timeless else draw(st.integers(0, 3)),
        leftover=draw(st.sampled_from(Leftover)),
        max_staleness=max_staleness,
        groups_per_version=None if max_staleness is None else draw(st.integers(1, 3)),
    )


actions = st.lists(
    st.tuples(st.just("take"), st.integers(1, 3))
    | st.tuples(st.just("wait"), st.integers(0, 8))
    | st.tuples(st.just("move"), st.just(1)),
    max_size=12,
)


async def act(world: World, stream: GroupStream, options: StreamOptions, script) -> list:
    """Do as the script says; a `take` that is not answered soon is cancelled. Returns the groups."""
    taken = []
    for action, amount in script:
        if action == "wait":
            for _ in range(amount):
                await asyncio.sleep(0)
        elif action == "move":
            world.version += 1
        else:
            if options.max_staleness is not None:
                amount = min(amount, (options.max_staleness + 1) * options.groups_per_version)
            taking = asyncio.create_task(stream.take(amount))
            for _ in range(60):
                await asyncio.sleep(0)
                if taking.done():
                    break
            else:
                taking.cancel()
            await asyncio.wait([taking])
            if not taking.cancelled():
                for group in taking.result():
                    world.check_group(group, options)
                taken += taking.result()
        check_counts(stream)
    return taken


def check_counts(stream: GroupStream) -> None:
    """Every prompt is counted once."""
    counts = stream.counts()
    assert counts.num_drawn + counts.num_resumed == sum(counts.fates.values()) + counts.num_open + counts.num_ready
    assert sum(counts.filtered.values()) == counts.fates["filtered"]


def check_fates(world: World, stream: GroupStream, options: StreamOptions, taken, known) -> None:
    """Each prompt of `known` has one fate, and none that contradicts what its runs and its verdict were."""
    left = [group.index for group in stream.state().groups]
    dropped = [group.index for group in stream.dropped]
    assert sorted([*(group.index for group in taken), *dropped, *left]) == sorted(known)
    counts = stream.counts()
    assert (counts.fates["kept"], counts.fates["handed_back"]) == (len(taken), len(left))
    assert all(world.fate(group.index, options) is GroupFate.KEPT for group in taken)
    for group in stream.dropped:
        if group.fate in (GroupFate.FILTERED, GroupFate.FAILED):
            assert world.fate(group.index, options) is group.fate
            assert (group.failure is not None) == (group.fate is GroupFate.FAILED)
    if options.leftover is Leftover.CANCEL:
        assert left == []


@settings(max_examples=150, deadline=None)
@given(worlds, stream_options(), actions)
def test_each_prompt_has_one_fate_whatever_consumers_and_versions_do(world, options, script):
    """Consumers that are slow, stop or are cancelled, versions that move, failures, filters and early stops: each prompt that was
    drawn is kept, filtered, failed, stale, cancelled or handed back, exactly once; nothing runs after the end."""

    async def main():
        stream = world.stream(options)
        taken = await act(world, stream, options, script)
        await stream.aclose()
        check_counts(stream)
        check_fates(world, stream, options, taken, range(stream.counts().num_drawn))
        assert (world.running, await stream.take(1)) == (0, [])
        assert world.peak <= world.concurrency
        if options.num_groups is not None:
            assert len(taken) <= options.num_groups
        elif options.in_order:
            assert [group.index for group in taken] == sorted(group.index for group in taken)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@settings(max_examples=100, deadline=None)
@given(worlds, stream_options(timeless=True))
def test_what_is_kept_is_a_function_of_indices(world, options):
    """Without oversampling and staleness the groups are those of the first prompts that are good enough, whatever takes how long,
    and with in_order they come in that order."""

    async def main():
        async with world.stream(options) as stream:
            taken = [group async for group in stream]
            good = [index for index in range(world.num_prompts) if world.fate(index, options) is GroupFate.KEPT]
            indices = [group.index for group in taken]
            assert sorted(indices) == good[: options.num_groups]
            if options.in_order:
                assert indices == sorted(indices)
            for group in taken:
                world.check_group(group, options)
            if options.num_groups is not None and len(taken) == options.num_groups:
                assert stream.counts().num_drawn == max(indices) + 1

    asyncio.run(main())


@settings(max_examples=100, deadline=None)
@given(worlds, stream_options(), actions)
def test_a_stream_goes_on_from_the_state_that_another_left(world, options, script):
    """Closed in the midst and taken up from its state, which went through JSON: every prompt has one fate over both, and no run that
    had ended is done again."""
    options = msgspec.structs.replace(options, leftover=Leftover.HAND_BACK, num_groups=None, oversample=0)

    async def main():
        first = world.stream(options)
        taken = await act(world, first, options, script)
        await first.aclose()
        state = first.state()
        state = msgspec.json.decode(msgspec.json.encode(state), type=type(state)[str, dict])
        assert state == first.state()
        num_left = sum(world.n - len(group.results) - len(group.failures) for group in state.groups)
        num_begun = world.num_begun
        rest = msgspec.structs.replace(options, max_staleness=None, groups_per_version=None, on_failure=OnFailure.KEEP)
        rest = msgspec.structs.replace(rest, max_reruns=0)
        second = world.stream(rest, state)
        async with second:
            late = [group async for group in second]
        check_counts(second)
        assert second.counts().fates["handed_back"] == 0
        assert world.num_begun - num_begun == num_left + (world.num_prompts - state.num_drawn) * world.n
        fates = [*(group.index for group in [*taken, *late, *first.dropped, *second.dropped])]
        assert sorted(fates) == list(range(world.num_prompts))

    asyncio.run(main())
