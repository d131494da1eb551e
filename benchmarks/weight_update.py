"""New weights for a running engine, by each transport, against copying the same bytes once.

    uv run python -m benchmarks.weight_update [--repeats N] [--bucket-bytes N] [--directory PATH]

A random Qwen3-shaped model of about 400 MB is sent to an embedded engine: within the process; through memory that is
shared with an engine in another process (the host's, and where there is an accelerator, the accelerator's); and through
a file. A transport's seconds run from the offer of the manifest until the new weights serve, writing and reading
included; the baseline is `copy_` of every tensor, timed between the others. Figures are medians. That every engine ends
with the weights that were sent is checked, bit for bit.
"""

import argparse
import asyncio
import hashlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ostinato_engines import SamplingParams, WeightManifest
from ostinato_engines.device import pick_device, shares_memory, synchronize
from ostinato_engines.transformers_server import TransformersServer
from ostinato_engines.weight_transfer import (
    MemoryKind,
    StoredWeights,
    WeightReceiver,
    WeightSender,
    send_weights,
    serve_weight_updates,
    write_weights,
)


def build_model(seed: int, device: str) -> Qwen3ForCausalLM:
    """The width of Qwen3-0.6B with six of its layers and 8192 ids: 103 M parameters in float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(device).eval()


def digest_of(model: torch.nn.Module) -> str:
    """Of all parameters' bytes, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().data)
    return digest.hexdigest()


async def receive(descriptor: int, device: str) -> None:
    """The other process: an engine that follows its sender, and says at the end what weights it has."""
    model = build_model(1, device)
    async with TransformersServer(model, device=device) as server:
        print("ready", flush=True)
        await serve_weight_updates(server, WeightReceiver(socket.socket(fileno=descriptor)))
        await server.generate([1, 2, 3], SamplingParams(max_tokens=1), "check")
        print(digest_of(model), flush=True)


class RemoteEngine:
    """An engine in a process of its own, at the other end of a sender."""

    def __init__(self, device: str, memory: MemoryKind, bucket_bytes: int | None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.weight_update",
                    "--receive",
                    str(theirs.fileno()),
                    "--device",
                    device,
                ],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
                text=True,
            )
        self.sender = WeightSender(ours, memory=memory, device=device, bucket_bytes=bucket_bytes)
        self._line("ready")

    def _line(self, wanted: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != wanted:
            raise SystemExit(f"the other process must say {wanted}, got {line!r}")

    def close(self, digest: str) -> None:
        """Ends it; raises unless it has the weights of that digest."""
        self.sender.close()
        self._line(digest)
        self._process.wait()


class Ways:
    """The transports of one set of weights, each as a coroutine function; and the copy that they are compared with."""

    def __init__(
        self, server: TransformersServer, target: torch.nn.Module, source: torch.nn.Module, file: Path
    ) -> None:
        self.tensors = dict(source.named_parameters())
        self.manifest = WeightManifest.from_tensors(1, self.tensors.items())
        self.writing_seconds: list[float] = []
        self._server = server
        self._target = target
        self._plain = [torch.empty_like(tensor) for tensor in self.tensors.values()]
        self._file = file

    async def copy(self) -> None:
        """The bytes once, and nothing else."""
        with torch.no_grad():
            for to, tensor in zip(self._plain, self.tensors.values(), strict=True):
                to.copy_(tensor)

    async def in_process(self) -> None:
        """Straight into the engine."""
        await self._server.update_weights(self.manifest, self.tensors.items())

    async def disk(self) -> None:
        """Into a file, and from it into the engine."""
        started = time.perf_counter()
        write_weights(self._file, self.manifest, self.tensors.items())
        self.writing_seconds.append(time.perf_counter() - started)
        with StoredWeights(self._file) as stored:
            await self._server.update_weights(stored.manifest, stored)

    def through(self, sender: WeightSender) -> Callable[[], Awaitable[None]]:
        """To an engine in another process."""
        return lambda: send_weights(sender, self.manifest, self.tensors.items())

    def check(self) -> None:
        """Raises unless the engine of this process has the weights that were sent; and takes them away again."""
        for name, parameter in self._target.named_parameters():
            if not torch.equal(parameter, self.tensors[name]):
                raise SystemExit(f"{name} must be what was sent, got another")
            parameter.data.zero_()


async def measure(repeats: int, bucket_bytes: int | None, directory: Path, device: str) -> dict[str, float]:
    """All figures."""
    source, target = build_model(0, device), build_model(1, device)
    seconds: dict[str, list[float]] = {}
    async with TransformersServer(target, device=device) as server:
        ways = Ways(server, target, source, directory / "weights.safetensors")
        remotes = {"shared_memory": RemoteEngine(device, MemoryKind.SHARED, bucket_bytes)}
        if shares_memory(device):
            remotes["device_memory"] = RemoteEngine(device, MemoryKind.DEVICE, bucket_bytes)
        by_name: dict[str, Callable[[], Awaitable[None]]] = {
            "copy": ways.copy,
            "in_process": ways.in_process,
            **{name: ways.through(remote.sender) for name, remote in remotes.items()},
            "disk": ways.disk,
        }
        for repeat in range(repeats + 1):
            for name, way in by_name.items():
                synchronize(device)
                started = time.perf_counter()
                await way()
                synchronize(device)
                if repeat:
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                if name in ("in_process", "disk"):
                    ways.check()
        for remote in remotes.values():
            remote.close(digest_of(source))
    seconds["disk_writing"] = ways.writing_seconds[1:]
    return figures(seconds, sum(tensor.nbytes for tensor in ways.tensors.values()))


def figures(seconds: dict[str, list[float]], num_bytes: int) -> dict[str, float]:
    """Medians, printed for people and returned for the JSON line."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:14s} {1e3 * median:8.1f} ms {num_bytes / median / 1e9:8.2f} GB/s")
    transports = [name for name in medians if name not in ("copy", "disk_writing")]
    return {
        **{f"{name}_ratio": round(medians[name] / medians["copy"], 3) for name in transports},
        **{f"seconds_{name}": round(median, 5) for name, median in medians.items()},
        "megabytes": round(num_bytes / 1e6, 1),
    }


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-bytes", type=int)
    parser.add_argument("--directory", type=Path, help="where the file is written; by default a temporary folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--receive", type=int, metavar="FD", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    if arguments.receive is not None:
        asyncio.run(receive(arguments.receive, device))
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="weight-update-") as folder:
        print(json.dumps(asyncio.run(measure(arguments.repeats, arguments.bucket_bytes, Path(folder), device))))


if __name__ == "__main__":
    main()
