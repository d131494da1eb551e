"""What a user writes, and what it is given: `AgentLoopBase.run`, and the context to run in."""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import msgspec

from ostinato_agent_loop.config import AgentConfig, MultiTurnConfig, RolloutConfig
from ostinato_agent_loop.errors import AgentConfigError
from ostinato_agent_loop.output import AgentLoopOutput
from ostinato_agent_loop.rows import row_tool_selection, row_tools_kwargs
from ostinato_engines import SamplingParams
from ostinato_rollout import ChatSession, LLMServerClient, Reply, SessionBudget, SessionStateError
from ostinato_rollout.tracing import Tracer, TrajectoryTrace
from ostinato_tokenization import ContinuousTokens
from ostinato_tools import ToolExecutor, ToolParser, TrajectoryTools

_PAUSE_S = 1.0


class _TrajectorySession(ChatSession):
    """A conversation of a trajectory. Once that is over it takes its time to refuse: an agent that was left to itself and asks again
    whatever it is told would hold up the event loop otherwise."""

    def __init__(self, is_over: asyncio.Event, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._is_over = is_over

    async def extend(self, messages: Sequence[dict]) -> None:
        await self._check_not_over()
        await super().extend(messages)

    async def generate(self, sampling_params: SamplingParams) -> Reply:
        await self._check_not_over()
        return await super().generate(sampling_params)

    async def _check_not_over(self) -> None:
        if self._is_over.is_set():
            await asyncio.sleep(_PAUSE_S)
            raise SessionStateError("a turn must come before its trajectory is over, got one after it; take none later")


@dataclasses.dataclass(frozen=True, slots=True)
class AgentLoopContext:
    """The world of one trajectory. All but its ids is shared between trajectories."""

    client: LLMServerClient
    """Where generations come from."""
    tokens: ContinuousTokens
    """How messages become token ids."""
    config: MultiTurnConfig
    """`actor_rollout_ref.rollout.multi_turn`."""
    budget: SessionBudget
    """How long a conversation may get."""
    tools: ToolExecutor
    """The only way in which tools run."""
    parser: ToolParser
    """Reads calls from what the model wrote, in the format that the configuration names."""
    agent: AgentConfig = dataclasses.field(default_factory=AgentConfig)
    """`actor_rollout_ref.rollout.agent`."""
    trajectory_id: str = ""
    """Which trajectory this is."""
    group_id: str = ""
    """Which row's group it belongs to."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a conversation waits for its place: the trajectory's clock stands still then."""
    tracer: Tracer | None = None
    """Records trajectories."""
    trace: TrajectoryTrace | None = None
    """Records this trajectory; None: it is not among those that are recorded."""
    sessions: list[ChatSession] = dataclasses.field(default_factory=list)
    """What `open_session` gave out; closed by the worker if the agent does not."""
    is_over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the trajectory has ended, or was given up."""

    def for_trajectory(
        self,
        group_id: str,
        trajectory_id: str,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        trace: TrajectoryTrace | None = None,
    ) -> AgentLoopContext:
        """Return the context of another trajectory."""
        return dataclasses.replace(
            self,
            group_id=group_id,
            trajectory_id=trajectory_id,
            waiting=waiting,
            trace=trace,
            sessions=[],
            is_over=asyncio.Event(),
        )

    def open_session(
        self,
        row: Mapping[str, Any],
        tools: Sequence[dict] | None = None,
        *,
        budget: SessionBudget | None = None,
        call_id_prefix: str = "call_",
    ) -> ChatSession:
        """Return a new conversation; use it as `async with`, or close it.

        Args:
            row: The dataset row that it belongs to.
            tools: Schemas of the tools that the model is shown; None or empty: it has none.
            budget: How long it may get; None: as the context says.
            call_id_prefix: What the ids of its calls begin with; see ChatSession.
        """
        number = len(self.sessions)
        request_id = None
        if self.trajectory_id:
            request_id = f"{self.trajectory_id}#{number}" if number else self.trajectory_id
        session = _TrajectorySession(
            self.is_over,
            client=self.client,
            tokens=self.tokens,
            config=self.config,
            budget=self.budget if budget is None else budget,
            parser=self.parser if tools else None,
            tools=tools,
            request_id=request_id,
            group=self.trajectory_id or None,
            waiting=self.waiting,
            call_id_prefix=call_id_prefix,
            number=number,
            trace=self.trace,
        )
        self.sessions.append(session)
        return session

    def open_tools(self, row: Mapping[str, Any]) -> TrajectoryTools:
        """Return the trajectory's tools, those that the row selects, with what it says to them; use them as `async with`.

        Raises:
            AgentRowError: The row says it in a wrong form.
        """
        return self.tools.open(self.trajectory_id, row_tools_kwargs(row), row_tool_selection(row))

    def share_budget(self) -> None:
        """Let no conversation use what others have used: each may respond as long as all of them together have tokens left.
        Call it before a turn where several conversations take turns; those under way at the same time do not see each other."""
        left = self.budget.max_response_tokens - sum(session.num_response_tokens for session in self.sessions)
        for session in self.sessions:
            bound = max(1, session.num_response_tokens + left)
            session.budget = msgspec.structs.replace(session.budget, max_response_tokens=bound)

    def budget_left(self) -> SessionBudget:
        """Return what a further conversation of this trajectory may use: the response tokens that those so far have left, and a prompt
        as long as any segment may be, since it may hold what was said in them.

        Raises:
            BudgetExceededError: They have left none.
        """
        if not self.sessions:
            return self.budget
        whole = self.budget.max_response_tokens
        left = whole - sum(session.num_response_tokens for session in self.sessions)
        if left < 1:
            raise self.budget.exceeded(1, 0, "max_response_tokens")
        prompt = self.budget.max_prompt_tokens + whole - left
        return msgspec.structs.replace(self.budget, max_prompt_tokens=prompt, max_response_tokens=left)

    async def close(self) -> None:
        """Close every conversation that is still open, all of them also where that is cancelled; none takes a turn any more."""
        self.is_over.set()
        cancellation: asyncio.CancelledError | None = None
        for session in self.sessions:
            try:
                await session.close()
            except asyncio.CancelledError as error:
                cancellation = error
        if cancellation is not None:
            raise cancellation


class AgentLoopBase(ABC):
    """An agent's program. One instance runs one trajectory; registered under a name, rows choose it by `agent_name`."""

    needs_tools: ClassVar[bool] = False
    """Set by agents that use the run's tools; they are refused at start while `multi_turn.enable` is false."""

    def __init__(self, context: AgentLoopContext) -> None:
        self.context = context

    @classmethod
    def check_config(cls, config: RolloutConfig, name: str) -> None:
        """Say before anything starts whether the agent, known as `name`, can run under `actor_rollout_ref.rollout`.

        Raises:
            AgentConfigError: It cannot.
        """
        if cls.needs_tools and not config.multi_turn.enable:
            raise AgentConfigError(
                f"multi_turn.enable must be true for agent {name!r}, which uses tools, got false;"
                " set actor_rollout_ref.rollout.multi_turn.enable=true or choose another agent"
            )

    @classmethod
    def gives_reward(cls, config: RolloutConfig) -> bool:
        """Whether the agent's trajectories bring their own score, so that no reward function is asked about its rows."""
        return False

    @abstractmethod
    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one trajectory and return its segments; most have one.

        Args:
            sampling_params: How to sample; its seed, if any, belongs to this trajectory alone.
            **row: The fields of the dataset row.

        Raises:
            Exception: Recorded as this trajectory's failure.
        """
