"""Where each tensor of a Hugging Face checkpoint stands in Megatron's model, and how tensor-parallel ranks share it.

Invariant: `join_shards` undoes `shard` bit for bit: both only cut, reorder and copy rows and columns, so that what holds of weights holds of
their moments too. Knows no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from ostinato_trainer.backends.megatron.shape import DecoderShape, MegatronLayout

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Split(Enum):
    """How the tensors of a part are shared by tensor-parallel ranks."""

    WHOLE = auto()
    """Every rank has all of it."""
    ROWS = auto()
    """Each rank has its rows."""
    COLUMNS = auto()
    """Each rank has its columns."""
    GATED = auto()
    """Gate and up projection: each rank has its rows of the one above its rows of the other."""
    GROUPED = auto()
    """Queries, keys and values: for each of its key-value heads a rank has the rows of the queries that read it, of the key and of the value."""


@dataclass(frozen=True)
class Part:
    """One parameter of Megatron's model."""

    parameter: str
    """Its name there, layers counted from the first of its pipeline stage."""
    names: tuple[str, ...]
    """The Hugging Face tensors that it is made of."""
    shapes: tuple[tuple[int, ...], ...]
    """Their shapes."""
    split: Split
    alias: bool = False
    """A copy of another stage's tensor: loaded, but not read back."""


@dataclass(frozen=True)
class Block:
    """Parts of one pipeline stage that are gathered together: the embedding, one layer, or the end."""

    name: str
    stage: int
    parts: tuple[Part, ...]

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the Hugging Face tensors in it."""
        return [
            (name, shape)
            for part in self.parts
            if not part.alias
            for name, shape in zip(part.names, part.shapes, strict=True)
        ]


def blocks_of(shape: DecoderShape, layout: MegatronLayout) -> list[Block]:
    """All blocks of a model, first to last."""
    stages = layout.pipeline_model_parallel_size
    layers_per_stage = shape.num_layers // stages
    vocabulary = (shape.vocab_size, shape.hidden_size)
    embedding = Part("embedding.word_embeddings.weight", (EMBEDDING,), (vocabulary,), Split.ROWS)
    end = [Part("decoder.final_layernorm.weight", ("model.norm.weight",), ((shape.hidden_size,),), Split.WHOLE)]
    if shape.value_head:
        shapes = ((1, shape.hidden_size), (1,))
        end += [Part(name, (name,), (size,), Split.WHOLE) for name, size in zip(shape.value_head, shapes, strict=False)]
    elif not shape.tied:
        end.append(Part("output_layer.weight", (HEAD,), (vocabulary,), Split.ROWS))
    elif stages > 1:
        end.append(Part("output_layer.weight", (EMBEDDING,), (vocabulary,), Split.ROWS, alias=True))
    layers = [
        Block(f"layer_{index:05d}", index // layers_per_stage, _layer_parts(shape, index, index % layers_per_stage))
        for index in range(shape.num_layers)
    ]
    return [Block("embedding", 0, (embedding,)), *layers, Block("end", stages - 1, tuple(end))]


def _layer_parts(shape: DecoderShape, index: int, place: int) -> tuple[Part, ...]:
    """The parts of layer `index`, which is layer `place` of its stage."""
    ours, theirs = f"decoder.layers.{place}.", f"model.layers.{index}."
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projections = tuple(f"{theirs}self_attn.{letter}_proj" for letter in "qkv")
    rows = (query, key, key)

    def norm(parameter: str, name: str, width: int) -> Part:
        return Part(f"{ours}{parameter}.weight", (f"{theirs}{name}.weight",), ((width,),), Split.WHOLE)

    parts = [
        norm("input_layernorm", "input_layernorm", hidden),
        Part(
            f"{ours}self_attention.linear_qkv.weight",
            tuple(f"{name}.weight" for name in projections),
            tuple((size, hidden) for size in rows),
            Split.GROUPED,
        ),
    ]
    if shape.qkv_bias:
        biases = tuple(f"{name}.bias" for name in projections)
        parts.append(
            Part(f"{ours}self_attention.linear_qkv.bias", biases, tuple((size,) for size in rows), Split.GROUPED)
        )
    if shape.qk_norm:
        parts += [
            norm(f"self_attention.{letter}_layernorm", f"self_attn.{letter}_norm", shape.head_dim) for letter in "qk"
        ]
    return (
        *parts,
        Part(
            f"{ours}self_attention.linear_proj.weight",
            (f"{theirs}self_attn.o_proj.weight",),
            ((hidden, query),),
            Split.COLUMNS,
        ),
        norm("pre_mlp_layernorm", "post_attention_layernorm", hidden),
        Part(
            f"{ours}mlp.linear_fc1.weight",
            (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"),
            ((inner, hidden), (inner, hidden)),
            Split.GATED,
        ),
        Part(f"{ours}mlp.linear_fc2.weight", (f"{theirs}mlp.down_proj.weight",), ((hidden, inner),), Split.COLUMNS),
    )


def shard(part: Part, tensors: Sequence[Tensor], rank: int, size: int, *, num_groups: int) -> Tensor:
    """What tensor-parallel rank `rank` of `size` holds of a part.

    Args:
        part: Which.
        tensors: Whole, in the order of `part.names`.
        rank: Below `size`.
        size: Divides what is split.
        num_groups: Key-value heads of the model.
    """
    match part.split:
        case Split.WHOLE:
            return tensors[0]
        case Split.ROWS:
            return tensors[0].chunk(size, dim=0)[rank]
        case Split.COLUMNS:
            return tensors[0].chunk(size, dim=1)[rank]
        case Split.GATED:
            return torch.cat([tensor.chunk(size, dim=0)[rank] for tensor in tensors])
        case Split.GROUPED:
            grouped = torch.cat([_grouped(tensor, num_groups) for tensor in tensors], dim=1)
            return grouped.chunk(size, dim=0)[rank].flatten(0, 1)


def join_shards(part: Part, shards: Sequence[Tensor], *, num_groups: int) -> list[tuple[str, Tensor]]:
    """The whole tensors of a part, by name, from what all tensor-parallel ranks hold, in their order."""
    match part.split:
        case Split.WHOLE:
            whole = [shards[0]]
        case Split.ROWS:
            whole = [torch.cat(list(shards), dim=0)]
        case Split.COLUMNS:
            whole = [torch.cat(list(shards), dim=1)]
        case Split.GATED:
            halves = [each.chunk(2, dim=0) for each in shards]
            whole = [torch.cat([half[place] for half in halves]) for place in range(2)]
        case Split.GROUPED:
            grouped = torch.cat([_grouped(each, num_groups // len(shards)) for each in shards], dim=0)
            rows = [shape[0] // num_groups for shape in part.shapes]
            whole = [piece.flatten(0, 1) for piece in grouped.split(rows, dim=1)]
    return [(name, tensor.contiguous()) for name, tensor in zip(part.names, whole, strict=True)]


def _grouped(tensor: Tensor, num_groups: int) -> Tensor:
    """[groups, rows of a group, ...]."""
    return tensor.unflatten(0, (num_groups, tensor.shape[0] // num_groups))
