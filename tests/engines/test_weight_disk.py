"""Weights through a file: whole under its name, checked before and while it is read, nothing left behind."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import EngineLoadError, ManifestError, TensorSpec, WeightManifest, WeightUpdateError

torch = pytest.importorskip("torch")

from ostinato_engines.weight_transfer import StoredWeights, write_weights  # noqa: E402
from ostinato_engines.weight_transfer.layout import SAFETENSORS_DTYPES  # noqa: E402

TENSORS = {f"layer.{index}": torch.full((index + 1, 40), float(index)) for index in range(6)}
MANIFEST = WeightManifest.from_tensors(3, TENSORS.items())


@pytest.fixture
def stored(tmp_path):
    """A file of `TENSORS`, version 3."""
    path = tmp_path / "weights.safetensors"
    write_weights(path, MANIFEST, TENSORS.items())
    return path


def bits(tensor):
    """What a tensor is, comparable."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_any_reader_of_safetensors_reads_it(stored):
    """The file is an ordinary safetensors file with the tensors and the version."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(stored, "pt") as file:
        assert {name: bits(file.get_tensor(name)) for name in file.keys()} == {  # noqa: SIM118  not a mapping
            name: bits(tensor) for name, tensor in TENSORS.items()
        }
        assert file.metadata()["ostinato.version"] == "3"


@given(
    described=st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(SAFETENSORS_DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=8,
    ),
    reverse=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_every_tensor_is_read_bit_for_bit(described, reverse, tmp_path_factory):
    """Whatever dtypes, shapes, names and order: what is read, twice, has the bits that were written."""
    path = tmp_path_factory.mktemp("bits") / "w.safetensors"
    tensors = {name: torch.ones(shape).to(getattr(torch, dtype)) for name, (dtype, shape) in described.items()}
    manifest = WeightManifest.from_tensors(8, tensors.items())
    write_weights(path, manifest, sorted(tensors.items(), reverse=reverse))
    wanted = {name: bits(tensor) for name, tensor in tensors.items()}
    with StoredWeights(path) as read:
        assert {name: bits(tensor) for name, tensor in read} == wanted
        assert {name: bits(tensor) for name, tensor in read} == wanted
        assert read.manifest.version == 8
        assert set(read.manifest.tensors) == set(manifest.tensors)


def test_tensors_stay_valid_while_the_file_is_replaced(stored):
    """Who reads goes on reading the old weights after new ones took the name, and tensors outlive the reader."""
    with StoredWeights(stored) as read:
        stream = iter(read)
        _, first = next(stream)
        doubled = {name: 2 * tensor + 1 for name, tensor in TENSORS.items()}
        write_weights(stored, WeightManifest.from_tensors(4, doubled.items()), doubled.items())
        rest = dict(stream)
    assert first.sum() == 0
    assert all(torch.equal(rest[name], TENSORS[name]) for name in rest)
    with StoredWeights(stored) as read:
        assert read.manifest.version == 4
        assert all(torch.equal(tensor, doubled[name]) for name, tensor in read)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pairs: [*pairs, pairs[0]], "twice"),
        (lambda pairs: [("no.such", pairs[0][1]), *pairs[1:]], "beyond it"),
        (lambda pairs: [(pairs[0][0], pairs[0][1].double()), *pairs[1:]], "as in the manifest"),
        (lambda pairs: pairs[:-1], "1 missing"),
        (
            lambda pairs: (1 / (3 - index) and pair for index, pair in enumerate(pairs)),
            "ZeroDivisionError.*after 3 of 6",
        ),
    ],
)
def test_a_failed_writing_leaves_the_file_as_it_was(stored, spoil, message):
    """A spoiled stream leaves the old file under its name and no other beside it."""
    before = stored.read_bytes()
    with pytest.raises(WeightUpdateError, match=message):
        write_weights(stored, MANIFEST, spoil(list(TENSORS.items())))
    assert stored.read_bytes() == before
    assert os.listdir(stored.parent) == [stored.name]


def test_what_cannot_be_written_is_refused(tmp_path):
    """A folder that is not there, the reserved name and a dtype that safetensors lacks are errors; no file appears."""
    with pytest.raises(WeightUpdateError, match="FileNotFoundError"):
        write_weights(tmp_path / "no" / "w", MANIFEST, TENSORS.items())
    for spec in (TensorSpec("__metadata__", (1,), "float32"), TensorSpec("a", (1,), "complex64")):
        with pytest.raises(ManifestError):
            write_weights(tmp_path / "w", WeightManifest(1, (spec,)), [])
    assert not os.listdir(tmp_path)


def cut(data, end):
    """Without what comes after `end`."""
    return data[:end]


def with_bytes(data, at, new):
    """With other bytes from `at` on."""
    at %= len(data)
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: cut(data, 5),
        lambda data: cut(data, 50),
        lambda data: cut(data, len(data) - 1),
        lambda data: data + b"\0",
        lambda data: with_bytes(data, 0, b"\xff" * 8),
        lambda data: with_bytes(data, 0, b"\0" * 8),
        lambda data: with_bytes(data, 8, b"["),
        lambda data: data.replace(b"ostinato.version", b"somebody.version"),
        lambda data: data.replace(b'"ostinato.version": "3"', b'"ostinato.version": "x"'),
        lambda data: data.replace(b'"ostinato.version": "3"', b'"ostinato.version": -3 '),
        lambda data: data.replace(b"[0, 160]", b"[4, 164]"),
        lambda data: data.replace(b"[1, 40]", b"[1, 41]"),
        lambda data: data.replace(b"F32", b"F64", 1),
        lambda data: data.replace(b"F32", b"X32", 1),
        lambda data: data.replace(b'"ostinato.sums": "0', b'"ostinato.sums": "g'),
    ],
)
def test_a_file_that_is_not_whole_is_refused_before_any_tensor(stored, damage):
    """A file cut short, made longer, or with another header does not open; so no engine is touched."""
    data = stored.read_bytes()
    damaged = damage(data)
    assert damaged != data
    stored.write_bytes(damaged)
    with pytest.raises(EngineLoadError, match="write it again"):
        StoredWeights(stored)


def test_a_file_that_is_not_there_or_not_ours_is_refused(tmp_path):
    """No file, a folder, and another program's safetensors file are errors that name the path."""
    with pytest.raises(EngineLoadError, match="absent"):
        StoredWeights(tmp_path / "absent")
    with pytest.raises(EngineLoadError):
        StoredWeights(tmp_path)
    save = pytest.importorskip("safetensors.torch")
    save.save_file(TENSORS, tmp_path / "foreign", metadata={"format": "pt"})
    with pytest.raises(EngineLoadError, match="foreign"):
        StoredWeights(tmp_path / "foreign")


@pytest.mark.parametrize("new", [b"\x01", b"\0" * 64])
def test_flipped_bits_and_lost_pages_break_the_stream(stored, new):
    """Bytes of a tensor that are not those that were written are an error that names the tensor."""
    stored.write_bytes(with_bytes(stored.read_bytes(), -100, new))
    with StoredWeights(stored) as read, pytest.raises(WeightUpdateError, match=r"layer\.5 .* damaged"):
        list(read)


def test_a_closed_file_has_no_stream(stored):
    """Reading after close is an error."""
    with StoredWeights(stored) as read:
        pass
    with pytest.raises(WeightUpdateError, match="must be open"):
        list(read)


KILLED = """
import os, signal, sys, torch
from ostinato_engines import WeightManifest
from ostinato_engines.weight_transfer import write_weights
tensors = {"a": torch.ones(10), "b": torch.ones(10)}
def source():
    yield "a", tensors["a"]
    os.kill(os.getpid(), signal.SIGKILL)
write_weights(sys.argv[1], WeightManifest.from_tensors(1, tensors.items()), source())
"""


def test_what_a_killed_writer_left_is_removed_by_the_next(stored):
    """SIGKILL leaves the old file whole and a hidden one, which the next writer removes, but none of a living writer."""
    before = stored.read_bytes()
    child = subprocess.run([sys.executable, "-c", KILLED, str(stored)], check=False, timeout=120)
    assert child.returncode == -signal.SIGKILL
    assert stored.read_bytes() == before
    assert len(os.listdir(stored.parent)) == 2
    alive = stored.parent / f".{stored.name}.alive.partial"
    with open(alive, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_weights(stored, MANIFEST, TENSORS.items())
        assert sorted(os.listdir(stored.parent)) == sorted([stored.name, alive.name])
    write_weights(stored, MANIFEST, TENSORS.items())
    assert os.listdir(stored.parent) == [stored.name]


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    """However many tensors a model has, one of the source is alive at a time."""
    import weakref

    live, counts = weakref.WeakSet(), []
    specs = tuple(TensorSpec(f"t{index}", (64,), "float32") for index in range(50))

    def source():
        for spec in specs:
            tensor = torch.zeros(spec.shape)
            live.add(tensor)
            counts.append(len(live))
            yield spec.name, tensor
            del tensor

    write_weights(tmp_path / "w", WeightManifest(1, specs), source())
    assert counts == [1] * 50
