"""Weight updates between processes: whole or not at all, bounded in memory, and nothing left behind."""

import contextlib
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import (
    EngineInputError,
    EngineNotReadyError,
    ManifestError,
    TensorSpec,
    WeightManifest,
    WeightPeerLostError,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)

torch = pytest.importorskip("torch")

from ostinato_engines.weight_transfer import (  # noqa: E402
    MemoryKind,
    WeightListener,
    WeightReceiver,
    WeightSender,
    connect,
)
from ostinato_engines.weight_transfer import memory as memory_module  # noqa: E402
from ostinato_engines.weight_transfer.channel import (  # noqa: E402
    Accepted,
    Bucket,
    Channel,
    Ended,
    Entry,
    Failed,
    MemoryOpened,
    Offer,
    Taken,
)
from ostinato_engines.weight_transfer.layout import ALIGNMENT, SAFETENSORS_DTYPES  # noqa: E402
from ostinato_engines.weight_transfer.memory import SharedMemory  # noqa: E402

TENSORS = {f"layer.{index}": torch.full((index + 1, 40), float(index)) for index in range(12)}
MANIFEST = WeightManifest.from_tensors(3, TENSORS.items())


def copied(update):
    """Reads an update to its end and keeps copies."""
    return {name: tensor.clone() for name, tensor in update}


class Follower:
    """A receiver in a thread that applies updates with `apply`, as an engine in another process would."""

    def __init__(self, connection, *, apply=copied, timeout_s=20.0):
        self.receiver = WeightReceiver(connection, timeout_s=timeout_s)
        self.apply = apply
        self.results = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        with contextlib.suppress(WeightPeerLostError):
            while (update := self.receiver.next_update()) is not None:
                try:
                    self.results.append(self.apply(update))
                    update.finish()
                except Exception as error:
                    self.results.append(error)
                    with contextlib.suppress(WeightPeerLostError):
                        update.fail(error)
        self.receiver.close()

    def join(self):
        """Waits for the sender's goodbye."""
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def connected():
    """A function: a sender and a follower that are connected; both are ended afterwards."""
    with contextlib.ExitStack() as stack:

        def connect_ends(*, apply=copied, timeout_s=20.0, **options):
            ours, theirs = socket.socketpair()
            follower = Follower(theirs, apply=apply, timeout_s=timeout_s)
            sender = WeightSender(ours, timeout_s=timeout_s, **options)
            stack.callback(follower.join)
            stack.callback(sender.close)
            return sender, follower

        yield connect_ends


@pytest.fixture
def raw():
    """A function: a `WeightReceiver`, and the bare channel of whoever pretends to be its sender; or the other way."""
    with contextlib.ExitStack() as stack:

        def connect_ends(kind, **options):
            ours, theirs = socket.socketpair()
            end = kind(ours, timeout_s=10.0, **options)
            channel = Channel(theirs, timeout_s=10.0, peer="the other")
            stack.callback(end.close)
            stack.callback(channel.close)
            return end, channel

        yield connect_ends


def descriptors():
    """Open file descriptors of this process, each with what it is of: those of others may be closed at any time."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def mappings():
    """Mappings of weight memory in this process."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "ostinato-weights" in line}


def shared_files():
    """Files of ours in the folder of shared memory; the folders there are those of engines, which may run beside these tests."""
    return sorted(path for path in Path("/dev/shm").glob("*ostinato*") if path.is_file())


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")


def same(received, sent):
    """Whether two collections of tensors are equal bit for bit, by name, shape and dtype."""
    if received.keys() != sent.keys():
        return False
    return all(
        tensor.dtype == sent[name].dtype
        and tensor.shape == sent[name].shape
        and tensor.contiguous().view(-1).view(torch.uint8).tolist()
        == sent[name].contiguous().view(-1).view(torch.uint8).tolist()
        for name, tensor in received.items()
    )


tensors_of_any_kind = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
    st.tuples(
        st.sampled_from(sorted(SAFETENSORS_DTYPES)),
        st.lists(st.integers(0, 5), max_size=3),
        st.booleans(),
        st.integers(0, 255),
    ),
    max_size=8,
)


def make_tensor(dtype, shape, transposed, byte):
    """A tensor of some bits, laid out in row-major order or not."""
    dtype = getattr(torch, dtype)
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    values = (torch.arange(num_bytes, dtype=torch.int64) * 7 + byte) % (2 if dtype is torch.bool else 256)
    tensor = values.to(torch.uint8).view(dtype).view(shape)
    return tensor.mT.contiguous().mT if transposed and len(shape) > 1 else tensor


@given(described=tensors_of_any_kind, bucket_bytes=st.integers(1, 300), reverse=st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_tensor_arrives_bit_for_bit(described, bucket_bytes, reverse):
    """Whatever dtypes, shapes, layouts, names, bucket size and order: the receiver has the bits that were sent."""
    tensors = {name: make_tensor(*description) for name, description in described.items()}
    ours, theirs = socket.socketpair()
    follower = Follower(theirs)
    sender = WeightSender(ours, bucket_bytes=bucket_bytes)
    manifest = WeightManifest.from_tensors(5, tensors.items())
    sender.send(manifest, sorted(tensors.items(), reverse=reverse))
    sender.close()
    follower.join()
    (received,) = follower.results
    assert same(received, tensors)


def test_updates_follow_each_other_in_the_same_memory(connected, monkeypatch):
    """One memory serves update after update, and a larger tensor gets a larger one; each update brings its own values."""
    created = []
    create = SharedMemory.create.__func__
    monkeypatch.setattr(
        SharedMemory,
        "create",
        classmethod(lambda cls, **sizes: created.append(sizes["slot_bytes"]) or create(cls, **sizes)),
    )
    sender, follower = connected(bucket_bytes=1024)
    for value in range(3):
        tensors = {"a": torch.full((8,), float(value)), "b": torch.full((300,), -float(value))}
        sender.send(WeightManifest.from_tensors(value, tensors.items()), tensors.items())
        assert same(follower.results[-1], tensors)
    large = {"a": torch.arange(5000.0)}
    sender.send(WeightManifest.from_tensors(9, large.items()), large.items())
    assert same(follower.results[-1], large)
    assert created == [1216, 20032]


def test_memory_is_bounded_by_two_buckets(connected):
    """However large the model is, two buckets of the size asked for exist, one tensor of the source at a time, and one at the
    receiver."""
    sizes, alive_at_source, alive_at_receiver = [], [], []
    live_source, live_received = weakref.WeakSet(), weakref.WeakSet()
    specs = tuple(TensorSpec(f"t{index}", (256,), "float32") for index in range(400))

    def source():
        for spec in specs:
            tensor = torch.zeros(spec.shape)
            live_source.add(tensor)
            alive_at_source.append(len(live_source))
            yield spec.name, tensor
            del tensor

    def apply(update):
        for _, tensor in update:
            live_received.add(tensor)
            alive_at_receiver.append(sum(tensor.numel() > 0 for tensor in live_received))
            memory = update._kept.memory
            sizes.append(os.fstat(memory.descriptors[0]).st_size)

    sender, _ = connected(apply=apply, bucket_bytes=8192)
    sender.send(WeightManifest(1, specs), source())
    assert set(sizes) == {2 * 8192}
    assert max(alive_at_source) == max(alive_at_receiver) == 1
    assert len(alive_at_receiver) == 400


def test_a_tensor_larger_than_a_bucket_has_one_to_itself(connected):
    """The memory grows to the largest tensor, and to no more."""
    tensors = {"small": torch.zeros(4), "large": torch.arange(10_000.0), "other": torch.ones(3)}
    sizes = []

    def apply(update):
        sizes.extend(update._kept.memory.slot_bytes for _ in update)

    sender, _ = connected(apply=apply, bucket_bytes=64)
    sender.send(WeightManifest.from_tensors(1, tensors.items()), tensors.items())
    assert set(sizes) == {40_000}


SPOILED = [
    (lambda pairs: [*pairs, pairs[0]], "'layer.0' twice"),
    (lambda pairs: [pairs[0], *pairs], "'layer.0' twice"),
    (lambda pairs: [("no.such", pairs[0][1]), *pairs[1:]], "'no.such' beyond it"),
    (
        lambda pairs: [(pairs[0][0], pairs[0][1][:, :1]), *pairs[1:]],
        r"layer\.0 must be float32 \(1, 40\).*got float32 \(1, 1\)",
    ),
    (lambda pairs: [(pairs[0][0], pairs[0][1].double()), *pairs[1:]], r"layer\.0 must be float32.*got float64"),
    (lambda pairs: pairs[:-1], r"none for layer\.11 \(1 missing\)"),
    (lambda pairs: [], "12 missing"),
    (lambda pairs: [*pairs[:5], None, *pairs[5:]], "TypeError.* after 5 of 12 tensors"),
    (lambda pairs: [*pairs[:5], ("layer.5", "text")], "AttributeError.* after"),
    (lambda pairs: (1 / (5 - index) and pair for index, pair in enumerate(pairs)), "ZeroDivisionError.* after 5 of 12"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_a_spoiled_source_fails_both_ends_and_the_next_update_succeeds(connected, spoil, message):
    """A tensor twice, unknown, of another shape or dtype, missing or raising breaks the update at both ends, by name."""
    sender, follower = connected(bucket_bytes=300)
    with pytest.raises(WeightUpdateError, match=message):
        sender.send(MANIFEST, spoil(list(TENSORS.items())))
    sender.send(MANIFEST, TENSORS.items())
    failed, received = follower.results
    assert isinstance(failed, WeightUpdateError)
    assert "sender of weights must stream to their end" in str(failed)
    assert same(received, TENSORS)


def test_why_an_update_broke_is_told_though_its_memory_cannot_be_freed(connected, monkeypatch):
    """At both ends the first error is the one that is raised, with the second as a note."""
    sender, follower = connected(bucket_bytes=300)
    close = SharedMemory.close

    def fails(memory):
        close(memory)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(SharedMemory, "close", fails)
    with pytest.raises(WeightUpdateError, match="none for") as found:
        sender.send(MANIFEST, list(TENSORS.items())[:-1])
    sender.send(MANIFEST, TENSORS.items())
    failed, received = follower.results
    assert same(received, TENSORS)
    assert "sender of weights must stream to their end, got WeightUpdateError: weights must hold every" in str(failed)
    note = ["freeing the memory of the update failed, too: RuntimeError: the device is gone"]
    assert [found.value.__notes__, failed.__notes__] == [note, note]


def test_a_refused_manifest_costs_no_tensor(connected):
    """What the engine says before it takes the first tensor reaches the sender as that error; the source is not touched."""
    refusals = [ManifestError("layer.0 must fit"), EngineNotReadyError("weights must be awake")]
    asked = []

    def apply(update):
        if refusals:
            raise refusals.pop(0)
        return copied(update)

    def source():
        asked.append(True)
        yield from TENSORS.items()

    sender, follower = connected(apply=apply)
    for kind, message in ((ManifestError, "layer.0 must fit"), (EngineNotReadyError, "must be awake")):
        with pytest.raises(kind, match=message):
            sender.send(MANIFEST, source())
    assert not asked
    sender.send(MANIFEST, source())
    assert same(follower.results[-1], TENSORS)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (WeightManifest(1, (TensorSpec("a", (1,), "float32"),) * 2), "'a' twice"),
        (WeightManifest(1, (TensorSpec("a", (1,), "complex64"),)), "complex64"),
        (WeightManifest(1, (TensorSpec("a", (1,), "__class__"),)), "__class__"),
        (WeightManifest(1, (TensorSpec("a", (2, -1), "float32"),)), "at least 0"),
    ],
)
def test_a_manifest_that_no_transport_carries_is_not_offered(connected, manifest, message):
    """A name twice, a dtype that cannot be carried and a negative size are refused at the sender."""
    sender, follower = connected()
    with pytest.raises(ManifestError, match=message):
        sender.send(manifest, [])
    sender.send(MANIFEST, TENSORS.items())
    assert len(follower.results) == 1


def test_an_engine_that_fails_in_the_middle_stops_the_sender(connected):
    """The sender learns the engine's error while it still streams, and the next update is complete."""
    taken = []

    def apply(update):
        if taken:
            return copied(update)
        for name, _ in update:
            taken.append(name)
            if len(taken) == 3:
                raise MemoryError("no room")
        return None

    sender, follower = connected(apply=apply, bucket_bytes=1)
    with pytest.raises(WeightUpdateError, match="got MemoryError: no room"):
        sender.send(MANIFEST, TENSORS.items())
    sender.send(MANIFEST, TENSORS.items())
    assert taken == ["layer.0", "layer.1", "layer.2"]
    assert same(follower.results[-1], TENSORS)


@pytest.mark.parametrize("num_read", [0, 5])
def test_an_engine_that_ignores_weights_is_not_believed(connected, num_read):
    """An engine that returns without reading everything makes the update fail."""

    def read_some(update):
        stream = iter(update)
        for _ in range(num_read):
            next(stream)

    sender, _ = connected(apply=read_some)
    with pytest.raises(WeightUpdateError, match=f"{num_read} of 12 tensors; it ignored the rest"):
        sender.send(MANIFEST, TENSORS.items())


def test_a_tensor_that_is_kept_is_empty_and_never_another(connected):
    """Who collects the tensors themselves finds them empty: nobody trains or serves on recycled memory."""
    sender, follower = connected(apply=dict, bucket_bytes=300)
    sender.send(MANIFEST, TENSORS.items())
    (kept,) = follower.results
    assert [tensor.numel() for tensor in kept.values()] == [0] * 12


@pytest.mark.parametrize("part", [lambda tensor: tensor[0], lambda tensor: tensor.mT, lambda tensor: tensor.numpy()])
def test_a_part_that_is_kept_breaks_the_update(connected, part):
    """Who keeps a view of a tensor is told so, before the memory changes under it; the view stays as it was."""

    def apply(update):
        kept = []
        try:
            for _, tensor in update:
                kept.append(part(tensor))
        except WeightUpdateError as error:
            return error, [float(view.sum()) for view in kept]

    sender, follower = connected(apply=apply)
    with pytest.raises(WeightUpdateError, match="engine must read all weights"):
        sender.send(MANIFEST, TENSORS.items())
    error, sums = follower.results[0]
    assert "layer.0 must be let go" in str(error)
    assert sums == [0.0]


def test_weights_are_read_once(connected):
    """A second reading of the same update is an error, not an empty model."""

    def apply(update):
        copied(update)
        return copied(update)

    sender, _ = connected(apply=apply)
    with pytest.raises(WeightUpdateError, match="read once"):
        sender.send(MANIFEST, TENSORS.items())


def test_one_update_is_sent_at_a_time(connected):
    """A second update that is begun while one streams is refused, and the first one arrives whole."""
    sender, follower = connected()

    def source():
        with pytest.raises(EngineInputError, match="two at a time"):
            sender.send(MANIFEST, TENSORS.items())
        yield from TENSORS.items()

    sender.send(MANIFEST, source())
    (received,) = follower.results
    assert same(received, TENSORS)


# Ends that stand still, or go away


def test_a_silent_receiver_times_out():
    """A receiver that does not answer the offer costs the sender its timeout, not for ever."""
    ours, theirs = socket.socketpair()
    with theirs:
        sender = WeightSender(ours, timeout_s=0.05)
        with pytest.raises(WeightUpdateTimeoutError, match=r"answer within 0\.05 s"):
            sender.send(MANIFEST, TENSORS.items())
        with pytest.raises(WeightPeerLostError):
            sender.send(MANIFEST, TENSORS.items())
        sender.close()


def test_a_receiver_that_stops_taking_times_out():
    """A receiver that accepts and then takes nothing stops the sender at the second bucket."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, timeout_s=5, peer="sender")
    sent = []

    def source():
        for name, tensor in TENSORS.items():
            sent.append(name)
            yield name, tensor

    sender = WeightSender(ours, timeout_s=0.2, bucket_bytes=1)
    channel.send(Accepted(1, os.getpid()))
    with pytest.raises(WeightUpdateTimeoutError):
        sender.send(MANIFEST, source())
    assert sent == ["layer.0", "layer.1", "layer.2"]
    sender.close()
    channel.close()


def test_a_silent_sender_times_out():
    """A sender that offers and then says nothing costs the receiver its timeout, and the conversation is over."""
    ours, theirs = socket.socketpair()
    receiver, channel = WeightReceiver(ours, timeout_s=0.05), Channel(theirs, timeout_s=5, peer="receiver")
    channel.send(Offer(1, MANIFEST))
    update = receiver.next_update()
    with pytest.raises(WeightUpdateTimeoutError, match="sender of weights must answer"):
        copied(update)
    with pytest.raises(WeightPeerLostError):
        update.fail(WeightUpdateError("late"))
    with pytest.raises(WeightPeerLostError):
        receiver.next_update()
    receiver.close()
    channel.close()


def test_a_sender_that_goes_away_is_lost(raw):
    """A closed channel in the middle of an update is an error at once; between updates it is a goodbye."""
    receiver, channel = raw(WeightReceiver)
    channel.send(Offer(1, MANIFEST))
    update = receiver.next_update()
    channel.close()
    with pytest.raises(WeightPeerLostError, match="sender of weights must stay"):
        copied(update)
    receiver, channel = raw(WeightReceiver)
    channel.close()
    assert receiver.next_update() is None


def test_a_receiver_that_goes_away_is_lost(raw):
    """A sender whose receiver closes raises at once, before it and after it accepted."""
    sender, channel = raw(WeightSender)
    channel.close()
    with pytest.raises(WeightPeerLostError):
        sender.send(MANIFEST, TENSORS.items())
    sender, channel = raw(WeightSender, bucket_bytes=1)
    channel.send(Accepted(1, os.getpid()))

    def source():
        for name, tensor in TENSORS.items():
            if name == "layer.4":
                channel.close()
            if name == "layer.1":
                channel.send(Taken(1, 0))
            yield name, tensor
            if name in ("layer.2", "layer.3"):
                channel.send(Taken(1, 1))

    with pytest.raises(WeightPeerLostError):
        sender.send(MANIFEST, source())


# Ends that lie


def opened(update=1, *, num_slots=2, slot_bytes=4096):
    """New memory, and the message that opens it."""
    memory = SharedMemory.create(num_slots=num_slots, slot_bytes=slot_bytes)
    return memory, MemoryOpened(update, MemoryKind.SHARED, num_slots, slot_bytes)


def bucket(*entries, index=0, slot=0, update=1):
    """A bucket with entries (name, offset)."""
    return Bucket(update, index, slot, tuple(Entry(*entry) for entry in entries))


LIES = {
    "unknown name": ([bucket(("no.such", 0))], WeightUpdateError, "'no.such' beyond it"),
    "a name twice": ([bucket(("layer.0", 0), ("layer.0", 64))], WeightUpdateError, "'layer.0' twice"),
    "beyond the slot": ([bucket(("layer.0", 4096 - 64))], WeightUpdateError, "within its bucket"),
    "before the slot": ([bucket(("layer.0", -64))], WeightUpdateError, "within its bucket"),
    "between elements": ([bucket(("layer.0", 2))], WeightUpdateError, "within its bucket"),
    "no such slot": ([bucket(slot=2)], WeightUpdateError, "got 2"),
    "a negative slot": ([bucket(slot=-1)], WeightUpdateError, "got -1"),
    "buckets out of order": ([bucket(index=1)], WeightUpdateError, "number 1 after 0"),
    "a bucket again": ([bucket(), bucket()], WeightUpdateError, "number 0 after 1"),
    "a bucket lost": ([bucket(), Ended(1, 2)], WeightUpdateError, "number 2 after 1"),
    "too few tensors": ([bucket(("layer.0", 0)), Ended(1, 1)], WeightUpdateError, "11 missing"),
    "another update": ([bucket(update=7)], WeightPeerLostError, "buckets of update 1"),
    "an answer": ([Taken(1, 0)], WeightPeerLostError, "got Taken"),
    "its own failure": ([Failed(1, "ValueError", "no gather")], WeightUpdateError, "ValueError: no gather"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_sender_that_lies_is_found_out(raw, lie):
    """What a sender says is checked before any byte is used: names, places, order and number."""
    messages, kind, words = LIES[lie]
    receiver, channel = raw(WeightReceiver)
    memory, message = opened()
    channel.send(Offer(1, MANIFEST))
    update = receiver.next_update()
    channel.send(message, descriptors=memory.descriptors)
    for each in messages:
        channel.send(each)
    with pytest.raises(kind, match=words):
        copied(update)
    memory.close()


@needs_proc
@pytest.mark.parametrize(
    ("message", "with_descriptor", "words"),
    [
        (MemoryOpened(1, "shared", 2, 8192), True, "8192 bytes for 2 slots of 8192"),
        (MemoryOpened(1, "shared", 2, 2048), True, "8192 bytes for 2 slots of 2048"),
        (MemoryOpened(1, "shared", 0, 4096), True, "0 slots"),
        (MemoryOpened(1, "shared", 2, 4096), False, "no descriptor"),
        (MemoryOpened(1, "telepathy", 2, 4096), True, "telepathy"),
        (MemoryOpened(1, "device", 2, 4096, b"nonsense"), False, "memory must be what the sender says"),
    ],
)
def test_memory_that_is_not_what_it_says_is_not_mapped(raw, message, with_descriptor, words):
    """Another size, no descriptor, an unknown kind or a broken handle is an error, and the descriptor is closed."""
    receiver, channel = raw(WeightReceiver)
    memory = SharedMemory.create(num_slots=2, slot_bytes=4096)
    channel.send(Offer(1, MANIFEST))
    update = receiver.next_update()
    channel.send(message, descriptors=memory.descriptors if with_descriptor else ())
    before = descriptors()
    with pytest.raises(WeightUpdateError, match=words):
        copied(update)
    assert descriptors() <= before
    memory.close()


def test_buckets_without_memory_are_refused(raw):
    """A bucket before any memory was opened is an error."""
    receiver, channel = raw(WeightReceiver)
    channel.send(Offer(1, MANIFEST))
    update = receiver.next_update()
    channel.send(bucket(("layer.0", 0)))
    with pytest.raises(WeightUpdateError, match="memory that was opened"):
        copied(update)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!IB", 5, 0) + b"hello",
        struct.pack("!IB", 2**31, 0),
        struct.pack("!IB", 4, 9) + b"abcd",
        struct.pack("!IB", 4, 1) + b"abcde",
        struct.pack("!IB", 100, 0) + b"cut",
        b"\0",
    ],
)
def test_noise_is_no_message(noise):
    """Who speaks something else, or stops in the middle of a message, is lost; nothing hangs and nothing is unpickled."""
    ours, theirs = socket.socketpair()
    receiver = WeightReceiver(ours, timeout_s=5)
    theirs.sendall(noise)
    theirs.close()
    with pytest.raises(WeightPeerLostError):
        receiver.next_update()
    receiver.close()


def test_another_protocol_is_refused(raw):
    """A sender of another version of the protocol is told so, and nothing is accepted."""
    receiver, channel = raw(WeightReceiver)
    channel.send(Offer(1, MANIFEST, protocol=99))
    channel.send(Offer(2, MANIFEST))
    assert receiver.next_update() is not None
    answer, _ = channel.receive()
    assert isinstance(answer, Failed)
    assert "protocol must be 1, got 99" in answer.message


def test_a_receiver_that_answers_something_else_is_lost(raw):
    """A receiver that answers an offer with anything but yes or no ends the conversation."""
    sender, channel = raw(WeightSender)
    channel.send(Ended(1, 0))
    with pytest.raises(WeightPeerLostError, match="must answer Accepted, got Ended"):
        sender.send(MANIFEST, TENSORS.items())


# Nothing is left behind


@needs_proc
@pytest.mark.parametrize("spoil", [None, *(spoil for spoil, _ in SPOILED)])
def test_nothing_is_left_behind(spoil):
    """After an update that succeeded or failed, and goodbye, no descriptor, mapping or file is left."""
    gc.collect()
    before = descriptors() | mappings(), shared_files()
    ours, theirs = socket.socketpair()
    follower, sender = Follower(theirs), WeightSender(ours, bucket_bytes=300)
    pairs = list(TENSORS.items())
    with contextlib.suppress(WeightUpdateError):
        sender.send(MANIFEST, pairs if spoil is None else spoil(pairs))
    sender.close()
    follower.join()
    del follower, sender
    gc.collect()
    assert descriptors() | mappings() <= before[0]
    assert shared_files() == before[1]


@needs_proc
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files without names are Linux's")
def test_shared_memory_has_no_name_and_a_fixed_size():
    """Nobody finds the memory by name, nobody but this user can open it, and nobody can cut it off under a mapping."""
    memory = SharedMemory.create(num_slots=2, slot_bytes=4096)
    (descriptor,) = memory.descriptors
    status = os.fstat(descriptor)
    assert status.st_nlink == 0 or "deleted" in os.readlink(f"/proc/self/fd/{descriptor}")
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 2 * 4096
    with pytest.raises(PermissionError):
        os.truncate(descriptor, 4096)
    memory.close()


CHILD = """
import os, signal, socket, sys, torch
from ostinato_engines import WeightManifest
from ostinato_engines.weight_transfer import WeightReceiver, WeightSender
role, connection = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
if role == "sender":
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(10)}
    def source():
        for name, tensor in tensors.items():
            if name == "t6":
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor
    WeightSender(connection, bucket_bytes=1).send(WeightManifest.from_tensors(1, tensors.items()), source())
else:
    for index, _ in enumerate(WeightReceiver(connection).next_update()):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_proc
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_process_that_is_killed_leaves_an_error_and_nothing_else(role):
    """SIGKILL in the middle of an update: the other end raises at once, and no memory, descriptor or file stays."""
    gc.collect()
    before = descriptors() | mappings(), shared_files()
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", CHILD, role, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    if role == "sender":
        end = WeightReceiver(ours, timeout_s=60)
        with pytest.raises(WeightPeerLostError, match="sender of weights must stay"):
            copied(end.next_update())
    else:
        end = WeightSender(ours, timeout_s=60, bucket_bytes=1)
        with pytest.raises(WeightPeerLostError):
            end.send(MANIFEST, TENSORS.items())
    assert child.wait(60) == -9
    end.close()
    del end
    gc.collect()
    assert descriptors() | mappings() <= before[0]
    assert shared_files() == before[1]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="process descriptors are Linux's")
def test_a_dead_process_is_told_from_a_living_one(monkeypatch):
    """A killed child counts as ended before and after its parent noticed; this process does not."""
    monkeypatch.setattr(memory_module, "_EXIT_S", 10.0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.kill()
    assert memory_module._has_ended(child.pid)
    child.communicate()
    assert memory_module._has_ended(child.pid)
    monkeypatch.setattr(memory_module, "_EXIT_S", 0.0)
    assert not memory_module._has_ended(os.getpid())


# Meeting


def test_two_processes_meet_in_a_folder_of_this_user():
    """A listener's folder is closed to others and gone after it; who comes too late or not at all is an error."""
    with WeightListener() as listener:
        assert listener.path.parent.stat().st_mode & 0o777 == 0o700
        theirs = connect(listener.path)
        ours = listener.accept()
        follower, sender = Follower(theirs), WeightSender(ours)
        with pytest.raises(WeightUpdateTimeoutError, match="got nobody"):
            listener.accept(timeout_s=0.01)
    sender.send(MANIFEST, TENSORS.items())
    sender.close()
    follower.join()
    assert same(follower.results[0], TENSORS)
    assert not listener.path.parent.exists()
    with pytest.raises(WeightPeerLostError, match="start the other end first"):
        connect(listener.path)


def test_options_are_checked():
    """A bucket of no bytes, a wait of no time and a device that cannot share memory are refused at the start."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for options, words in (
            ({"bucket_bytes": 0}, "bucket_bytes"),
            ({"bucket_bytes": 1.5}, "bucket_bytes"),
            ({"timeout_s": 0}, "timeout_s"),
            ({"memory": MemoryKind.DEVICE, "device": "cpu"}, "share memory"),
        ):
            with pytest.raises(EngineInputError, match=words):
                WeightSender(ours, **options)


def test_slots_suit_every_dtype():
    """Whatever lies in a bucket is aligned to its own size."""
    assert all(ALIGNMENT % getattr(torch, name).itemsize == 0 for name in SAFETENSORS_DTYPES)
