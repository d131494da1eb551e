"""Tokenizers of transformers for templates that were written for other tokenizers."""

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import transformers

from ostinato_tokenization.rendering import own_variables

SHARED = Path(os.environ.get("OSTINATO_SHARED", Path(__file__).resolve().parents[1].parent / "shared"))
TEMPLATES = SHARED / "templates"
_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^<>\s]{1,40}｜>|</?[A-Za-z_][\w:.-]{0,30}>|\[/?[A-Z][A-Z_]{2,30}\]|\[gMASK\]|<\w+\|>|<\|\w+>|\[\w~\[|\]~!?\w[\[\]]"
)
_VARIABLES = {"functions": "[]", "datetime": "2025-01-02"}
_NAMED = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}


def templates_in(folders: Iterable[Path]) -> Iterator[Path]:
    """The templates of the folders, by name."""
    for folder in folders:
        yield from sorted(folder.rglob("*.jinja"))


def control_strings(template: str) -> list[str]:
    """The strings that a template writes and that look like tokens of their own, in order of appearance."""
    texts: list[str] = []
    try:
        for _, kind, value in jinja2.Environment().lex(template):
            if kind in ("data", "string"):
                texts.append(
                    value.encode("utf-8").decode("unicode_escape") if "\\" in value and value.isascii() else value
                )
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError):
        texts = [template]
    found: dict[str, None] = {}
    for text in texts:
        found.update(dict.fromkeys(_CONTROL.findall(text)))
    return list(found)


def variables_of(template: str) -> dict[str, str]:
    """Values for the variables without which some templates refuse every conversation."""
    names = own_variables(template)
    return {name: value for name, value in _VARIABLES.items() if name in names}


class Tokenizers:
    """The tokenizers of `shared/tokenizers`, each with a template's control strings.

    Args:
        names: Their folders with commas between, or `all`.
    """

    def __init__(self, names: str) -> None:
        self.folder = SHARED / "tokenizers"
        known = sorted(path.name for path in self.folder.iterdir() if (path / "tokenizer.json").is_file())
        self.names = known if names == "all" else names.split(",")

    @cache  # noqa: B019  # one object, as long as the process
    def _document(self, name: str) -> tuple[str, Any]:
        reference = transformers.AutoTokenizer.from_pretrained(self.folder / name)
        return reference.backend_tokenizer.to_str(), dict(reference.special_tokens_map)

    def make(self, name: str, template: str) -> Any:
        """A fast tokenizer of transformers with the template, its control strings being special tokens."""
        document, named = self._document(name)
        backend = tokenizers.Tokenizer.from_str(document)
        named = {key: str(value) for key, value in named.items() if isinstance(value, str)}
        for key, text in _NAMED.items():
            if key in template and key not in named:
                named[key] = text
        there = {token.content for token in backend.get_added_tokens_decoder().values()}
        wanted = [*named.values(), *control_strings(template)]
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(text, special=True, normalized=False)
                for text in dict.fromkeys(wanted)
                if text not in there
            ]
        )
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)
