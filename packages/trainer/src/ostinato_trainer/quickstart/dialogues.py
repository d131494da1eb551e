"""Demonstrations for the warm start: most carry a fault that reinforcement learning has to remove.

A clean warm start would leave nothing to learn, and random noise nothing to learn from: the faults copy the question's own tokens.
Tool messages are not written here: they are what the real executor answers to the call in the dialogue.
"""

import json
import random
from collections.abc import Iterator

from ostinato_tools import ToolCall, ToolExecutor
from ostinato_trainer.quickstart.task import OPERATORS, Problem, Step, problems

FAULTY_SHARE = 0.85
FAULTS = ("no_tool", "wrong_key", "wrong_expression", "operand_as_answer", "stops_early")


class DialogueMaker:
    """Turns problems into conversations with the tool's real replies.

    Args:
        executor: Runs the calls of the dialogues.
        seed: Chooses problems and faults.
    """

    def __init__(self, executor: ToolExecutor, *, seed: int) -> None:
        self._executor = executor
        self._rng = random.Random(f"dialogues-{seed}")
        self._problems: Iterator[Problem] = problems(held_out=False, seed=seed)
        self._replies: dict[str, dict] = {}

    async def make(self, count: int) -> list[list[dict]]:
        """`count` conversations of OpenAI-style messages, each ending with an assistant message."""
        return [await self._dialogue(next(self._problems)) for _ in range(count)]

    async def _dialogue(self, problem: Problem) -> list[dict]:
        fault = self._rng.choice(FAULTS) if self._rng.random() < FAULTY_SHARE else None
        first = problem.steps[0]
        operand = self._rng.choice((first.left, first.right))
        messages = [{"role": "user", "content": problem.question}]
        if fault == "no_tool":
            return [*messages, says(operand)]
        if fault == "wrong_key":
            await self._call(messages, {"expr": first.expression})
            return [*messages, says(operand)]
        faulty_step = self._rng.randrange(len(problem.steps)) if fault == "wrong_expression" else None
        result = first.left
        for index, step in enumerate(problem.steps):
            asked = step if index == 0 else Step(result, step.operator, step.right)
            if index == faulty_step:
                asked = self._other_calculation(asked)
            await self._call(messages, {"expression": asked.expression})
            result = asked.value
            if fault == "stops_early" and index == len(problem.steps) - 1:
                return [*messages, {"role": "assistant", "content": ""}]
        return [*messages, says(operand if fault == "operand_as_answer" else result)]

    def _other_calculation(self, step: Step) -> Step:
        """Another operator, or the operands of a difference the wrong way round."""
        if step.operator == "-" and self._rng.random() < 0.5 and step.left != step.right:
            return Step(step.right, "-", step.left)
        return Step(step.left, self._rng.choice([op for op in OPERATORS if op != step.operator]), step.right)

    async def _call(self, messages: list[dict], arguments: dict[str, str]) -> None:
        """Append a call and what the tool answers."""
        raw = json.dumps(arguments)
        function = {"name": "calculator", "arguments": arguments}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        if raw not in self._replies:
            call = ToolCall(name="calculator", arguments=arguments, raw_arguments=raw, id="call_0")
            async with self._executor.open("warm-start") as tools:
                [outcome] = await tools.run([call])
            self._replies[raw] = {"role": "tool", "content": outcome.message["content"]}
        messages.append(self._replies[raw])


def says(number: int) -> dict:
    """The assistant's last message."""
    return {"role": "assistant", "content": f"The answer is {number}."}
