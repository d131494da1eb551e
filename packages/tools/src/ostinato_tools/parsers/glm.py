r"""The format of GLM 4.5 and later (and of other models that took it over).

`<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>`, with or without the newlines, and with
reasoning in `<think>...</think>`. A value is exactly what stands between its tags. Values carry no types: text is written
as it is and everything else as JSON, so the tool's schema says which it is. See `tagged` for tags inside of values.

It cannot express: names with a line end, `<`, or white space at either end; keys with a line end.
"""

from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.tagged import TaggedFormat
from ostinato_tools.parsers.turn import Steps, Turn

_NAME_END = Tags("<", "\n")
_VALUE = Tags("<arg_value>")


class GlmParser(TaggedFormat):
    """Parser of the format of GLM 4.5 and later."""

    name = "glm"
    # GLM's own, and those of other models that write this format.
    end_tokens = (
        "<|user|>",
        "<|observation|>",
        "<|endoftext|>",
        "<|role_end|>",
        "<｜end▁of▁sentence｜>",
        "</assistant>",
    )
    begin, end = "<tool_call>", "</tool_call>"
    call_tags = ("", "", "")
    parameter_tags = ("<arg_key>", "</arg_key>", "</arg_value>")
    shape = "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"

    def read_name(self, turn: Turn, position: int) -> Steps[tuple[str, int]]:
        """Return the name at `position`, which ends at a tag or line end, and where it ends."""
        _, at = yield from turn.find(_NAME_END, position)
        return turn.text[position:at].strip(), at

    def read_key(self, turn: Turn, position: int) -> Steps[tuple[str, int]]:
        """Return the key at `position`, and where its value begins; "" if none begins."""
        key, end = yield from super().read_key(turn, position)
        if not key:
            return "", position
        end = yield from turn.skip_space(end)
        tag = yield from turn.tag_at(_VALUE, end)
        return (key, end + len(tag)) if tag else ("", position)
