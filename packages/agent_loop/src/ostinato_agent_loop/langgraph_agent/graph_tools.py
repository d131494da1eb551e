"""A run's tools in a graph: LangChain tools whose calls our executor runs, and the account of what became of them.

Invariant: however a graph runs calls, by a node of ours or by LangGraph's, one at a time or side by side, the same calls of
a turn run, with the same outcomes, rewards and limits. Knows no model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

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


class _Entry:
    """The reward of one call, at its place: turn and position, or behind all turns."""

    __slots__ = ("place", "reward", "turn")

    def __init__(self, turn: int | None, place: int) -> None:
        self.turn, self.place, self.reward = turn, place, 0.0


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
        self._places: dict[str, tuple[int, int, bool]] = {}  # of a call: its turn, its place there, whether it may run
        self._entries: list[_Entry] = []
        self.metrics = AgentLoopMetrics()
        """Seconds and outcomes of calls."""

    @property
    def schemas(self) -> list[dict]:
        """What the model is shown of the tools."""
        return self._tools.schemas

    @property
    def tool_rewards(self) -> list[float]:
        """One for each call that was answered, in the order of turns and calls; those that no turn made come last."""
        return [entry.reward for entry in self._sorted()]

    @property
    def turn_scores(self) -> list[float]:
        """One for each turn with calls that were answered: the sum of their rewards."""
        scores: dict[int, float] = {}
        for entry in self._sorted():
            if entry.turn is not None:
                scores[entry.turn] = scores.get(entry.turn, 0.0) + entry.reward
        return list(scores.values())

    def expect(self, turn: GraphTurn) -> None:
        """Take note of the calls that a turn makes. A malformed call runs nothing, and so takes no other call's place."""
        calls = turn.reply.tool_calls
        if turn.is_last:
            self.metrics.count_calls([NOT_RUN] * len(calls))
            return
        num_readable = 0
        for place, call in enumerate(calls):
            num_readable += call.error is None
            self._places[call.id] = (
                turn.number,
                place,
                call.error is not None or num_readable <= self._config.max_parallel_calls,
            )

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
        calls = sorted(calls, key=lambda call: self._places.get(call.id, (0, len(calls)))[1])
        began = time.perf_counter()
        allowed = [self._places[call.id][2] if call.id in self._places else True for call in calls]
        entries = [self._entry(call) for call, runs in zip(calls, allowed, strict=True) if runs]
        running = [call for call, runs in zip(calls, allowed, strict=True) if runs]
        outcomes = await self._tools.run(running) if running else []
        self.metrics.tool_calls += time.perf_counter() - began
        self.metrics.count_calls([outcome.kind.value for outcome in outcomes] + [NOT_RUN] * allowed.count(False))
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.reward = outcome.reward
        if any(outcome.terminate for outcome in outcomes):
            self._finish(TrajectoryEnd.TOOL_TERMINATED)
        answers = iter([_with_status(outcome.message, outcome.kind) for outcome in outcomes])
        return [
            next(answers) if runs else _with_status(refusal(call, self._config.max_parallel_calls), None)
            for call, runs in zip(calls, allowed, strict=True)
        ]

    def _entry(self, call: ToolCall) -> _Entry:
        turn, place = self._places[call.id][:2] if call.id in self._places else (None, 0)
        entry = _Entry(turn, place)
        self._entries.append(entry)
        return entry

    def _sorted(self) -> list[_Entry]:
        return sorted(self._entries, key=lambda entry: (entry.turn is None, entry.turn or 0, entry.place))


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
