"""The JSON format of Llama 3 and 4: a turn that is `{"name": ..., "parameters": {...}}`, several with `;` or nothing between.

A call stands where content begins, behind another call, or behind `<|python_tag|>`, `<|python_start|>` or `<|python_end|>`
(which Llama 4 writes around what it says before a call); JSON elsewhere in the content, and JSON without "parameters" (or
"arguments", which is accepted), is content. Behind `<|python_tag|>` a built-in tool may also be
called as `name.call(key="value")`; any other code there is an error, since nothing here evaluates code.
"""

import re

from ostinato_tools.parsers.grammar import TagFormat
from ostinato_tools.parsers.json_calls import JsonCallReader, ReadCall
from ostinato_tools.parsers.literals import LiteralError, read_keywords
from ostinato_tools.parsers.scanning import PYTHON, Tags
from ostinato_tools.parsers.turn import Steps, Turn

_OPEN, _AROUND = "<|python_tag|>", ("<|python_start|>", "<|python_end|>")
_BEGINS, _SEPARATOR = Tags("{"), Tags(";")
_BORDERS = Tags(";", _OPEN, *_AROUND, "<think>", "</think>")
_BUILT_IN = re.compile(r"(?:[^\W\d][\w.\-]{0,255})?")
_CALL = ".call"
_FIRST_KEYS = Tags(*(f'"{key}"' for key in ("name", "parameters", "arguments", "type", "id", "function")))
_READER = JsonCallReader("parameters", "arguments")


class Llama3JsonParser(TagFormat):
    """Parser of the JSON format of Llama 3 and 4."""

    name = "llama3_json"
    openers = (_OPEN, *_AROUND)
    stop_tokens: tuple[str, ...] = ("<|eom_id|>",)
    end_tokens = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>")

    def read_start(self, turn: Turn) -> Steps[None]:
        """Read calls that stand where content begins."""
        start = yield from turn.skip_space(turn.position)
        if (yield from self._read_calls(turn, start)):
            turn.begin_content()

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read calls, or the call of a built-in tool."""
        start = yield from turn.skip_space(turn.position)
        if (yield from self._read_calls(turn, start)) or opener != _OPEN:
            return
        end = yield from turn.word_end(_BUILT_IN, start)
        name = turn.text[start:end]
        if name.endswith(_CALL) and turn.text.startswith("(", end):
            stop, is_complete = yield from turn.bracketed(end, PYTHON)
            if is_complete:
                turn.position = stop
                turn.add_call(*_read_built_in(name.removesuffix(_CALL), turn.text[end:stop]))
                return
        turn.add_error(f"{opener} must be followed by a call, not by code; write {_READER.shape}")

    def _read_calls(self, turn: Turn, start: int) -> Steps[bool]:
        """Read the calls that begin at `start` and tell whether there is any."""
        position = yield from self._read_one(turn, start)
        if position is None:
            return False
        while position is not None:
            turn.position = position
            start = yield from turn.skip_space(position)
            start += len((yield from turn.tag_at(_SEPARATOR, start)))
            start = yield from turn.skip_space(start)
            position = yield from self._read_one(turn, start)
        return True

    def _read_one(self, turn: Turn, start: int) -> Steps[int | None]:
        """Read the call that begins at `start`; return where it ends, or None if it is no call."""
        if not (yield from turn.tag_at(_BEGINS, start)):
            return None
        first = yield from turn.skip_space(start + 1)
        key = yield from turn.tag_at(_FIRST_KEYS, first)
        if not key:
            return None
        end, is_complete = yield from turn.bracketed(start)
        if is_complete:
            body = turn.text[start:end]
            call = _READER.read(body)
            if call.error is not None and not _READER.has_arguments(body):
                return None
            turn.add_call(*call)
            return end
        if key != '"name"':
            return None
        tag, border = yield from turn.find(_BORDERS, end)
        if tag:
            turn.add_call(*_READER.read(turn.text[start:border]))
        else:
            turn.add_error(f"a tool call is never closed: {turn.text[start : start + 60]!r}; write {_READER.shape}")
        return border


def _read_built_in(name: str, arguments: str) -> ReadCall:
    try:
        return ReadCall(name, read_keywords(arguments), arguments)
    except LiteralError as fault:
        return ReadCall(name, None, arguments, f"the arguments of {name} are not valid: {fault}; write {_READER.shape}")
