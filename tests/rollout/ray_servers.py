"""Servers that actors make by class path, as a user's own server is made."""

import asyncio
import os
import subprocess
import sys

from ostinato_engines import Capabilities, EngineInputError, EngineLoadError, WeightUpdateError
from ostinato_engines.testing import ScriptedServer

VOCAB = 96


class Scripted(ScriptedServer):
    """Answers by the sum of the prompt; keeps the contract."""

    def __init__(self, model_path, *, delay_s=0.0):
        super().__init__(
            lambda request: [(sum(request.prompt_ids) + place) % VOCAB for place in range(64)], max_model_len=128
        )
        self.delay_s = delay_s

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if not all(0 <= token_id < VOCAB for token_id in prompt_ids):
            raise EngineInputError("prompt_ids must be in the vocabulary, got others; use the tokenizer of this model")
        await asyncio.sleep(self.delay_s)
        return await super().generate(prompt_ids, sampling_params, request_id, media)

    def capabilities(self):
        return Capabilities(engine="scripted", logprobs=True, abort=True, kv_capacity_sessions=4)


class Telling(Scripted):
    """Tells what its process sees, and has a child, as engines do."""

    def __init__(self, model_path):
        super().__init__(model_path)
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    async def chat_completion(self, raw_request):
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {"child": self.child.pid, "devices": devices, "own": os.environ.get("OSTINATO_TEST")}


class Learning(Scripted):
    """Tells which weights it was given; refuses those of version 13."""

    weights = None

    async def update_weights(self, manifest, weights):
        def read():
            return {name: tensor.float().tolist() for name, tensor in weights}

        if manifest.version == 13:
            raise WeightUpdateError("version must not be 13, got 13; send another")
        self.weights = await asyncio.to_thread(read)
        self.policy_version = manifest.version

    async def chat_completion(self, raw_request):
        return {"weights": self.weights}

    def capabilities(self):
        return Capabilities(engine="scripted", weight_update=True)


class FailingAtStart(Scripted):
    """Finds at its start that it cannot be."""

    async def start(self):
        raise EngineLoadError("model must be a checkpoint, got none; give another")


class HangingAtStart(Scripted):
    """Never has started."""

    async def start(self):
        await asyncio.Event().wait()
