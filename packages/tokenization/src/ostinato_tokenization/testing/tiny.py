"""Real, tiny tokenizers of several kinds and chat templates of several habits, made in the call; nothing is read or fetched."""

from __future__ import annotations

import json
from enum import StrEnum
from functools import lru_cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.testing.templates import SAMPLE_TEMPLATES, SAMPLE_TOKENS, TINY_CHAT_TEMPLATE

TINY_SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""Added tokens that decoding may skip."""
TINY_TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that decoding keeps."""

_CORPUS = (
    "system user assistant tool function name arguments type object properties required string number description",
    '{"name": "calculator", "arguments": {"expression": "12 + 30"}}\n',
    "You are a helpful assistant. What is the answer? The answer is 42. Call a tool, then say what it returned.",
)


def tiny_tokenizer(*, vocab_size: int = 400) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer trained on three lines; the same in every process.

    Args:
        vocab_size: Upper limit of learnt tokens, 256 single bytes included; the seven added tokens come after them.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in TINY_SPECIAL_TOKENS])
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in TINY_TAG_TOKENS])
    return tokenizer


class TokenizerKind(StrEnum):
    """Families of tokenizers that treat text in different ways."""

    BYTE_LEVEL = "byte_level"
    """BPE over bytes, as in GPT-2 and Qwen."""
    NFC = "nfc"
    """The same behind Unicode normalization."""
    PREPEND = "prepend"
    """BPE with byte fallback behind a normalizer that puts a mark before a text, as in Llama 2."""
    METASPACE = "metaspace"
    """The same with a pre-tokenizer that marks the first word, as in newer conversions."""


def sample_tokenizer(kind: TokenizerKind) -> tokenizers.Tokenizer:
    """A tokenizer of this kind, trained on three lines, with the added tokens of `tiny_tokenizer` and `SAMPLE_TOKENS`."""
    kind = TokenizerKind(kind)
    if kind in (TokenizerKind.BYTE_LEVEL, TokenizerKind.NFC):
        tokenizer = tiny_tokenizer()
        if kind == TokenizerKind.NFC:
            tokenizer.normalizer = normalizers.NFC()
    else:
        tokenizer = _sentence_piece(kind)
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in (*TINY_SPECIAL_TOKENS, *SAMPLE_TOKENS)]
    )
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in TINY_TAG_TOKENS])
    return tokenizer


def _sentence_piece(kind: TokenizerKind) -> tokenizers.Tokenizer:
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    learner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    learner.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    )
    learnt = json.loads(learner.to_str())["model"]
    pieces = ["<unk>", *bytes_, *(piece for piece in learnt["vocab"] if piece != "<unk>")]
    merges = [(left, right) for left, right in learnt["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if kind == TokenizerKind.PREPEND:
        mark = chr(0x2581)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(chr(0x2581), " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@lru_cache(maxsize=64)
def sample_chat_tokenizer(kind: TokenizerKind, template: str) -> ChatTokenizer:
    """A tokenizer of this kind with one of `SAMPLE_TEMPLATES`, by name. The result is shared between calls."""
    return ChatTokenizer(
        sample_tokenizer(kind),
        SAMPLE_TEMPLATES[template],
        named_tokens={"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"},
    )


@lru_cache(maxsize=8)
def tiny_chat_tokenizer(*, chat_template: str = TINY_CHAT_TEMPLATE, vocab_size: int = 400) -> ChatTokenizer:
    """A chat tokenizer that needs no file: ChatML, hermes-style tools, `<|im_end|>` as the stop token.

    The result is shared between calls with the same arguments: a ChatTokenizer does not change.
    """
    return ChatTokenizer(
        tiny_tokenizer(vocab_size=vocab_size),
        chat_template,
        named_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
