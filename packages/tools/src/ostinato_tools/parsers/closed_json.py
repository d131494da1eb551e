"""JSON between an opening and a closing tag, as several formats write calls: closing tags inside of strings are text."""

from collections.abc import Callable

from ostinato_tools.parsers.grammar import unclosed
from ostinato_tools.parsers.json_calls import ReadCall
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.turn import Steps, Turn


class ClosedJson:
    """How a format closes the JSON of a call.

    Args:
        opening: The tag at which a call begins.
        closing: The tag at which it ends. Both begin with `<`, which no JSON has outside of a string.
        borders: Other tags of the format at which a call that was not closed ends, too.
        reasoning: Tags of reasoning: such an unclosed call ends there if its JSON does.
    """

    def __init__(
        self, opening: str, closing: str, *borders: str, reasoning: tuple[str, ...] = ("<think>", "</think>")
    ) -> None:
        self._opening = opening
        self._closing = closing
        self._borders = Tags(opening, closing, *borders)
        self._tags = Tags(opening, closing, *borders, *reasoning)

    def read(self, turn: Turn, read: Callable[[str], ReadCall], *, start: int | None = None) -> Steps[None]:
        """Add the call whose JSON begins at the position, or an error if it is never closed, and go behind it.

        Args:
            turn: The turn.
            read: Decodes the call from its JSON.
            start: Where the call itself begins, for messages; the position if None.
        """
        begin = turn.position
        start = begin if start is None else start
        tag, close = yield from turn.find(self._borders, begin)
        if tag == self._closing:  # most often this is it: what stands before it is JSON, so the tag is in no string
            call = read(turn.text[begin:close])
            if call.error is None:
                turn.add_call(*call)
                turn.position = close + len(tag)
                return
        stop = yield from turn.json_run(begin)
        tag = yield from turn.tag_at(self._tags, stop)
        if tag == self._closing:
            call = read(turn.text[begin:stop])
            if call.error is None:
                turn.add_call(*call)
                turn.position = stop + len(tag)
                return
        close = turn.text.find(self._closing, begin, stop)
        if close >= 0:  # a closing tag in what may be a string, or may follow a string that was not closed
            if tag == self._closing and turn.text.find(self._opening, close, stop) < 0:
                close = stop
        else:  # it broke before it could end; a call that begins before that end is another one
            if not tag:
                tag, stop = yield from turn.find(self._borders, stop)
            if tag != self._closing:
                turn.add_error(unclosed(turn.text[start : min(stop, start + 60)], self._closing))
                turn.position = stop
                return
            close = stop
        turn.add_call(*read(turn.text[begin:close]))
        turn.position = close + len(self._closing)
