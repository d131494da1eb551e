"""Weight updates through an accelerator's memory; skipped where no accelerator can share its memory."""

import gc
import hashlib
import socket
import subprocess
import sys

import pytest

from ostinato_engines import WeightManifest, WeightPeerLostError
from ostinato_engines.device import memory_allocated, pick_device, shares_memory

torch = pytest.importorskip("torch")

from ostinato_engines.weight_transfer import MemoryKind, WeightSender  # noqa: E402

DEVICE = pick_device("auto")
pytestmark = pytest.mark.skipif(not shares_memory(DEVICE), reason="no accelerator here shares its memory")

FOLLOWER = """
import hashlib, os, signal, socket, sys, torch
from ostinato_engines.weight_transfer import WeightReceiver
receiver = WeightReceiver(socket.socket(fileno=int(sys.argv[1])))
while (update := receiver.next_update()) is not None:
    digests, places = {}, set()
    for index, (name, tensor) in enumerate(update):
        digests[name] = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        places.add(str(tensor.device))
        if update.manifest.version == 9 and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    update.finish()
    print(sorted(places), hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest(), flush=True)
"""


def digest_of(tensors):
    """As the follower says it."""
    digests = {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def tensors_of(seed, device):
    """Some tensors of several dtypes and sizes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"t{index}": torch.randn(index + 1, 257, generator=generator).to(
            device, (torch.float32, torch.bfloat16)[index % 2]
        )
        for index in range(20)
    }
    return {**tensors, "scalar": torch.tensor(seed, device=device), "across": torch.ones(30, 40, device=device).mT}


@pytest.mark.parametrize("memory", list(MemoryKind))
def test_another_process_receives_the_bits_and_its_death_costs_no_memory(memory):
    """Updates from the device's weights arrive bit for bit by either memory; when the receiver is killed the sender
    raises, and no memory of the device stays."""
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
    assert child.stdout is not None
    sender = WeightSender(ours, memory=memory, device=DEVICE, bucket_bytes=8192, timeout_s=120)
    place = f"{DEVICE}:0" if memory is MemoryKind.DEVICE else "cpu"
    for seed in range(3):
        tensors = tensors_of(seed, DEVICE)
        before = memory_allocated(DEVICE)
        sender.send(WeightManifest.from_tensors(seed, tensors.items()), tensors.items())
        assert child.stdout.readline().strip() == f"['{place}'] {digest_of(tensors)}"
        assert memory_allocated(DEVICE) == before
    with pytest.raises(WeightPeerLostError):
        sender.send(WeightManifest.from_tensors(9, tensors.items()), tensors.items())
    assert child.wait(60) == -9
    sender.close()
    gc.collect()
    assert memory_allocated(DEVICE) == before
