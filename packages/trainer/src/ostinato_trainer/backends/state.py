"""The state of a model under training, and its files: two of safetensors and one of JSON, none of which can run code when
read.

This module copies, writes and reads it and tells a damaged or foreign one by name. Atomic replacement is
`ostinato_trainer.checkpoints.manager`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato_engines.device import HOST
from ostinato_trainer.errors import CheckpointError

_WEIGHTS = "weights.safetensors"
_MOMENTS = "optimizer.safetensors"
_COUNTERS = "backend.json"
FORMAT = "ostinato-backend-1"
"""Of what one device writes."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BackendState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Counters of a backend."""

    num_steps: int
    num_skipped: int
    policy_version: int
    frozen: str | None = None
    """`fingerprint` of the weights that the run needs and never changes, under adapters or of a reference; None where there are none."""
    format: str = FORMAT


@dataclass(frozen=True)
class ModelState:
    """Weights, moments and counters of a model: those under training, or a copy of them."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    counters: BackendState

    def copied(self) -> ModelState:
        """The same in tensors of the host's own, which further steps leave as they are."""
        return ModelState(_copies(self.weights), _copies(self.moments), self.counters)

    def save(self, directory: str | Path) -> None:
        """Write it; see `write_state`."""
        write_state(Path(directory), self.weights, self.moments, self.counters)


def write_state(
    directory: Path, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], state: BackendState
) -> None:
    """Writes the three files into `directory`, made where absent.

    Raises:
        OSError: the directory cannot be made or written.
        SafetensorError: a file of tensors cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_on_host(weights), directory / _WEIGHTS)
    save_file(_on_host(moments), directory / _MOMENTS)
    (directory / _COUNTERS).write_bytes(msgspec.json.encode(state))


def read_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], BackendState]:
    """Weights, moments and counters of `directory`, on the host.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    tensors = []
    for name in (_WEIGHTS, _MOMENTS):
        try:
            tensors.append(load_file(directory / name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint must hold a whole {name}, got {directory}: {error}; resume from another step"
            ) from error
    try:
        state = msgspec.json.decode((directory / _COUNTERS).read_bytes(), type=BackendState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"checkpoint must hold a valid {_COUNTERS}, got {directory}: {error}; resume from another step"
        ) from error
    if state.format != FORMAT:
        raise CheckpointError(
            f"checkpoint must be of format {FORMAT}, got {state.format} in {directory}; use the version that wrote it"
        )
    return tensors[0], tensors[1], state


def check_matches(directory: str | Path, found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that tensors have the expected names and shapes; errors as `check_shapes`."""
    check_shapes(directory, {name: tuple(tensor.shape) for name, tensor in found.items()}, expected)


def check_shapes(
    directory: str | Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Checks names and shapes of what a directory holds.

    Raises:
        CheckpointError: one is missing, unexpected or of another shape; the message names the first.
    """
    for name in [*expected, *(set(found) - set(expected))]:
        shape = found.get(name)
        if name not in expected or shape != expected[name]:
            raise CheckpointError(
                f"checkpoint must fit the model: {name} must be {_shape_of(expected.get(name))}, "
                f"got {_shape_of(shape)} in {directory}; resume with the model that was saved"
            )


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Names, types, shapes and content of tensors in a few characters, the same on every device.

    The content is the sum of a tensor's bits, taken as whole numbers of its width: exact in any order, and read once at the speed of the memory.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {int(bits.sum(dtype=torch.int64))}\n".encode())
    return digest.hexdigest()


def check_frozen(directory: str | Path, found: str | None, expected: str | None) -> None:
    """Checks that the weights that a run never changes are those that it began with, as far as both have any.

    Raises:
        CheckpointError: they are others.
    """
    if found is not None and expected is not None and found != expected:
        raise CheckpointError(
            "actor_rollout_ref.model.path must name the weights that the run began with, for adapters and the reference rest on them, got "
            f"others than those of {directory}; write the path and the precision (actor.dtype) of that run"
        )


def _shape_of(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to(HOST, copy=True) for name, tensor in tensors.items()}


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
