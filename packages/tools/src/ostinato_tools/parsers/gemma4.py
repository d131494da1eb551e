r"""The format of Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1,on:true,list:[1,{k:2}]}<tool_call|>`.

Values are JSON but for two things: text stands between `<|"|>` tokens, without escapes, and keys are bare. So a tag inside
of a text is text, and no schema is needed. Also read are keys between those tokens, `None` for null (which the template
writes) and JSON strings. Bare words that are no value are an error. Reasoning stands in `<|channel>thought\n...<channel|>`.

It cannot express: a text with `<|"|>` in it; names with `{` or `<`; keys with one of `{}[],:"<\\`, a line end, or white
space at either end.
"""

import re
from itertools import chain
from json.encoder import encode_basestring

from ostinato_tools.parsers.grammar import TagFormat, unclosed
from ostinato_tools.parsers.json_calls import ReadCall, read_arguments
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.turn import Steps, Turn

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_QUOTES = Tags(_QUOTE)
_TAGS = Tags(_OPEN, _CLOSE, _QUOTE)
_HEAD = re.compile(r"\s*call:([^{<]*+)(?=\{)")
_STRING = re.compile(r'<\|"\|>((?:[^<]++|<(?!\|"\|>))*+)<\|"\|>|("(?:[^"\\]++|\\.)*+(?:"|\\?\Z))', re.DOTALL)
_PLACE = "\0"
"""Stands for a string while the rest is made JSON."""
_NONE = re.compile(r"(?<=[\[,:\s])None(?=\s*+[,\]}])")
_WORD = r'[^\s{}\[\],:"<\\\0]++'
_KEY = re.compile(rf"([{{,]\s*+)({_WORD}(?:[ \t]++{_WORD})*+)\s*+:")
_SHAPE = _OPEN + 'call:NAME{key:<|"|>text<|"|>}' + _CLOSE
_EXCERPT = 60


class Gemma4Parser(TagFormat):
    """Parser of the format of Gemma 4."""

    name = "gemma4"
    stop_tokens: tuple[str, ...] = ("<turn|>", "<|tool_response>")
    end_tokens = ("<turn|>", "<|tool_response>", "<eos>")
    openers = (_OPEN,)
    closers = (_CLOSE,)
    reasoning_tags = (("<|channel>thought", "<channel|>"),)

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read the call that begins at the position."""
        start = turn.position
        tag, stop = yield from _find_outside_of_text(turn, start)
        close = turn.text.find(_CLOSE, start, stop)  # in a text, or behind a text that was not closed
        if tag == _CLOSE:
            call = _read_body(turn.text[start:stop])
            if call.error is None or close < 0 or turn.text.find(_OPEN, close, stop) < 0:
                turn.add_call(*call)
                turn.position = stop + len(tag)
                return
        if close >= 0:
            turn.add_call(*_read_body(turn.text[start:close]))
            turn.position = close + len(_CLOSE)
        else:
            turn.add_error(unclosed(turn.text[start:stop][:_EXCERPT], _CLOSE))
            turn.position = stop


def _find_outside_of_text(turn: Turn, position: int) -> Steps[tuple[str, int]]:
    """Return the first tag outside of text between quotes, and where it is; "" and the end if there is none."""
    while True:
        tag, at = yield from turn.find(_TAGS, position)
        if tag != _QUOTE:
            return tag, at
        quote, at = yield from turn.find(_QUOTES, at + len(tag))
        if not quote:
            return "", at
        position = at + len(quote)


def _read_body(body: str) -> ReadCall:
    head = _HEAD.match(body)
    if head is None or not head.group(1).strip():
        return ReadCall("", None, body, f"the tool call must be {_SHAPE}, got {body[:_EXCERPT]!r}; write it like that")
    name, raw = head.group(1).strip(), body[head.end() :].strip()
    call = read_arguments(name, _to_json(raw), _SHAPE)
    return call._replace(raw=raw)


def _to_json(raw: str) -> str:
    """Return arguments as JSON; what is none remains what is none."""
    pieces = _STRING.split(raw)
    quoted = zip(pieces[1::3], pieces[2::3], strict=True)
    strings = [json if text is None else encode_basestring(text) for text, json in quoted]
    rest = _NONE.sub("null", _PLACE.join(pieces[::3]))
    rest = _KEY.sub(r'\1"\2":', rest).split(_PLACE)
    if len(rest) != len(strings) + 1:  # there was such a character, which no JSON has outside of a string
        return raw
    return "".join(chain.from_iterable(zip(rest, (*strings, ""), strict=True)))
