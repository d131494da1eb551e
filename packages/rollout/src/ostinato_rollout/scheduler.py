"""Work under bounded concurrency: all of it at once, or as a stream of groups. Knows no agent, no reward and no server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.failure import Failure
from ostinato_rollout.group_steps import StreamCallbacks
from ostinato_rollout.group_stream import GroupStream
from ostinato_rollout.stream_types import Group, Run, StreamOptions, StreamState

Item = TypeVar("Item")
Prompt = TypeVar("Prompt")
Result = TypeVar("Result")


class RolloutScheduler:
    """Runs coroutines, at most `concurrency` at a time, each in a task (and context) of its own.

    Items are taken one by one as places get free. What raises becomes a Failure in its place, with the traceback logged once;
    the others go on. `stream` gives groups as they finish; `run` is a stream whose groups, of one each, are taken all together.
    """

    async def run(
        self,
        items: Iterable[Item] | AsyncIterable[Item],
        run_one: Callable[[Item], Awaitable[Result]],
        *,
        concurrency: int,
        item_timeout_s: float | None = None,
    ) -> list[Result | Failure]:
        """Return the result of `run_one` for each item, in the order of the items, whatever finishes first.

        Cancelling it cancels what is under way.

        Args:
            items: What there is to do.
            run_one: Does it for one item.
            concurrency: Items that are under way at a time, at most.
            item_timeout_s: Longest time that one item may take; a longer one is cancelled and becomes a Failure. None: what
                `run_one` does has deadlines of its own.

        Raises:
            SessionInputError: `concurrency` or `item_timeout_s` is not positive.
            Exception: What `items` raised; those before it were run.
        """

        async def run_item(run: Run[Item]) -> Result:
            return await run_one(run.prompt)

        async with self.stream(items, run_item, n=1, concurrency=concurrency, item_timeout_s=item_timeout_s) as groups:
            return [group.results[0] for group in await groups.take(sys.maxsize)]

    def stream(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        run_one: Callable[[Run[Prompt]], Awaitable[Result]],
        *,
        n: int,
        concurrency: int,
        item_timeout_s: float | None = None,
        options: StreamOptions | None = None,
        keep_group: Callable[[Group[Prompt, Result]], bool | str | Awaitable[bool | str]] | None = None,
        failure_of: Callable[[Result], Failure | None] | None = None,
        current_version: Callable[[], int] | None = None,
        oldest_version: Callable[[Result], int | None] | None = None,
        state: StreamState[Prompt, Result] | None = None,
    ) -> GroupStream[Prompt, Result]:
        """Return an async iterator of groups: for each prompt the results of n runs, as soon as all of them are there.

        Nothing begins before the first group is asked for. What a group holds is a function of its prompt, as far as
        `run_one` is; so is whether it is given out, as far as `keep_group` is, except where time has a say: with `oversample` (the
        first to finish count), with `max_staleness` (what has become too old is dropped), and where runs time out.
        Without these, the groups of a stream of `num_groups` are those of the first prompts that are good enough. The
        order is that of finishing, unless `in_order` is set.

        Args:
            prompts: Where prompts come from, with or without end. One more is drawn only when it can be begun.
            run_one: Does one run.
            n: Runs of a prompt; they need not run at the same time.
            concurrency: Runs that are under way at a time, at most; a verdict that is awaited takes a place as well.
            item_timeout_s: Longest time that one run, or one verdict, may take; see `run`.
            options: Which groups are made and given out.
            keep_group: Says whether a group is given out: True, False, or why not in a few words, which are counted. Raising is
                a failure of the group.
            failure_of: Says whether a result is a failure, where `run_one` returns failures instead of raising them.
            current_version: Says which policy version serves now; needed for `max_staleness`.
            oldest_version: Says which is the oldest version that took part in a result; without it, or for None, that which
                served when the run began.
            state: Where to go on from; the prompts begin after those that it has drawn.

        Raises:
            SessionInputError: `n`, `concurrency` or `item_timeout_s` is not positive, or something does not fit together.
        """
        for name, value in (("concurrency", concurrency), ("n", n)):
            if value < 1:
                raise SessionInputError(f"{name} must be at least 1, got {value}; 1 runs one after the other")
        if item_timeout_s is not None and not item_timeout_s > 0:
            raise SessionInputError(f"item_timeout_s must be positive, got {item_timeout_s}; None sets no deadline")
        callbacks: StreamCallbacks[Any, Any] = StreamCallbacks(
            run_one=run_one,
            keep_group=keep_group,
            failure_of=failure_of,
            current_version=current_version,
            oldest_version=oldest_version,
        )
        return GroupStream(
            prompts,
            callbacks,
            n=n,
            concurrency=concurrency,
            item_timeout_s=item_timeout_s,
            options=StreamOptions() if options is None else options,
            state=StreamState() if state is None else state,
        )
