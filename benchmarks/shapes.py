"""Sizes of the models that benchmarks make with random weights, by the names that `transformers` gives them. No benchmark by itself."""

from typing import Final

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)


def sizes(*numbers: int) -> dict[str, int]:
    """Vocabulary, width, layers, heads, key-value heads, width of a head, width of the feed-forward layers."""
    return dict(zip(_SIZES, numbers, strict=True))


SMOLLM2_135M: Final = sizes(49152, 576, 30, 9, 3, 64, 1536)
QWEN3_0_6B: Final = sizes(151936, 1024, 28, 16, 8, 128, 3072)
QWEN3_1_7B: Final = sizes(151936, 2048, 28, 16, 8, 128, 6144)
