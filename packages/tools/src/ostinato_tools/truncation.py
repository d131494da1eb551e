"""How a long text is cut: which side goes, and what the limit counts. Tokens are counted by a callable, no tokenizer is known."""

from collections.abc import Callable, Sized
from enum import StrEnum

from ostinato_tools.errors import ToolConfigError


class TruncateSide(StrEnum):
    """The side of a long text that is cut off."""

    LEFT = "left"
    RIGHT = "right"
    MIDDLE = "middle"


class TruncateUnit(StrEnum):
    """What a length limit counts."""

    CHARACTERS = "characters"
    TOKENS = "tokens"


_MARKS = {
    TruncateSide.LEFT: "(truncated)...",
    TruncateSide.RIGHT: "...(truncated)",
    TruncateSide.MIDDLE: "...(truncated)...",
}

_CHARACTERS_A_TOKEN = 16
"""More than texts have, but for long runs of one character."""


def as_truncate_side(value: str) -> TruncateSide:
    """Return the side that `value` names.

    Raises:
        ToolConfigError: it names none.
    """
    try:
        return TruncateSide(value)
    except ValueError:
        raise ToolConfigError(
            f"truncate_side must be one of left, right, middle, got {value!r}; it names the side that is cut off"
        ) from None


def as_truncate_unit(value: str) -> TruncateUnit:
    """Return the unit that `value` names.

    Raises:
        ToolConfigError: it names none.
    """
    try:
        return TruncateUnit(value)
    except ValueError:
        raise ToolConfigError(
            f"truncate_unit must be one of characters, tokens, got {value!r}; for tokens give encode, too"
        ) from None


def truncate(text: str, max_length: int | None, side: TruncateSide) -> str:
    """Keep `max_length` characters of `text` and mark the place of the cut.

    Args:
        text: Any text.
        max_length: Characters of `text` to keep, not counting the mark; None keeps all of it.
        side: The side that is cut off. For `MIDDLE` the head is the longer half by one where `max_length` is odd.

    Returns:
        `text` itself where it is short enough.
    """
    if max_length is None or len(text) <= max_length:
        return text
    num_head, num_tail = _shares(max_length, side)
    return text[:num_head] + _MARKS[side] + text[len(text) - num_tail :]


def truncate_tokens(text: str, max_tokens: int, side: TruncateSide, encode: Callable[[str], Sized]) -> str:
    """Keep at most `max_tokens` tokens of `text`, in whole characters, and mark the place of the cut.

    Each part that is kept, encoded by itself, has at most its share of tokens. Nothing is decoded, so that no character is
    broken. The work grows with `max_tokens`, not with the length of the text.

    Args:
        text: Any text.
        max_tokens: Tokens of `text` to keep, not counting the mark.
        side: As for `truncate`, in tokens.
        encode: From a text to its token ids, of which only the number counts.

    Returns:
        `text` itself where it is short enough.
    """
    # A part may have more tokens than the whole, so a text that is not very long is first taken as a whole.
    if len(text) <= _CHARACTERS_A_TOKEN * max_tokens and len(encode(text)) <= max_tokens:
        return text
    if _num_fitting(text, max_tokens, encode, from_end=False) == len(text):
        return text
    head_tokens, tail_tokens = _shares(max_tokens, side)
    num_head = _num_fitting(text, head_tokens, encode, from_end=False) if head_tokens else 0
    num_tail = _num_fitting(text, tail_tokens, encode, from_end=True) if tail_tokens else 0
    return text[:num_head] + _MARKS[side] + text[max(num_head, len(text) - num_tail) :]


def _shares(limit: int, side: TruncateSide) -> tuple[int, int]:
    """How much of the limit goes to the head and how much to the tail."""
    if side is TruncateSide.LEFT:
        return 0, limit
    if side is TruncateSide.RIGHT:
        return limit, 0
    return limit - limit // 2, limit // 2


def _num_fitting(text: str, max_tokens: int, encode: Callable[[str], Sized], *, from_end: bool) -> int:
    """The number of characters, from one end of `text`, that encode to at most `max_tokens` tokens: the greatest that halving finds."""

    def fits(num_characters: int) -> bool:
        part = text[len(text) - num_characters :] if from_end else text[:num_characters]
        return len(encode(part)) <= max_tokens

    fitting, too_many = 0, 4 * max_tokens
    while too_many < len(text) and fits(too_many):
        fitting, too_many = too_many, 2 * too_many
    if too_many >= len(text):
        if fits(len(text)):
            return len(text)
        too_many = len(text)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting
