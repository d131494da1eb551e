"""`tool_agent`: a model that calls tools, as a state machine.

    PENDING -> GENERATING -> PROCESSING_TOOLS -> GENERATING -> ... -> TERMINATED

Knows messages, calls and turns. Token ids belong to the session, the running of tools to their executor.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from ostinato_agent_loop.base import AgentLoopBase
from ostinato_agent_loop.output import AgentLoopMetrics, AgentLoopOutput, TrajectoryEnd, outputs_from_session
from ostinato_agent_loop.registry import register
from ostinato_agent_loop.rows import row_messages
from ostinato_engines import SamplingParams, StopReason
from ostinato_rollout import BudgetExceededError, ChatSession, Reply
from ostinato_tools import ToolCall, TrajectoryTools

NOT_RUN = "not_run"
"""What became of a call that nobody ran, in `AgentLoopMetrics.tool_outcomes`."""


class AgentState(StrEnum):
    """Where a trajectory stands."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"


@dataclasses.dataclass(slots=True)
class Episode:
    """One trajectory under way."""

    session: ChatSession
    tools: TrajectoryTools
    sampling_params: SamplingParams
    prompt: list[dict]
    reply: Reply | None = None
    end: TrajectoryEnd | None = None
    assistant_turns: int = 0
    user_turns: int = 0
    malformed_in_a_row: int = 0
    turn_scores: list[float] = dataclasses.field(default_factory=list)
    tool_rewards: list[float] = dataclasses.field(default_factory=list)
    metrics: AgentLoopMetrics = dataclasses.field(default_factory=AgentLoopMetrics)


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Generates, runs the calls that the model made, shows it their answers, and so on until there is a reason to end.

    Tools of a turn run also where no turn may follow: their rewards and their state count. Only those of a turn that the
    response's limit cut do not. Answers that no turn follows are not part of the output.
    """

    needs_tools = True

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See AgentLoopBase. `extra_fields` holds `tool_rewards` (one for each call but those beyond the limit, in order),
        `turn_scores` (one for each turn with calls: the sum of their rewards), `tool_state_rewards` (by tool, of the state
        left behind) and `messages` (the conversation)."""
        context, prompt = self.context, row_messages(row)
        async with context.open_tools(row) as tools, context.open_session(row, tools.schemas) as session:
            episode = Episode(session, tools, sampling_params, prompt)
            steps = {
                AgentState.PENDING: self._pending,
                AgentState.GENERATING: self._generating,
                AgentState.PROCESSING_TOOLS: self._processing_tools,
            }
            state = AgentState.PENDING
            while state is not AgentState.TERMINATED:
                state = await steps[state](episode)
            state_rewards = await tools.calc_rewards()
        episode.metrics.num_release_failures = len(tools.release_failures)
        return outputs_from_session(
            session,
            stop_reason=episode.end or TrajectoryEnd.NO_TOOL_CALL,
            metrics=episode.metrics,
            extra_fields={
                "turn_scores": episode.turn_scores,
                "tool_rewards": episode.tool_rewards,
                "tool_state_rewards": state_rewards,
                "messages": session.messages,
            },
        )

    async def _pending(self, episode: Episode) -> AgentState:
        await episode.session.extend(episode.prompt)
        return AgentState.GENERATING

    async def _generating(self, episode: Episode) -> AgentState:
        """Sample a turn; limits were checked before."""
        reply = episode.reply = await episode.session.generate(episode.sampling_params)
        cut = reply.stop_reason is StopReason.LENGTH
        if not reply.num_tokens and not cut:
            return _ended(episode, TrajectoryEnd.NOTHING_GENERATED)
        episode.assistant_turns += reply.num_tokens > 0
        if cut and episode.session.room == 0:
            episode.metrics.count_calls([NOT_RUN] * len(reply.tool_calls))
            return _ended(episode, TrajectoryEnd.RESPONSE_LENGTH)
        if reply.tool_calls or (reply.errors and not cut):
            return AgentState.PROCESSING_TOOLS
        return _ended(episode, TrajectoryEnd.TURN_LENGTH if cut else TrajectoryEnd.NO_TOOL_CALL)

    async def _processing_tools(self, episode: Episode) -> AgentState:
        """Answer every call of the turn: run it, or say why it did not run."""
        reply = episode.reply
        assert reply is not None
        answers, terminate = await self._answer_calls(episode, reply.tool_calls)
        readable = any(call.error is None for call in reply.tool_calls)
        episode.malformed_in_a_row = 0 if readable else episode.malformed_in_a_row + 1
        if reply.errors:
            explain(reply.errors, answers)
        end = TrajectoryEnd.TOOL_TERMINATED if terminate else self._limit(episode)
        if end is not None:
            return _ended(episode, end)
        try:
            await episode.session.extend(answers)
        except BudgetExceededError as error:
            cut = error.limit == "max_tokens"
            return _ended(episode, TrajectoryEnd.TURN_LENGTH if cut else TrajectoryEnd.TOOL_RESPONSE_LENGTH)
        episode.user_turns += 1
        return AgentState.GENERATING

    async def _answer_calls(self, episode: Episode, calls: Sequence[ToolCall]) -> tuple[list[dict], bool]:
        """Run the first calls and refuse those beyond the limit; return the messages in the order of the calls.

        A malformed call is answered with what is wrong with it; it runs nothing, and so takes no other call's place.
        """
        limit, metrics = self.context.config.max_parallel_calls, episode.metrics
        refused = _beyond(limit, calls)
        allowed = [call for place, call in enumerate(calls) if place not in refused] if refused else calls
        began = time.perf_counter()
        outcomes = await episode.tools.run(allowed) if allowed else []
        metrics.tool_calls += time.perf_counter() - began
        metrics.count_calls([outcome.kind.value for outcome in outcomes] + [NOT_RUN] * len(refused))
        if calls:
            rewards = [outcome.reward for outcome in outcomes]
            episode.tool_rewards += rewards
            episode.turn_scores.append(sum(rewards))
        answers = [outcome.message for outcome in outcomes]
        for place in refused:  # rising, so that each one finds those before it in their places
            answers.insert(place, refusal(calls[place], limit))
            if self.context.trace is not None:
                self.context.trace.tool_call_not_run(calls[place], answers[place]["content"])
        return answers, any(outcome.terminate for outcome in outcomes)

    def _limit(self, episode: Episode) -> TrajectoryEnd | None:
        """Return why no further turn may be generated, if so."""
        config = self.context.config
        if episode.malformed_in_a_row > config.max_consecutive_malformed:
            return TrajectoryEnd.MALFORMED_CALLS
        if config.max_assistant_turns is not None and episode.assistant_turns >= config.max_assistant_turns:
            return TrajectoryEnd.MAX_ASSISTANT_TURNS
        if config.max_user_turns is not None and episode.user_turns >= config.max_user_turns:
            return TrajectoryEnd.MAX_USER_TURNS
        return None


def _ended(episode: Episode, reason: TrajectoryEnd) -> AgentState:
    episode.end = reason
    return AgentState.TERMINATED


def _beyond(limit: int, calls: Sequence[ToolCall]) -> dict[int, None]:
    """Return the places of the calls that do not run because as many as may run stand before them, in order."""
    if len(calls) <= limit:
        return {}
    return dict.fromkeys([place for place, call in enumerate(calls) if call.error is None][limit:])


def refusal(call: ToolCall, limit: int) -> dict:
    """Answer a call beyond the limit in a way that the model can act on."""
    calls = "call runs" if limit == 1 else "calls run"
    text = f"Not run: at most {limit} tool {calls} per turn. Call again in your next turn if you still need it."
    return {"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name}


def explain(errors: Sequence[str], answers: list[dict]) -> None:
    """Tell the model what could not be read as a call: behind the last answer, or where there is none, as a user."""
    text = "Your tool call could not be read: " + "; ".join(errors) + ". Correct it and call again."
    if not answers:
        answers.append({"role": "user", "content": text})
        return
    content = answers[-1]["content"]
    more = f"{content}\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    answers[-1] = {**answers[-1], "content": more}
