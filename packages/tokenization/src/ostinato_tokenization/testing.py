"""Fakes for tests of code that uses this package: a real, tiny tokenizer with a chat template, made in the call."""

from __future__ import annotations

from functools import lru_cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ostinato_tokenization.chat_tokenizer import ChatTokenizer

TINY_SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""Added tokens that decoding may skip."""
TINY_TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that decoding keeps."""

TINY_CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- 'You can call these tools:\\n' }}
{%- for tool in tools %}
{{- (tool | tojson) + '\\n' }}
{%- endfor %}
{{- 'Write a call as <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML with tool calls as JSON in tags; it never rewrites earlier turns."""

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
