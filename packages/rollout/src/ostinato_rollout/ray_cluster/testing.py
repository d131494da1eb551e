"""A Ray cluster on this host for tests, the proof that nothing of it is left, and a policy to run on it."""

import asyncio
import hashlib
import os
import re
import shutil
import signal
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from ostinato_engines import SamplingParams, TokenOutput, WeightManifest
from ostinato_engines.testing import ScriptedServer
from ostinato_engines.testing.scripted import RecordedRequest
from ostinato_rollout.ray_cluster.cluster import init_ray
from ostinato_rollout.ray_cluster.host_processes import descendants, is_running, wait_until_gone
from ostinato_tokenization.testing import tiny_chat_tokenizer

__all__ = ["CallingServer", "descendants", "is_running", "local_cluster", "wait_until_gone"]

_STORE_BYTES = 80 << 20
_MAX_PATH = 40
"""Of the folder: the names of Ray's sockets in it are long, and a socket's path has at most 107 bytes."""


@contextmanager
def local_cluster(*, num_cpus: int = 16, num_gpus: int = 0) -> Iterator[None]:
    """A cluster of one node, or the one that this process has already.

    The amounts are what actors may ask for; nobody looks whether the host has them. Where TMPDIR is too long for sockets,
    its folder is in /tmp.

    Raises:
        AssertionError: A process of the cluster was left at the end; it has been killed.
    """
    if ray.is_initialized():
        yield
        return
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="ray", dir=parent if len(parent) <= _MAX_PATH else "/tmp")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before, own = descendants(os.getpid()), set()
    try:
        init_ray(
            {
                "address": "local",
                "num_cpus": num_cpus,
                "num_gpus": num_gpus,
                "include_dashboard": False,
                "_temp_dir": folder,
                "object_store_memory": _STORE_BYTES,
                "log_to_driver": False,
            }
        )
        own = descendants(os.getpid()) - before
        yield
    finally:
        # What this process has started meanwhile for other ends is not the cluster's.
        started = own.union(*map(descendants, own))
        ray.shutdown()
        left = wait_until_gone(started)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, f"no process must be left of the cluster, got {left}"


class CallingServer(ScriptedServer):
    """A policy of the tiny tokenizer that calls the tool `echo` some times and then answers.

    What it samples follows from the whole prompt: a token that was lost or came twice changes all that comes after it, so
    that a disturbed conversation that equals an undisturbed one is right. It keeps nothing of what it was asked.

    Args:
        model_path: Not read.
        num_calls: Turns with a call before the answer.
        delay_s: Seconds that each turn takes.
        update_s: The same of an update of weights.
    """

    def __init__(self, model_path: str, *, num_calls: int = 2, delay_s: float = 0.0, update_s: float = 0.0) -> None:
        super().__init__(self._turn)
        self._tokenizer = tiny_chat_tokenizer()
        answered = self._tokenizer.token_id("<tool_response>")
        assert answered is not None
        self._answered = answered
        self._num_calls, self._delay_s, self._update_s = num_calls, delay_s, update_s

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        request_id: str,
        media: Sequence[Any] = (),
    ) -> TokenOutput:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        output = await super().generate(prompt_ids, sampling_params, request_id, media)
        self.requests.clear()
        return output

    async def release(self, request_id: str) -> None:
        """Nothing is kept."""

    async def update_weights(self, manifest: WeightManifest, weights: Iterable[tuple[str, Any]]) -> None:
        await asyncio.sleep(self._update_s)
        await super().update_weights(manifest, weights)

    def _turn(self, request: RecordedRequest) -> list[int]:
        name = hashlib.blake2b(array("i", request.prompt_ids).tobytes(), digest_size=6).hexdigest()
        if request.prompt_ids.count(self._answered) >= self._num_calls:
            return self._encoded(f"So it is {name}.<|im_end|>")
        call = f'{{"name": "echo", "arguments": {{"text": "{name}"}}}}'
        return self._encoded(f"I ask for {name}.\n<tool_call>\n{call}\n</tool_call><|im_end|>")

    def _encoded(self, text: str) -> list[int]:
        """As a model samples it: tags are control tokens."""
        ids = []
        for piece in filter(None, re.split(r"(<\|im_end\|>|</?tool_call>)", text)):
            token_id = self._tokenizer.token_id(piece) if piece.startswith("<") else None
            ids += self._tokenizer.encode_text(piece) if token_id is None else [token_id]
        return ids
