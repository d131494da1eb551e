"""A run's tools in a graph: LangChain tools whose calls our executor runs, and the account of what became of them.

Invariant: however a graph runs calls, by a node of ours or by LangGraph's, one at a time or side by side, the same calls of
a turn run, with the same outcomes, rewards and limits. Knows no model.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import Field

from ostinato_agent_loop.config import MultiTurnConfig
from ostinato_agent_loop.errors import GraphStateError
from ostinato_agent_loop.langgraph_agent.bridge import LoopBridge
from ostinato_agent_loop.langgraph_agent.conversations import GraphTurn
from ostinato_agent_loop.langgraph_agent.messages import calls_of
from ostinato_agent_loop.output import AgentLoopMetrics, TrajectoryEnd
from ostinato_agent_loop.tool_agent import NOT_RUN, explain, refusal
from ostinato_tools import OutcomeKind, ToolCall, TrajectoryTools


class _Place(NamedTuple):
    """Where a call stands among all; in this order rewards are told."""

    turn: float
    """The turn that made it; infinite: none did."""
    position: int
    """Its place there."""
    may_run: bool
    """Whether it is within the turn's limit."""


class GraphTools:
    """The tools of one trajectory, and what they gave.

    Args:
        tools: Runs calls.
        config: How many calls of a turn run, and how often in a row none of them may be readable.
        finish: Told when a tool ends the trajectory.
    """

    def __init__(
        self, tools: TrajectoryTools, config: MultiTurnConfig, finish: Callable[[TrajectoryEnd], None]
    ) -> None:
        self._tools, self._config, self._finish = tools, config, finish
        self._malformed_in_a_row = 0
        self._places: dict[str, _Place] = {}  # by the call's id
        self._num_outside = 0  # calls that no turn made
        self._rewards: list[tuple[_Place, float]] = []
        self.metrics = AgentLoopMetrics()
        """Seconds and outcomes of calls."""

    @property
    def schemas(self) -> list[dict]:
        """What the model is shown of the tools."""
        return self._tools.schemas

    @property
    def tool_rewards(self) -> list[float]:
        """One for each call that ran, in the order of turns and calls; those that no turn made come last."""
        return [reward for _, reward in sorted(self._rewards)]

    @property
    def turn_scores(self) -> list[float]:
        """One for each turn with calls that ran: the sum of their rewards."""
        of_turns = [(place.turn, reward) for place, reward in sorted(self._rewards) if place.turn != math.inf]
        return [sum(reward for _, reward in turn) for _, turn in groupby(of_turns, key=itemgetter(0))]

    def expect(self, turn: GraphTurn) -> None:
        """Take note of the calls that a turn makes. A malformed call runs nothing, and so takes no other call's place."""
        calls = turn.reply.tool_calls
        if turn.is_last:
            self.metrics.count_calls([NOT_RUN] * len(calls))
            return
        num_readable = 0
        for position, call in enumerate(calls):
            num_readable += call.error is None
            may_run = call.error is not None or num_readable <= self._config.max_parallel_calls
            self._places[call.id] = _Place(turn.number, position, may_run)

    async def answer(self, message: AIMessage) -> list[BaseMessage]:
        """Answer a turn as `tool_agent` does: run its calls, and say what could not be read. Too many turns in a row that
        held nothing readable end the trajectory."""
        calls, errors = calls_of(message)
        answers = await self.run(calls)
        readable = any(call.error is None for call in calls)
        self._malformed_in_a_row = 0 if readable else self._malformed_in_a_row + 1
        if errors:
            explain(errors, answers)
        if self._malformed_in_a_row > self._config.max_consecutive_malformed:
            self._finish(TrajectoryEnd.MALFORMED_CALLS)
        return [
            tool_message(answer) if answer["role"] == "tool" else HumanMessage(answer["content"]) for answer in answers
        ]

    async def run(self, calls: Sequence[ToolCall]) -> list[dict]:
        """Answer calls: run them, or say why not; return the messages in the order in which the turn made the calls."""
        placed = sorted(((self._place_of(call), call) for call in calls), key=itemgetter(0))
        running = [(place, call) for place, call in placed if place.may_run]
        began = time.perf_counter()
        outcomes = await self._tools.run([call for _, call in running]) if running else []
        self.metrics.tool_calls += time.perf_counter() - began
        num_refused = len(placed) - len(running)
        self.metrics.count_calls([outcome.kind.value for outcome in outcomes] + [NOT_RUN] * num_refused)
        self._rewards += [(place, outcome.reward) for (place, _), outcome in zip(running, outcomes, strict=True)]
        if any(outcome.terminate for outcome in outcomes):
            self._finish(TrajectoryEnd.TOOL_TERMINATED)
        answers = iter([_with_status(outcome.message, outcome.kind) for outcome in outcomes])
        limit = self._config.max_parallel_calls
        return [next(answers) if place.may_run else _with_status(refusal(call, limit), None) for place, call in placed]

    def _place_of(self, call: ToolCall) -> _Place:
        known = self._places.get(call.id)
        if known is None:
            self._num_outside += 1
            return _Place(math.inf, self._num_outside, True)
        return known


def _with_status(message: dict, kind: OutcomeKind | None) -> dict:
    """Add what LangChain wants to know: whether the call succeeded."""
    return {**message, "status": "success" if kind is OutcomeKind.OK else "error"}


class TrajectoryTool(BaseTool):
    """One of the run's tools as a LangChain tool, for `ToolNode`, prebuilt agents and nodes of one's own.

    Its answer is a ToolMessage where it is given a whole call, else the text alone.
    """

    openai_schema: dict = Field(exclude=True)
    """What the model is shown, as it stands in the run's configuration."""
    tools: Any = Field(exclude=True, repr=False)
    """The trajectory's GraphTools."""
    bridge: Any = Field(exclude=True, repr=False)
    """The trajectory's LoopBridge."""

    async def ainvoke(self, input: str | dict | Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """See BaseTool; takes a whole call, or the arguments alone."""
        return await super().ainvoke(_wrapped(input), config, **kwargs)

    def invoke(self, input: str | dict | Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """See `ainvoke`; for threads beside the event loop."""
        return super().invoke(_wrapped(input), config, **kwargs)

    async def _arun(self, arguments: Any, call_id: str | None) -> Any:
        return await self.bridge.call(self._answer, arguments, call_id)

    def _run(self, arguments: Any, call_id: str | None) -> Any:
        return self.bridge.call_blocking(self._answer, arguments, call_id)

    async def _answer(self, arguments: dict, call_id: str | None) -> Any:
        call = ToolCall(self.name, arguments, json.dumps(arguments, ensure_ascii=False, default=repr), call_id or "")
        (answer,) = await self.tools.run([call])
        return answer["content"] if call_id is None else tool_message(answer)


def _wrapped(value: Any) -> Any:
    """Return arguments that hold the call as a whole: a tool of ours may name a parameter as it likes, LangChain's may not."""
    if not isinstance(value, dict):
        raise GraphStateError(f"a tool must be given a call or its arguments, got {value!r:.80}; pass a dict")
    if value.get("type") != "tool_call":
        return {"arguments": value, "call_id": None}
    return {**value, "args": {"arguments": value["args"], "call_id": value["id"]}}


def tool_message(answer: dict) -> ToolMessage:
    """Return the answer to a call as LangChain's message."""
    return ToolMessage(
        content=answer["content"], tool_call_id=answer["tool_call_id"], name=answer["name"], status=answer["status"]
    )


def langchain_tools(tools: GraphTools, bridge: LoopBridge) -> list[TrajectoryTool]:
    """Return the trajectory's tools as LangChain tools."""
    made = []
    for schema in tools.schemas:
        function = schema["function"]
        made.append(
            TrajectoryTool(
                name=function["name"],
                description=function.get("description") or function["name"],
                args_schema={"type": "object", "properties": {}, **(function.get("parameters") or {})},
                openai_schema=schema,
                tools=tools,
                bridge=bridge,
            )
        )
    return made
