"""What a program said to the model and was answered, as the segments of its trajectory.

Invariants: all requests go through the trajectory's own conversations, within its budget and as the run samples; whatever
a program does with its histories, each sampled token stands in one segment, once. Knows no process and no address.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from ostinato_agent_loop.base import AgentLoopContext
from ostinato_agent_loop.errors import AgentProgramError
from ostinato_agent_loop.output import AgentLoopMetrics, AgentLoopOutput, TrajectoryEnd, outputs_from_session
from ostinato_engines import SamplingParams
from ostinato_rollout import BudgetExceededError, ChatSession, derive_seed
from ostinato_rollout.openai_app import ApiError, AppLimits, ChatRequest, OpenAIApp, UnknownSessionError

_SESSION = "trajectory"
_UNLIMITED_S = 1e9  # the trajectory has a deadline of its own


class Recording:
    """The app of one trajectory, and what came of it.

    The policy samples as the run says: of a request's own parameters those count that bound a turn (`max_tokens`,
    `stop_token_ids`), since a program that cooled it down would be trained on what another policy says.

    Args:
        context: The trajectory's.
        row: The dataset's row.
        sampling_params: How the run samples.
        max_segments: Most conversations.
    """

    def __init__(
        self, context: AgentLoopContext, row: Mapping[str, Any], sampling_params: SamplingParams, *, max_segments: int
    ) -> None:
        self._context, self._row, self._sampling_params = context, row, sampling_params
        self._num_requests = self._num_turns = 0
        self._by_last_turn: dict[str, int] = {}  # request ids of conversations, the last one to sample at the end
        self._metrics = AgentLoopMetrics()
        self.end = TrajectoryEnd.PROGRAM_ENDED
        """Why the trajectory ends when the program does: what a request was last refused for, if any."""
        self.engine_error: Exception | None = None
        """Why the last request could not be answered, where that was not the program's fault."""
        self.api_key = secrets.token_urlsafe(32)
        self.app = OpenAIApp(
            None,
            context.tokens,
            model="policy",
            parser=context.parser,
            config=context.config,
            api_key=self.api_key,
            limits=AppLimits(max_segments=max_segments, max_open=max_segments, idle_timeout_s=_UNLIMITED_S),
            client=context.client,
            only_session=_SESSION,
            any_model=True,
            open_chat=self._open_chat,
            watch=self._watch,
        )

    async def outputs(self, extra_fields: Mapping[str, Any]) -> list[AgentLoopOutput]:
        """End the conversations and return them as segments, the one that sampled last at the end.

        Raises:
            AgentProgramError: Nothing was sampled.
        """
        try:
            chats = await self.app.sessions.take(_SESSION)
        except UnknownSessionError:
            chats = ()
        if not chats:
            raise AgentProgramError(
                "the agent's program must ask the model at least once, got no request that was answered;"
                " let it use OPENAI_BASE_URL and OPENAI_API_KEY"
            )
        order = list(self._by_last_turn)
        chats = sorted(chats, key=lambda chat: order.index(chat.request_id) if chat.request_id in order else -1)
        generations = [chat.metrics.num_generations for chat in chats]
        num_turns = 1 + sum(generations) + sum(count - 1 for count in generations)
        extra = {"turn_scores": [], "tool_rewards": [], **extra_fields, "messages": chats[-1].messages}
        return [
            output
            for chat in chats
            for output in outputs_from_session(
                chat, num_turns=num_turns, stop_reason=self.end, metrics=self._metrics, extra_fields=extra
            )
        ]

    def _open_chat(self, _session: str | None, tools: Sequence[dict]) -> ChatSession:
        number = len(self._context.sessions)
        return self._context.open_session(
            self._row, tools, budget=self._context.budget_left(), call_id_prefix=f"call_{number}_"
        )

    @contextmanager
    def _watch(self, request: ChatRequest) -> Iterator[ChatRequest]:
        """Let a request sample as the run does, within its turns; note what became of it."""
        self._check_turns(request.n)
        self._num_requests += 1
        self._num_turns += request.n
        before = {session.request_id: session.metrics.num_generations for session in self._context.sessions}
        num_exact = self.app.sessions.num_continued
        self.end, self.engine_error = TrajectoryEnd.PROGRAM_ENDED, None
        try:
            yield msgspec.structs.replace(request, params=self._params(request.params))
        except BaseException as error:
            self._num_turns -= request.n
            if isinstance(error, BudgetExceededError):
                self.end = TrajectoryEnd.RESPONSE_LENGTH
            elif isinstance(error, Exception) and not isinstance(error, ApiError):
                self.engine_error = error
            raise
        if any(message["role"] == "assistant" for message in request.messages):
            self._metrics.num_continuations += 1
            self._metrics.num_exact_continuations += min(1, self.app.sessions.num_continued - num_exact)
        for session in self._context.sessions:
            if session.metrics.num_generations > before.get(session.request_id, 0):
                self._by_last_turn.pop(session.request_id, None)
                self._by_last_turn[session.request_id] = self._num_requests

    def _check_turns(self, num_new: int) -> None:
        limit = self._context.config.max_assistant_turns
        if limit is not None and self._num_turns + num_new > limit:
            self.end = TrajectoryEnd.MAX_ASSISTANT_TURNS
            raise ApiError(
                f"the model must be asked for at most {limit} turns in a trajectory, got {num_new} more; end here",
                code="max_assistant_turns",
            )

    def _params(self, asked: SamplingParams) -> SamplingParams:
        seed = self._sampling_params.seed
        return msgspec.structs.replace(
            self._sampling_params,
            max_tokens=asked.max_tokens,
            stop_token_ids=asked.stop_token_ids,
            seed=None if seed is None else derive_seed(seed, self._num_requests),
        )
