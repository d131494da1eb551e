"""`single_turn_agent`: one prompt, one turn."""

from __future__ import annotations

from typing import Any

from ostinato_agent_loop.base import AgentLoopBase
from ostinato_agent_loop.output import AgentLoopOutput, TrajectoryEnd, outputs_from_session
from ostinato_agent_loop.registry import register
from ostinato_agent_loop.rows import row_messages
from ostinato_engines import SamplingParams, StopReason


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Asks once and takes what comes."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See AgentLoopBase."""
        async with self.context.open_session(row) as session:
            await session.extend(row_messages(row))
            reply = await session.generate(sampling_params)
        if reply.stop_reason is StopReason.LENGTH:
            end = TrajectoryEnd.RESPONSE_LENGTH if session.room == 0 else TrajectoryEnd.TURN_LENGTH
        else:
            end = TrajectoryEnd.STOP if reply.num_tokens else TrajectoryEnd.NOTHING_GENERATED
        return outputs_from_session(
            session,
            stop_reason=end,
            extra_fields={"turn_scores": [], "tool_rewards": [], "messages": session.messages},
        )
