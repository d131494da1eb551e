r"""The format of gpt-oss (harmony): a turn is a row of messages, each with a header.

`<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>`, where the prompt has already written the first
`<|start|>assistant`. What a message is, its header says:

- `to=functions.NAME`, before or behind the channel and on whichever channel: a call, whose text is the arguments as JSON
  (`to=all` and `to=user` make none).
- channel `analysis`: reasoning. A header quoted in it is text.
- channel `final`, or `commentary` without a recipient (a preamble): content.

The last message may lack its closing tag, which is a stop token that engines take away: `<|return|>` behind the content,
`<|call|>` behind a call. A call ends at a tag outside of its JSON's strings. Recipients outside of `functions` keep their
whole name. It cannot express: names with white space at either end, and behind the channel none with white space or `<`.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from ostinato_tools.parsers.grammar import Format, unclosed
from ostinato_tools.parsers.json_calls import ReadCall, read_arguments
from ostinato_tools.parsers.scanning import JSON, Bracketed, Tags
from ostinato_tools.parsers.turn import Steps, Turn

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", _CALL, "<|return|>")
_TEXT_END = Tags(_START, _CHANNEL, *_ENDS)
_CHANNELS = Tags(_CHANNEL)
_HEADER_END = Tags(_START, _MESSAGE, *_ENDS)
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_WRITTEN = re.compile(r"\S")
_CHANNEL_NAME = re.compile(r"\s*(\w+)")
_SHAPE = '<|channel|>commentary to=functions.<name> <|constrain|>json<|message|>{"key": ...}<|call|>'
_EXCERPT = 60
_LONG = 200
"""Longer headers are not remembered."""


class _Header(NamedTuple):
    channel: str
    recipient: str
    is_own: bool = True
    """Whether its role is assistant."""
    error: str | None = None


class GptOssParser(Format):
    """Parser of the harmony format."""

    name = "gpt_oss"
    stop_tokens: tuple[str, ...] = ("<|return|>", _CALL)
    end_tokens = ("<|return|>",)
    reasoning_openers = ("<|channel|>analysis<|message|>",)

    def grammar(self, turn: Turn) -> Steps[None]:
        """Take a turn apart. A prompt that ended inside reasoning ended behind the `<|message|>` of an analysis."""
        turn.undecided = False
        header = _Header("analysis", "") if turn.in_reasoning else (yield from _read_header(turn, False))
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
        turn.position = at + len(tag)
        if tag == _MESSAGE:
            text = turn.text[start:at]
            header = _parse_header(text, has_role) if at - start < _LONG else _parse_header.__wrapped__(text, has_role)
            if header.error is not None:
                turn.add_error(header.error)
            return header
        written = _WRITTEN.search(turn.text, start, at)
        if written is not None or has_role:
            excerpt = turn.text[written.start() : min(at, written.start() + _EXCERPT)] if written is not None else ""
            turn.add_error(
                f"a message must have <|message|> between its header and its text, got {excerpt!r}; write both"
            )
        elif tag and tag != _START:
            turn.add_error(f"{tag} ends nothing; write a message first")
        if not tag:
            if _CHANNELS.search(turn.text, start) is None:  # no header at all: text for the reader
                turn.position = start
                turn.begin_content()
                turn.position = at
                turn.keep()
            return None
        has_role = tag == _START


@lru_cache(maxsize=256)
def _parse_header(header: str, has_role: bool) -> _Header:
    """Take apart what stands before `<|message|>`; `has_role`: behind a `<|start|>`, so that it begins with the role."""
    before, _, behind = header.partition(_CHANNEL)
    head, _, recipient = before.partition("to=")  # before the channel nothing stands behind it: it may have spaces
    recipient = recipient.partition("<|constrain|>")[0].strip() if not head or head[-1].isspace() else ""
    if not recipient and (named := _RECIPIENT.search(behind)):
        recipient = named.group(1)
    if recipient in ("all", "user"):
        recipient = ""
    found = _CHANNEL_NAME.match(behind)
    channel = found.group(1) if found else ""
    role = before.split(maxsplit=1)[0] if has_role and before.strip() else "assistant"
    error = None
    if role != "assistant":
        error = f"the role of a message must be assistant, got {role!r}; write only messages of your own"
    elif channel not in ("analysis", "commentary", "final"):
        error = f"the channel must be analysis, commentary or final, got {channel!r}; write one of them"
    return _Header(channel, recipient, role == "assistant", error)


def _read_text(turn: Turn, header: _Header) -> Steps[str]:
    """Read the text of a message, go behind the tag that ends it and return that tag; "" at the end."""
    if not header.is_own:
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
    tag, stop = yield from turn.find(_TEXT_END, start)
    call = read_arguments(name, turn.text[start:stop], _SHAPE)
    if call.error is not None and tag:  # the tag may stand in a string
        longer, end_tag = yield from _read_longer_call(turn, name, stop)
        if longer is not None:
            call, tag, stop = longer, end_tag, turn.position
    elif call.error is not None and _is_cut(turn.text, start):
        turn.add_error(unclosed(turn.text[start:][:_EXCERPT], _CALL))
        turn.position = stop
        return ""
    if not name:
        turn.add_call("", None, call.raw, f"the name of a tool must not be empty; write {_SHAPE}")
    else:
        turn.add_call(*call)
    turn.position = stop + len(tag)
    return tag


def _read_longer_call(turn: Turn, name: str, first_end: int) -> Steps[tuple[ReadCall | None, str]]:
    """Return the call at the position with the tag behind it and go to that tag, if it ends behind `first_end`, at a tag
    outside of strings; None if a string that is not closed may have hidden another message."""
    start = turn.position
    stop = yield from turn.json_run(start)
    tag = yield from turn.tag_at(_TEXT_END, stop)
    if stop <= first_end or not (tag or stop == len(turn.text)):
        return None, ""
    call = read_arguments(name, turn.text[start:stop], _SHAPE)
    if call.error is not None and (not tag or turn.text.find(_START, first_end, stop) >= 0):
        return None, ""
    turn.position = stop
    return call, tag


def _is_cut(text: str, start: int) -> bool:
    """Tell whether text that ends in a call ends before its JSON does."""
    body = text[start:].lstrip()
    value = Bracketed(0, JSON)
    return not body or (not value.advance(body) and not value.complete)
