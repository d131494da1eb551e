"""Files that ranks on Megatron write: Hugging Face folders, and checkpoints that any layout of ranks reads.

A checkpoint holds whole tensors in Hugging Face's names, a file of safetensors for each block (`embedding`, `layer_00000`, ..., `end`) with the
float32 weights and their moments, and `megatron.json` with the counters: no pickle, and nothing of how many ranks wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ostinato_engines.device import HOST
from ostinato_trainer.backends.megatron.mapping import Block
from ostinato_trainer.backends.megatron.optimizer import MASTER, STATE_KEYS
from ostinato_trainer.backends.megatron.pretrained import INDEX_FILE, WEIGHTS_FILE
from ostinato_trainer.backends.state import BackendState
from ostinato_trainer.errors import CheckpointError

_FORMAT = "ostinato-megatron-1"
_COUNTERS = "megatron.json"
_SHARD_BYTES = 4 * 2**30


def write_block(directory: Path, block: Block, state: Mapping[str, Sequence[tuple[str, Tensor]]]) -> None:
    """Writes the file of a block: for each of `STATE_KEYS` its whole tensors by name, on the host."""
    tensors = {f"{key}/{name}": tensor for key, named in state.items() for name, tensor in named}
    save_file(tensors, directory / f"{block.name}.safetensors")


def write_counters(directory: Path, counters: BackendState) -> None:
    """Writes the counters, after which the checkpoint is whole."""
    (directory / _COUNTERS).write_bytes(msgspec.json.encode(msgspec.structs.replace(counters, format=_FORMAT)))


def read_counters(directory: Path) -> BackendState:
    """The counters of a checkpoint.

    Raises:
        CheckpointError: they are missing, damaged, or of another format.
    """
    try:
        counters = msgspec.json.decode((directory / _COUNTERS).read_bytes(), type=BackendState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"checkpoint must hold a valid {_COUNTERS}, got {directory}: {error}; resume from another step, "
            "or with the actor_rollout_ref.actor.strategy that wrote it"
        ) from error
    if counters.format != _FORMAT:
        raise CheckpointError(
            f"checkpoint must be of format {_FORMAT}, got {counters.format} in {directory}; use the version that wrote it"
        )
    return counters


def check_block(directory: Path, block: Block, *, has_moments: bool) -> None:
    """Raises CheckpointError where the file of a block is missing, damaged, or not of this model."""
    path = directory / f"{block.name}.safetensors"
    keys = STATE_KEYS if has_moments else (MASTER,)
    expected = {f"{key}/{name}": shape for key in keys for name, shape in block.tensors}
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  a file, not a dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint must hold a whole {path.name}, got {path}: {error}; resume from another step"
        ) from error
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        name = differing[0]
        wanted = f"be of shape {expected[name]}" if name in expected else "be absent"
        raise CheckpointError(
            f"checkpoint must fit the model: {name} must {wanted}, got {found.get(name, 'none')} in {path}; "
            "resume with the model that was saved"
        )


def read_block(
    directory: Path, block: Block, names: Sequence[str], *, has_moments: bool
) -> dict[str, dict[str, Tensor]]:
    """For each of `STATE_KEYS` (the weights alone without moments) the tensors of the given names, from the file of a block; on the host."""
    keys = STATE_KEYS if has_moments else (MASTER,)
    with safe_open(directory / f"{block.name}.safetensors", framework="pt") as file:
        return {key: {name: file.get_tensor(f"{key}/{name}") for name in names} for key in keys}


def write_hf_weights(directory: Path, blocks: Iterator[list[tuple[str, Tensor]]], total_bytes: int) -> None:
    """Writes whole tensors as a Hugging Face folder has them, one file or several with an index; never more than one file's in memory.

    Args:
        directory: Exists.
        blocks: The tensors, a few at a time.
        total_bytes: Of all of them.
    """
    waiting: dict[str, Tensor] = {}
    written: list[list[str]] = []

    def flush() -> None:
        save_file(waiting, directory / f"part-{len(written):05d}", metadata={"format": "pt"})
        written.append(list(waiting))
        waiting.clear()

    for tensors in blocks:
        waiting |= {name: tensor.to(HOST) for name, tensor in tensors}
        if sum(tensor.nbytes for tensor in waiting.values()) >= _SHARD_BYTES:
            flush()
    if waiting or not written:
        flush()
    if len(written) == 1:
        (directory / "part-00000").rename(directory / WEIGHTS_FILE)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(written):
        file = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        (directory / f"part-{number:05d}").rename(directory / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
