"""`SharedRMSNorm`: the norm of Megatron's local layers, also where tensor ranks split the tokens between the matrices, which their own refuses."""

from __future__ import annotations

from typing import Any

from torch import nn


class SharedRMSNorm(nn.RMSNorm):
    """Takes the place of every norm in a layer's specification. Each tensor rank has the whole weight; where it norms a part of the tokens, Megatron
    adds up its gradients over the ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **others: Any) -> None:
        """Arguments are those with which Megatron makes it; what is not needed is not read."""
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]  where Megatron looks for it
