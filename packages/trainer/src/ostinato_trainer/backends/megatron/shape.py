"""`DecoderShape`: what Megatron-core is told of a Hugging Face model; `MegatronLayout`: over how many ranks it is spread.

Invariant: what is not mapped is refused by name, never approximated. Reads plain configuration data; knows neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ostinato_trainer.errors import BackendError
from ostinato_trainer.home_paths import home_path

_MODEL_PATH = "actor_rollout_ref.model.path"
_PREFIX = "actor_rollout_ref.actor.megatron"
_OTHER_STRATEGY = "use actor_rollout_ref.actor.strategy=fsdp2 or local"

_QKV_BIAS = {"llama": False, "qwen2": True, "qwen3": False}
"""The model types that are mapped, and whether their queries, keys and values have a bias."""
_ROPE_KINDS = frozenset({"default", "linear", "llama3"})
"""Rotary positions whose frequencies depend neither on the length of a sequence nor on anything but the configuration."""


class MegatronLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ranks of one model; what is left of the world multiplies the data (`actor_rollout_ref.actor.megatron`)."""

    tensor_model_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Ranks over which each layer's matrices, heads and vocabulary are split."""
    pipeline_model_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Ranks over which the layers are spread."""
    sequence_parallel: bool = True
    """Between the matrices, split the tokens over the tensor ranks."""

    @property
    def splits_tokens(self) -> bool:
        """Whether tensor ranks hold different tokens between the matrices."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def check(self, shape: DecoderShape, world_size: int, *, of: str = "the model") -> None:
        """Raises BackendError, naming the keys to change, where the model, which messages call `of`, or the ranks do not divide."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if world_size % self.model_size:
            raise BackendError(
                f"{_PREFIX}.tensor_model_parallel_size x pipeline_model_parallel_size must divide the number of ranks, got {tensor} x {pipeline} "
                f"with {world_size}; change them, or trainer.nnodes x trainer.n_gpus_per_node"
            )
        split = {
            "the vocabulary": shape.vocab_size,
            "the attention heads": shape.num_heads,
            "the key-value heads": shape.num_kv_heads,
            "the width of the MLP": shape.intermediate_size,
        }
        for what, size in split.items():
            if size % tensor:
                raise BackendError(
                    f"{_PREFIX}.tensor_model_parallel_size must divide {what} of {of}, got {tensor} with {size}; choose a divisor"
                )
        if shape.num_layers % pipeline:
            raise BackendError(
                f"{_PREFIX}.pipeline_model_parallel_size must divide the layers of {of}, got {pipeline} with {shape.num_layers}; "
                "choose a divisor"
            )


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped queries, SwiGLU."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    """Queries and keys are normed head by head."""
    padding_id: int | None = None
    """A token whose row of the embedding learns nothing from being read, as `transformers` has it."""
    value_head: tuple[str, ...] = ()
    """The tensors of a critic's head, which stands in the place of the output layer: its weight [1, hidden] and perhaps its bias [1]; none for a
    language model."""

    def with_value_head(self, names: Sequence[str]) -> DecoderShape:
        """The same as a critic, whose head has these tensors."""
        return msgspec.structs.replace(self, value_head=tuple(names), tied=False)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, key: str = _MODEL_PATH, path: str | Path = "config.json"
    ) -> DecoderShape:
        """The shape that a model folder's config.json describes; `key` of the configuration names the folder, `path` is the file.

        Raises:
            BackendError: the model is of a type, or has a part, that is not mapped, or a number is missing or none; the message names it.
        """
        try:
            return cls._read(config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # of what is no object, or no number
            raise BackendError(
                f"{path} must describe a causal language model, got {type(error).__name__}: {error}; fix {key}"
            ) from error

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> DecoderShape:
        model_type = str(config.get("model_type"))
        if model_type not in _QKV_BIAS:
            raise BackendError(
                f"model type must be one of {', '.join(_QKV_BIAS)} to be trained with Megatron, got {model_type}; {_OTHER_STRATEGY}"
            )
        _refuse_what_is_not_mapped(model_type, config)
        num_heads, hidden_size = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        vocab_size = _size(config, "vocab_size")
        return cls(
            model_type=model_type,
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or (128 if model_type == "qwen3" else hidden_size // num_heads)),
            intermediate_size=_size(config, "intermediate_size"),
            vocab_size=vocab_size,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=_QKV_BIAS[model_type],
            qk_norm=model_type == "qwen3",
            padding_id=_padding_id(config.get("pad_token_id"), vocab_size),
        )

    @classmethod
    def from_folder(cls, folder: str | Path, *, key: str = _MODEL_PATH) -> DecoderShape:
        """The shape of the model in a folder, which a key of the configuration names.

        Raises:
            BackendError: there is no readable config.json in it, or see `from_config`.
        """
        path = home_path(folder, key, BackendError) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BackendError(
                f"model path must be a folder with a readable config.json to be trained with Megatron, got {str(folder)!r}: {error}; "
                f"fix {key}"
            ) from error
        return cls.from_config(config, key=key, path=path)


def _size(config: Mapping[str, Any], name: str) -> int:
    """A number of config.json that must be at least 1; ValueError where it is not."""
    if (size := int(config[name])) < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    return size


def _padding_id(given: Any, vocab_size: int) -> int | None:
    """The row of the padding token, which may be counted from the end; ValueError where it is none of the vocabulary's, as in `transformers`."""
    if given is None:
        return None
    if not -vocab_size <= int(given) < vocab_size:
        raise ValueError(f"pad_token_id must be below the vocabulary of {vocab_size}, got {given}")
    return int(given) % vocab_size


def _refuse_what_is_not_mapped(model_type: str, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    layer_kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    unmapped = {
        f"rotary positions of kind {kind}": kind not in _ROPE_KINDS,
        "rotary positions over a part of each head": any(
            float(each.get("partial_rotary_factor") or 1.0) != 1.0 for each in (rope, config)
        ),
        "sliding-window attention": bool(layer_kinds) or bool(config.get("use_sliding_window")),
        "a bias in attention": bool(config.get("attention_bias")),
        "a bias in the MLP": bool(config.get("mlp_bias")),
        f"the activation {config.get('hidden_act')}": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention dropout": bool(config.get("attention_dropout")),
        "quantized weights": config.get("quantization_config") is not None,
    }
    found = next((what for what, is_there in unmapped.items() if is_there), None)
    if found is not None:
        raise BackendError(
            f"a {model_type} model must be without {found} to be trained with Megatron, got one with it; {_OTHER_STRATEGY}"
        )
