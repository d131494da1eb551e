"""Devices are picked and checked in one place."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

import ostinato_engines
from ostinato_engines import EngineInputError, device

torch = pytest.importorskip("torch")


def test_auto_is_available():
    """ "auto" gives a device on which torch can compute."""
    picked = device.pick_device("auto")
    assert torch.ones(2, device=picked).sum().item() == 2
    device.synchronize(picked)
    device.empty_cache(picked)
    assert device.memory_allocated(picked) >= 0


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cpu:3", "", "npu"])
def test_a_wrong_device_is_refused(name):
    """An unknown kind, a bad index and a device that is not there are errors that name them."""
    with pytest.raises(EngineInputError, match=f"got {name!r}"):
        device.pick_device(name)


def test_seed_all_seeds_everything():
    """The same seed gives the same numbers from Python, numpy and torch."""

    def draw():
        device.seed_all(5)
        return random.random(), np.random.random(), torch.rand(1).item()

    assert draw() == draw()


def test_out_of_memory_is_told_apart():
    """Memory errors of host and device are recognised, others are not."""
    assert device.is_out_of_memory(MemoryError())
    assert device.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert device.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not device.is_out_of_memory(RuntimeError("shape mismatch"))
    assert not device.is_out_of_memory(ValueError("out of memory"))


def test_no_other_module_names_a_device():
    """Only `ostinato_engines.device` says cuda, npu or mps."""
    root = Path(ostinato_engines.__file__).parent
    for file in root.rglob("*.py"):
        if root / "device" not in file.parents:
            text = file.read_text()
            assert not any(f'"{kind}"' in text for kind in ("cuda", "npu", "mps")), file


def test_generators_go_on_where_they_stood():
    """Python's, numpy's and torch's generators give the numbers that would have come, from a state that went through JSON."""

    def draw():
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.normal(),
            np.random.random(3).tolist(),
            torch.rand(2).tolist(),
        )

    device.seed_all(7)
    random.gauss(0, 1), np.random.normal()  # half of a pair is kept for the next call
    state = json.loads(json.dumps(device.random_state()))
    expected = draw()
    device.seed_all(8)
    device.restore_random_state(state)
    assert draw() == expected


@pytest.mark.parametrize("damage", [{}, {"python": [3, [1], None]}, {"python": 1}])
def test_a_foreign_state_of_generators_is_refused(damage):
    """What is no such state is an error that says so."""
    with pytest.raises(EngineInputError, match="must be what random_state"):
        device.restore_random_state(damage)


def test_the_host_has_no_memory_of_a_device_and_no_generation():
    """What only accelerators have is None for the CPU, of which torch keeps no account."""
    assert device.device_memory("cpu") is None
    assert device.device_generation("cpu") is None


def test_a_device_s_memory_is_somebody_s():
    """Total is what is free, what this process holds, and what is left over: the others'."""
    memory = device.DeviceMemory(total=100, free=20, allocated=10, reserved=30)
    assert memory.others == 50
