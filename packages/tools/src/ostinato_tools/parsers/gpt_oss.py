r"""The format of gpt-oss (harmony): a turn is a row of messages, each with a header.

`<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>`, where the prompt has already written the first
`<|start|>assistant`. What a message is, its header says:

- `to=functions.NAME`, before or behind the channel and on whichever channel: a call, whose text is the arguments as JSON.
- channel `analysis`: reasoning. A header quoted in it is text.
- channel `final`, or `commentary` without a recipient (a preamble): content.

The last message may lack its closing tag, which is a stop token that engines take away: `<|return|>` behind the content,
`<|call|>` behind a call. A call ends at a tag outside of its JSON's strings. Recipients outside of `functions` keep their
whole name. It cannot express: names with white space or `<`.
"""

import re
from typing import NamedTuple

from ostinato_tools.parsers.grammar import Format, unclosed
from ostinato_tools.parsers.json_calls import read_arguments
from ostinato_tools.parsers.scanning import JSON, Bracketed, Tags
from ostinato_tools.parsers.turn import Steps, Turn

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", _CALL, "<|return|>")
_TEXT_END = Tags(_START, _CHANNEL, *_ENDS)
_HEADER_END = Tags(_START, _MESSAGE, *_ENDS)
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"\s*(\w+)")
_SHAPE = '<|channel|>commentary to=functions.<name> <|constrain|>json<|message|>{"key": ...}<|call|>'
_EXCERPT = 60


class _Header(NamedTuple):
    role: str
    channel: str
    recipient: str


class GptOssParser(Format):
    """Parser of the harmony format."""

    name = "gpt_oss"
    stop_tokens = ("<|return|>", _CALL)
    end_tokens = ("<|return|>",)

    def grammar(self, turn: Turn) -> Steps[None]:
        """Take a turn apart. A prompt that ended inside reasoning ended behind the `<|message|>` of an analysis."""
        turn.undecided = False
        header = _Header("assistant", "analysis", "") if turn.in_reasoning else (yield from _read_header(turn, False))
        while header is not None:
            tag = yield from _read_text(turn, header)
            if tag == _CHANNEL:
                turn.add_error("a message must end before the next begins, got <|channel|> in it; write <|end|> first")
                turn.position -= len(tag)
            header = yield from _read_header(turn, tag == _START)


def _read_header(turn: Turn, has_role: bool) -> Steps[_Header | None]:
    """Read the header at the position and go to the text of its message; None at the end."""
    while True:
        start = turn.position
        tag, at = yield from turn.find(_HEADER_END, start)
        if tag == _MESSAGE:
            turn.position = at + len(tag)
            return _parse_header(turn, turn.text[start:at], has_role)
        if turn.text[start:at].strip():
            excerpt = turn.text[start:at].strip()[:_EXCERPT]
            turn.add_error(
                f"a message must have <|message|> between its header and its text, got {excerpt!r}; write both"
            )
        elif tag and tag != _START:
            turn.add_error(f"{tag} ends nothing; write a message first")
        if not tag and _CHANNEL not in turn.text[start:at]:  # no message at all: text for the reader
            turn.begin_content()
            turn.position = at
            turn.keep()
        turn.position = at + len(tag)
        if not tag:
            return None
        has_role = tag == _START


def _parse_header(turn: Turn, header: str, has_role: bool) -> _Header:
    before, _, behind = header.partition(_CHANNEL)
    recipient = _RECIPIENT.search(before) or _RECIPIENT.search(behind)
    channel = _CHANNEL_NAME.match(behind)
    role = before.split(maxsplit=1)[0] if has_role and before.strip() else "assistant"
    found = _Header(role, channel.group(1) if channel else "", recipient.group(1) if recipient else "")
    if role != "assistant":
        turn.add_error(f"the role of a message must be assistant, got {role!r}; write only messages of your own")
    elif found.channel not in ("analysis", "commentary", "final"):
        turn.add_error(f"the channel must be analysis, commentary or final, got {found.channel!r}; write one of them")
    return found


def _read_text(turn: Turn, header: _Header) -> Steps[str]:
    """Read the text of a message, go behind the tag that ends it and return that tag; "" at the end."""
    if header.role != "assistant":
        tag, at = yield from turn.find(_TEXT_END, turn.position)
        turn.position = at + len(tag)
    elif header.recipient:
        tag = yield from _read_call(turn, header.recipient.removeprefix("functions."))
    elif header.channel == "analysis":
        tag = yield from turn.reasoning_until(_TEXT_END)
        if not tag:
            turn.add_error("the reasoning is never closed; write <|end|> before the answer or a call")
    else:
        turn.begin_content("")
        tag = yield from turn.content_until(_TEXT_END)
    return tag


def _read_call(turn: Turn, name: str) -> Steps[str]:
    start = turn.position
    stop = yield from turn.json_run(start)
    tag = yield from turn.tag_at(_TEXT_END, stop)
    if not tag and stop == len(turn.text) and _is_cut(turn.text, start):
        turn.add_error(unclosed(turn.text[start:][:_EXCERPT], _CALL))
        turn.position = stop
        return ""
    call = read_arguments(name, turn.text[start:stop], _SHAPE)
    if call.error is not None or (not tag and stop < len(turn.text)):
        end = _TEXT_END.search(turn.text, start, stop)  # it may follow a string that was not closed
        if end is not None and not (tag and turn.text.find(_START, end.start(), stop) < 0):
            tag, stop = end.group(), end.start()
        elif not tag:
            tag, stop = yield from turn.find(_TEXT_END, stop)
        call = read_arguments(name, turn.text[start:stop], _SHAPE)
    if not name:
        turn.add_call("", None, call.raw, f"the name of a tool must not be empty; write {_SHAPE}")
    else:
        turn.add_call(*call)
    turn.position = stop + len(tag)
    return tag


def _is_cut(text: str, start: int) -> bool:
    """Tell whether text that ends in a call ends before its JSON does."""
    body = text[start:].lstrip()
    value = Bracketed(0, JSON)
    return not body or (not value.advance(body) and not value.complete)
