"""`ShardMesh`: where a sharded rank stands: its device, all ranks that hold slices, and the neighbours that share its tokens."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ostinato_trainer.backends.ranks.base import RankPlace
from ostinato_trainer.backends.sequence_ranks import SEQUENCE_KEY, SequenceRanks
from ostinato_trainer.errors import BackendError


class ShardMesh:
    """The layout of the default process group. Collective.

    Args:
        device: What this rank computes on.
        sequence_size: How many neighbours share the tokens of a micro-batch.
        timeout_s: How long an exchange among these may take.

    Raises:
        BackendError: the ranks cannot be shared out; on all alike.
    """

    def __init__(self, device: torch.device, *, sequence_size: int = 1, timeout_s: float = 600.0) -> None:
        self.device, self.rank, self.num_ranks = device, dist.get_rank(), dist.get_world_size()
        if self.num_ranks % sequence_size:
            raise BackendError(
                f"{SEQUENCE_KEY} must divide the number of ranks (trainer.nnodes x trainer.n_gpus_per_node), {self.num_ranks}, got {sequence_size}; "
                f"write {SEQUENCE_KEY}=1"
            )
        self._sequence_size = sequence_size
        self.slices = init_device_mesh(device.type, (self.num_ranks,), mesh_dim_names=("data",))
        """All ranks, in one dimension: each holds a slice of everything."""
        self.sequence_ranks: SequenceRanks | None = None
        if sequence_size > 1:
            group, _ = dist.new_subgroups(sequence_size, timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            self.sequence_ranks = SequenceRanks(group)

    @property
    def place(self) -> RankPlace:
        """See `RankBackend.place`: neighbours that share tokens have the same data, and the first of them reports."""
        return RankPlace(
            rank=self.rank,
            world_size=self.num_ranks,
            data_index=self.rank // self._sequence_size,
            data_size=self.num_ranks // self._sequence_size,
            reports=self.rank % self._sequence_size == 0,
        )
