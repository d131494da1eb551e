"""Which models Megatron is told of, and how ranks may share them; needs no Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato_trainer.backends.megatron.shape import DecoderShape, MegatronLayout
from ostinato_trainer.errors import BackendError

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 4,
}


def test_a_config_becomes_a_shape() -> None:
    """What Megatron needs to know stands in config.json, with the defaults of the model's type."""
    qwen3 = DecoderShape.from_config(QWEN3)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.tied, qwen3.num_kv_heads) == (True, False, True, 4)
    qwen2 = DecoderShape.from_config({**QWEN3, "model_type": "qwen2", "head_dim": None, "tie_word_embeddings": False})
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.tied, qwen2.head_dim) == (False, True, False, 8)
    llama = DecoderShape.from_config({**QWEN3, "model_type": "llama", "num_key_value_heads": None})
    assert (llama.qk_norm, llama.qkv_bias, llama.num_kv_heads) == (False, False, 8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_type": None}, "None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of each head"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "bias in attention"),
        ({"mlp_bias": True}, "bias in the MLP"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_dropout": 0.1}, "dropout"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_what_is_not_mapped_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    """A model with a part that is not mapped is refused, naming the part and a strategy that takes it."""
    with pytest.raises(BackendError, match=named) as refused:
        DecoderShape.from_config({**QWEN3, **change})
    assert "strategy=fsdp2" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"vocab_size": "many"}, "many"),
        ({"intermediate_size": None}, "TypeError"),
        ({"rope_scaling": ["linear"]}, "AttributeError"),
        ({"partial_rotary_factor": "half"}, "half"),
        ({"pad_token_id": 128}, "pad_token_id must be below the vocabulary of 128, got 128"),
        ({"pad_token_id": -129}, "pad_token_id must be below the vocabulary of 128, got -129"),
    ],
)
def test_numbers_that_make_no_model_are_refused(change: dict[str, Any], named: str) -> None:
    """What is no number, or none that a model can have, is an error with the key of the folder; another row of the embedding is never taken for the
    padding token's."""
    with pytest.raises(BackendError, match=named) as refused:
        DecoderShape.from_config({**QWEN3, **change})
    assert "fix actor_rollout_ref.model.path" in str(refused.value)


def test_a_padding_token_may_be_counted_from_the_end() -> None:
    """As `transformers` counts it."""
    assert DecoderShape.from_config({**QWEN3, "pad_token_id": -1}).padding_id == 127


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rotary_positions_that_depend_on_the_configuration_alone_are_taken(kind: str) -> None:
    """Scaling that is fixed by the configuration is mapped."""
    assert DecoderShape.from_config({**QWEN3, "rope_scaling": {"rope_type": kind, "factor": 8.0}}).num_layers == 4


@pytest.mark.parametrize(
    ("tensor", "pipeline", "world", "named"),
    [
        (2, 2, 6, "number of ranks"),
        (8, 1, 8, "key-value heads of the model, got 8 with 4"),
        (3, 1, 3, "vocabulary of the model, got 3 with 128"),
        (1, 3, 3, "layers of the model, got 3 with 4"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(tensor: int, pipeline: int, world: int, named: str) -> None:
    """What cannot be split is refused with both numbers and the key."""
    layout = MegatronLayout(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    with pytest.raises(BackendError, match=named) as refused:
        layout.check(DecoderShape.from_config(QWEN3), world)
    assert "actor_rollout_ref.actor.megatron." in str(refused.value)


def test_layouts_that_divide_are_taken() -> None:
    """Tensor, pipeline and data parallel go together."""
    layout = MegatronLayout(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    layout.check(DecoderShape.from_config(QWEN3), 16)
    assert layout.model_size == 8


def test_a_folder_is_read_before_anything_starts(tmp_path: Path) -> None:
    """A folder's config.json is enough; one that is absent, broken or lacks a number is an error that names the key."""
    with pytest.raises(BackendError, match=r"actor_rollout_ref\.model\.path"):
        DecoderShape.from_folder(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(BackendError, match=r"readable config\.json"):
        DecoderShape.from_folder(tmp_path)
    config.write_text(json.dumps({name: value for name, value in QWEN3.items() if name != "hidden_size"}))
    with pytest.raises(BackendError, match="hidden_size"):
        DecoderShape.from_folder(tmp_path)
    config.write_text("[]")
    with pytest.raises(
        BackendError, match=r"config\.json must describe a causal language model.*fix critic\.model\.path"
    ):
        DecoderShape.from_folder(tmp_path, key="critic.model.path")
    config.write_text(json.dumps(QWEN3))
    assert DecoderShape.from_folder(tmp_path) == DecoderShape.from_config(QWEN3)
