"""The conversations of one trajectory of a graph, found by what was said in them, and the limits of its turns.

Invariant: each sampled token stands in one ledger, once, whatever the graph makes of its histories: what goes on from all
that a conversation has seen extends it, anything else (a branch, a replay, a shortened or edited history, a second call at
the same time) begins one, in which earlier turns are context. Knows no LangChain and no tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ostinato_agent_loop.config import MultiTurnConfig
from ostinato_agent_loop.errors import TurnLimitError
from ostinato_agent_loop.output import TrajectoryEnd
from ostinato_engines import SamplingParams, StopReason
from ostinato_rollout import BudgetExceededError, ChatSession, Reply
from ostinato_rollout.histories import TrackedChat, TrackedChats, has_sampled

_MAX_OPEN = 64


class GraphTurn(msgspec.Struct, frozen=True):
    """One turn of the policy in a graph."""

    number: int
    """Its place among the trajectory's turns, as they began."""
    reply: Reply
    """What was said."""
    is_last: bool
    """The response's limit has cut it: no turn can follow in this conversation, so its calls are not offered."""
    num_prompt_tokens: int
    """Length of what it answers."""
    num_cached_tokens: int
    """How many of these the replica did not compute again."""


class GraphConversations:
    """What a graph's model has said.

    Args:
        open_chat: Makes a conversation that shows the model these tools; the number is its place among those begun.
        sampling_params: How to sample.
        config: How many turns there may be.
        share_budget: Called before each turn: lets no conversation use what others have used.
    """

    def __init__(
        self,
        open_chat: Callable[[Sequence[dict], int], ChatSession],
        sampling_params: SamplingParams,
        config: MultiTurnConfig,
        share_budget: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_chat, self._sampling_params, self._config = open_chat, sampling_params, config
        self._share_budget = share_budget
        self._tracked = TrackedChats(self._open, max_open=_MAX_OPEN)
        self._num_opened = 0
        self._finished: TrajectoryEnd | None = None
        self._first: ChatSession | None = None
        self.last: ChatSession | None = None
        """The conversation that had the last turn; the first one until then."""
        self.last_end: TrajectoryEnd | None = None
        """Why the last turn was cut or refused; None: it was neither."""
        self.num_assistant_turns = 0
        """Turns that were sampled or are being sampled."""
        self.num_user_turns = 0
        """How often a conversation went on after a turn."""
        self.num_continuations = 0
        """Turns whose history brought earlier ones."""
        self.num_exact_continuations = 0
        """Of these, those that went on in a conversation as its tokens are; the others began one."""
        self._num_begun = 0

    @property
    def chats(self) -> list[ChatSession]:
        """The conversations in which something was sampled, as they began; the first one if nothing was."""
        sampled = [chat for chat in self._tracked.begun if has_sampled(chat)]
        return sampled or ([] if self._first is None else [self._first])

    def finish(self, end: TrajectoryEnd) -> None:
        """Let no turn begin any more; `end` is why."""
        self._finished = self.last_end = end

    async def answer(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict],
        max_tokens: int | None,
        show: Callable[[GraphTurn], dict],
    ) -> GraphTurn:
        """Sample the turn that answers a history.

        Args:
            messages: The whole history, in plain form.
            tools: What the model is shown.
            max_tokens: Longest turn; None: as long as there is room.
            show: Gives the message, in plain form, as which the turn will come back in histories.

        Raises:
            TurnLimitError: No turn may begin: a limit is reached, or the history leaves no room.
            BudgetExceededError: The trajectory's first prompt is too long.
            RolloutError: What sessions raise.
        """
        tracked = self._tracked.find(messages, tools)
        goes_on = tracked is not None and tracked.answered
        self._check_limits(goes_on)
        brings_turns = any(map(has_sampled, self._tracked.begun)) and any(m["role"] == "assistant" for m in messages)
        number = self._num_begun
        self._num_begun += 1
        self.num_assistant_turns += 1
        is_sampled = False
        try:
            self._share_budget()
            tracked = tracked or self._tracked.begin(tools)
            async with self._tracked.hold(tracked, messages):
                self.num_user_turns += goes_on
                ledger = tracked.chat.ledger
                is_exact = ledger is not None and ledger.num_sampled > 0
                turn = await self._sample(tracked, number, max_tokens)
                tracked.answer(show(turn))
                is_sampled = True
            self.num_continuations += brings_turns
            self.num_exact_continuations += brings_turns and is_exact
            return turn
        except BudgetExceededError as error:
            end = self._end_of(error, goes_on)
            if end is None:
                raise
            raise self._refused(end, str(error)) from error
        finally:
            self.num_assistant_turns -= not is_sampled

    async def close(self) -> None:
        """End every conversation; turns under way are cancelled."""
        await self._tracked.end()

    def _open(self, tools: Sequence[dict]) -> ChatSession:
        chat = self._open_chat(tools, self._num_opened)
        self._num_opened += 1
        if self._first is None:
            self._first = self.last = chat
        return chat

    async def _sample(self, tracked: TrackedChat, number: int, max_tokens: int | None) -> GraphTurn:
        chat = tracked.chat
        params = self._sampling_params
        if max_tokens is not None:
            params = msgspec.structs.replace(params, max_tokens=max_tokens)
        ledger = chat.ledger
        assert ledger is not None  # it was extended
        num_prompt, num_cached = len(ledger), chat.metrics.num_cached_tokens
        reply = await chat.generate(params)
        if not reply.num_tokens:
            if reply.stop_reason is StopReason.LENGTH:
                raise self._refused(TrajectoryEnd.RESPONSE_LENGTH, "there is no room for a turn")
            raise self._refused(TrajectoryEnd.NOTHING_GENERATED, "a turn came back without a token")
        is_cut = reply.stop_reason is StopReason.LENGTH
        is_last = is_cut and chat.room == 0
        self.last, self.last_end = chat, self._finished
        if is_cut and self._finished is None:
            self.last_end = TrajectoryEnd.RESPONSE_LENGTH if is_last else TrajectoryEnd.TURN_LENGTH
        return GraphTurn(number, reply, is_last, num_prompt, chat.metrics.num_cached_tokens - num_cached)

    def _check_limits(self, goes_on: bool) -> None:
        """Raise TurnLimitError if no turn may begin."""
        config = self._config
        if self._finished is not None:
            raise self._refused(self._finished, "the trajectory is over")
        if config.max_assistant_turns is not None and self.num_assistant_turns >= config.max_assistant_turns:
            raise self._refused(TrajectoryEnd.MAX_ASSISTANT_TURNS, f"got {self.num_assistant_turns} turns")
        if goes_on and config.max_user_turns is not None and self.num_user_turns >= config.max_user_turns:
            raise self._refused(TrajectoryEnd.MAX_USER_TURNS, f"got {self.num_user_turns} answers")

    def _end_of(self, error: BudgetExceededError, goes_on: bool) -> TrajectoryEnd | None:
        """Return the end that messages bring for which there is no room; None: there was nothing to end."""
        if not self._tracked.begun:
            return None
        if error.limit == "max_tokens":
            return TrajectoryEnd.TURN_LENGTH
        return TrajectoryEnd.TOOL_RESPONSE_LENGTH if goes_on else TrajectoryEnd.RESPONSE_LENGTH

    def _refused(self, end: TrajectoryEnd, why: str) -> TurnLimitError:
        self.last_end = end
        return TurnLimitError(f"a turn must be within the trajectory's limits ({end}): {why}; end the graph", end=end)
