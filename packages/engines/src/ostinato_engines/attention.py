"""Scaled dot-product attention that never copies keys and values to match the number of query heads.

Query heads that share a key-value head become further query positions of it: the same sums, without the repeated
states that a masked attention otherwise builds in every layer and step. Registered with transformers under `NAME`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "ostinato_grouped"
_FOREIGN = ("position_bias", "s_aux", "softcap")
"""Arguments of models whose attention is more than softmax(QK)V: transformers' own function decides about them."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention under transformers' interface for attention functions, whose keyword arguments are the models' own.

    Args:
        module: The attention layer.
        query: [n, heads, width, head_dim].
        key: [n, kv_heads, length, head_dim].
        value: As `key`.
        attention_mask: [n, 1, width, length], bool or added to the scores; None hides only what is later in `query`.
        dropout: Of the weights, in training.
        scaling: Of the products.
        **kwargs: What else a model passes.

    Returns:
        [n, width, heads, head_dim], and no weights.
    """
    num, heads, width, _ = query.shape
    kv_heads = key.shape[1]
    if (
        heads == kv_heads
        or (attention_mask is None and width > 1)
        or any(kwargs.get(name) is not None for name in _FOREIGN)
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    group = heads // kv_heads
    if attention_mask is not None and width > 1:
        attention_mask = attention_mask.repeat(1, 1, group, 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(num, kv_heads, group * width, -1),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(num, heads, width, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
