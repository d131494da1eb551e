"""Reading a tokenizer from a directory in the Hugging Face layout.

Invariant: what is returned is complete and usable; every fault of a file is one error that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers

from ostinato_tokenization.errors import ChatTemplateError, TokenizerLoadError, TokenizerNotFoundError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFiles(NamedTuple):
    """What a directory says about a tokenizer."""

    tokenizer: tokenizers.Tokenizer
    templates: dict[str, str]
    """Chat templates by name; `default` is the one that is always there."""
    named_tokens: dict[str, str]
    """`bos_token`, `eos_token`, … as templates see them."""


def read_tokenizer(directory: str | Path, chat_template: str | None) -> TokenizerFiles:
    """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja or .json.

    Raises:
        TokenizerNotFoundError: There is no such directory, or no tokenizer.json in it.
        TokenizerLoadError: A file is damaged.
        ChatTemplateError: No template is there and none was given.
    """
    root = Path(directory)
    path = root / "tokenizer.json"
    if not path.is_file():
        missing = path if root.is_dir() else root
        raise TokenizerNotFoundError(
            f"path must be a directory with a tokenizer.json, got {str(directory)!r}: no {missing};"
            " download the model first, and convert a slow tokenizer with transformers"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise TokenizerLoadError(
            f"{path} must be a tokenizer of the tokenizers library, got {error}; fetch it again"
        ) from error
    config = _read_json(root / "tokenizer_config.json")
    named = named_tokens(config) | named_tokens(_read_json(root / "special_tokens_map.json"))
    _add_missing(tokenizer, config)
    templates = {"default": chat_template} if chat_template is not None else _find_templates(root, config)
    return TokenizerFiles(tokenizer, templates, named)


def take_tokenizer(source: Any) -> TokenizerFiles:
    """The same from an object of transformers: a fast tokenizer, or a processor that holds one.

    Raises:
        TokenizerLoadError: It is neither.
        ChatTemplateError: It has no chat template.
    """
    tokenizer = getattr(source, "tokenizer", source)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TokenizerLoadError(
            f"tokenizer must be a fast tokenizer of transformers or a processor with one, got {type(tokenizer).__name__};"
            " load it with AutoTokenizer.from_pretrained(…, use_fast=True)"
        )
    template = getattr(source, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    templates = templates_by_name(template, type(source).__name__)
    named = named_tokens({name: str(value) for name, value in tokenizer.special_tokens_map.items()})
    return TokenizerFiles(tokenizers.Tokenizer.from_str(backend.to_str()), templates, named)


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that a configuration names, as plain strings."""
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def templates_by_name(value: Any, source: str) -> dict[str, str]:
    """Chat templates from any of the forms in use: a string, a mapping by name, a list of named ones.

    Raises:
        ChatTemplateError: There is none, or it has another form.
    """
    if isinstance(value, str):
        if value and "{" not in value:  # most likely the name of a file
            raise ChatTemplateError(
                f"chat_template must be the text of a Jinja template, got {value!r:.120}, which has no tag; read the file first"
            )
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, Mapping) and value and all(isinstance(text, str) for text in value.values()):
        templates = dict(value)
        templates.setdefault("default", next(iter(templates.values())))
        return templates
    if not value:
        raise ChatTemplateError(f"chat_template must be given, got none in {source}; pass chat_template=…")
    raise ChatTemplateError(f"chat_template must be text or named texts, got {type(value).__name__} in {source}")


def _find_templates(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = root / "chat_template.jinja"
    if path.is_file():
        templates = {"default": _read_text(path)}
        for extra in sorted(root.glob("additional_chat_templates/*.jinja")):
            templates[extra.stem] = _read_text(extra)
        return templates
    value = _read_json(root / "chat_template.json").get("chat_template") or config.get("chat_template")
    return templates_by_name(value, str(root))


def _add_missing(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json lists, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = entry["content"]
        if content in {token.content for token in tokenizer.get_added_tokens_decoder().values()}:
            continue
        token = tokenizers.AddedToken(
            content,
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", False),
            special=entry.get("special", False),
        )
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(f"{path} must be readable UTF-8 text, got {error}; fetch it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = msgspec.json.decode(_read_text(path))
    except msgspec.DecodeError as error:
        raise TokenizerLoadError(f"{path} must be JSON, got {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{path} must hold a JSON object, got {type(value).__name__}; fetch it again")
    return value
