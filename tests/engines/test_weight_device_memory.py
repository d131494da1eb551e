"""How a sender uses an accelerator's memory, with memory of the host in its place: what is sized, shared, and given back when."""

import itertools
import socket
import threading

import msgspec
import pytest

from ostinato_engines import WeightManifest
from ostinato_engines import device as devices

torch = pytest.importorskip("torch")

from ostinato_engines.weight_transfer import MemoryKind, WeightReceiver, WeightSender  # noqa: E402
from ostinato_engines.weight_transfer.memory import DeviceMemory  # noqa: E402

BUCKET = 4096


class Driver:
    """Stands in for an accelerator: hands memory out by number, and spoils what its owner has given back."""

    def __init__(self, monkeypatch):
        self._numbers = itertools.count()
        self._memory = {}
        self.sizes = []
        """Slots and bytes of each memory that was made."""
        self.live = 0
        """Bytes of the memory that was made and not given back; the most of them."""
        self.most = 0
        monkeypatch.setattr(devices, "shares_memory", lambda device: True)
        monkeypatch.setattr(devices, "export_memory", self._export)
        monkeypatch.setattr(devices, "import_memory", lambda exported: self._memory[exported.num_bytes])
        create, close = DeviceMemory.create.__func__, DeviceMemory.close

        def created(cls, device, *, num_slots, slot_bytes):
            self.sizes.append((num_slots, slot_bytes))
            self.live += num_slots * slot_bytes
            self.most = max(self.most, self.live)
            return create(cls, device, num_slots=num_slots, slot_bytes=slot_bytes)

        def closed(memory):
            if memory._exported is not None and memory._memory is not None:
                self.live -= memory._memory.numel()
                memory._memory.fill_(0xAB)
            close(memory)

        monkeypatch.setattr(DeviceMemory, "create", classmethod(created))
        monkeypatch.setattr(DeviceMemory, "close", closed)

    def _export(self, memory):
        number = next(self._numbers)
        self._memory[number] = memory
        return msgspec.structs.replace(EXPORTED, num_bytes=number)


EXPORTED = devices.ExportedMemory("gpu", b"", 0, 0, b"", 0, b"", False)


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


def sent(updates):
    """Sends some updates through device memory; returns what a receiver in another thread copied of each."""
    ours, theirs = socket.socketpair()
    received = []

    def follow():
        receiver = WeightReceiver(theirs, timeout_s=60)
        while (update := receiver.next_update()) is not None:
            received.append({name: tensor.clone() for name, tensor in update})
            update.finish()
        receiver.close()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    sender = WeightSender(ours, memory=MemoryKind.DEVICE, device="cpu", bucket_bytes=BUCKET, timeout_s=60)
    try:
        for version, tensors in enumerate(updates):
            sender.send(WeightManifest.from_tensors(version, tensors), iter(tensors))
    finally:
        sender.close()
        thread.join(60)
    assert not thread.is_alive()
    return received


def tensors_of(sizes):
    """Tensors of so many bytes, no two alike."""
    return [
        (f"t{place}", torch.arange(size, dtype=torch.int64).add_(place).to(torch.uint8))
        for place, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    "sizes",
    [
        [100, 3 * BUCKET, 200, 300],
        [3 * BUCKET, 100, 200],
        [100] * 200 + [2 * BUCKET, 5 * BUCKET, 2 * BUCKET],
        [BUCKET] * 7,
        [BUCKET + 1],
        [64],
        [],
    ],
)
def test_what_is_larger_than_a_bucket_has_memory_of_its_own(driver, sizes):
    """Values arrive whatever the sizes are and in whatever order, never from memory that was given back; no more exists at a time than two
    buckets, or the one large tensor; and between updates there is none."""
    tensors = tensors_of(sizes)
    for received in sent([tensors, tensors]):
        assert list(received) == [name for name, _ in tensors]
        assert all(torch.equal(received[name], tensor) for name, tensor in tensors)
    assert driver.live == 0
    largest = max((size for size in sizes if size > BUCKET), default=0)
    assert driver.most <= max(2 * BUCKET, -(-largest // 64) * 64)
    assert all(slots == 2 or size > BUCKET for slots, size in driver.sizes)


def test_an_engine_that_fails_with_a_large_tensor_takes_the_next_update(driver):
    """After an update that broke off in memory for one tensor the next one comes whole, through memory that is made anew."""
    ours, theirs = socket.socketpair()
    received = []

    def follow():
        receiver = WeightReceiver(theirs, timeout_s=60)
        while (update := receiver.next_update()) is not None:
            try:
                for name, tensor in update:
                    if update.manifest.version == 0:
                        raise MemoryError("full")
                    received.append((name, tensor.clone()))
                update.finish()
            except MemoryError as error:
                update.fail(error)
        receiver.close()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    sender = WeightSender(ours, memory=MemoryKind.DEVICE, device="cpu", bucket_bytes=BUCKET, timeout_s=60)
    tensors = tensors_of([2 * BUCKET, 100])
    with pytest.raises(Exception, match="full"):
        sender.send(WeightManifest.from_tensors(0, tensors), iter(tensors))
    sender.send(WeightManifest.from_tensors(1, tensors), iter(tensors))
    sender.close()
    thread.join(60)
    assert not thread.is_alive()
    assert [name for name, _ in received] == ["t0", "t1"]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(received, tensors, strict=True))
