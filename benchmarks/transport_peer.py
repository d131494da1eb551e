"""verl's client over Ray, for the benchmark `transport`; and how either side is measured.

Runs in verl's own environment (`python -m benchmarks.peers verl`), so it imports nothing of ours. A side reads one JSON command a line and
answers with one: `{"what": "turns", "tokens": [N, ...], "turns": T}` with the seconds of each turn but the first, for each length;
`{"what": "many", "tokens": [N], "turns": T, "at_once": C}` with the calls per second of many conversations at once.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

NEW_IDS = list(range(7, 23))
"""What each turn adds to the prompt and the answer before."""

Generate = Callable[[str, Any], Awaitable[list[int]]]
"""A conversation's name and its prompt to the answer's ids."""
MakePrompt = Callable[[list[int]], Any]


def answer_to(prompt_ids: Any) -> list[int]:
    """What either server says at once; it shows that the whole prompt was there."""
    return [len(prompt_ids), prompt_ids[0], prompt_ids[-1]]


class Conversation:
    """One whose prompts grow and whose answers are checked."""

    def __init__(self, generate: Generate, make_prompt: MakePrompt, name: str, tokens: int) -> None:
        self._generate, self._make_prompt, self._name = generate, make_prompt, name
        self._ids = [index % 50_000 for index in range(tokens)]
        self.seconds: list[float] = []

    async def turn(self) -> None:
        """Asks once, by the clock."""
        prompt, expected = self._make_prompt(self._ids), answer_to(self._ids)
        started = time.perf_counter()
        got = await self._generate(self._name, prompt)
        self.seconds.append(time.perf_counter() - started)
        if got != expected:
            raise SystemExit(f"the answer must be {expected}, got {got}")
        self._ids += [*got, *NEW_IDS]

    async def hold(self, turns: int) -> None:
        """Asks so many times."""
        for _ in range(turns):
            await self.turn()


async def obey(generate: Generate, make_prompt: MakePrompt) -> None:
    """Measures as the commands say, until there are no more."""
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        number += 1
        command = json.loads(line)
        lengths, turns = command["tokens"] * command.get("at_once", 1), command["turns"]
        talks = [
            Conversation(generate, make_prompt, f"{number}-{index}", tokens) for index, tokens in enumerate(lengths)
        ]
        if command["what"] == "turns":
            # Turn by turn, so that what else the machine does disturbs all lengths alike.
            for _ in range(turns):
                for talk in talks:
                    await talk.turn()
            answer: Any = [talk.seconds[1:] for talk in talks]
        else:
            started = time.perf_counter()
            await asyncio.gather(*(talk.hold(turns) for talk in talks))
            answer = len(talks) * turns / (time.perf_counter() - started)
        print(json.dumps(answer), flush=True)


def main() -> None:
    """verl's LLMServerClient and GlobalRequestLoadBalancer, and a server actor that answers at once."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    class Server:
        async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None):
            ids = [len(prompt_ids), prompt_ids[0], prompt_ids[-1]]
            return TokenOutput(token_ids=ids, log_probs=[-0.5] * 3, stop_reason="completed", num_preempted=0)

    server = ray.remote(Server).options(num_cpus=0, max_concurrency=1000).remote()
    balancer = ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote({"server": server})
    rollout = SimpleNamespace(name="vllm", full_determinism=False)
    client = LLMServerClient(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), balancer)  # pyright: ignore[reportArgumentType]

    async def generate(name: str, prompt: list[int]) -> list[int]:
        output = await client.generate(name, prompt_ids=prompt, sampling_params={"max_tokens": 8})
        return output.token_ids

    try:
        asyncio.run(obey(generate, list))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
