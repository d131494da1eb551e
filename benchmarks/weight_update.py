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


async def measure(repeats: int, bucket_bytes: int | None, directory: Path, device: str) -> dict[str, float]:
    """All figures."""
    source, target, plain = build_model(0, device), build_model(1, device), build_model(2, device)
    tensors = dict(source.named_parameters())
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    manifest = WeightManifest.from_tensors(1, tensors.items())
    file = directory / "weights.safetensors"
    seconds: dict[str, list[float]] = {}

    async def copy() -> None:
        with torch.no_grad():
            for parameter, tensor in zip(plain.parameters(), tensors.values(), strict=True):
                parameter.copy_(tensor)

    async with TransformersServer(target, device=device) as server:

        async def in_process() -> None:
            await server.update_weights(manifest, tensors.items())

        async def disk() -> None:
            started = time.perf_counter()
            write_weights(file, manifest, tensors.items())
            seconds.setdefault("disk_writing", []).append(time.perf_counter() - started)
            with StoredWeights(file) as stored:
                await server.update_weights(stored.manifest, stored)

        remotes = {"shared_memory": RemoteEngine(device, MemoryKind.SHARED, bucket_bytes)}
        if shares_memory(device):
            remotes["device_memory"] = RemoteEngine(device, MemoryKind.DEVICE, bucket_bytes)
        ways: dict[str, Callable[[], Awaitable[None]]] = {"copy": copy, "in_process": in_process}
        for name, remote in remotes.items():
            ways[name] = lambda sender=remote.sender: send_weights(sender, manifest, tensors.items())
        ways["disk"] = disk
        for repeat in range(repeats + 1):
            for name, way in ways.items():
                synchronize(device)
                started = time.perf_counter()
                await way()
                synchronize(device)
                if repeat:
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                if name in ("in_process", "disk"):
                    for (parameter_name, parameter), tensor in zip(
                        target.named_parameters(), tensors.values(), strict=True
                    ):
                        if not torch.equal(parameter, tensor):
                            raise SystemExit(f"{parameter_name} must be what was sent, got another by {name}")
                        parameter.data.zero_()
        digest = digest_of(source)
        for remote in remotes.values():
            remote.close(digest)
    file.unlink()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:14s} {1e3 * median:8.1f} ms {num_bytes / median / 1e9:8.2f} GB/s")
    return {
        **{f"{name}_ratio": round(medians[name] / medians["copy"], 3) for name in ways if name != "copy"},
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
