"""`SequenceRanks`: ranks that share the tokens of a packed row (Ulysses sequence parallel, arXiv:2309.14509).

Each rank computes everything for its own stretch of tokens. Only for attention it gives away its tokens' heads, gets all tokens of its own heads, and
afterwards the other way round. Invariants: the ranks are given the same batches, so a loss is computed by all alike; each takes from it the gradient
of its own tokens, and the sum over ranks is the whole; and no rank ever holds the logits of tokens that are not its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ostinato_trainer.errors import BackendError

SEQUENCE_KEY: Final = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


class SequenceRanks:
    """This rank among those that share tokens. Every method that takes tensors of tokens' states is collective.

    Args:
        group: Of these ranks, two or more; its order is that of the stretches of tokens.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.index = group, group.size(), group.rank()

    def width(self, num_tokens: int) -> int:
        """Tokens of each rank's stretch; the last stretches are filled up to it."""
        return -(-num_tokens // self.size)

    def own(self, column: Tensor) -> Tensor:
        """This rank's stretch of a column [T, ...], filled up with zeros: [width, ...]."""
        width = self.width(column.shape[0])
        start = self.index * width
        stretch = column[start : start + width]
        return functional.pad(stretch, (0, 0) * (column.ndim - 1) + (0, width - stretch.shape[0]))

    def sequences(self, starts: Tensor, num_tokens: int) -> Tensor:
        """`cu_seqlens` int [N+1] with what fills the row up as a sequence more, where there is any."""
        end = self.width(num_tokens) * self.size
        return starts if end == num_tokens else torch.cat([starts, starts.new_full((1,), end)])

    def lengths(self, lengths: Sequence[int]) -> list[int]:
        """Lengths of `sequences`."""
        num_tokens = sum(lengths)
        filling = self.width(num_tokens) * self.size - num_tokens
        return [*lengths, filling] if filling else list(lengths)

    def predicted_here(self, tokens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Of flat positions of tokens (int64 [S], above 0) those whose predecessors are this rank's, and where in its stretch these are."""
        width = self.width(num_tokens)
        places = tokens - 1 - self.index * width
        held = (places >= 0) & (places < width)
        return tokens[held], places[held]

    def gathered(self, rows: Tensor, num_tokens: int) -> Tensor:
        """[T, ...] of the rows [width, ...] of all ranks' stretches, the same on all; no gradient."""
        stretches = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(stretches, rows.contiguous(), group=self.group)
        return torch.cat(stretches)[:num_tokens]

    def whole(self, values: Tensor) -> Tensor:
        """Adds up what each rank knows of its own tokens, [T, ...] with zeros elsewhere. The gradient of an own token's value is that of the sum."""
        return _Whole.apply(values, self.group)

    def heads(self, states: Tensor) -> Tensor:
        """From [1, heads, width, d] of own tokens to [1, heads / size, width * size, d] of own heads; heads too few to share out are repeated.

        A rank's query heads are the ones that ask its key heads.

        Raises:
            BackendError: the heads cannot be shared out.
        """
        num_heads = math.lcm(states.shape[1], self.size)
        return _Heads.apply(states.repeat_interleave(num_heads // states.shape[1], dim=1), self)

    def tokens(self, states: Tensor) -> Tensor:
        """The way back from `heads`."""
        return _Tokens.apply(states, self)

    def check_heads(self, num_heads: int) -> None:
        """Raises BackendError where query heads cannot be shared out."""
        if num_heads % self.size:
            sizes = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
            raise BackendError(
                f"{SEQUENCE_KEY} must divide the model's {num_heads} attention heads, got {self.size}; write one of {', '.join(map(str, sizes))}"
            )

    def exchanged(self, parts: Tensor) -> Tensor:
        """[size, ...]: part r of what this rank has goes to rank r, whose part comes to place r."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received


class _Heads(torch.autograd.Function):
    """`SequenceRanks.heads`, whose gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return _to_heads(states, ranks)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  torch's stub names the first argument, which a static method cannot override
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return _to_tokens(gradient, ctx.ranks), None


class _Tokens(torch.autograd.Function):
    """`SequenceRanks.tokens`, whose gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return _to_tokens(states, ranks)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  as above
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return _to_heads(gradient, ctx.ranks), None


class _Whole(torch.autograd.Function):
    """A sum over ranks, of which each rank's gradient is that of its own addend: the loss behind it is the same on all, and counts once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  as above
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return gradient, None


def _to_heads(states: Tensor, ranks: SequenceRanks) -> Tensor:
    _, heads, width, depth = states.shape
    received = ranks.exchanged(states.view(ranks.size, heads // ranks.size, width, depth))
    return received.transpose(0, 1).reshape(1, heads // ranks.size, ranks.size * width, depth)


def _to_tokens(states: Tensor, ranks: SequenceRanks) -> Tensor:
    _, heads, length, depth = states.shape
    parts = states.view(heads, ranks.size, length // ranks.size, depth).transpose(0, 1)
    return ranks.exchanged(parts).reshape(1, heads * ranks.size, length // ranks.size, depth)
