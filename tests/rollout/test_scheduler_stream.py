"""Groups as they finish: order, backpressure, filters, early stops, staleness, reruns, state, and how a stream ends."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from itertools import count

import msgspec
import pytest

from ostinato_rollout import (
    Failure,
    FailureKind,
    GroupFate,
    Leftover,
    OnFailure,
    RequestTimeoutError,
    RolloutError,
    RolloutScheduler,
    SavedGroup,
    SessionInputError,
    StreamOptions,
    StreamStalledError,
    StreamState,
    dump,
)


class Gates:
    """Runs that wait until they are let go, by index."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.cancelled: list[tuple[int, int]] = []
        self._gates: dict[int, asyncio.Event] = {}

    def open(self, *indices: int) -> None:
        """Let runs of these prompts end."""
        for index in indices:
            self._gates.setdefault(index, asyncio.Event()).set()

    async def run_one(self, run):
        """Return the run's place once its gate is open."""
        self.begun.append((run.index, run.number))
        try:
            await self._gates.setdefault(run.index, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append((run.index, run.number))
            raise
        return (run.index, run.number)


async def settle():
    """Let everything happen that waits for nothing."""
    for _ in range(30):
        await asyncio.sleep(0)


def stream_of(prompts, run_one, *, n=1, concurrency=4, keep_group=None, state=None, version=None, **options):
    """A stream; `version` is a list that holds the current one."""
    return RolloutScheduler().stream(
        prompts,
        run_one,
        n=n,
        concurrency=concurrency,
        options=StreamOptions(**options),
        keep_group=keep_group,
        state=state,
        current_version=None if version is None else lambda: version[0],
    )


async def echo(run):
    """Return the run's place at once."""
    return (run.index, run.number)


async def test_groups_come_as_they_finish_and_a_straggler_holds_nobody():
    """A group comes when its n runs have ended, whatever others do; the results are those of the numbers, in their order."""
    gates = Gates()
    async with stream_of("abcdefgh", gates.run_one, n=2, concurrency=4) as stream:
        gates.open(*range(1, 8))
        groups = [await anext(stream) for _ in range(7)]
        assert [group.index for group in groups] == [1, 2, 3, 4, 5, 6, 7]
        assert groups[0].prompt == "b"
        assert groups[0].results == [(1, 0), (1, 1)]
        gates.open(0)
        assert [group.index async for group in stream] == [0]
    assert stream.counts().fates["kept"] == 8


async def test_a_group_needs_no_n_places_at_once():
    """With fewer places than runs of a group, they run one after the other, and the group comes when the last has ended."""
    async with stream_of("ab", echo, n=5, concurrency=2) as stream:
        assert [len(group.results) async for group in stream] == [5, 5]


async def test_nothing_begins_before_the_first_group_is_asked_for():
    """Making a stream draws no prompt."""
    drawn = iter(range(5))
    stream = stream_of(drawn, echo)
    await settle()
    assert next(drawn) == 0
    await stream.aclose()


async def test_each_run_has_a_context_of_its_own():
    """What a run sets in its context is seen by no other, and all see that of whoever made the stream."""
    name = contextvars.ContextVar("name", default="none")
    name.set("maker")
    seen = []

    async def run_one(run):
        seen.append(name.get())
        name.set(f"run {run.index}")

    async with stream_of(range(6), run_one, concurrency=1) as stream:
        name.set("later")
        assert len([group async for group in stream]) == 6
    assert seen == ["maker"] * 6


async def test_a_consumer_that_does_not_come_stops_the_drawing():
    """From an endless source only what the queue and the places hold is drawn; nothing is lost when the consumer comes back."""
    drawn = []

    def prompts():
        for index in count():
            drawn.append(index)
            yield index

    async with stream_of(prompts(), echo, concurrency=3, queue_size=5) as stream:
        first = await anext(stream)
        await settle()
        num_drawn = len(drawn)
        assert 5 <= num_drawn - 1 <= 5 + 3
        assert stream.activity().held_by == "the consumer"
        assert "new ones wait for the consumer" in dump().text()
        more = [await anext(stream) for _ in range(50)]
        assert [first.index, *(group.index for group in more)] == list(range(51))
        assert len(await stream.take(20)) == 20
    assert stream.counts().fates["cancelled"] == stream.counts().num_drawn - 71


async def test_filtered_groups_are_counted_by_reason_and_replaced():
    """False and reasons drop a group and are counted; others take its place, until there are as many as asked for."""

    def keep_group(group):
        return {0: False, 1: "all equal", 2: "all equal"}.get(group.index % 4, True)

    async with stream_of(count(), echo, keep_group=keep_group, num_groups=3) as stream:
        assert [group.index async for group in stream] == [3, 7, 11]
    counts = stream.counts()
    assert counts.filtered == {"keep_group said no": 3, "all equal": 6}
    assert (counts.num_drawn, counts.fates["filtered"]) == (12, 9)
    assert [(one.index, one.reason) for one in stream.dropped][:2] == [(0, "keep_group said no"), (1, "all equal")]


async def test_reasons_without_number_are_counted_together():
    """Texts that differ from group to group do not fill the memory."""
    async with stream_of(range(200), echo, keep_group=lambda group: f"std {group.index}") as stream:
        assert [group async for group in stream] == []
    assert (len(stream.counts().filtered), stream.counts().filtered["other"]) == (101, 100)


@pytest.mark.parametrize(("answer", "text"), [("raise", "LookupError: lost"), (None, "got None"), (2, "got 2")])
async def test_a_filter_that_fails_is_a_recorded_failure_of_the_group(answer, text, caplog):
    """Raising, awaited or not, and answers that are none drop that group as failed, with the failure; others are kept."""

    def plain(group):
        if answer == "raise":
            raise LookupError("lost")
        return answer

    async def awaited(group):
        await asyncio.sleep(0)
        return plain(group)

    def keep_group(group):
        return [lambda group: True, plain, awaited][group.index](group)

    async with stream_of(range(3), echo, keep_group=keep_group) as stream:
        assert [group.index async for group in stream] == [0]
    assert stream.counts().fates["failed"] == 2
    for one in stream.dropped:
        assert (one.fate, one.reason) == (GroupFate.FAILED, f"keep_group of item {one.index}")
        assert text in one.failure.message
    assert f"keep_group of item {one.index} failed" in caplog.text


async def test_a_filter_may_answer_with_any_kind_of_truth():
    """What equals True or False counts as it, as the booleans of numpy do."""

    class Truth:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return self.value == other

        def __bool__(self):
            return self.value

        __hash__ = None

    async with stream_of(range(4), echo, keep_group=lambda group: Truth(group.index % 2 == 0)) as stream:
        assert [group.index async for group in stream] == [0, 2]


async def test_with_oversampling_the_first_to_finish_count_and_the_rest_is_cancelled():
    """Of four prompts under way for two groups, two finish; the stream ends then, and what still ran is cancelled and counted."""
    gates = Gates()
    async with stream_of(count(), gates.run_one, concurrency=8, num_groups=2, oversample=2) as stream:
        gates.open(1, 3)
        assert [group.index async for group in stream] == [1, 3]
        assert gates.cancelled == [(0, 0), (2, 0)]
    assert [(one.index, one.fate) for one in stream.dropped] == [(0, GroupFate.CANCELLED), (2, GroupFate.CANCELLED)]
    assert (stream.counts().num_drawn, stream.state()) == (4, StreamState(num_drawn=4))


async def test_what_is_left_over_can_be_handed_back_and_taken_up():
    """The next stream begins with the prompts that the last one left, with the results that they had, and draws on from there."""
    gates, source = Gates(), count(100)
    options = {"num_groups": 2, "oversample": 1, "leftover": Leftover.HAND_BACK}

    async def run_one(run):
        return (run.index, 0) if run.number == 0 else await gates.run_one(run)

    async with stream_of(source, run_one, n=2, **options) as stream:
        gates.open(0, 2)
        assert [group.index async for group in stream] == [0, 2]
    state = stream.state()
    assert state == StreamState(num_drawn=3, groups=[SavedGroup(index=1, prompt=101, results={0: (1, 0)})])
    assert stream.counts().fates["handed_back"] == 1
    gates.begun.clear()
    gates.open(1, 3, 4)
    async with stream_of(source, run_one, n=2, state=state, **options) as stream:
        assert [group.prompt for group in await stream.take(2)] == [101, 103]
    assert gates.begun[0] == (1, 1)
    assert stream.state().num_drawn == 3 + stream.counts().num_drawn


async def test_verdicts_that_come_together_keep_no_more_than_asked_for():
    """Of two groups found good in the same moment for one place, one is given out; the other is handed back as it is."""
    async with stream_of(
        range(2), echo, keep_group=lambda group: True, num_groups=1, oversample=1, leftover=Leftover.HAND_BACK
    ) as stream:
        assert [group.index async for group in stream] == [0]
    (left,) = stream.state().groups
    assert (left.index, left.results) == (1, {0: (1, 0)})
    async with stream_of([], echo, num_groups=1, state=stream.state()) as stream:
        assert [group.index async for group in stream] == [1]


async def test_zero_staleness_is_synchronous():
    """No more prompts are drawn than the consumer takes at one version; the next ones begin when it has moved, told by nobody."""
    version, begun = [0], []

    async def run_one(run):
        begun.append((run.index, version[0]))
        return run.index

    async with stream_of(count(), run_one, version=version, max_staleness=0, groups_per_version=3) as stream:
        assert [group.index for group in await stream.take(3)] == [0, 1, 2]
        await settle()
        assert begun == [(0, 0), (1, 0), (2, 0)]
        taking = asyncio.create_task(stream.take(3))
        await settle()
        assert (taking.done(), stream.activity().held_by) == (False, "the policy version")
        version[0] = 1
        assert [group.index for group in await taking] == [3, 4, 5]
        assert begun[3:] == [(3, 1), (4, 1), (5, 1)]
    assert stream.counts().fates["stale"] == 0


async def test_prompts_are_drawn_as_far_ahead_as_the_bound_can_hold():
    """With one version of staleness two versions' worth are under way, and whoever takes in step gets nothing stale."""
    version = [0]
    async with stream_of(
        count(), echo, concurrency=64, version=version, max_staleness=1, groups_per_version=4
    ) as stream:
        for step in range(6):
            groups = await stream.take(4)
            assert [group.index for group in groups] == list(range(4 * step, 4 * step + 4))
            assert all(version[0] - group.oldest_version <= 1 for group in groups)
            await settle()
            counts = stream.counts()
            assert counts.num_ready + counts.num_open == 4
            version[0] += 1
    assert stream.counts().fates["stale"] == 0


async def test_what_has_become_too_old_is_dropped_wherever_it_is():
    """A version that moves makes groups stale that are ready and that end later; others take their places."""
    version, gates = [5], Gates()
    options = {"max_staleness": 1, "groups_per_version": 3, "version": version}
    async with stream_of(range(20), gates.run_one, n=2, concurrency=6, **options) as stream:
        taking = asyncio.create_task(stream.take(1))
        gates.open(0, 1)
        assert (await taking)[0].index == 0
        await settle()
        version[0] = 7
        gates.open(*range(2, 20))
        groups = await stream.take(3)
        assert all(version[0] - group.oldest_version <= 1 for group in groups)
        stale = {one.index: one.reason for one in stream.dropped if one.fate is GroupFate.STALE}
        assert stale[1] == "version 5 took part and 7 serves"
        assert set(stale) == {1, 2, 3, 4}
        assert gates.cancelled == []


async def test_the_oldest_part_of_a_group_counts():
    """A result that says of which version it is, is of that; of several the oldest decides."""
    version = [9]
    stream = RolloutScheduler().stream(
        range(3),
        echo,
        n=3,
        concurrency=9,
        options=StreamOptions(max_staleness=2, groups_per_version=5),
        current_version=lambda: version[0],
        oldest_version=lambda result: {1: 6, 2: 7}.get(result[0]) if result[1] == 1 else None,
    )
    async with stream:
        assert [(group.index, group.oldest_version) async for group in stream] == [(0, 9), (2, 7)]
    assert [(one.index, one.fate) for one in stream.dropped] == [(1, GroupFate.STALE)]


async def test_a_group_that_becomes_stale_before_it_is_taken_is_replaced_by_one_that_was_stopped():
    """A stream that had enough, and has not any more, goes on with what it had stopped."""
    version, gates = [0], Gates()
    async with stream_of(
        range(2), gates.run_one, version=version, num_groups=1, oversample=1, max_staleness=0, groups_per_version=2, leftover=Leftover.HAND_BACK,
    ) as stream:  # fmt: skip
        taking = asyncio.create_task(stream.take(1))
        await settle()
        taking.cancel()
        gates.open(0)
        await settle()
        assert (stream.counts().num_ready, gates.cancelled) == (1, [(1, 0)])
        version[0] = 1
        gates.open(1)
        assert [group.index for group in await stream.take(1)] == [1]
    assert [(one.index, one.fate) for one in stream.dropped] == [(0, GroupFate.STALE)]


async def test_failed_runs_are_done_again_and_then_counted():
    """A run that fails is done again so often; after that its group is dropped, its other runs are cancelled, another prompt is drawn."""
    attempts, cancelled = [], []

    async def run_one(run):
        attempts.append((run.index, run.number, run.attempt))
        if run.index == 0 and run.number == 0:
            raise ValueError("never")
        if run.index == 1 and run.attempt < 2:
            raise ValueError("later")
        if run.index == 0:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(run.number)
        return run.number

    async with stream_of(
        count(), run_one, n=2, max_reruns=2, on_failure=OnFailure.DROP, num_groups=2, concurrency=6
    ) as stream:
        assert sorted([group.index async for group in stream]) == [1, 2]
    assert [attempt for attempt in attempts if attempt[:2] == (0, 0)] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert (cancelled, stream.counts().num_reruns) == ([1], 6)
    (dropped,) = stream.dropped
    assert (dropped.fate, dropped.failure) == (
        GroupFate.FAILED,
        Failure("item 0, run 0", FailureKind.AGENT, "ValueError: never"),
    )


async def test_results_that_are_failures_count_as_such():
    """Where results carry their failures, failure_of tells; kept, they stand in their places as they are."""

    async def run_one(run):
        return "bad" if run.index == 1 and run.attempt == 0 else "good"

    def failure_of(result):
        return Failure("here", FailureKind.TOOL, "bad") if result == "bad" else None

    for max_reruns, results in ((0, ["good", "bad"]), (1, ["good", "good"])):
        stream = RolloutScheduler().stream(
            range(2), run_one, n=1, concurrency=1, failure_of=failure_of, options=StreamOptions(max_reruns=max_reruns)
        )
        async with stream:
            assert [group.results[0] async for group in stream] == results
            assert stream.counts().num_reruns == max_reruns


@pytest.mark.parametrize("name", ["failure_of", "oldest_version"])
@pytest.mark.parametrize(("answer", "text"), [(KeyError("lost"), "KeyError: 'lost'"), ("nonsense", "")])
async def test_what_is_asked_about_results_and_answers_nonsense_is_a_failure_of_the_run(name, answer, text):
    """failure_of and oldest_version that raise, or answer what they may not, fail that run, not the stream."""

    def broken(result):
        if isinstance(answer, Exception):
            raise answer
        return answer

    stream = RolloutScheduler().stream(range(1), echo, n=1, concurrency=1, **{name: broken})
    async with stream:
        ((failure,),) = [group.results async for group in stream]
    assert (failure.where, failure.kind) == ("item 0", FailureKind.AGENT)
    assert text in failure.message


async def test_in_order_waits_for_those_before():
    """With in_order a group that is finished waits for those before it; one that is dropped holds nobody."""
    gates = Gates()
    async with stream_of(
        range(5), gates.run_one, concurrency=5, in_order=True, keep_group=lambda group: group.index != 1
    ) as stream:
        gates.open(1, 2, 3)
        taking = asyncio.create_task(stream.take(2))
        await settle()
        assert not taking.done()
        gates.open(0, 4)
        assert [group.index for group in await taking] == [0, 2]
        assert [group.index async for group in stream] == [3, 4]


async def test_a_state_taken_in_the_midst_is_plain_and_is_gone_on_from():
    """Position, finished groups and those under way, with reruns so far, survive pickle and JSON; the same groups come out."""
    gates = Gates()

    async def run_one(run):
        if (run.index, run.number) == (1, 0) and run.attempt == 0:
            raise ValueError("once")
        if (run.index, run.number) == (1, 0) or run.index == 2:
            await gates.run_one(run)
        return f"{run.index}/{run.number}/{run.attempt}"

    first = stream_of(range(10), run_one, n=2, concurrency=4, max_reruns=1, num_groups=4)
    (group,) = await first.take(1)
    await settle()
    state = first.state()
    assert (group.index, state.num_drawn, [saved.index for saved in state.groups]) == (0, 4, [1, 2, 3])
    assert state.groups[0] == SavedGroup(index=1, prompt=1, results={1: "1/1/0"}, attempts={0: 1})
    assert (state.groups[2].is_kept, state.groups[2].results) == (True, {0: "3/0/0", 1: "3/1/0"})
    again = msgspec.json.decode(msgspec.json.encode(state), type=StreamState[int, str])
    assert again == pickle.loads(pickle.dumps(state)) == state
    await first.aclose()
    gates.open(1, 2)
    async with stream_of(range(4, 10), run_one, n=2, max_reruns=1, num_groups=3, state=again) as second:
        groups = [group async for group in second]
    assert sorted(group.index for group in groups) == [1, 2, 3]
    assert {group.index: group.results for group in groups}[1] == ["1/0/1", "1/1/0"]
    assert (second.counts().num_resumed, second.counts().num_drawn) == (3, 0)


@pytest.mark.parametrize(
    ("groups", "n", "text"),
    [
        ([SavedGroup(index=3, prompt=0)], 1, "below num_drawn=3"),
        ([SavedGroup(index=0, prompt=0), SavedGroup(index=0, prompt=0)], 1, "must be different"),
        ([SavedGroup(index=0, prompt=0, results={2: "x"})], 2, "n must be what it was"),
        ([SavedGroup(index=0, prompt=0, results={0: "x"}, is_kept=True)], 2, "n must be what it was"),
    ],
)
async def test_a_state_that_does_not_fit_is_refused(groups, n, text):
    """Groups that were never drawn, that come twice, or that have other numbers of runs."""
    with pytest.raises(SessionInputError, match=text):
        stream_of([], echo, n=n, state=StreamState(num_drawn=3, groups=groups))


async def test_a_cancelled_take_has_taken_nothing():
    """A consumer with a deadline that passes gets the same groups later."""
    gates = Gates()
    async with stream_of(range(3), gates.run_one) as stream:
        gates.open(0, 1)
        taking = asyncio.create_task(stream.take(3))
        await settle()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        gates.open(2)
        assert [group.index for group in await stream.take(5)] == [0, 1, 2]
        assert (await stream.take(1), await stream.take(1)) == ([], [])


async def test_several_consumers_share_a_stream():
    """Each group goes to one of them, and the end to all."""
    async with stream_of(range(20), echo, queue_size=1) as stream:

        async def consume():
            return [group.index async for group in stream]

        shares = await asyncio.gather(*(consume() for _ in range(3)))
    assert sorted(index for share in shares for index in share) == list(range(20))


async def test_an_end_that_one_consumer_finds_is_told_to_all():
    """While one waits for the source, another one's call finds that the version cannot be told: both get the error."""
    version = [0]
    stream = RolloutScheduler().stream(
        Queued(),
        echo,
        n=1,
        concurrency=2,
        current_version=lambda: version[0],
        options=StreamOptions(max_staleness=0, groups_per_version=2),
    )
    async with stream:
        first = asyncio.create_task(stream.take(1))
        await settle()
        version[0] = None
        for waiting in (asyncio.create_task(stream.take(1)), first):
            with pytest.raises(TypeError):
                await waiting


async def test_groups_are_given_before_what_was_stopped_has_ended():
    """The last groups of a stream that had enough do not wait for runs that take their time to end; its end does."""
    gates, gate = Gates(), asyncio.Event()

    async def run_one(run):
        try:
            return await gates.run_one(run)
        finally:
            if run.index == 0:
                await gate.wait()

    async with stream_of(range(3), run_one, num_groups=2, oversample=1) as stream:
        gates.open(1, 2)
        assert [group.index for group in await stream.take(2)] == [1, 2]
        end = asyncio.create_task(stream.take(1))
        await settle()
        assert not end.done()
        gate.set()
        assert await end == []


async def test_closing_frees_everything_and_tells_those_who_wait():
    """aclose cancels what runs and waits for it, ends a consumer's wait, can be called again, and leaves no task."""
    gates, ended = Gates(), []

    async def run_one(run):
        try:
            await gates.run_one(run)
        finally:
            await asyncio.sleep(0)
            ended.append(run.index)

    stream = stream_of(count(), run_one, concurrency=3)
    consuming = asyncio.create_task(stream.take(1))
    await settle()
    await asyncio.gather(stream.aclose(), stream.aclose())
    assert (sorted(ended), await consuming, [group async for group in stream]) == ([0, 1, 2], [], [])
    assert stream.counts().fates["cancelled"] == 3
    assert (asyncio.all_tasks(), dump().schedulers) == ({asyncio.current_task()}, [])


async def test_closing_before_anything_began_is_nothing():
    """A stream that was only made can be closed, and then has no groups."""
    stream = stream_of(count(), echo)
    await stream.aclose()
    assert await stream.take(1) == []
    assert stream.counts().num_drawn == 0


async def test_a_close_that_is_cancelled_still_waits_for_the_runs():
    """Cancelling the one who closes does not leave runs behind; the cancellation comes after they have ended."""
    gates, ended = Gates(), []

    async def run_one(run):
        try:
            await gates.run_one(run)
        finally:
            await settle()
            ended.append(run.index)

    stream = stream_of(count(), run_one, concurrency=2)
    consuming = asyncio.create_task(stream.take(1))
    await settle()
    closing = asyncio.create_task(stream.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert ended == [0, 1]
    assert await consuming == []


async def test_runs_that_do_not_end_when_cancelled_are_said(let_go):
    """The close waits for them no longer than it may, and says how many there are."""

    async def run_one(run):
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    stream = stream_of(range(2), run_one, close_timeout_s=0.05)
    consuming = asyncio.create_task(stream.take(1))
    await settle()
    with pytest.raises(RequestTimeoutError, match=r"2 cancelled runs must end within 0\.05 s"):
        await stream.aclose()
    let_go.set()
    await stream.aclose()
    with pytest.raises(RequestTimeoutError):
        await consuming


class Queued:
    """Prompts that somebody puts there, for one after the other."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue = asyncio.Queue()

    def __aiter__(self):
        return self

    async def __anext__(self):
        prompt = await self.queue.get()
        if prompt is None:
            raise StopAsyncIteration
        if isinstance(prompt, BaseException):
            raise prompt
        return prompt


async def test_prompts_may_have_to_be_awaited():
    """While the source is asked, what is under way goes on, and the end of the source is the end of the stream."""
    source = Queued()
    async with stream_of(source, echo) as stream:
        source.queue.put_nowait("a")
        assert (await anext(stream)).prompt == "a"
        taking = asyncio.create_task(anext(stream))
        await settle()
        assert (taking.done(), stream.activity().held_by) == (False, "the source of the prompts")
        source.queue.put_nowait("b")
        assert (await taking).prompt == "b"
        source.queue.put_nowait(None)
        assert [group async for group in stream] == []


async def test_a_source_that_is_still_asked_at_an_early_stop_can_be_used_again():
    """The wait for a prompt that is needed no more is ended; a queue has it for the next stream."""
    source = Queued()
    for _ in range(2):
        source.queue.put_nowait("a")
        async with stream_of(source, echo, num_groups=1, oversample=1) as stream:
            assert [group.prompt async for group in stream] == ["a"]
        assert stream.counts().num_drawn == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("options", [{"num_groups": 1, "oversample": 1}, {}], ids=["had enough", "was closed"])
@pytest.mark.parametrize("leftover", Leftover)
async def test_a_prompt_that_comes_with_the_end_is_not_lost(leftover, options):
    """One that the source gives although the stream has ended counts as drawn, and is left over."""

    class Late(Queued):
        async def __anext__(self):
            try:
                return await super().__anext__()
            except asyncio.CancelledError:
                return "late"

    source = Late()
    source.queue.put_nowait("a")
    async with stream_of(source, echo, leftover=leftover, **options) as stream:
        assert (await anext(stream)).prompt == "a"
        await settle()
    assert stream.counts().num_drawn == 2
    assert [saved.prompt for saved in stream.state().groups] == (["late"] if leftover is Leftover.HAND_BACK else [])
    assert stream.counts().fates["cancelled"] == (leftover is Leftover.CANCEL)


@pytest.mark.parametrize("is_async", [False, True])
async def test_what_the_source_raises_comes_after_the_groups_before_it(is_async):
    """Prompts that were drawn before are finished and given out; then its error is raised, and again to whoever asks again."""

    def prompts():
        yield from range(3)
        raise OSError("the file is gone")

    async def awaited():
        for prompt in prompts():
            yield prompt

    async with stream_of(awaited() if is_async else prompts(), echo) as stream:
        assert len([await anext(stream) for _ in range(3)]) == 3
        for _ in range(2):
            with pytest.raises(OSError, match="the file is gone"):
                await anext(stream)
    with pytest.raises(OSError, match="the file is gone"):
        await RolloutScheduler().run(awaited() if is_async else prompts(), run_one=settle_with, concurrency=2)


async def settle_with(item):
    """Take a while."""
    await settle()


async def test_a_source_that_is_cancelled_by_others_is_an_error():
    """Not the end of the prompts, and no endless wait."""
    source = Queued()
    source.queue.put_nowait(asyncio.CancelledError())

    def cancelled():
        yield "a"
        raise asyncio.CancelledError

    for prompts, num_groups in ((source, 0), (cancelled(), 1)):
        async with stream_of(prompts, echo) as stream:
            assert len([await anext(stream) for _ in range(num_groups)]) == num_groups
            with pytest.raises(RolloutError, match="got a cancellation"):
                await anext(stream)


@pytest.mark.parametrize(("last", "error"), [("raise", LookupError), ("seven", TypeError)])
async def test_a_version_that_cannot_be_told_is_an_error(last, error):
    """Raised, or no number: no more is drawn, and the error comes once what is under way is done."""
    answers = [0, 0, 0]

    def current_version():
        if answers:
            return answers.pop()
        if last == "raise":
            raise LookupError("nobody knows")
        return last

    stream = RolloutScheduler().stream(
        count(),
        echo,
        n=1,
        concurrency=1,
        current_version=current_version,
        options=StreamOptions(max_staleness=0, groups_per_version=100),
    )
    async with stream:
        with pytest.raises(error):
            await stream.take(50)
        assert stream.counts().num_ready >= 1


async def test_a_stream_that_keeps_nothing_ends_with_an_error():
    """Endless prompts and a filter that wants none: after so many in a row it says what became of them."""
    async with stream_of(count(), echo, keep_group=lambda group: "dull", max_dropped_in_row=20) as stream:
        with pytest.raises(StreamStalledError, match=r"max_dropped_in_row=20.*20 filtered.*for: dull"):
            await anext(stream)
    assert stream.counts().fates["filtered"] >= 20


async def test_only_drops_in_a_row_count():
    """One good group in between, and the counting begins anew."""
    options = {"max_dropped_in_row": 5, "num_groups": 8, "concurrency": 1}
    async with stream_of(count(), echo, keep_group=lambda group: group.index % 5 == 4, **options) as stream:
        assert len([group async for group in stream]) == 8
    assert stream.counts().fates["filtered"] == 32


async def test_a_run_past_its_deadline_fails_alone():
    """In a group its siblings keep their results; a verdict that does not come fails its group."""

    async def run_one(run):
        if run.number == 1:
            await asyncio.Event().wait()
        return "done"

    stream = RolloutScheduler().stream(range(1), run_one, n=2, concurrency=2, item_timeout_s=0.5)
    async with stream:
        (group,) = [group async for group in stream]
    assert group.results[0] == "done"
    assert group.results[1].kind is FailureKind.TIMEOUT
    assert group.results[1].where == "item 0, run 1"
    stream = RolloutScheduler().stream(
        range(1), echo, n=1, concurrency=1, item_timeout_s=0.5, keep_group=lambda group: asyncio.Event().wait()
    )
    async with stream:
        assert [group async for group in stream] == []
    assert stream.dropped[0].failure.kind is FailureKind.TIMEOUT


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"queue_size": 0}, "queue_size must be at least 1, got 0"),
        ({"num_groups": 0}, "num_groups must be at least 1"),
        ({"max_reruns": -1}, "max_reruns must be at least 0"),
        ({"oversample": 1}, "oversample must go with num_groups"),
        ({"max_staleness": 1}, "max_staleness and groups_per_version must go together"),
        ({"groups_per_version": 1}, "max_staleness and groups_per_version must go together"),
        ({"max_staleness": 0, "groups_per_version": 1}, "current_version must be given with max_staleness"),
        ({"close_timeout_s": 0}, "close_timeout_s must be positive"),
        ({"on_failure": "retry"}, "on_failure must be one of keep, drop, got 'retry'"),
        ({"leftover": None}, "leftover must be one of cancel, hand_back, got None"),
        ({"n": 0}, "n must be at least 1"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"prompts": 3}, "prompts must be an iterable or an async iterable, got int"),
    ],
)
async def test_options_that_cannot_be_meant_are_refused(options, text):
    """Each with what it must be and the cure, before anything begins."""
    with pytest.raises(SessionInputError, match=text):
        stream_of(**{"prompts": [], "run_one": echo, **options})


def test_choices_may_be_given_as_texts():
    """As a configuration has them."""
    options = StreamOptions(on_failure="drop", leftover="hand_back")
    assert (options.on_failure, options.leftover) == (OnFailure.DROP, Leftover.HAND_BACK)
    assert options.leftover is Leftover.HAND_BACK


async def test_more_than_can_ever_be_there_is_refused():
    """Asking for nothing, or for more groups than staleness lets wait, is an error instead of a wait without end."""
    async with stream_of(count(), echo, version=[0], max_staleness=1, groups_per_version=2) as stream:
        for num_groups in (0, 5):
            with pytest.raises(
                SessionInputError, match=rf"num_groups must be at least 1, and at most .*=4, got {num_groups}"
            ):
                await stream.take(num_groups)
        assert len(await stream.take(4)) == 4
