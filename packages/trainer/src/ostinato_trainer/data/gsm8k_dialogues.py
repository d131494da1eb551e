"""Demonstrations of tool use made of GSM8K's own solutions, in which every calculation is annotated: `48/2 = <<48/2=24>>24`.

Invariant: no answer of a tool is written here. Each call of a dialogue was run by the real tools, and a solution that they
contradict gives no dialogue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ostinato_tools import OutcomeKind, ToolCall, ToolExecutor, ToolRegistry, TrajectoryTools
from ostinato_tools.calculator import calculator
from ostinato_tools.gsm8k import CalcGsm8kReward
from ostinato_trainer.rewards.scorers import normalized_number

__all__ = ["Gsm8kDialogues"]

_ANNOTATION: Final = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_CHECK: Final = "calc_gsm8k_reward"


class Gsm8kDialogues:
    """Makes conversations in which an assistant calculates with `calculator` and checks in with `calc_gsm8k_reward`.

    Args:
        checks: False leaves the second tool out: it knows the right answer.
    """

    def __init__(self, *, checks: bool = True) -> None:
        self._checks = checks
        registry = ToolRegistry()
        if checks:
            registry.add_class(CalcGsm8kReward)
        registry.add_function(calculator)
        self._executor = ToolExecutor(registry)

    @property
    def tools(self) -> list[dict]:
        """Schemas of the tools, in the order in which a model is shown them."""
        return self._executor.registry.schemas()

    async def make(
        self, prompt: Sequence[Mapping[str, Any]], solution: str, ground_truth: str, tools_kwargs: Mapping[str, Mapping]
    ) -> list[dict] | None:
        """One conversation: a turn for each annotated calculation, one that checks the result in, if any does, and the final answer.

        What the solution says about a calculation is said in the turn after it, when its result is known.

        Args:
            prompt: The messages before the first turn.
            solution: A reference answer, `#### N` at its end.
            ground_truth: The number N.
            tools_kwargs: What the row gives its tools.

        Returns:
            The messages, the last one the assistant's; None where nothing is annotated, or a tool answers otherwise than
            the solution says.
        """
        if not _ANNOTATION.search(solution):
            return None
        messages = [dict(message) for message in prompt]
        said: list[str] = []
        async with self._executor.open("demonstration", tools_kwargs) as tools:
            for line in solution.partition("####")[0].splitlines():
                for expression, result in _ANNOTATION.findall(line):
                    answer = await self._call(tools, messages, said, "calculator", {"expression": expression.strip()})
                    value = None if answer is None else normalized_number(answer)
                    if value is None or value != normalized_number(result.strip()):
                        return None
                    said = []
                if text := _ANNOTATION.sub("", line).strip():
                    said.append(text)
            if self._checks:
                if await self._call(tools, messages, said, _CHECK, {"answer": ground_truth}) is None:
                    return None
                if (await tools.calc_rewards()).get(_CHECK) != 1.0:
                    return None
                said = []
        return [*messages, {"role": "assistant", "content": "\n".join([*said, f"#### {ground_truth}"])}]

    async def _call(
        self, tools: TrajectoryTools, messages: list[dict], said: list[str], name: str, arguments: dict[str, str]
    ) -> str | None:
        """Append a turn with one call and the tool's answer; returns its text, or None where the call failed."""
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "\n".join(said), "tool_calls": [call]})
        made = ToolCall(name=name, arguments=arguments, raw_arguments=json.dumps(arguments), id="call_0")
        [outcome] = await tools.run([made])
        if outcome.kind is not OutcomeKind.OK:
            return None
        text = str(outcome.message["content"])
        messages.append({"role": "tool", "content": text})
        return text
