"""Tokenizers and templates that the tests of this package share, and the way to real ones where they are present."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ostinato_tokenization import ChatTokenizer, ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer

REAL_TOKENIZERS = ("qwen", "qwen25", "llama3", "llama2", "smollm2")

HEADER = "{{ '<|s|>' + m.role + '\\n' + m.content + '<|e|>\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|s|>assistant\\n' }}{% endif %}"
TEMPLATES = {
    "plain": "{% for m in messages %}" + HEADER + "{% endfor %}" + PROMPT,
    "default_system": (
        "{% if messages[0].role != 'system' %}{{ '<|s|>system\\nbe kind<|e|>\\n' }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|s|>user' }}{% endif %}"
        "{{ '\\n<result>\\n' + m.content + '\\n</result>' }}"
        "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|e|>\\n' }}{% endif %}"
        "{% else %}{{ '<|s|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}"
        "{{ '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}"
        "{% endfor %}{{ '<|e|>\\n' }}{% endif %}{% endfor %}" + PROMPT
    ),
    "forgets_reasoning": (
        "{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set c = m.content %}"
        "{% if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last %}"
        "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{{ '<|s|>' + m.role + '\\n' + c + '<|e|>\\n' }}{% endfor %}" + PROMPT
    ),
    "prints_bos": (
        "{{ bos_token }}{% for m in messages %}{{ '<|s|>' + m.role + '\\n' + (m.content | trim) + '<|e|>\\n' }}"
        "{% endfor %}" + PROMPT
    ),
    "tools_not_none": (
        "{% if tools is not none %}{{ '<|s|>system\\ntools here<|e|>\\n' }}{% endif %}"
        "{% for m in messages %}" + HEADER + "{% endfor %}" + PROMPT
    ),
    "iterates_arguments": (
        "{% for m in messages %}{{ '<|s|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<f=' + c.function.name + '>' }}"
        "{% for k, v in c.function.arguments | items %}{{ k ~ '=' ~ v }}{% endfor %}{{ '</f>' }}{% endfor %}"
        "{{ '<|e|>\\n' }}{% endfor %}" + PROMPT
    ),
    "opener_stops": (
        "{% for m in messages %}"
        "{{ {'user': '<|user|>', 'tool': '<|observation|>', 'assistant': '<|assistant|>', 'system': '<|system|>'}[m.role] }}"
        "{{ '\\n' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    ),
    "moves_tools": (
        "{% for m in messages %}{% if loop.last and tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}"
        + HEADER
        + "{% endfor %}"
        + PROMPT
    ),
    "alternates": (
        "{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + HEADER + "{% endfor %}" + PROMPT
    ),
}
SPECIAL = ("<|s|>", "<|e|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, four merges, and added tokens of both kinds."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), ("Ċ", "Ċ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in TAGS])
    return tokenizer


@pytest.fixture(scope="session")
def make() -> Callable[[str], ChatTokenizer]:
    """A chat tokenizer with one of the templates above."""
    made: dict[str, ChatTokenizer] = {}

    def build(name: str) -> ChatTokenizer:
        if name not in made:
            named = {"bos_token": "<|bos|>", "eos_token": "<|e|>"}
            if name == "opener_stops":
                named["eos_token"] = "<|eos|>"
            made[name] = ChatTokenizer(byte_tokenizer(), TEMPLATES[name], named_tokens=named)
        return made[name]

    return build


@pytest.fixture(scope="session")
def tiny() -> ChatTokenizer:
    return tiny_chat_tokenizer()


@pytest.fixture(scope="session")
def tokens(tiny: ChatTokenizer) -> ContinuousTokens:
    return ContinuousTokens(tiny)


@pytest.fixture(scope="session")
def shared_tokenizers() -> Path:
    """The folder of real tokenizers, where there is one."""
    default = Path(__file__).resolve().parents[2].parent / "shared"
    folder = Path(os.environ.get("OSTINATO_SHARED", default)) / "tokenizers"
    if not folder.is_dir():
        pytest.skip(f"no real tokenizers in {folder}; set OSTINATO_SHARED")
    return folder
