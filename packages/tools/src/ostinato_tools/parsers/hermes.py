r"""The hermes format: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, with reasoning in `<think>...</think>`.

A call ends at the first closing tag that stands outside of a JSON string. Nothing is repaired: a call that is not exactly
that JSON is a call with an error.
"""

from ostinato_tools.parsers.closed_json import ClosedJson
from ostinato_tools.parsers.grammar import TagFormat
from ostinato_tools.parsers.json_calls import JsonCallReader
from ostinato_tools.parsers.turn import Steps, Turn

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BODY = ClosedJson(_OPEN, _CLOSE)
_READER = JsonCallReader("arguments")


class HermesParser(TagFormat):
    """Parser of the hermes format."""

    name = "hermes"
    openers = (_OPEN,)
    closers = (_CLOSE,)
    end_tokens = ("<|im_end|>", "<|endoftext|>")

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read the call that begins at the position."""
        return _BODY.read(turn, _READER.read)
