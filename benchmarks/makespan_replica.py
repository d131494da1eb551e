"""A replica in simulated time: the model of `shared/data/makespan`, exact, at a few events a turn.

A decode step gives one token to each running sequence and takes as long as reading the weights and all key-value (KV) memory in use. A
prefill runs alone, over what is not cached. A conversation that waits for its tool stays cached until others need its room, the longest
waiting first; where running sequences alone outgrow the memory, the newest one is put aside and computed anew later. What comes in the
middle of a step or prefill takes effect at its end. Between such events each step adds the same number of tokens, so that the time of
any number of them is a sum in closed form.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ostinato_engines import AsyncServerBase, Capabilities, EngineInputError, SamplingParams, StopReason, TokenOutput


class ReplicaModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of one replica, as the workload's file has them."""

    count: int
    """How many replicas there are."""
    kv_capacity_tokens: int
    weight_bytes: float
    kv_bytes_per_token: float
    bandwidth_bytes_per_s: float
    prefill_tokens_per_s: float

    def steps_s(self, num_steps: int, kv_tokens: int, num_running: int) -> float:
        """Seconds that so many steps take: the first one reads `kv_tokens`, each further one `num_running` more."""
        tokens = num_steps * kv_tokens + num_running * num_steps * (num_steps - 1) // 2
        return (num_steps * self.weight_bytes + tokens * self.kv_bytes_per_token) / self.bandwidth_bytes_per_s

    def steps_begun(self, seconds: float, kv_tokens: int, num_running: int) -> int:
        """How many of these steps have begun when so many seconds have passed: `steps_s` solved for its first argument."""
        growth = self.kv_bytes_per_token * num_running / self.bandwidth_bytes_per_s / 2
        first = self.steps_s(1, kv_tokens, num_running) - growth
        return math.ceil((math.sqrt(first * first + 4 * growth * seconds) - first) / (2 * growth) - 1e-6)


@dataclass(eq=False, slots=True)
class _Turn:
    """One request."""

    request_id: str
    num_prompt: int
    num_wanted: int
    ended: asyncio.Future[None]
    num_sampled: int = 0
    """Before it began to run, the last time."""
    last_step: int = 0
    """The replica's step that brings its last token, while it runs."""
    num_cached: int | None = None
    num_preempted: int = 0


class _Memory:
    """Tokens of KV memory, by who uses them."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.running, self.waiting = capacity, 0, 0
        self._cached: dict[str, int] = {}  # of conversations that wait, the longest waiting first

    @property
    def used(self) -> int:
        """By running and by waiting conversations."""
        return self.running + self.waiting

    def keep(self, request_id: str, num_tokens: int) -> None:
        """Cache what a turn leaves."""
        self._cached[request_id] = num_tokens
        self.waiting += num_tokens

    def drop(self, request_id: str) -> int:
        """Forget what is cached of a conversation; return how much it was."""
        num_tokens = self._cached.pop(request_id, 0)
        self.waiting -= num_tokens
        return num_tokens

    def make_room(self, num_tokens: int) -> int:
        """Evict the longest waiting ones until so many tokens are free, or none waits; return how many were evicted."""
        before = len(self._cached)
        while self._cached and self.used + num_tokens > self.capacity:
            self.drop(next(iter(self._cached)))
        return before - len(self._cached)


@dataclass(slots=True)
class _Work:
    """What is being computed: a prefill, or decode steps."""

    began: float
    prefill: _Turn | None = None
    num_steps: int = 0
    kv_tokens: int = 0
    """Before the first step."""


class SimulatedReplica(AsyncServerBase):
    """Samples exactly `max_tokens` tokens for each request, in the time that its model says, by the clock of the event loop."""

    def __init__(self, model: ReplicaModel) -> None:
        self.model = model
        self.num_decoded = self.num_prefilled = self.num_evicted = self.num_preempted = 0
        self.busy_s = 0.0
        self._memory = _Memory(model.kv_capacity_tokens)
        self._queue: deque[_Turn] = deque()
        self._running: dict[_Turn, None] = {}  # the newest last
        self._ends: list[tuple[int, int, _Turn]] = []  # heap by last step; may hold turns that run no more
        self._given_up: list[_Turn] = []
        self._num_steps = self._num_started = 0
        self._work: _Work | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def kv_tokens(self) -> int:
        """KV memory in use."""
        return self._memory.used

    def capabilities(self) -> Capabilities:
        """What admission needs to know."""
        return Capabilities(engine="simulated", prefix_reuse=True, kv_capacity_tokens=self.model.kv_capacity_tokens)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        request_id: str,
        media: Sequence[Any] = (),
    ) -> TokenOutput:
        """Only the length of the prompt matters; the tokens are zeros."""
        num_prompt, num_wanted = len(prompt_ids), SamplingParams.from_mapping(sampling_params).max_tokens
        if not num_wanted or num_prompt + num_wanted > self.model.kv_capacity_tokens:
            raise EngineInputError(
                f"prompt and max_tokens must fit {self.model.kv_capacity_tokens} tokens, got {num_prompt} and {num_wanted}"
            )
        turn = _Turn(request_id, num_prompt, num_wanted, asyncio.get_running_loop().create_future())
        self._queue.append(turn)
        self._changed()
        try:
            await turn.ended
        except asyncio.CancelledError:
            self._given_up.append(turn)
            self._changed()
            raise
        return TokenOutput(
            [0] * num_wanted,
            None,
            StopReason.LENGTH,
            num_cached_tokens=turn.num_cached,
            num_preempted=turn.num_preempted,
        )

    async def chat_completion(self, raw_request: Any) -> Any:
        """There is no text."""
        raise NotImplementedError

    async def release(self, request_id: str) -> None:
        """Free what is cached of a conversation."""
        if self._memory.drop(request_id):
            self._changed()

    def _changed(self) -> None:
        """Let what has changed take effect: at once, or at the end of the step or prefill under way."""
        work = self._work
        if work is None:
            self._go_on()
        elif work.prefill is None:
            elapsed = asyncio.get_running_loop().time() - work.began
            begun = max(1, self.model.steps_begun(elapsed, work.kv_tokens, len(self._running)))
            if begun < work.num_steps:
                work.num_steps = begun
                self._set_alarm()

    def _set_alarm(self) -> None:
        """Call `_ended` when the work ends."""
        work = self._work
        assert work is not None
        if self._alarm is not None:
            self._alarm.cancel()
        if work.prefill is not None:
            seconds = work.num_steps / self.model.prefill_tokens_per_s
        else:
            seconds = self.model.steps_s(work.num_steps, work.kv_tokens, len(self._running))
        self._alarm = asyncio.get_running_loop().call_at(work.began + seconds, self._work_ended, seconds)

    def _work_ended(self, seconds: float) -> None:
        work, self._work = self._work, None
        assert work is not None
        self.busy_s += seconds
        if work.prefill is not None:
            self._run(work.prefill)
        else:
            self._num_steps += work.num_steps
            self._memory.running += work.num_steps * len(self._running)
            self.num_decoded += work.num_steps * len(self._running)
            self._end_turns()
        self._go_on()

    def _run(self, turn: _Turn) -> None:
        """Begin to decode."""
        turn.last_step = self._num_steps + turn.num_wanted - turn.num_sampled
        self._running[turn] = None
        self._num_started += 1
        heapq.heappush(self._ends, (turn.last_step, self._num_started, turn))

    def _stop(self, turn: _Turn) -> int:
        """End to decode; return how long its context is."""
        del self._running[turn]
        turn.num_sampled = turn.num_wanted - (turn.last_step - self._num_steps)
        num_tokens = turn.num_prompt + turn.num_sampled
        self._memory.running -= num_tokens
        return num_tokens

    def _end_turns(self) -> None:
        """Answer those whose last token has come."""
        while self._ends and self._ends[0][0] <= self._num_steps:
            last_step, _, turn = heapq.heappop(self._ends)
            if turn not in self._running or turn.last_step != last_step:
                continue  # put aside or given up meanwhile
            num_tokens = self._stop(turn)
            if not turn.ended.done():
                self._memory.keep(turn.request_id, num_tokens)
                turn.ended.set_result(None)

    def _go_on(self) -> None:
        """Find the next thing to do, if there is one."""
        self._forget_given_up()
        if not self._start_prefill():
            self._start_steps()
        if self._work is not None:
            self._set_alarm()

    def _forget_given_up(self) -> None:
        for turn in self._given_up:
            if turn in self._running:
                self._stop(turn)
            elif turn in self._queue:
                self._queue.remove(turn)
        self._given_up.clear()

    def _start_prefill(self) -> bool:
        """Compute the next prompt, if there is one that fits beside what runs."""
        if not self._queue:
            return False
        turn, memory = self._queue[0], self._memory
        num_tokens = turn.num_prompt + turn.num_sampled
        if memory.running + num_tokens + len(self._running) + 1 > memory.capacity:
            return False  # nor would the next step fit
        self._queue.popleft()
        num_cached = memory.drop(turn.request_id)
        if turn.num_cached is None:
            turn.num_cached = num_cached
        self.num_evicted += memory.make_room(num_tokens)
        memory.running += num_tokens
        self.num_prefilled += num_tokens - num_cached
        self._work = _Work(self._now(), prefill=turn, num_steps=num_tokens - num_cached)
        return True

    def _start_steps(self) -> None:
        """Decode until a turn ends or the memory is full."""
        memory, running = self._memory, self._running
        self.num_evicted += memory.make_room(len(running))
        while memory.used + len(running) > memory.capacity:
            self._put_aside(next(reversed(running)))
        if not running:
            return
        while self._ends[0][2] not in running or self._ends[0][2].last_step != self._ends[0][0]:
            heapq.heappop(self._ends)
        num_steps = min(self._ends[0][0] - self._num_steps, (memory.capacity - memory.used) // len(running))
        self._work = _Work(self._now(), num_steps=num_steps, kv_tokens=memory.used)

    def _put_aside(self, turn: _Turn) -> None:
        """Take a turn's memory away; it goes on, computed anew, before all that wait."""
        self._stop(turn)
        turn.num_preempted += 1
        self.num_preempted += 1
        self._queue.appendleft(turn)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
