"""What a checkpoint's `config.json` says that an adapter must know before, or without, loading the model."""

import json
from pathlib import Path
from typing import Any

import msgspec

from ostinato_engines.errors import EngineLoadError

_TEXT = "text_config"
"""Where models of several modalities keep what is about text."""


class CheckpointConfig(msgspec.Struct, frozen=True):
    """Of the text model."""

    vocab_size: int
    max_model_len: int
    """Positions that the model has."""
    dtype: str
    """Of the stored weights, as torch calls it."""
    tied: bool
    """Whether the output head is the embedding."""


def read_config(model: str) -> CheckpointConfig:
    """Reads a folder's `config.json`.

    Raises:
        EngineLoadError: It is not there, or lacks something.
    """
    path = Path(model) / "config.json"
    try:
        whole: dict[str, Any] = json.loads(path.read_text())
        text: dict[str, Any] = {**whole, **(whole.get(_TEXT) or {})}
        return CheckpointConfig(
            vocab_size=int(text["vocab_size"]),
            max_model_len=int(text["max_position_embeddings"]),
            dtype=str(text.get("dtype") or text.get("torch_dtype") or "float32"),
            tied=bool(text.get("tie_word_embeddings", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineLoadError(
            f"model must be a folder with a config.json of a language model, got {model} ({type(error).__name__}: {error}); "
            "check the path, or download the model first"
        ) from error
