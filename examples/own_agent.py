"""An agent in one file: its tool, its reward and its loop. Trained on the quickstart's model by

ostinato train outputs/quickstart/config.yaml examples/own_agent.yaml trainer.default_local_dir=outputs/own_agent
"""

import re
from contextlib import suppress

from ostinato_agent_loop import AgentLoopBase, outputs_from_session, register
from ostinato_rollout import BudgetExceededError
from ostinato_tools import function_tool


@function_tool
async def calculator(expression: str) -> str:
    """Adds, subtracts or multiplies two numbers.

    Args:
        expression: Two numbers with + - or * between them, for example 3+4.
    """
    match = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    if match is None:
        return "Error: write two numbers with + - or * between them."
    left, right = int(match[1]), int(match[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[match[2]])


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """1 for the right answer, 0.2 for another one in the right form, 0 for anything else."""
    answer = re.search(r"The answer is (-?\d+)\.\s*$", extra_info["sampled_text"])
    if answer is None:
        return 0.0
    return 1.0 if answer[1] == ground_truth else 0.2


@register("own_agent")
class OwnAgent(AgentLoopBase):
    """Calls tools until it answers."""

    needs_tools = True

    async def run(self, sampling_params, *, raw_prompt, **row):
        context = self.context
        async with context.open_tools(row) as tools, context.open_session(row, tools.schemas) as session:
            with suppress(BudgetExceededError):  # the response is full: what was said counts
                await session.extend(raw_prompt)
                while (reply := await session.generate(sampling_params)).tool_calls:
                    outcomes = await tools.run(reply.tool_calls)
                    await session.extend([outcome.message for outcome in outcomes])
        return outputs_from_session(session)
