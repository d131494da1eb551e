"""`PackedCausalAttention`: the attention of Megatron's local layers over packed sequences, which their own cannot do.

It is the function that `transformers` models are packed with, so both backends compute the same: nothing is padded, no table of scores exists
where the kernel needs none, and a sequence never sees its neighbours.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ostinato_trainer.backends.packed_attention import packed_attention


class PackedCausalAttention(nn.Module):
    """Takes the place of `core_attention` in a layer's specification."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **others: Any) -> None:
        """Arguments are those with which Megatron makes it; what is not needed is not read."""
        super().__init__()
        self.is_causal = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """float [T, heads, width]; `query` is of that shape, `key` and `value` of as many heads as read them."""
        assert attention_mask is None
        assert attention_bias is None
        assert packed_seq_params is not None
        query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        attended, _ = packed_attention(
            self,
            query,
            key,
            value,
            None,
            cu_seq_lens_q=packed_seq_params.cu_seqlens_q,
            max_length_q=packed_seq_params.max_seqlen_q,
        )
        return attended.squeeze(0)
