"""Streams: a turn parsed while it is sampled, with the same grammar that parses a whole text (see `turn`).

However the text is cut, the deltas of a stream are those of the whole text, and all its steps together cost one pass.
"""

import re
from collections.abc import Callable, Sequence

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
        ParserInputError: an end token is part of another one, so that what is at the end would not be sure before the end.
    """

    def __init__(self, grammar: Callable[[Turn], Steps[None]], turn: Turn, end_tokens: Sequence[str]) -> None:
        self._turn = turn
        self._steps = grammar(turn)
        self._tail = _Tail(end_tokens)
        self._num_told = 0
        self._is_read = False
        self._advance()

    def feed(self, text: str) -> list[Delta]:
        """Take more of the text and return what has become certain by it."""
        if self._turn.ended:
            raise ParserInputError("a stream must not be fed after finish(), got more text; begin another stream")
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


class _Tail:
    """Keeps back the end of the text for as long as it may be nothing but end tokens and the white space after them."""

    def __init__(self, end_tokens: Sequence[str]) -> None:
        self._tokens = tuple(token for token in end_tokens if token)
        self._held = ""  # begins with an end token, or with the beginning of one
        self._seen = 0  # up to where `_held` is nothing but end tokens and white space
        if self._tokens:
            try:
                self._tags = Tags(*self._tokens)
            except ValueError as error:
                raise ParserInputError(f"end_tokens of a stream must not overlap: {error}") from None
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
            # From `_seen` on there is no end token; what begins one at the very end may still become one.
            if self._seen == len(held) or self._tags.holds(held, self._seen) == self._seen:
                break
            token = self._tags.search(held, self._seen)
            released = token.start() if token is not None else self._tags.holds(held, self._seen)
            self._seen = token.end() if token is not None else released
            if token is None:
                break
        self._seen -= released
        self._held = held[released:]
        return held[:released]

    def rest(self) -> str:
        """The text has ended: return what is not taken off."""
        return strip_end_tokens(self._held, self._tokens)
