"""What a program said to the model and was answered, as the segments of its trajectory.

Invariants: all requests go through the trajectory's own conversations, within its budget and as the run samples; whatever
a program does with its histories, each sampled token stands in one segment, once. Knows no process and no address.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ostinato_agent_loop.base import AgentLoopContext
from ostinato_agent_loop.errors import AgentProgramError
from ostinato_agent_loop.gateway.own_reward import PATH, OwnReward
from ostinato_agent_loop.output import AgentLoopMetrics, AgentLoopOutput, TrajectoryEnd, outputs_from_session
from ostinato_engines import SamplingParams
from ostinato_rollout import BudgetExceededError, ChatSession, Failure, FailureKind
from ostinato_rollout.openai_app import (
    Answer,
    ApiError,
    AppLimits,
    ChatRequest,
    OpenAIApp,
    Proceed,
    UnknownSessionError,
    as_api_error,
)

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
        own_reward: Whether the program is to give the reward.
    """

    def __init__(
        self,
        context: AgentLoopContext,
        row: Mapping[str, Any],
        sampling_params: SamplingParams,
        *,
        max_segments: int,
        own_reward: bool = False,
    ) -> None:
        self._context, self._row, self._sampling_params = context, row, sampling_params
        self._num_turns = 0
        # Request ids of conversations, each once, the one that was answered last at the end.
        self._answered: list[str] = []
        self._metrics = AgentLoopMetrics()
        self.end = TrajectoryEnd.PROGRAM_ENDED
        """Why the trajectory ends when the program does: what a request was last refused for, if any."""
        self.engine_error: Exception | None = None
        """Why the last request could not be answered, where that was not the program's fault."""
        self._refusal: Exception | None = None  # the last request's, at a limit of the trajectory
        self.own_reward = OwnReward(is_wanted=own_reward)
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
            posts={PATH: self.own_reward.take},
        )

    async def outputs(self, extra_fields: Mapping[str, Any]) -> list[AgentLoopOutput]:
        """End the conversations and return them as segments, the one that was answered last at the end, with the reward that the
        program gave or the failure to give one.

        Raises:
            AgentProgramError: Nothing was sampled, and the program is to blame.
            Exception: Nothing was sampled, since the last request found no room, or no engine.
        """
        try:
            chats = await self.app.sessions.take(_SESSION)
        except UnknownSessionError:
            chats = ()
        if not chats:
            if (error := self.engine_error or self._refusal) is not None:
                raise error
            raise AgentProgramError(
                "the agent's program must ask the model at least once, got no request that was answered;"
                " let it use OPENAI_BASE_URL and OPENAI_API_KEY"
            )
        places = {request_id: place for place, request_id in enumerate(self._answered)}
        chats = sorted(chats, key=lambda chat: places.get(chat.request_id, -1))
        generations = [chat.metrics.num_generations for chat in chats]
        num_turns = 1 + sum(generations) + sum(count - 1 for count in generations)
        extra = {"turn_scores": [], "tool_rewards": [], **extra_fields, "messages": chats[-1].messages}
        if (given := self.own_reward.result) is not None:
            extra["reward_extra"] = given.extra
        outputs = [
            output
            for chat in chats
            for output in outputs_from_session(
                chat, num_turns=num_turns, stop_reason=self.end, metrics=self._metrics, extra_fields=extra
            )
        ]
        missing = self.own_reward.missing()
        for output in outputs:
            output.reward_score = None if given is None else given.score
            if missing is not None:
                where = f"reward of trajectory {self._context.trajectory_id}"
                output.failure = Failure.from_error(missing, where, kind=FailureKind.REWARD)
        return outputs

    def _open_chat(self, _session: str | None, tools: Sequence[dict]) -> ChatSession:
        number = len(self._context.sessions)
        return self._context.open_session(
            self._row, tools, budget=self._context.budget_left(), call_id_prefix=f"call_{number}_"
        )

    async def _watch(self, request: ChatRequest, proceed: Proceed) -> Answer:
        """Let a request sample as the run does, within its turns and its budget; note what became of it."""
        self._check_turns(request.n)
        self._num_turns += request.n
        self.end, self.engine_error, self._refusal = TrajectoryEnd.PROGRAM_ENDED, None, None
        brings_turns = bool(self._answered) and any(message["role"] == "assistant" for message in request.messages)
        try:
            self._context.share_budget()
            answer = await proceed(msgspec.structs.replace(request, params=self._params(request.params)))
        except BaseException as error:
            self._num_turns -= request.n
            self._note_failure(error)
            raise
        if brings_turns:
            self._metrics.num_continuations += 1
            self._metrics.num_exact_continuations += all(choice.goes_on for choice in answer.choices)
        now = [choice.request_id for choice in answer.choices]
        self._answered = [request_id for request_id in self._answered if request_id not in now] + now
        return answer

    def _note_failure(self, error: BaseException) -> None:
        if isinstance(error, BudgetExceededError):
            is_cut = error.limit == "max_tokens"  # the turn before has no end to go on from
            self.end = TrajectoryEnd.TURN_LENGTH if is_cut else TrajectoryEnd.RESPONSE_LENGTH
            self._refusal = error
        elif isinstance(error, ApiError) and error.code == "too_many_segments":
            self.end, self._refusal = TrajectoryEnd.MAX_SEGMENTS, error
        elif isinstance(error, Exception):
            known = as_api_error(error)
            if known is None or known.status >= 500:
                self.engine_error = error

    def _check_turns(self, num_new: int) -> None:
        limit = self._context.config.max_assistant_turns
        if limit is not None and self._num_turns + num_new > limit:
            error = ApiError(
                f"the model must be asked for at most {limit} turns in a trajectory, got {num_new} more; end here",
                code="max_assistant_turns",
            )
            self.end, self.engine_error, self._refusal = TrajectoryEnd.MAX_ASSISTANT_TURNS, None, error
            raise error

    def _params(self, asked: SamplingParams) -> SamplingParams:
        given = self._sampling_params
        bounds = [bound for bound in (given.max_tokens, asked.max_tokens) if bound is not None]
        return msgspec.structs.replace(
            given,
            max_tokens=min(bounds, default=None),
            stop_token_ids=tuple(dict.fromkeys((*given.stop_token_ids, *asked.stop_token_ids))),
        )
