"""Streams: a turn parsed while it is sampled, with the same grammar that parses a whole text (see `turn`).

However the text is cut, the deltas of a stream are those of the whole text, and all its steps together cost one pass.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product

from ostinato_tools.errors import ParserInputError
from ostinato_tools.parsers.base import Delta, ParsedTurn, strip_end_tokens
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.turn import Steps, Turn


class GrammarStream:
    """A stream over a grammar; see `TurnStream`.

    Args:
        grammar: Takes the turn apart.
        turn: A turn without text.
        end_tokens: Tokens, as text, that are taken off the end.

    Raises:
        ParserInputError: end tokens overlap or have white space around them, so that they are sure only at the end.
    """

    def __init__(self, grammar: Callable[[Turn], Steps[None]], turn: Turn, end_tokens: Sequence[str]) -> None:
        self._turn = turn
        self._steps = grammar(turn)
        self._tail = _Tail(end_tokens)
        self._num_told = 0
        self._is_read = False
        self._advance()

    def feed(self, text: str) -> list[Delta]:
        """Take more of the text and return what has become certain by it.

        Raises:
            ParserInputError: it is no text, or the stream was finished.
        """
        if self._turn.ended:
            raise ParserInputError("a stream must not be fed after finish(), got more text; begin another stream")
        check_text(text)
        if certain := self._tail.push(text):
            self._turn.append(certain)
            self._advance()
        return self.drain()

    def finish(self) -> ParsedTurn:
        """The text has ended: return the whole turn; `drain` then gives the last deltas."""
        if not self._turn.ended:
            self._turn.append(self._tail.rest())
            self._turn.ended = True
            self._advance()
        return self._turn.parsed()

    def drain(self) -> list[Delta]:
        """Return what has become certain and was not returned before."""
        turn = self._turn
        if turn.undecided and not turn.ended:
            return []
        new = turn.deltas[self._num_told :]
        self._num_told = len(turn.deltas)
        return new

    def _advance(self) -> None:
        if not self._is_read:
            self._is_read = next(self._steps, True) is True


def check_text(text: object) -> None:
    """Require that what is to be parsed is text.

    Raises:
        ParserInputError: it is something else.
    """
    if not isinstance(text, str):
        raise ParserInputError(
            f"text must be a string, got {type(text).__name__}; decode token ids with their special tokens"
        )


class _Tail:
    """Keeps back the end of the text for as long as it may be nothing but end tokens and the white space after them."""

    def __init__(self, end_tokens: Sequence[str]) -> None:
        self._tokens = tuple(token for token in end_tokens if token)
        self._held = ""  # begins with an end token, or with the beginning of one
        self._seen = 0  # up to where `_held` is nothing but end tokens and white space
        if self._tokens:
            _check_apart(self._tokens)
            self._tags = Tags(*self._tokens)
            self._blank = re.compile(rf"(?:\s++|{'|'.join(map(re.escape, self._tokens))})*+")

    def push(self, text: str) -> str:
        """Take more text and return what of it, and of what was kept back, is certain not to be taken off."""
        if not self._tokens:
            return text
        held, self._held = self._held, ""
        held += text  # in place: nothing else refers to it
        released = 0
        while True:
            blank = self._blank.match(held, self._seen) if self._seen > released else None
            if blank is not None:
                self._seen = blank.end()
            if self._seen == len(held) or self._tags.holds(held, self._seen) == self._seen:
                break  # nothing but end tokens so far, or one that may have begun
            # What was kept back goes on in another way. The end of its last token may be the beginning of a later one.
            start = max(released + (self._seen > released), self._seen - self._tags.longest + 1)
            token = self._tags.search(held, start)
            released = token.start() if token is not None else self._tags.holds(held, start)
            self._seen = token.end() if token is not None else released
            if token is None:
                break
        self._seen -= released
        self._held = held[released:]
        return held[:released]

    def rest(self) -> str:
        """The text has ended: return what is not taken off."""
        return strip_end_tokens(self._held, self._tokens)


@lru_cache(maxsize=64)
def _check_apart(tokens: tuple[str, ...]) -> None:
    """Refuse tokens of which a row could be divided in two ways, so that only its end would tell which one holds."""
    for first, second, token in product(tokens, repeat=3):
        row = first + second
        places = {at for at in range(len(row)) if row.startswith(token, at)}
        if token != token.strip() or not places <= {0, len(first)} or (0 in places and token != first):
            raise ParserInputError(
                f"end_tokens of a stream must not overlap or have white space around them, got {token!r} among {tokens}; "
                "leave out what the engine takes off itself, or parse the whole text"
            )
