"""Names, shapes and shares of tensors under Megatron; needs no Megatron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ostinato_trainer.backends.megatron.mapping import EMBEDDING, Split, blocks_of, join_shards, shard
from ostinato_trainer.backends.megatron.shape import DecoderShape, MegatronLayout

KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}


def shape_of(
    kind: str = "qwen2", *, groups: int = 2, queries: int = 2, head_dim: int = 4, tied: bool = False, layers: int = 4
) -> DecoderShape:
    """A small shape with all parts that its kind has."""
    return DecoderShape(
        model_type=kind,
        num_layers=layers,
        hidden_size=12,
        num_heads=groups * queries,
        num_kv_heads=groups,
        head_dim=head_dim,
        intermediate_size=8 * groups,
        vocab_size=8 * groups,
        norm_eps=1e-6,
        tied=tied,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_blocks_name_what_transformers_has(kind: str, tied: bool) -> None:
    """The blocks' tensors are the parameters of the model in `transformers`, each once, with their shapes."""
    model_class, config_class = KINDS[kind]
    config: Any = config_class(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        **({"head_dim": 8} if kind == "qwen3" else {}),
    )
    model: Any = model_class(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shape = DecoderShape.from_config(config.to_dict())
    for pipeline in (1, 2):
        found = [
            pair
            for block in blocks_of(shape, MegatronLayout(pipeline_model_parallel_size=pipeline))
            for pair in block.tensors
        ]
        assert dict(found) == expected
        assert len(found) == len(expected)


@given(
    size=st.sampled_from([1, 2, 4]),
    groups_per_rank=st.integers(1, 3),
    queries=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_shares_come_together_again(size: int, groups_per_rank: int, queries: int, head_dim: int, kind: str) -> None:
    """What ranks hold of a part, put together, is the part bit for bit; and together they hold each number of it once, norms aside."""
    shape = shape_of(kind, groups=size * groups_per_rank, queries=queries, head_dim=head_dim, layers=1)
    for block in blocks_of(shape, MegatronLayout(tensor_model_parallel_size=size)):
        for part in block.parts:
            tensors, start = [], 0
            for each in part.shapes:
                count = torch.Size(each).numel()
                tensors.append(torch.arange(start, start + count, dtype=torch.float64).view(each))
                start += count
            shares = [shard(part, tensors, rank, size, num_groups=shape.num_kv_heads) for rank in range(size)]
            whole = dict(join_shards(part, shares, num_groups=shape.num_kv_heads))
            assert list(whole) == list(part.names)
            assert all(torch.equal(whole[name], tensor) for name, tensor in zip(part.names, tensors, strict=True))
            if part.split is not Split.WHOLE:
                assert torch.equal(
                    torch.cat([share.flatten() for share in shares]).sort().values,
                    torch.arange(float(start), dtype=torch.float64),
                )


def test_a_rank_gets_whole_groups_of_heads() -> None:
    """A rank's rows are, group by group, those of the queries, then of their key, then of their value."""
    shape = shape_of(groups=2, queries=2, head_dim=1)
    (part,) = [
        part for part in blocks_of(shape, MegatronLayout())[1].parts if part.parameter.endswith("linear_qkv.bias")
    ]
    query, key, value = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])
    shares = [shard(part, [query, key, value], rank, 2, num_groups=2).tolist() for rank in range(2)]
    assert shares == [[0.0, 1.0, 10.0, 20.0], [2.0, 3.0, 11.0, 21.0]]


def test_stages_get_layers_in_order_and_the_last_a_copy_of_a_tied_embedding() -> None:
    """Layers are counted anew on each stage; a tied embedding is loaded twice and read back once."""
    blocks = blocks_of(shape_of(tied=True), MegatronLayout(pipeline_model_parallel_size=2))
    assert [block.stage for block in blocks] == [0, 0, 0, 1, 1, 1]
    assert blocks[3].parts[0].parameter == "decoder.layers.0.input_layernorm.weight"
    assert blocks[3].parts[0].names == ("model.layers.2.input_layernorm.weight",)
    alias = blocks[-1].parts[-1]
    assert (alias.parameter, alias.names, alias.alias) == ("output_layer.weight", (EMBEDDING,), True)
    assert EMBEDDING not in dict(blocks[-1].tensors)
