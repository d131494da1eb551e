"""`ModelTensors`: a model's tensors in Hugging Face's names, however tensor and pipeline ranks share it; gathered block by block.

Invariant: every rank walks the same blocks in the same order, and no rank ever holds more whole tensors than one block has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato_trainer.backends.megatron.core import RankGroups
from ostinato_trainer.backends.megatron.mapping import Block, Part, blocks_of, join_shards, shard
from ostinato_trainer.backends.megatron.shape import DecoderShape, MegatronLayout

NamedTensors = list[tuple[str, Tensor]]


class ModelTensors:
    """Between this rank's shares and whole tensors.

    Args:
        shape: Of the model.
        layout: Of the ranks.
        groups: Of this rank.
        device: Where tensors travel.
    """

    def __init__(self, shape: DecoderShape, layout: MegatronLayout, groups: RankGroups, device: torch.device) -> None:
        self._shape, self._layout, self._groups, self._device = shape, layout, groups, device
        self.blocks = blocks_of(shape, layout)
        """Of the whole model."""

    @property
    def own_blocks(self) -> list[Block]:
        """Those of this rank's stage."""
        return [block for block in self.blocks if block.stage == self._groups.stage]

    @property
    def speaks_for_stage(self) -> bool:
        """Whether this is the rank of its stage that gets what is gathered."""
        return self._groups.tensor_rank == 0 and self._groups.data_rank == 0

    def own_share(self, part: Part, whole: Mapping[str, Tensor]) -> Tensor:
        """What this rank holds of a part, cut from whole tensors by name."""
        tensors = [whole[name] for name in part.names]
        groups = self._groups
        return shard(part, tensors, groups.tensor_rank, groups.tensor_size, num_groups=self._shape.num_kv_heads)

    def gathered(self, block: Block, share_of: Callable[[Part], Tensor]) -> NamedTensors:
        """The whole tensors of a block of this stage, on the rank that speaks for it; nothing elsewhere. The stage's tensor ranks of the first
        data rank call it together.

        Args:
            block: Of this rank's stage.
            share_of: This rank's share of a part.
        """
        found: NamedTensors = []
        for part in block.parts:
            if part.alias:
                continue
            share = share_of(part).detach().contiguous()
            shares = [share]
            if self._groups.tensor_size > 1:
                shares = [torch.empty_like(share) for _ in range(self._groups.tensor_size)]
                dist.all_gather(shares, share, group=self._groups.tensor_group)
            if self.speaks_for_stage:
                found += join_shards(part, shares, num_groups=self._shape.num_kv_heads)
        return found

    def on_first_rank(self, block: Block, share_of: Callable[[Part], Tensor], dtype: torch.dtype) -> NamedTensors:
        """The whole tensors of any block, on rank 0; nothing elsewhere. All ranks call it.

        Args:
            block: Any.
            share_of: This rank's share of a part; asked on the block's stage only.
            dtype: Of the shares.
        """
        groups, found = self._groups, NamedTensors()
        if groups.data_rank == 0 and block.stage == groups.stage:
            found = self.gathered(block, share_of)
        if block.stage == 0:
            return found
        if groups.stage == block.stage and self.speaks_for_stage:
            for _, tensor in found:
                dist.send(tensor, 0)
            return []
        if dist.get_rank() != 0:
            return []
        source = block.stage * (dist.get_world_size() // groups.num_stages)  # ranks are counted stage by stage
        for name, shape in block.tensors:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            dist.recv(tensor, source)
            found.append((name, tensor))
        return found

    def on_all_ranks(self, block: Block, found: NamedTensors, dtype: torch.dtype) -> NamedTensors:
        """What rank 0 has found of a block, on every rank. All ranks call it; arguments as `on_first_rank` has them and returns it."""
        if dist.get_rank() != 0:
            found = [(name, torch.empty(shape, dtype=dtype, device=self._device)) for name, shape in block.tensors]
        whole = [(name, tensor.detach().contiguous()) for name, tensor in found]
        for _, tensor in whole:
            dist.broadcast(tensor, 0)
        return whole
