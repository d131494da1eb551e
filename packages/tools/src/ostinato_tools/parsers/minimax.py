r"""The format of MiniMax M2: calls of one turn stand together in `<minimax:tool_call>`.

`<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n</minimax:tool_call>`, with
reasoning in `<think>...</think>`. A value is exactly what stands between its tags. Values carry no types: text is written
as it is and everything else as JSON, so the tool's schema says which it is. See `tagged` for tags inside of values.

It cannot express: names with a newline or `">`.
"""

from ostinato_tools.parsers.tagged import TaggedFormat


class MiniMaxParser(TaggedFormat):
    """Parser of the format of MiniMax M2."""

    name = "minimax"
    end_tokens = ("[e~[",)
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    call_tags = ('<invoke name="', '">', "</invoke>")
    parameter_tags = ('<parameter name="', '">', "</parameter>")
    shape = (
        '<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>'
    )
