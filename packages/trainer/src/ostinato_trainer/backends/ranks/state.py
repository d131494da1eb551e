"""The files of a model whose tensors are cut along their first dimension: each rank writes its slices, any number of ranks reads them.

Safetensors and JSON: nothing in them can run code when read. `weights-00001-of-00004.safetensors` holds the slices of the second of four ranks, in
the order of ranks they make the whole; what is not cut stands in the first file. A folder that one device wrote reads as one of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ostinato_engines.device import HOST
from ostinato_trainer.backends.state import FORMAT, BackendState, read_state
from ostinato_trainer.errors import CheckpointError

_COUNTERS = "backend.json"
_FORMAT = "ostinato-backend-ranks-1"
_PARTS = ("weights", "optimizer")


class RankedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Counters of a backend of ranks, and how many wrote."""

    num_ranks: int
    num_steps: int
    num_skipped: int
    policy_version: int
    frozen: str | None = None
    """See `BackendState.frozen`."""
    format: str = _FORMAT


def write_slices(
    directory: Path, rank: int, num_ranks: int, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> None:
    """Writes one rank's files.

    Args:
        directory: Exists.
        rank: Of `num_ranks`.
        num_ranks: How many write.
        weights: This rank's slices, on any device; may be none.
        moments: Likewise.

    Raises:
        OSError: the directory cannot be written.
        SafetensorError: a file of tensors cannot be written.
    """
    for part, tensors in zip(_PARTS, (weights, moments), strict=True):
        on_host = {name: tensor.detach().to(HOST).contiguous() for name, tensor in tensors.items()}
        save_file(on_host, directory / _name(part, rank, num_ranks))


def write_counters(directory: Path, state: RankedState) -> None:
    """Writes what one rank writes for all, once every rank's files are there."""
    (directory / _COUNTERS).write_bytes(msgspec.json.encode(state))


def read_whole(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], RankedState | BackendState]:
    """Weights, moments and counters of a folder that ranks, or a single device, wrote, on the host.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if isinstance(_read_counters(directory), BackendState):
        return read_state(directory)
    with SlicedState(directory) as state:
        weights, moments = ({name: state.rows(part, name) for name in state.shapes(part)} for part in _PARTS)
        return weights, moments, state.counters


class SlicedState:
    """A folder that ranks, or a single device, wrote, open to read any rows of any tensor. A context.

    Args:
        directory: See `write_slices`, and `ostinato_trainer.backends.state.write_state`.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.counters = _read_counters(directory)
        self._files = ExitStack()
        self._slices: dict[str, dict[str, list[Any]]] = {}
        try:
            for part in _PARTS:
                self._slices[part] = self._opened(part)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> SlicedState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slices.clear()
        self._files.close()

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """The whole shape of each tensor of `weights` or of `optimizer`."""
        return {name: _whole_shape(slices) for name, slices in self._slices[part].items()}

    def rows(self, part: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The rows from `start` to `stop` of a tensor, on the host; all of one without dimensions.

        Raises:
            CheckpointError: the file is damaged.
        """
        slices = self._slices[part][name]
        try:
            if not slices[0].get_shape():
                return slices[0][...]
            stop = _whole_shape(slices)[0] if stop is None else stop
            found, first = [], 0
            for each in slices:
                length = each.get_shape()[0]
                low, high = max(start, first), min(stop, first + length)
                if low < high:
                    found.append(each[low - first : high - first])
                first += length
            return torch.cat(found) if found else slices[0][0:0]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint must hold all of {name}, got {self._directory}: {error}; resume from another step"
            ) from error

    def _opened(self, part: str) -> dict[str, list[Any]]:
        slices: dict[str, list[Any]] = {}
        for file in self._names(part):
            try:
                opened = self._files.enter_context(safe_open(self._directory / file, framework="pt", device=HOST))
                for name in opened.keys():  # noqa: SIM118  the file is not a mapping
                    slices.setdefault(name, []).append(opened.get_slice(name))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"checkpoint must hold a whole {file}, got {self._directory}: {error}; resume from another step"
                ) from error
        return slices

    def _names(self, part: str) -> list[str]:
        if isinstance(self.counters, BackendState):
            return [f"{part}.safetensors"]
        num_ranks = self.counters.num_ranks
        return [_name(part, rank, num_ranks) for rank in range(num_ranks)]


def _name(part: str, rank: int, num_ranks: int) -> str:
    return f"{part}-{rank:05d}-of-{num_ranks:05d}.safetensors"


def _whole_shape(slices: Sequence[Any]) -> tuple[int, ...]:
    shapes = [each.get_shape() for each in slices]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()


def _read_counters(directory: Path) -> RankedState | BackendState:
    try:
        raw = (directory / _COUNTERS).read_bytes()
        kind = RankedState if msgspec.json.decode(raw).get("format") == _FORMAT else BackendState
        state = msgspec.json.decode(raw, type=kind)
    except (OSError, msgspec.DecodeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint must hold a valid {_COUNTERS}, got {directory}: {error}; resume from another step"
        ) from error
    if state.format not in (_FORMAT, FORMAT):
        raise CheckpointError(
            f"checkpoint must be of format {_FORMAT}, got {state.format} in {directory}; use the version that wrote it"
        )
    return state
