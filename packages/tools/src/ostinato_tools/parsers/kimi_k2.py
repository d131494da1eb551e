"""The Kimi K2 format, calls in a section:

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>JSON<|tool_call_end|> ...
    <|tool_calls_section_end|>

White space between the tags is only here for reading. `functions.NAME:NUMBER` is the id of the call, which the model expects
to see again above its result. A name that ends in a colon and digits, or holds one of the tags, cannot be told by it.
"""

from functools import partial

from ostinato_tools.parsers.closed_json import ClosedJson
from ostinato_tools.parsers.grammar import unclosed
from ostinato_tools.parsers.json_calls import ReadCall, read_arguments
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.sections import SectionFormat
from ostinato_tools.parsers.turn import Steps, Turn

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEADER_ENDS = Tags(*_SECTION, *_CALL, _ARGUMENTS, "<think>", "</think>")
_BODY = ClosedJson(*_CALL, *_SECTION)
_SHAPE = f"functions.<name>:<number>{_ARGUMENTS}<object>"


class KimiK2Parser(SectionFormat):
    """Parser of the Kimi K2 format."""

    name = "kimi_k2"
    section = _SECTION
    call = _CALL
    end_tokens = ("<|im_end|>", "[EOS]")

    def read_one(self, turn: Turn) -> Steps[None]:
        """Read the call whose opening tag ends at the position."""
        start = turn.position
        tag, end = yield from turn.find(_HEADER_ENDS, start)
        header = turn.text[start:end].strip()
        turn.position = end + len(tag)
        if tag == _ARGUMENTS:
            yield from _BODY.read(turn, partial(_read, header), start=start)
        elif tag == _CALL[1]:
            turn.add_call(_name_of(header), None, header, f"the tool call has no {_ARGUMENTS}; write {_SHAPE}")
        else:
            turn.position = end
            turn.add_error(unclosed(turn.text[start : min(end, start + 60)], _CALL[1]))


def _read(header: str, body: str) -> ReadCall:
    name = _name_of(header)
    if not name:
        return ReadCall("", None, body, f"the name of a tool call must not be empty; write {_SHAPE}")
    call = read_arguments(name, body, _SHAPE)
    return call._replace(call_id=header) if header != name else call


def _name_of(header: str) -> str:
    name, colon, number = header.removeprefix("functions.").rpartition(":")
    return name if colon and number.isascii() and number.isdigit() else name + colon + number
