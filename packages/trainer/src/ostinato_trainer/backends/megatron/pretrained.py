"""What a rank reads of a Hugging Face model: its configuration, its rotary frequencies, and its tensors block by block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ostinato_engines.device import HOST
from ostinato_trainer.backends.causal_lm import load_causal_lm
from ostinato_trainer.backends.megatron.mapping import Block
from ostinato_trainer.errors import BackendError
from ostinato_trainer.home_paths import home_path

MODEL_PATH: Final = "actor_rollout_ref.model.path"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


class PretrainedTensors:
    """The tensors of a model folder, read when they are asked for.

    Args:
        path: Folder or hub id. Where it is no folder of safetensors, `transformers` loads the whole model into memory.
        key: That names it in the configuration.

    Raises:
        BackendError: it holds no model that can be loaded.
    """

    def __init__(self, path: str | Path, *, key: str = MODEL_PATH) -> None:
        folder = home_path(path, "actor_rollout_ref.model.path", BackendError)
        self._files: dict[str, Path] = {}
        self._loaded: Mapping[str, Tensor] = {}
        try:
            if (folder / INDEX_FILE).is_file():
                index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
                self._files = {name: folder / file for name, file in index["weight_map"].items()}
            elif (folder / WEIGHTS_FILE).is_file():
                with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
                    self._files = dict.fromkeys(file.keys(), folder / WEIGHTS_FILE)
            else:
                model = load_causal_lm(path, dtype=torch.float32, device=torch.device(HOST))
                self._loaded = model.state_dict()
        except (OSError, ValueError, KeyError, SafetensorError) as error:
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
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, shape in wanted.items():
                tensor = self._loaded.get(name)
                try:
                    if name in self._files:
                        path = self._files[name]
                        if path not in opened:
                            opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                        tensor = opened[path].get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise self._unfit(name, shape, str(error)) from error
                if tensor is None or tuple(tensor.shape) != shape:
                    raise self._unfit(name, shape, "none" if tensor is None else f"shape {list(tensor.shape)}")
                tensors[name] = tensor
        return tensors

    def value_head(self, hidden_size: int) -> tuple[str, ...]:
        """The names of the tensors of the scalar head that these have, or are given now: one that is zero."""
        weight, bias = "score.weight", "score.bias"
        stored = self._files.keys() | self._loaded.keys()
        if weight not in stored:
            zeros = {weight: torch.zeros(1, hidden_size), bias: torch.zeros(1)}
            self._loaded = {**self._loaded, **zeros}
            return weight, bias
        return (weight, bias) if bias in stored else (weight,)

    def _unfit(self, name: str, shape: tuple[int, ...], found: str) -> BackendError:
        return BackendError(
            f"model path must hold {name} of shape {list(shape)}, got {found} in {str(self._path)!r}; check {self._key}"
        )


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
