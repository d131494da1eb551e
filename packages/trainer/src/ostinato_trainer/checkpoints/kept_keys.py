"""What of a configuration a run must keep to go on from a checkpoint, for its files would not fit else. Reads no tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import to_yaml
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import CheckpointError

__all__ = ["CONFIG_FILE", "MODEL_FOLDER", "check_kept", "keys_of", "saved_keys"]

MODEL_FOLDER: Final = "huggingface"
"""Of a checkpoint: the model as any program of the field reads it."""
CONFIG_FILE: Final = "config.yaml"

_STRATEGY: Final = "actor_rollout_ref.actor.strategy"
_SHAPES_OF_ADAPTERS: Final = ("lora_rank", "target_modules", "exclude_modules")


def keys_of(config: Config | SftConfig) -> dict[str, Any]:
    """All values by dotted keys, as a checkpoint has them."""
    return dict(_flat(yaml.safe_load(to_yaml(config))))


def saved_keys(directory: Path) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint, by dotted keys.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return dict(_flat(yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{directory / CONFIG_FILE} must be readable, got {error}; resume from another step"
        ) from error


def check_kept(directory: Path, config: Config | SftConfig) -> None:
    """Refuse a checkpoint whose files the configuration cannot read.

    Raises:
        CheckpointError: Naming the key to change back.
    """
    saved, current = saved_keys(directory), keys_of(config)
    _check_strategy(directory, saved, current)
    _check_adapters(directory, saved, current, "model" if isinstance(config, SftConfig) else "actor_rollout_ref.model")


def _check_strategy(directory: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Megatron's ranks write files of their own; local and fsdp2 read what either of them wrote."""
    given = current.get(_STRATEGY)
    wrote = saved.get(_STRATEGY, given)
    if (wrote == "megatron") == (given == "megatron"):
        return
    wanted = "megatron" if wrote == "megatron" else "local or fsdp2"
    raise CheckpointError(
        f"{_STRATEGY} must be {wanted} to go on from {directory}, which {wrote} wrote, got {given}; "
        f"change it back, or begin anew with that model: actor_rollout_ref.model.path={directory / MODEL_FOLDER} and another "
        "trainer.default_local_dir"
    )


def _check_adapters(directory: Path, saved: Mapping[str, Any], current: Mapping[str, Any], model: str) -> None:
    """Adapters, or none, of the same shape; those of a folder have that folder's."""
    if any(keys.get(f"{model}.lora_adapter_path") for keys in (saved, current)):
        return
    ranks = [keys.get(f"{model}.lora_rank", 0) for keys in (saved, current)]
    for name in _SHAPES_OF_ADAPTERS if all(ranks) else _SHAPES_OF_ADAPTERS[:1]:
        key = f"{model}.{name}"
        given = current.get(key)
        if (wrote := saved.get(key, given)) != given:
            raise CheckpointError(
                f"{key} must be {wrote} to go on from {directory}, which was trained so, got {given}; write {key}={wrote}, or choose another "
                "trainer.default_local_dir to begin anew"
            )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
