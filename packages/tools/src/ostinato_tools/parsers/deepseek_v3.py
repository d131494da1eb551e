"""The DeepSeek formats of V3 and R1, and of V3.1, calls in a section. White space here is only for reading:

    <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> ... <｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>

    V3.1:     NAME<｜tool▁sep｜>JSON
    V3, R1:   function<｜tool▁sep｜>NAME, line break, ```json, line break, JSON, line break, ```

The two are told apart by what follows the separator: a JSON object, or a name and a fence.
"""

from functools import partial

from ostinato_tools.parsers.closed_json import ClosedJson
from ostinato_tools.parsers.grammar import unclosed
from ostinato_tools.parsers.json_calls import ReadCall, read_arguments
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.sections import SectionFormat
from ostinato_tools.parsers.turn import Steps, Turn

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR, _FENCE, _END_FENCE = "<｜tool▁sep｜>", "```json", "```"
_BORDERS = (*_SECTION, *_CALL, "<think>", "</think>")
_HEADER_ENDS = Tags(_SEPARATOR, *_BORDERS)
_NAME_ENDS = Tags(_FENCE, *_BORDERS)
_JSON_BEGINS = Tags("{")
_BODY = ClosedJson(*_CALL, *_SECTION)
_SHAPE = f"<name>{_SEPARATOR}<object>"


class DeepSeekV3Parser(SectionFormat):
    """Parser of the DeepSeek V3, R1 and V3.1 formats."""

    name = "deepseek_v3"
    section = _SECTION
    call = _CALL
    end_tokens = ("<｜end▁of▁sentence｜>",)

    def read_one(self, turn: Turn) -> Steps[None]:
        """Read the call whose opening tag ends at the position."""
        start = turn.position
        tag, end = yield from turn.find(_HEADER_ENDS, start)
        name = turn.text[start:end].strip()
        turn.position = end + len(tag)
        if tag == _SEPARATOR and name == "function":
            position = yield from turn.skip_space(turn.position)
            if not (yield from turn.tag_at(_JSON_BEGINS, position)):
                tag, end = yield from turn.find(_NAME_ENDS, position)
                name = turn.text[position:end].strip()
                turn.position = end + len(tag)
        if tag in (_SEPARATOR, _FENCE):
            yield from _BODY.read(turn, partial(_read, name, tag == _FENCE), start=start)
        elif tag == _CALL[1]:
            turn.add_call(name, None, turn.text[start:end], f"the tool call {name!r} has no arguments; write {_SHAPE}")
        else:
            turn.position = end
            turn.add_error(unclosed(turn.text[start : min(end, start + 60)], _CALL[1]))


def _read(name: str, is_fenced: bool, body: str) -> ReadCall:
    if not name:
        return ReadCall("", None, body, f"the name of a tool call must not be empty; write {_SHAPE}")
    if is_fenced:
        body = body.strip().removesuffix(_END_FENCE)
    return read_arguments(name, body, _SHAPE)
