"""`Fsdp2Options`: what a sharded rank needs to know besides its model."""

from __future__ import annotations

from typing import Final

from ostinato_trainer.backends.local import LocalBackendOptions, MemoryCures
from ostinato_trainer.backends.sequence_ranks import SEQUENCE_KEY
from ostinato_trainer.errors import BackendError

CURES: Final = MemoryCures(
    batches="lower ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu, or data.max_response_length, or write "
    "model.enable_gradient_checkpointing=true or actor.fsdp_config.param_offload=true",
    state="share the model out over more devices (trainer.nnodes, trainer.n_gpus_per_node) or write actor.fsdp_config.param_offload=true",
)
"""Where memory does not suffice."""


class Fsdp2Options(LocalBackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names follow `actor_rollout_ref.actor.fsdp_config`. `device` is the rank's own, and `cures` are those of all sharded ranks."""

    param_offload: bool = False
    """Keep weights, gradients and moments in the host's memory and take the step there."""
    optimizer_offload: bool = False
    """Keep the moments in the host's memory between steps."""
    reshard_after_forward: bool = True
    """See `ShardOptions`."""
    gradient_checkpointing: bool = False
    """See `ShardOptions`."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share the tokens of a micro-batch; see `SequenceRanks`."""

    def check(self) -> None:
        """Raises BackendError where a value is out of range or not done by this backend."""
        if self.ulysses_sequence_parallel_size < 1:
            raise BackendError(
                f"{SEQUENCE_KEY} must be at least 1, got {self.ulysses_sequence_parallel_size}; 1 shares no tokens"
            )
        super().check()
