"""verl's tool agent in verl's own environment: `python agent_loop_peer.py FOLDER`.

Not a benchmark: `benchmarks.agent_loop` starts it and asks it, a JSON line at a time, for the seconds of one round of all conversations
(`turns`) or of making the padded batch from what the last round returned (`arrays`). FOLDER holds the model's tokenizer, the
tool and the conversations. Everything runs in this process: the worker is the class that verl wraps as a Ray actor, and the client is
the stub that answers with what the conversations say.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class StubClient:
    """Answers at once: turn by turn what the conversation says; its number is in the request's id."""

    def __init__(self, output_class):
        self.output_class = output_class
        self.turns, self.served = [], []

    def begin(self, conversations):
        self.turns = [conversation["turns"] for conversation in conversations]
        self.served = [0] * len(self.turns)

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        number = int(request_id.removeprefix("det-"))
        turn = self.turns[number][self.served[number]]
        self.served[number] += 1
        return self.output_class(token_ids=turn["ids"], log_probs=turn["logprobs"], stop_reason="completed")


class Verl:
    """The worker with its two halves apart: running the agents, and making the batch of what they return."""

    def __init__(self, folder, lengths):
        import verl
        from omegaconf import OmegaConf
        from verl.experimental.agent_loop import tool_agent_loop  # noqa: F401  (registers the agent)
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
        from verl.workers.rollout.replica import TokenOutput

        class Worker(AgentLoopWorker):
            async def _agent_loop_postprocess(self, output, validate, **row):
                return output

            def _postprocess(self, outputs, **_):
                return outputs

        config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
        config.actor_rollout_ref.model.path = str(folder / "model")
        rollout = config.actor_rollout_ref.rollout
        rollout.name = "vllm"  # one must be named; none is started
        rollout.full_determinism = rollout.calculate_log_probs = True
        rollout.prompt_length, rollout.response_length = lengths
        rollout.multi_turn.function_tool_path = str(folder / "verl_tools.py")
        rollout.multi_turn.max_tool_response_length = 2000
        self.folder = folder
        self.client = StubClient(TokenOutput)
        self.worker = Worker(config, self.client)
        self.original = AgentLoopWorker

    def begin(self, number):
        """Takes the conversations of a round."""
        import numpy as np
        from verl.protocol import DataProto

        conversations = json.loads((self.folder / f"conversations-{number}.json").read_text(encoding="utf-8"))
        self.client.begin(conversations)
        columns = {
            "raw_prompt": [conversation["prompt"] for conversation in conversations],
            "agent_name": ["tool_agent"] * len(conversations),
            "priority": list(range(len(conversations))),
        }
        arrays = {}
        for name, values in columns.items():
            arrays[name] = np.empty(len(values), dtype=object)
            arrays[name][:] = values
        self.batch = DataProto(non_tensor_batch=arrays)
        self.rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    async def turns(self):
        started = time.process_time()
        self.outputs = await self.worker.generate_sequences(self.batch)
        return time.process_time() - started

    async def arrays(self):
        started = time.process_time()
        padded = [
            await self.original._agent_loop_postprocess(self.worker, output, False, **row)
            for output, row in zip(self.outputs, self.rows, strict=True)
        ]
        self.data = self.original._postprocess(self.worker, padded).batch
        return time.process_time() - started

    def digest(self):
        """A hash of the tokens, of what is trained on, and of the log-probabilities there."""
        import torch

        real = self.data["attention_mask"].bool()
        prompt_length = self.data["prompts"].shape[1]
        mask = torch.zeros_like(real)
        mask[:, prompt_length:] = self.data["response_mask"].bool()
        ids, logprobs = self.data["input_ids"][real], self.data["rollout_log_probs"][mask[:, prompt_length:]]
        parts = (ids, mask[real], logprobs)
        return [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in parts]


def main():
    """Answers until its input ends. Whatever verl prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder = Path(sys.argv[1])
    sides = {}
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                lengths = tuple(request["lengths"])
                if lengths not in sides:
                    sides[lengths] = Verl(folder, lengths)
                side = sides[lengths]
                if request["run"] == "turns":
                    side.begin(request["conversations"])
                    answer = {"seconds": runner.run(side.turns())}
                elif request["run"] == "arrays":
                    answer = {"seconds": runner.run(side.arrays())}
                else:
                    answer = {"digest": side.digest()}
            except Exception as error:  # verl may fail as it likes; the benchmark then leaves it out and says why
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
