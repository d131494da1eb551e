r"""The formats of MiniMax: the calls of a turn stand together, in M2's tags or in M1's JSON. Reasoning is in `<think>`.

M2: `<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n</minimax:tool_call>`. A
value is exactly what stands between its tags. Values carry no types: text is written as it is and everything else as JSON,
so the tool's schema says which it is. See `tagged` for tags inside of values. It cannot express names with a line end or
`">`.

M1: `<tool_calls>\n{"name": NAME, "arguments": {...}}\n</tool_calls>`, one object for each call, each on a line of its own.
"""

from ostinato_tools.parsers.grammar import unclosed
from ostinato_tools.parsers.json_calls import JsonCallReader
from ostinato_tools.parsers.scanning import JSON, Tags
from ostinato_tools.parsers.tagged import TaggedFormat
from ostinato_tools.parsers.turn import Steps, Turn

_ROWS, _ROWS_END = "<tool_calls>", "</tool_calls>"
_NEXT_ROW = Tags("\n{", _ROWS, _ROWS_END)
_END = Tags(_ROWS_END)
_BRACE = Tags("{")
_READER = JsonCallReader("arguments")


class MiniMaxParser(TaggedFormat):
    """Parser of the formats of MiniMax M2 and M1."""

    name = "minimax"
    end_tokens = ("[e~[", "<end_of_sentence>")
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    other_openers, other_closers = (_ROWS,), (_ROWS_END,)
    call_tags = ('<invoke name="', '">', "</invoke>")
    parameter_tags = ('<parameter name="', '">', "</parameter>")
    shape = (
        '<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>'
    )

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read the section that begins at the position."""
        if opener == self.begin:
            yield from super().read_call(turn, opener)
            return
        while True:
            turn.position = yield from turn.skip_space(turn.position)
            if (yield from turn.tag_at(_END, turn.position)):
                turn.position += len(_ROWS_END)
                return
            if not (yield from _read_row(turn)):
                return


def _read_row(turn: Turn) -> Steps[bool]:
    """Read a call of M1 and go behind it; False if there is none and the section is over."""
    start = turn.position
    if (yield from turn.tag_at(_BRACE, start)):
        end, is_complete = yield from turn.bracketed(start, JSON)
        if is_complete:
            call = _READER.read(turn.text[start:end])
            if call.error is None:
                turn.add_call(*call)
                turn.position = end
                return True
    tag, end = yield from turn.find(_NEXT_ROW, start)
    if tag not in ("\n{", _ROWS_END):
        turn.add_error(unclosed(turn.text[start:end][:60], _ROWS_END))
        turn.position = end
        return False
    turn.add_call(*_READER.read(turn.text[start:end]))
    turn.position = end
    return True
