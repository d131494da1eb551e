r"""The hermes format: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, with reasoning in `<think>...</think>`.

A call ends at the first closing tag that stands outside of a JSON string. Nothing is repaired: a call that is not exactly
that JSON is a call with an error.
"""

from ostinato_tools.parsers.grammar import TagFormat, unclosed
from ostinato_tools.parsers.json_calls import JsonCallReader
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.turn import Steps, Turn

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BORDERS = Tags(_OPEN, _CLOSE)
_TAGS = Tags(_OPEN, _CLOSE, "<think>", "</think>")
_READER = JsonCallReader("arguments")


class HermesParser(TagFormat):
    """Parser of the hermes format."""

    name = "hermes"
    openers = (_OPEN,)
    closers = (_CLOSE,)
    end_tokens = ("<|im_end|>", "<|endoftext|>")

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read the call that begins at the position."""
        start = turn.position
        stop = yield from turn.json_run(start)
        tag = yield from turn.tag_at(_TAGS, stop)
        if tag == _CLOSE:
            call = _READER.read(turn.text[start:stop])
            if call.error is None:
                turn.add_call(*call)
                turn.position = stop + len(_CLOSE)
                return
        close = turn.text.find(_CLOSE, start, stop)
        if close >= 0:  # a closing tag in what may be a string, or may be a call whose string was not closed
            if tag == _CLOSE and turn.text.find(_OPEN, close, stop) < 0:
                close = stop
        else:  # it broke before it could end; a call that begins before that end is another one
            if not tag:
                tag, stop = yield from turn.find(_BORDERS, stop)
            if tag != _CLOSE:
                turn.add_error(unclosed(turn.text[start : min(stop, start + 60)], _CLOSE))
                turn.position = stop
                return
            close = stop
        turn.add_call(*_READER.read(turn.text[start:close]))
        turn.position = close + len(_CLOSE)
