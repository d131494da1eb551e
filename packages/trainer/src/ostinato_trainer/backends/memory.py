"""What holds the memory of a device that trains: before a run, whether a model's state can fit at all, and where memory has run out, a report.

Invariants: a run is refused only where parameters, gradients and moments alone, which every step holds at once, are more than the device has;
and memory that runs out is one kind of error, `OutOfMemoryError`, which says what held it and names the keys to change. It knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from ostinato_engines.device import DeviceMemory, device_memory, is_out_of_memory
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import OutOfMemoryError, TrainerError

__all__ = [
    "EngineShare",
    "HeldMemory",
    "MemoryOwner",
    "StateSize",
    "check_state_fits",
    "has_run_out",
    "held_memory",
    "out_of_memory_named",
]

_logger = logging.getLogger(__name__)

_GIB: Final = 2**30
_MAX_TEXT: Final = 300
_UTILIZATION: Final = "actor_rollout_ref.rollout.gpu_memory_utilization"
_NOTABLE: Final = 0.25
"""Part of a device above which what others hold is worth a cure."""


class EngineShare(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine takes of the device that is trained on."""

    fraction: float = 0.0
    """Of the device's memory; 0 where no engine is there, or nobody has said how much it takes."""
    sleeps: bool = True
    """Whether it gives its memory back while there is training."""


class StateSize(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a model's state on one device, as far as they are certain before anything is there."""

    parameters: int
    """A reference among them."""
    gradients: int
    moments: int
    moments_stay: bool = True
    """Whether they are there between steps too, or in the host's memory then."""

    @property
    def in_update(self) -> int:
        """What the device holds at once while a step is taken."""
        return self.parameters + self.gradients + self.moments

    @property
    def between_steps(self) -> int:
        """What it holds while there is sampling, from the first step on."""
        return self.parameters + (self.moments if self.moments_stay else 0)


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a model under training holds on one device, by what they are for."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.reference


@dataclass(frozen=True)
class MemoryOwner:
    """Who computes on a device, for reports.

    Args:
        device: Where.
        held: What is held there now.
        look: How the device is asked.
    """

    device: torch.device
    held: Callable[[], HeldMemory]
    look: Callable[[torch.device], DeviceMemory | None] = device_memory


def held_memory(
    device: torch.device,
    parameters: Iterable[Tensor],
    *,
    optimizer: Iterable[Tensor] = (),
    reference: Iterable[Tensor] = (),
) -> HeldMemory:
    """What tensors hold on a device, gradients with their parameters'; memory that several share counts once, sharded tensors by the own part."""
    parameters, seen = list(parameters), set()
    gradients = [getattr(each, "main_grad", None) if each.grad is None else each.grad for each in parameters]
    return HeldMemory(
        parameters=_num_bytes(parameters, device, seen),
        gradients=_num_bytes((each for each in gradients if each is not None), device, seen),
        optimizer=_num_bytes(optimizer, device, seen),
        reference=_num_bytes(reference, device, seen),
    )


def check_state_fits(
    size: StateSize,
    device: torch.device,
    *,
    cures: str,
    engine: EngineShare | None = None,
    look: Callable[[torch.device], DeviceMemory | None] | None = None,
) -> None:
    """Refuse what no device of this size holds, before anything is put there.

    Args:
        size: Of the state.
        device: Where it is to go; one whose memory cannot be asked for is taken to be large enough.
        cures: What to change.
        engine: That samples on the same device.
        look: How the device is asked; None asks torch.

    Raises:
        OutOfMemoryError: The state alone, or with an engine that stays awake, is more than the device has.
    """
    memory, engine = (look or device_memory)(device), engine or EngineShare()
    if memory is None:
        return
    of_engine = int(engine.fraction * memory.total)
    text = (
        f"{_gib(size.parameters)} of parameters, {_gib(size.gradients)} of gradients and {_gib(size.moments)} of the optimizer's moments on "
        f"{device}, which has {_gib(memory.total)}"
    )
    if size.in_update + (0 if engine.sleeps else of_engine) > memory.total:
        beside = (
            f", beside an engine that keeps {_gib(of_engine)} ({_UTILIZATION})"
            if not engine.sleeps and of_engine
            else ""
        )
        raise OutOfMemoryError(
            f"memory must suffice for one step of training, got {text}{beside}; {_cures(cures, beside)}"
        )
    if size.between_steps + of_engine > memory.total:
        _logger.warning(
            "Memory will run out after the first step: %s, and the engine wants %s beside what stays between steps; lower %s to %.2f, or %s",
            text,
            _gib(of_engine),
            _UTILIZATION,
            max(0.0, (memory.total - size.between_steps) / memory.total),
            cures,
        )
    elif size.in_update > memory.available:
        _logger.warning("Memory may run out: %s, of which %s is free", text, _gib(memory.available))


def has_run_out(error: BaseException) -> bool:
    """Whether an error is Python's or torch's own for memory that ran out; those of others that speak of it have said what there is to say."""
    is_bare = isinstance(error, MemoryError) or type(error).__module__.partition(".")[0] in ("builtins", "torch")
    return is_bare and not isinstance(error, TrainerError) and is_out_of_memory(error)


@contextmanager
def out_of_memory_named(
    what: str, cures: str, *, owner: MemoryOwner | None = None, batches: Sequence[Batch] = ()
) -> Iterator[None]:
    """Raises OutOfMemoryError where the block runs out of memory.

    Args:
        what: Was computed.
        cures: What to change.
        owner: Whose device it is; without one the report is short.
        batches: Micro-batches, of which the one with most tokens is described.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not has_run_out(error):
            raise
        raise OutOfMemoryError(_report(what, cures, error, owner, batches)) from error


def _report(what: str, cures: str, error: BaseException, owner: MemoryOwner | None, batches: Sequence[Batch]) -> str:
    memory = None if owner is None else owner.look(owner.device)
    others = "" if memory is None or memory.others < _NOTABLE * memory.total else "others"
    lines = [f"memory must suffice for {what}, but it ran out; {_cures(cures, others)}"]
    if owner is not None:
        lines.append(_held_line(owner.device, owner.held(), memory))
    if batches:
        largest = max(batches, key=lambda batch: batch.num_tokens)
        number = f"the largest of {len(batches)} micro-batches" if len(batches) > 1 else "the micro-batch"
        lines.append(
            f"{number} has {largest.num_tokens} tokens in {largest.num_sequences} sequences, the longest "
            f"{int(largest.sequence_lengths.max())}"
        )
    lines.append(f"what was raised: {' '.join(str(error).split())[:_MAX_TEXT] or type(error).__name__}")
    return "\n  ".join(lines)


def _held_line(device: torch.device, held: HeldMemory, memory: DeviceMemory | None) -> str:
    parts = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "the optimizer's state": held.optimizer,
        "the reference": held.reference,
    }
    if memory is None:
        return f"on {device}: {_listed(parts)}; what else is held there cannot be asked for"
    parts |= {
        "activations and all else of this process": max(0, memory.allocated - held.total),
        "kept by torch without use": memory.reserved - memory.allocated,
        f"other processes and the driver (an engine takes {_UTILIZATION})": memory.others,
        "free": memory.free,
    }
    return f"of {_gib(memory.total)} on {device}: {_listed(parts)}"


def _cures(cures: str, beside: str) -> str:
    return f"{cures}, or lower {_UTILIZATION}" if beside else cures


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"


def _num_bytes(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        to_local: Any = getattr(tensor, "to_local", None)  # of a DTensor
        local = tensor if to_local is None else to_local()
        if local.device.type != device.type or not local.numel():
            continue
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
