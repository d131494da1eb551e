"""How a rank's tensors reach its controller."""

import pickle
import subprocess
import sys
from multiprocessing import Pipe

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines.device import empty_to_share, sharing
from ostinato_trainer.backends.ranks import handover
from ostinato_trainer.backends.ranks.handover import dumped, hand_over, taken_over
from ostinato_trainer.backends.ranks.messages import Answer

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_tensors_arrive_as_they_were(kinds, seed):
    """Whatever types and shapes, empty ones and scalars too, come out bit for bit, in memory of their own, one piece for all."""
    generator = torch.Generator().manual_seed(seed)
    given_tensors = [
        (f"t{number}", torch.randint(0, 2, shape, generator=generator).to(dtype))
        for number, (shape, dtype) in enumerate(kinds)
    ]
    handed = hand_over(given_tensors)
    found = taken_over(handed)
    assert [name for name, _ in found] == [name for name, _ in given_tensors]
    for (_, tensor), (_, original) in zip(found, given_tensors, strict=True):
        assert tensor.dtype == original.dtype
        assert tensor.shape == original.shape
        assert torch.equal(tensor, original)
        assert tensor.untyped_storage().data_ptr() == handed.memory.untyped_storage().data_ptr()
    for _, original in given_tensors:
        original.zero_()
    again = hand_over(found)
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(taken_over(again), found, strict=True))


def test_a_transposed_tensor_arrives_in_its_shape():
    """A tensor that does not lie in its order is copied by its values."""
    across = torch.arange(12.0).reshape(3, 4).mT
    ((_, found),) = taken_over(hand_over([("a", across)]))
    assert torch.equal(found, across)


SENDER = """
import sys
from multiprocessing import current_process
from multiprocessing.connection import Connection
import torch
from ostinato_trainer.backends.ranks.handover import dumped
from ostinato_trainer.backends.ranks.messages import Answer
connection = Connection(int(sys.argv[1]))
current_process().authkey = connection.recv_bytes()
for number in range(3):
    tensors = [("a", torch.full((3, 5), float(number))), ("b", torch.tensor(number, dtype=torch.int8))]
    connection.send_bytes(dumped(Answer, tensors))
    del tensors
    connection.recv_bytes()
"""


def test_what_came_from_another_process_outlives_it():
    """Tensors of another process can be read after it let go of them, and after it ended."""
    from multiprocessing import current_process

    ours, theirs = Pipe()
    process = subprocess.Popen([sys.executable, "-c", SENDER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    ours.send_bytes(bytes(current_process().authkey))
    kept = []
    for _ in range(3):
        kept.append(taken_over(pickle.loads(ours.recv_bytes()).value))
        ours.send_bytes(b"")
    assert process.wait(120) == 0
    for number, tensors in enumerate(kept):
        assert [name for name, _ in tensors] == ["a", "b"]
        assert torch.equal(tensors[0][1], torch.full((3, 5), float(number)))
        assert int(tensors[1][1]) == number
    ours.close()


def test_memory_that_no_other_process_can_open_is_gone_round(monkeypatch, caplog):
    """Where a device's memory cannot be shared, which shows when it is to travel, the tensors travel through the host's, and this is said."""
    places = []
    whole = handover.empty_to_share

    def allocate(num_bytes, place):
        places.append(str(place))
        if len(places) == 1:
            raise RuntimeError("expandable segments")
        return whole(num_bytes, place)

    monkeypatch.setattr(handover, "empty_to_share", allocate)
    monkeypatch.setattr(handover, "shares_memory", lambda device: len(places) < 2)
    answer = pickle.loads(dumped(Answer, [("a", torch.ones(2))]))
    assert torch.equal(taken_over(answer.value)[0][1], torch.ones(2))
    assert len(places) == 2
    assert "through the host's memory" in caplog.text
    assert "expandable segments" in caplog.text


def test_without_enough_memory_the_error_is_told(monkeypatch):
    """On the host there is no other way, and the error is the caller's."""

    def fail(num_bytes, place):
        raise RuntimeError("no room")

    monkeypatch.setattr(handover, "empty_to_share", fail)
    with pytest.raises(RuntimeError, match="no room"):
        dumped(Answer, [("a", torch.ones(2))])


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
    ],
)
def test_shared_memory_is_never_of_expandable_segments(monkeypatch, variable, text, said):
    """While memory to share is taken, expandable segments are off; then the settings are again what the variables say."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, text)
    events = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", events.append, raising=False)
    monkeypatch.setattr(sharing, "shares_memory", lambda device: True)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: events.append("taken") or empty(*a, **k))
    assert empty_to_share(10, "cpu").numel() == 10
    assert events == (["expandable_segments:False", "taken", text] if said else ["taken"])
