"""Keeps control strings inside message text from becoming control tokens.

Before rendering, each control string in a text is replaced by one private-use character; after rendering, every
control string that is left was written by the template. The masks are then undone in the plain text between them.
Invariant: what `mask` hid and `restore` brings back is the same text. This module knows no tokenizer and no template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ostinato_tokenization.errors import MessageError
from ostinato_tokenization.messages import RawArguments

_FIRST_MASK = 0xF0000
_LAST_MASK = 0xFFFFD
_PRIVATE_USE = re.compile("[\U000f0000-\U0010ffff]")
_NUMBERS = (int, float, bool)
_MAX_PARTS = 256
"""Mappings and lists of a message that are looked at together; also what ends those that hold themselves."""

SENTINEL = "\U0010fff1"
"""Marks a place in a probe; texts that hold private-use characters are masked, so it cannot come from one."""
NEXT_SENTINEL = "\U0010fff2"


class MaskTable:
    """The masks of one rendering: which character stands for which text."""

    __slots__ = ("_masks", "plain_only", "texts")

    def __init__(self) -> None:
        self._masks: dict[str, str] = {}
        self.texts: dict[int, str] = {}
        self.plain_only = False
        """Some text looks like a control string after normalization: text must be encoded apart from control strings."""

    def __bool__(self) -> bool:
        return self.plain_only or bool(self.texts)

    def mask_for(self, text: str) -> str:
        mask = self._masks.get(text)
        if mask is None:
            code = _FIRST_MASK + len(self._masks)
            if code > _LAST_MASK:
                raise MessageError(
                    f"messages must hold at most {_LAST_MASK - _FIRST_MASK + 1} different private-use characters and"
                    " control strings, got more; remove them from the text"
                )
            mask = self._masks[text] = chr(code)
            self.texts[code] = text
        return mask

    def restore(self, text: str) -> str:
        """Put the hidden texts back."""
        return text.translate(self.texts) if self.texts else text


class ControlText:
    """Finds and masks one set of control strings.

    Args:
        strings: The control strings. A string that a text only begins or ends with in part is masked too, so that no
            template can complete it.
        normalize: How the tokenizer normalizes text, where some control strings are matched after that; else None.
    """

    def __init__(self, strings: Collection[str], normalize: Callable[[str], str] | None = None) -> None:
        ordered = sorted(set(strings), key=lambda text: (-len(text), text))
        self.strings = frozenset(ordered)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
        self._heads = frozenset(text[:cut] for text in ordered for cut in range(1, len(text)))
        self._tails = frozenset(text[cut:] for text in ordered for cut in range(1, len(text)))
        self._first = "".join(sorted({text[0] for text in ordered}))
        self._last = "".join(sorted({text[-1] for text in ordered}))
        self._reach = max((len(text) - 1 for text in ordered), default=0)
        self._normalize = normalize
        self._ends = tuple(sorted({*self._first, *self._last}))
        self._escaped = any('"' in text or "\\" in text or not text.isprintable() for text in ordered)

    def without(self, strings: Collection[str]) -> ControlText:
        """The same, less these strings."""
        return ControlText(self.strings - set(strings), self._normalize)

    def occurs_in(self, text: str) -> bool:
        """Whether a control string stands in `text`, as it is or after normalization."""
        if self.pattern.search(text):
            return True
        return self._normalize is not None and self.pattern.search(self._normalize(text)) is not None

    def mask(self, text: str, table: MaskTable) -> str:
        """`text` with every control string, and every private-use character, hidden."""
        if not text or (self._normalize is None and not self._is_suspicious(text)):
            return text
        masked = text
        if not text.isascii() and _PRIVATE_USE.search(text):
            masked = _PRIVATE_USE.sub(lambda match: table.mask_for(match.group()), masked)
        if self.pattern.search(masked):
            masked = self.pattern.sub(lambda match: table.mask_for(match.group()), masked)
        if self._normalize is not None and self.pattern.search(self._normalize(masked)):
            table.plain_only = True
        return self._mask_edges(masked, table)

    def _is_suspicious(self, text: str) -> bool:
        """Whether there may be something to hide; looking for characters one by one is far faster than for a class of them."""
        for char in self._ends:
            if char in text:
                return True
        return not text.isascii() and _PRIVATE_USE.search(text) is not None

    def _mask_edges(self, text: str, table: MaskTable) -> str:
        stripped = text.strip()
        end = stripped[-self._reach :] if self._reach else ""
        if any(char in end for char in self._first):
            for size in range(len(end), 0, -1):
                if end[-size:] in self._heads:
                    at = text.rindex(end) + len(end) - size
                    text = text[:at] + table.mask_for(end[-size:]) + text[at + size :]
                    break
        start = text.strip()[: self._reach] if self._reach else ""
        if any(char in start for char in self._last):
            for size in range(len(start), 0, -1):
                if start[:size] in self._tails:
                    at = text.index(start)
                    text = text[:at] + table.mask_for(start[:size]) + text[at + size :]
                    break
        return text

    def mask_value(self, value: Any, table: MaskTable) -> Any:
        """The same for every string within lists and mappings; values without any are returned uncopied."""
        if isinstance(value, str):
            return self.mask(value, table)
        if type(value) is dict and self._is_harmless(value):
            return value
        if isinstance(value, RawArguments):
            masked_text = self.mask(value.text, table)
            return value if masked_text is value.text else RawArguments(masked_text)
        if isinstance(value, Mapping):
            changed: dict[Any, Any] | None = None
            for key, item in value.items():
                new_key, new_item = self.mask_value(key, table), self.mask_value(item, table)
                if new_key is not key or new_item is not item:
                    changed = changed if changed is not None else dict(value)
                    if new_key is not key:
                        changed = {(new_key if old is key else old): kept for old, kept in changed.items()}
                    changed[new_key] = new_item
            return value if changed is None else changed
        if isinstance(value, (list, tuple)):
            items = [self.mask_value(item, table) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        return value

    def _is_harmless(self, value: dict[Any, Any]) -> bool:
        """Whether no text within holds anything to hide, as in most messages; False where it takes longer to tell."""
        if self._normalize is not None:
            return False
        texts: list[str] = []
        parts: list[Any] = [value]
        for _ in range(_MAX_PARTS):
            if not parts:
                return not self._is_suspicious("".join(texts))
            part = parts.pop()
            for item in (*part, *part.values()) if type(part) is dict else part:
                kind = type(item)
                if kind is str:
                    texts.append(item)
                elif kind is dict or kind is list:
                    parts.append(item)
                elif item is not None and kind not in _NUMBERS:
                    return False
        return False

    def may_occur_in_json(self, document: str) -> bool:
        """Whether a string within this JSON text may need masking."""
        if self._escaped or self._normalize is not None:
            return True
        return self.pattern.search(document) is not None or (
            not document.isascii() and _PRIVATE_USE.search(document) is not None
        )
