r"""The formats of MiniMax: the calls of a turn stand together, in M2's tags or in M1's JSON. Reasoning is in `<think>`.

M2: `<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n</minimax:tool_call>`. A
value is exactly what stands between its tags. Values carry no types: text is written as it is and everything else as JSON,
so the tool's schema says which it is. See `tagged` for tags inside of values. It cannot express names with a line end,
`<` or `">`.

M1: `<tool_calls>\n{"name": NAME, "arguments": {...}}\n</tool_calls>`, one object for each call, each on a line of its own.
"""

from ostinato_tools.parsers.grammar import unclosed
from ostinato_tools.parsers.json_calls import JsonCallReader, ReadCall
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.tagged import TaggedFormat
from ostinato_tools.parsers.turn import Steps, Turn

_ROWS, _ROWS_END = "<tool_calls>", "</tool_calls>"
_BORDERS = Tags(_ROWS, _ROWS_END)
_READER = JsonCallReader("arguments")
_EXCERPT = 60


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
        return super().read_call(turn, opener) if opener == self.begin else _read_rows(turn)


def _read_rows(turn: Turn) -> Steps[None]:
    """Read a section of M1. It ends at the first closing tag outside of a string; if a row is broken and a section may have
    begun since, at the very first."""
    start = turn.position
    stop = yield from turn.json_run(start)
    tag = yield from turn.tag_at(_BORDERS, stop)
    close = turn.text.find(_ROWS_END, start, stop)
    if tag == _ROWS_END:
        calls = _read_lines(turn.text[start:stop])
        if close >= 0 and turn.text.find(_ROWS, close, stop) >= 0 and any(call.error is not None for call in calls):
            stop, calls = close, _read_lines(turn.text[start:close])
    else:
        if close >= 0:
            tag, stop = _ROWS_END, close
        elif not tag:
            tag, stop = yield from turn.find(_BORDERS, stop)
        calls = _read_lines(turn.text[start:stop])
    if tag != _ROWS_END:
        turn.add_error(unclosed(turn.text[start:stop][:_EXCERPT], _ROWS_END))
        turn.position = stop
        return
    for call in calls:
        turn.add_call(*call)
    if not calls:
        turn.add_error(f"{_ROWS} must hold a call, got none; write a call or no section")
    turn.position = stop + len(tag)


def _read_lines(rows: str) -> list[ReadCall]:
    """Read calls, one a line. Lines side by side that are none are one malformed call."""
    calls: list[ReadCall] = []
    broken: list[str] = []
    for line in (*rows.split("\n"), ""):
        call = _READER.read(line) if line.strip() else None
        if call is not None and not call.name:
            broken.append(line)
            continue
        if broken and (call is not None or not line):
            calls.append(_READER.read("\n".join(broken)))
            broken = []
        if call is not None:
            calls.append(call)
    return calls
