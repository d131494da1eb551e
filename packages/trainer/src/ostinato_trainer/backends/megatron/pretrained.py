"""What a rank reads of a Hugging Face model: its configuration, its rotary frequencies, and its tensors block by block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ostinato_engines.device import HOST
from ostinato_trainer.backends.causal_lm import load_causal_lm, model_folder
from ostinato_trainer.backends.megatron.mapping import EMBEDDING, HEAD, Block
from ostinato_trainer.errors import BackendError
from ostinato_trainer.home_paths import home_path

MODEL_PATH: Final = "actor_rollout_ref.model.path"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


class PretrainedTensors:
    """The tensors of a model folder, read when they are asked for.

    Args:
        path: Folder or hub id. Where it is no folder of safetensors, `transformers` loads, and fetches, the whole model first.
        key: That names it in the configuration.

    Raises:
        BackendError: it holds no model that can be loaded.
    """

    def __init__(self, path: str | Path, *, key: str = MODEL_PATH) -> None:
        folder = home_path(path, key, BackendError)
        self._files: dict[str, Path] = {}
        self._loaded: Mapping[str, Tensor] = {}
        self._names: dict[str, str] = {}
        """Under which names others are stored."""
        try:
            if folder.is_dir():
                self._files = _stored(folder)
            if not self._files:
                host = torch.device(HOST)
                model = load_causal_lm(path, dtype=torch.float32, device=host, key=key, needs_head=key == MODEL_PATH)
                self._files = _stored(model_folder(path, key))  # of a hub id, whose files are there now
                self._loaded = {} if self._files else model.state_dict()
        except (OSError, AttributeError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise BackendError(
                f"model path must hold readable weights, got {str(path)!r}: {error}; check {key}"
            ) from error
        self._path, self._key = path, key

    def of_block(self, block: Block) -> dict[str, Tensor]:
        """The whole tensors that the parts of a block are made of, on the host.

        Raises:
            BackendError: one is missing, damaged or of another shape.
        """
        wanted = {name: shape for part in block.parts for name, shape in zip(part.names, part.shapes, strict=True)}
        tensors: dict[str, Tensor] = {}
        for name, shape in wanted.items():
            tensor = self._tensor(name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "none" if tensor is None else f"shape {list(tensor.shape)}"
                raise self._unfit(f"{name} of shape {list(shape)}", found)
            tensors[name] = tensor
        return tensors

    def tie(self) -> None:
        """Makes one tensor of embedding and output layer, whichever of both is stored.

        Raises:
            BackendError: both are, and differ: `transformers` would compute with both, engines would not.
        """
        embedding, head = self._tensor(EMBEDDING), self._tensor(HEAD)
        if embedding is None:
            self._names[EMBEDDING] = HEAD
        elif head is not None and not torch.equal(embedding, head):
            raise self._unfit(f"one tensor as {EMBEDDING} and {HEAD}, which config.json ties", "two that differ")

    def value_head(self, hidden_size: int) -> tuple[str, ...]:
        """The names of the tensors of the scalar head that these have, or are given now: one that is zero."""
        weight, bias = "score.weight", "score.bias"
        stored = self._files.keys() | self._loaded.keys()
        if weight not in stored:
            zeros = {weight: torch.zeros(1, hidden_size), bias: torch.zeros(1)}
            self._loaded = {**self._loaded, **zeros}
            return weight, bias
        return (weight, bias) if bias in stored else (weight,)

    def _tensor(self, name: str) -> Tensor | None:
        """A whole tensor, on the host; None where there is none. BackendError where its file is missing or damaged."""
        stored = self._names.get(name, name)
        if stored not in self._files:
            return self._loaded.get(stored)
        try:
            with safe_open(self._files[stored], framework="pt") as file:
                return file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise self._unfit(name, str(error)) from error

    def _unfit(self, wanted: str, found: str) -> BackendError:
        return BackendError(f"model path must hold {wanted}, got {found} in {str(self._path)!r}; check {self._key}")


def _stored(folder: Path) -> dict[str, Path]:
    """The file of each tensor in a folder; none where it is no folder of safetensors."""
    if (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        return {name: folder / file for name, file in index["weight_map"].items()}
    if not (folder / WEIGHTS_FILE).is_file():
        return {}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS_FILE)


def model_config(path: str | Path, *, key: str = MODEL_PATH) -> Any:
    """The configuration of the model of a folder or a hub id, which a key of the configuration names.

    Raises:
        BackendError: there is none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path))
    except Exception as error:  # transformers and huggingface_hub each raise their own: here they become one message
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise BackendError(
            f"model path must hold a causal language model, got {str(path)!r}: {reason}; check {key}"
        ) from error


def rotary_frequencies(config: Any) -> Tensor:
    """float [head_dim / 2]: those of `transformers` itself, scaling included.

    Raises:
        BackendError: attention is scaled beside them.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    if rotary.attention_scaling != 1.0:
        raise BackendError(
            f"rotary positions must leave attention unscaled to be trained with Megatron, got a factor of {rotary.attention_scaling}; "
            "use actor_rollout_ref.actor.strategy=fsdp2 or local"
        )
    return rotary.inv_freq.detach().clone()
