r"""The hermes format: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, with reasoning in `<think>...</think>`.

A call ends at the first closing tag that stands outside of a JSON string. Nothing is repaired: a call that is not exactly
that JSON is a call with an error.

Why it is linear: each opening tag is read once up to the place where it stops being JSON-like (`_JSON_LIKE`). Outside of a
string no `<` and no backslash is JSON-like, so of two readings that disagree on where strings are, one ends at the next
tag; at most two readings ever cover the same text.
"""

import re
from collections.abc import Sequence

import msgspec

from ostinato_tools.calls import ToolCall
from ostinato_tools.parsers.base import ParsedTurn, strip_end_tokens

_OPEN, _CLOSE, _THINK, _END_THINK = "<tool_call>", "</tool_call>", "<think>", "</think>"
_TAG = re.compile("</?(?:tool_call|think)>")
_JSON_LIKE = re.compile(r'(?:[^"\\<]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,200})"')
_BYTE = re.compile(r" \(byte (\d+)\)")
_SHAPE = '{"name": <name>, "arguments": <object>}'
_KINDS = {"[": "an array", '"': "a string", "n": "null", "t": "a boolean", "f": "a boolean"}
_NEVER = 1 << 62
_BLANK = " \t\r\n"


class _Body(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_any = msgspec.json.Decoder().decode


class HermesParser:
    """Parser of the hermes format."""

    name = "hermes"
    stop_tokens: tuple[str, ...] = ()

    def parse(
        self,
        text: str,
        tools: Sequence[dict] | None = None,
        *,
        id_prefix: str = "call_",
        end_tokens: Sequence[str] = ("<|im_end|>", "<|endoftext|>"),
        in_reasoning: bool = False,
    ) -> ParsedTurn:
        """Take a turn apart; see `ToolParser.parse`. `tools` is not needed: JSON carries its types.

        Calls inside reasoning are drafts and are not returned. A `</think>` that nothing opened closes reasoning that
        the prompt opened: everything before it is reasoning.
        """
        return _Turn(strip_end_tokens(text, end_tokens), in_reasoning).parsed(id_prefix)


class _Turn:
    """One pass over one text."""

    def __init__(self, text: str, in_reasoning: bool) -> None:
        self.text = text
        self.pieces: list[str] = []
        self.calls: list[tuple[str, dict | None, str, str | None]] = []
        self.errors: dict[str, None] = {}
        self.reasoning: list[str] = []
        self.next_tag = {_CLOSE: -1, _END_THINK: -1}
        self.piece_start = 0
        self.after = ""  # the tag that ended just before the current piece of content
        position = 0
        if in_reasoning:
            inner = len(text) - len(text.lstrip())
            position = self._reason(inner + len(_THINK) if text.startswith(_THINK, inner) else 0)
        while (tag := _TAG.search(text, position)) is not None:
            position = self._at_tag(tag.group(), tag.start(), tag.end())
        self._end_piece(len(text), "")

    def parsed(self, id_prefix: str) -> ParsedTurn:
        calls = tuple(
            ToolCall(name=name, arguments=arguments, raw_arguments=raw, id=f"{id_prefix}{index}", error=error)
            for index, (name, arguments, raw, error) in enumerate(self.calls)
        )
        content = self.pieces[0] if len(self.pieces) == 1 else "\n".join(self.pieces)
        reasoning = "\n".join(part.strip("\n") for part in self.reasoning) if self.reasoning else None
        return ParsedTurn(content=content, reasoning=reasoning, tool_calls=calls, errors=tuple(self.errors))

    def _at_tag(self, tag: str, start: int, end: int) -> int:
        """Handle one tag and return where to go on."""
        if tag == _OPEN:
            self._end_piece(start, _OPEN)
            return self._begin_piece(self._read_call(end), _CLOSE)
        if tag == _THINK:
            self._end_piece(start, _THINK)
            return self._reason(end)
        if tag == _END_THINK and not self.reasoning:
            self.pieces.clear()
            self.calls.clear()
            self.errors.clear()
            self.reasoning.append(self.text[:start])
            return self._begin_piece(end, _END_THINK)
        self.errors[f"{tag} closes nothing; write the opening tag first"] = None
        return end

    def _begin_piece(self, position: int, after: str) -> int:
        self.piece_start, self.after = position, after
        return position

    def _end_piece(self, end: int, before: str) -> None:
        """Keep a piece of content, without the white space that only sets off a tag beside it."""
        piece = self.text[self.piece_start : end]
        if before:
            piece = piece.rstrip()
        if self.after:
            piece = piece.lstrip() if self.after == _CLOSE else piece.lstrip("\n")
        if piece:
            self.pieces.append(piece)

    def _reason(self, start: int) -> int:
        close = self.text.find(_END_THINK, start)
        if close < 0:
            self.errors[f"the reasoning is never closed; write {_END_THINK} before the answer or a call"] = None
            self.reasoning.append(self.text[start:])
            return self._begin_piece(len(self.text), _END_THINK)
        self.reasoning.append(self.text[start:close])
        return self._begin_piece(close + len(_END_THINK), _END_THINK)

    def _next(self, tag: str, start: int) -> int:
        """Where `tag` comes next, `_NEVER` if it does not; remembered, so that all questions together cost one pass."""
        if self.next_tag[tag] < start:
            found = self.text.find(tag, start)
            self.next_tag[tag] = found if found >= 0 else _NEVER
        return self.next_tag[tag]

    def _read_call(self, start: int) -> int:
        """Read the call whose opening tag ends at `start` and return where to go on."""
        text = self.text
        match = _JSON_LIKE.match(text, start)
        stop = match.end() if match is not None else start
        if text.startswith(_CLOSE, stop):
            call = _read_body(text[start:stop])
            if call[3] is None:
                self.calls.append(call)
                return stop + len(_CLOSE)
        close = self._next(_CLOSE, start)
        if not self.reasoning and (end_think := self._next(_END_THINK, start)) < close:
            return end_think  # a broken draft in reasoning that the prompt opened
        if stop < close:  # it broke before it could end; a call that begins before that end is another one
            tag = _TAG.match(text, stop)
            resume = stop if tag is not None else text.find(_OPEN, stop, min(close, len(text)))
            if resume >= 0 or close == _NEVER:
                excerpt = text[start : start + 60].strip()
                self.errors[f"a tool call is never closed: {excerpt!r}; write {_CLOSE} after its JSON"] = None
                return resume if resume >= 0 else len(text)
        elif text.startswith(_CLOSE, stop) and text.find(_OPEN, close, stop) < 0:
            close = stop  # the closing tags before this one stand inside of a string
        self.calls.append(_read_body(text[start:close]))
        return close + len(_CLOSE)


def _read_body(body: str) -> tuple[str, dict | None, str, str | None]:
    """Decode one call: name, arguments, raw arguments, error."""
    body = body.strip(_BLANK)
    try:
        call = _decode_body(body)
        raw = bytes(call.arguments).decode()
        kind = _KINDS.get(raw[0], "a number") if raw[0] != "{" else None
        arguments = _decode_any(raw) if kind is None else None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        named = _NAME.match(body)
        return named.group(1) if named else "", None, body, _fault(error, body)
    if not call.name:
        return "", None, raw, f"the name of a tool call must not be empty; write {_SHAPE}"
    if kind is not None:
        return call.name, None, raw, f"the arguments of {call.name} must be a JSON object, got {kind}; write {_SHAPE}"
    return call.name, arguments, raw, None


def _fault(error: Exception, body: str) -> str:
    if not body:
        return f"the tool call is empty; write {_SHAPE}"
    if isinstance(error, RecursionError):
        return "the tool call is nested too deeply"
    if isinstance(error, msgspec.ValidationError):
        return f"the tool call must be {_SHAPE}: {error}"
    where = _BYTE.search(str(error))
    if where is None:
        reason = "it ends too early" if "truncated" in str(error) else str(error)
        return f"the tool call is not valid JSON: {reason}; write {_SHAPE}"
    reason = str(error)[: where.start()].removeprefix("JSON is malformed: ")
    data = body.encode("utf-8", "replace")
    offset = int(where.group(1))
    before = len(data[:offset].decode("utf-8", "ignore"))
    return (
        f"the tool call is not valid JSON: {reason} at character {before + 1}, "
        f"near {body[max(before - 20, 0) : before + 20]!r}; write {_SHAPE}"
    )
