"""Policies at work: what one executor remembers of one tool in order to keep its `ToolPolicy`.

A guard knows attempts, clocks and counts. What an attempt does, and whose trajectory it belongs to, it does not know.
"""

import asyncio
import json
import logging
import math
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from ostinato_tools.calls import CallFailed, OutcomeKind
from ostinato_tools.policies import ToolPolicy
from ostinato_tools.responses import ToolResponse
from ostinato_tools.schema import compile_json_schema
from ostinato_tools.stats import ToolStats

_logger = logging.getLogger(__name__)

Result = tuple[ToolResponse, float, dict]
"""Response, reward and metrics of a good attempt."""

FAILURES = frozenset(
    {OutcomeKind.TOOL_ERROR, OutcomeKind.TIMEOUT, OutcomeKind.INFRASTRUCTURE, OutcomeKind.RATE_LIMITED}
)
"""What an attempt may end as without it being the model's mistake."""


class Guard:
    """Keeps the policy of one tool over all trajectories of one executor."""

    def __init__(self, name: str, policy: ToolPolicy, timeout_s: float, stats: ToolStats) -> None:
        """Begin with nothing used up.

        Args:
            name: The tool's name, for texts.
            policy: What to keep.
            timeout_s: The deadline of an attempt, in seconds.
            stats: Where retries, cached answers and fallbacks are counted.

        Raises:
            ToolSchemaError: `result_schema` is no valid JSON schema.
        """
        self._name = name
        self._policy = policy
        self._stats = stats
        self._max_wait_s = timeout_s if policy.max_wait_s is None else policy.max_wait_s
        self._rate = None if policy.max_calls_per_s is None else _Rate(policy.max_calls_per_s, policy.burst)
        self._breaker = None if policy.breaker_failures is None else _Breaker(name, policy)
        self._cache: OrderedDict[str, Result] = OrderedDict()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._result_problems = (
            None
            if policy.result_schema is None
            else compile_json_schema(policy.result_schema, "result_schema", f"the policy of {name}")
        )

    async def run(
        self, arguments: dict, seed: str, num_earlier: int, attempt: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Answer a call: from memory, by attempts, or not at all.

        Args:
            arguments: What the call is remembered by.
            seed: Tells calls apart whose waits between attempts should differ.
            num_earlier: Calls that its trajectory made before.
            attempt: Runs the tool once; may be awaited several times, one after the other.

        Raises:
            CallFailed: there is no good result.
        """
        budget = self._policy.max_calls_per_trajectory
        if budget is not None and num_earlier >= budget:
            raise CallFailed(
                OutcomeKind.RATE_LIMITED,
                f"Error: {self._name} may be called {budget} times here, and was; go on without.",
            )
        key = _cache_key(arguments) if self._policy.cache_size else None
        if key is not None and key in self._cache:
            self._stats.num_cached += 1
            self._cache.move_to_end(key)
            return _again(self._cache[key])
        result = await self._attempts(seed, attempt)
        if key is not None:
            self._cache[key] = _again(result)
            self._cache.move_to_end(key)
            if len(self._cache) > self._policy.cache_size:
                self._cache.popitem(last=False)
        return result

    async def _attempts(self, seed: str, attempt: Callable[[], Awaitable[Result]]) -> Result:
        number = 0
        while True:
            try:
                return await self._attempt(attempt)
            except _AttemptFailed as failed:
                if number >= self._policy.max_retries or failed.kind not in FAILURES:
                    raise self._final(failed) from None
            number += 1
            self._stats.num_retries += 1
            await asyncio.sleep(self._backoff_s(number, seed))

    async def _attempt(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Run one attempt when it is its turn. Only what the attempt itself ends as is an `_AttemptFailed`."""
        is_probe = self._breaker is not None and self._breaker.enter()
        kind: OutcomeKind | None = None
        try:
            slots = await self._take_turn()
            try:
                result = await attempt()
                await self._check(result[0])
            except CallFailed as failed:
                kind = failed.kind
                raise _AttemptFailed(kind, failed.text, isinstance(failed, _InvalidResult)) from None
            finally:
                if slots is not None:
                    slots.release()
            kind = OutcomeKind.OK
            return result
        finally:
            if self._breaker is not None:
                self._breaker.leave(kind, is_probe)

    async def _take_turn(self) -> asyncio.Semaphore | None:
        """Wait for a turn under the rate and the concurrency limit, together at most `max_wait_s` seconds.

        Returns:
            What is to be released after the attempt, if anything.
        """
        wait_s = 0.0
        if self._rate is not None:
            wait_s = self._rate.reserve(self._max_wait_s)
            if wait_s > self._max_wait_s:
                raise self._refusal(f"it is called too often; try again in {math.ceil(wait_s)} s")
            if wait_s > 0:
                await asyncio.sleep(wait_s)
        if self._policy.max_concurrency is None:
            return None
        slots = self._semaphore(self._policy.max_concurrency)
        if not slots.locked():
            await slots.acquire()  # does not wait
            return slots
        try:
            async with asyncio.timeout(self._max_wait_s - wait_s):
                await slots.acquire()
        except TimeoutError:
            raise self._refusal(
                f"it is busy, and no turn came up within {self._max_wait_s} s; try again later"
            ) from None
        return slots

    def _semaphore(self, size: int) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:  # a semaphore serves the loop that it first waited in
            self._slots = (loop, asyncio.Semaphore(size))
        return self._slots[1]

    def _refusal(self, why: str) -> CallFailed:
        return CallFailed(OutcomeKind.RATE_LIMITED, f"Error: {self._name} did not run: {why}.")

    def _backoff_s(self, number: int, seed: str) -> float:
        whole = min(self._policy.backoff_s * 2.0 ** min(number - 1, 60), self._policy.max_backoff_s)
        # Spread by the call itself rather than by chance: a run repeats, and trajectories do not march in step.
        return whole * (1 - zlib.crc32(f"{seed}/{number}".encode(errors="replace")) / 2**33)

    def _final(self, failed: "_AttemptFailed") -> CallFailed:
        fallback = self._policy.fallback
        if fallback is None or not failed.is_invalid_result:
            return failed
        self._stats.num_fallbacks += 1
        text = fallback if isinstance(fallback, str) else json.dumps(fallback, ensure_ascii=False)
        return CallFailed(failed.kind, text)

    async def _check(self, response: ToolResponse) -> None:
        problem = await self._problem(response)
        if problem is not None:
            _logger.warning("result of tool %s is not valid: %s", self._name, problem)
            raise _InvalidResult(f"Error: {self._name} failed: its result is not valid ({problem}).")

    async def _problem(self, response: ToolResponse) -> str | None:
        if self._result_problems is not None:
            try:
                value = json.loads(response.text or "")
            except (ValueError, RecursionError) as error:
                return f"it is no JSON: {error}"
            problems = await self._result_problems.problems(value)
            if problems:
                return "; ".join(problems)
        if self._policy.validate_result is not None:
            try:
                valid = self._policy.validate_result(response)
            except Exception as error:  # the author's check: whatever it raises, nothing vouches for the result
                return f"its check failed with {type(error).__name__}: {error}"
            if valid is not True:
                return "its check says no"
        return None


class _InvalidResult(CallFailed):
    """An attempt went well, but what it gave is not what the policy asks for."""

    def __init__(self, text: str) -> None:
        super().__init__(OutcomeKind.TOOL_ERROR, text)


class _AttemptFailed(CallFailed):
    """What an attempt itself ended as; other failures of a call mean that nothing was attempted."""

    def __init__(self, kind: OutcomeKind, text: str, is_invalid_result: bool) -> None:
        super().__init__(kind, text)
        self.is_invalid_result = is_invalid_result


class _Rate:
    """A rate with a burst, as the time at which the next turn falls due. A turn that is not taken up is lost."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / per_s
        self._ahead_s = (burst - 1) * self._interval_s
        self._due = -math.inf

    def reserve(self, max_wait_s: float) -> float:
        """Return the seconds to wait; the turn is reserved unless they are more than `max_wait_s`."""
        now = time.monotonic()
        due = max(self._due, now)
        wait_s = max(0.0, due - self._ahead_s - now)
        if wait_s <= max_wait_s:
            self._due = due + self._interval_s
        return wait_s


class _Breaker:
    """Stops calls after failures in a row, and lets one through after a while to see whether the tool works again."""

    def __init__(self, name: str, policy: ToolPolicy) -> None:
        assert policy.breaker_failures is not None
        self._name = name
        self._max_failures = policy.breaker_failures
        self._reset_s = policy.breaker_reset_s
        self._num_failures = 0
        self._open_until: float | None = None
        self._is_probed = False

    def enter(self) -> bool:
        """Begin an attempt.

        Returns:
            Whether this attempt finds out if the tool works again.

        Raises:
            CallFailed: the tool is not to be called now.
        """
        if self._open_until is None:
            return False
        wait_s = self._open_until - time.monotonic()
        if wait_s > 0 or self._is_probed:
            raise CallFailed(
                OutcomeKind.INFRASTRUCTURE,
                f"Error: {self._name} does not work at the moment ({self._num_failures} failures in a row); "
                f"try again in {max(1, math.ceil(wait_s))} s.",
            )
        self._is_probed = True
        return True

    def leave(self, kind: OutcomeKind | None, is_probe: bool) -> None:
        """End an attempt; None is one that did not run or was cancelled, from which nothing follows."""
        if is_probe:
            self._is_probed = False
        elif self._open_until is not None:
            return  # began before the breaker opened; the next probe decides
        if kind in FAILURES:
            self._num_failures += 1
            if self._num_failures >= self._max_failures:
                self._open_until = time.monotonic() + self._reset_s
        elif kind is OutcomeKind.OK:
            self._num_failures = 0
            self._open_until = None


def _cache_key(arguments: dict) -> str | None:
    try:
        return json.dumps(arguments, sort_keys=True, ensure_ascii=False)  # 1, 1.0, True and "1" are four keys
    except (TypeError, ValueError, RecursionError):
        return None


def _again(result: Result) -> Result:
    """A copy whose containers can be changed; media stay the same objects."""
    response, reward, metrics = result
    image = None if response.image is None else list(response.image)
    video = None if response.video is None else list(response.video)
    return ToolResponse(response.text, image, video), reward, dict(metrics)
