"""The pythonic format: `[get_weather(city="Paris", days=3), now()]`, with or without tags around it.

Without tags (Llama 3.2 and 4) the list must stand where content begins; with `<|tool_call_start|>...<|tool_call_end|>`
(LFM2) or `<|python_start|>...<|python_end|>` it may stand anywhere. Arguments are literals, by name; nothing is evaluated
(see `literals` for what is read). Names are those of Python, dots and hyphens included; other names cannot be written.
"""

import re

from ostinato_tools.parsers.grammar import TagFormat
from ostinato_tools.parsers.json_calls import ReadCall
from ostinato_tools.parsers.literals import LiteralError, read_keywords
from ostinato_tools.parsers.scanning import PYTHON, Tags
from ostinato_tools.parsers.turn import Steps, Turn

_PAIRS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_BORDERS = Tags(*_PAIRS, *_PAIRS.values(), "<think>", "</think>")
_ENDS = {opening: Tags(closing) for opening, closing in _PAIRS.items()}
_LIST_BEGINS, _LIST_GOES_ON = Tags("["), Tags(",", "]")
_NAME = re.compile(r"(?:[^\W\d][\w.\-]{0,255})?")
_SHAPE = "[<name>(<argument>=<literal>, ...), ...]"


class PythonicParser(TagFormat):
    """Parser of the pythonic format."""

    name = "pythonic"
    openers = tuple(_PAIRS)
    closers = tuple(_PAIRS.values())
    end_tokens = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end_of_text|>")
    is_json = False

    def read_start(self, turn: Turn) -> Steps[None]:
        """Read a list of calls that stands where content begins."""
        start = yield from turn.skip_space(turn.position)
        if not (yield from turn.tag_at(_LIST_BEGINS, start)):
            return
        first = yield from turn.skip_space(start + 1)
        end = yield from turn.word_end(_NAME, first)
        if end > first and turn.text.startswith("(", end):
            turn.position = first
            yield from self._read_list(turn)
            turn.begin_content()

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read a list of calls between tags."""
        start = yield from turn.skip_space(turn.position)
        is_list = yield from turn.tag_at(_LIST_BEGINS, start)
        turn.position = start + len(is_list)
        if not is_list:
            turn.add_error(f"{opener} must be followed by a list of calls; write {_SHAPE}")
            return
        yield from self._read_list(turn)
        start = yield from turn.skip_space(turn.position)
        turn.position = start + len((yield from turn.tag_at(_ENDS[opener], start)))

    def _read_list(self, turn: Turn) -> Steps[None]:
        """Read calls, the list's opening bracket being read, and go behind its end."""
        while True:
            start = yield from turn.skip_space(turn.position)
            name_end = yield from turn.word_end(_NAME, start)
            if name_end == start or not turn.text.startswith("(", name_end):
                if turn.text.startswith("]", start) and turn.text[start - 1] == ",":  # a comma may follow the last call
                    turn.position = start + 1
                else:
                    yield from self._skip_broken(turn, f"a list of tool calls must hold calls only; write {_SHAPE}")
                return
            end, is_complete = yield from turn.bracketed(name_end, PYTHON)
            if not is_complete:
                yield from self._read_broken(turn, start, name_end, end)
                return
            turn.add_call(*_read(turn.text[start:name_end], turn.text[name_end:end]))
            turn.position = yield from turn.skip_space(end)
            tag = yield from turn.tag_at(_LIST_GOES_ON, turn.position)
            turn.position += len(tag)
            if not tag:
                yield from self._skip_broken(turn, "a list of tool calls is never closed; write ] at its end")
            if tag != ",":
                return

    def _read_broken(self, turn: Turn, start: int, name_end: int, end: int) -> Steps[None]:
        """Read a call whose brackets do not close, up to the next tag; without one it is no call, but an error."""
        tag, turn.position = yield from turn.find(_BORDERS, end)
        if not tag:
            turn.add_error(f"a tool call is never closed: {turn.text[start : start + 60]!r}; write {_SHAPE}")
            return
        turn.add_call(*_read(turn.text[start:name_end], turn.text[name_end : turn.position]))

    def _skip_broken(self, turn: Turn, error: str) -> Steps[None]:
        _, turn.position = yield from turn.find(_BORDERS, turn.position)
        turn.add_error(error)


def _read(name: str, arguments: str) -> ReadCall:
    """Read a call: its name, and its arguments with their brackets, which are its raw arguments."""
    try:
        return ReadCall(name, read_keywords(arguments), arguments)
    except LiteralError as fault:
        return ReadCall(name, None, arguments, f"the arguments of {name} are not valid: {fault}; write {_SHAPE}")
