"""The Mistral formats, each with `[TOOL_CALLS]` in front:

    up to V7:    [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": "..."}, ...]
    from V11:    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}[TOOL_CALLS]...
    from V13:    [TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]...

and with reasoning in `[THINK]...[/THINK]`. A name ends at the first tag or brace. Templates of these models accept only ids of
nine letters and digits, so a call to which the model gave no such id gets one made from prefix and number.
"""

import re
from collections.abc import Callable
from functools import partial
from hashlib import blake2b

from ostinato_tools.parsers.grammar import TagFormat
from ostinato_tools.parsers.json_calls import JsonCallReader, ReadCall, read_arguments
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.turn import Steps, Turn

_OPEN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_THINK = ("[THINK]", "[/THINK]")
_NAME_ENDS = Tags(_ARGUMENTS, _ID, "{", _OPEN, *_THINK)
_ID_ENDS = Tags(_ARGUMENTS, _OPEN, *_THINK)
_BORDERS = Tags(_OPEN, *_THINK)
_LIST_BEGINS, _OBJECT_BEGINS, _LIST_GOES_ON = Tags("["), Tags("{"), Tags(",", "]")
_GOOD_ID = re.compile("[A-Za-z0-9]{9}")
_READER = JsonCallReader("arguments", has_id=True)
_SHAPE = f"{_OPEN}<name>{_ARGUMENTS}<object>"


class MistralParser(TagFormat):
    """Parser of the Mistral formats."""

    name = "mistral"
    openers = (_OPEN,)
    end_tokens = ("</s>",)
    reasoning_tags = (_THINK,)

    def make_id(self, prefix: str, index: int) -> str:
        """Return nine hexadecimal digits that stand for prefix and number."""
        return blake2b(f"{prefix}{index}".encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read a list of calls, or one call."""
        position = yield from turn.skip_space(turn.position)
        is_tag = yield from turn.tag_at(_BORDERS, position)
        if not is_tag and (yield from turn.tag_at(_LIST_BEGINS, position)):
            turn.position = position + 1
            yield from self._read_list(turn)
        else:
            yield from self._read_named(turn)

    def _read_list(self, turn: Turn) -> Steps[None]:
        """Read calls, the list's opening bracket being read."""
        while True:
            start = yield from turn.skip_space(turn.position)
            turn.position = start
            if not (yield from turn.tag_at(_OBJECT_BEGINS, start)):
                yield from self._skip_broken(turn, start, f"{_OPEN}[ must be followed by calls in braces")
                return
            if not (yield from self._read_json(turn, _READER.read)):
                return
            start = yield from turn.skip_space(turn.position)
            tag = yield from turn.tag_at(_LIST_GOES_ON, start)
            turn.position = start + len(tag)
            if tag == "]":
                return
            if not tag:
                yield from self._skip_broken(turn, start, "a list of tool calls is never closed; write ] at its end")
                return

    def _read_named(self, turn: Turn) -> Steps[None]:
        """Read a name and its arguments."""
        start = turn.position
        tag, end = yield from turn.find(_NAME_ENDS, start)
        name, call_id = turn.text[start:end].strip(), None
        if tag == _ID:
            begin = end + len(tag)
            tag, end = yield from turn.find(_ID_ENDS, begin)
            call_id = turn.text[begin:end].strip()
        turn.position = end if tag == "{" else end + len(tag)
        if tag not in (_ARGUMENTS, "{"):
            turn.position = end
            turn.add_error(f"a tool call ends after its name {name[:60]!r}; write {_SHAPE}")
            return
        turn.position = yield from turn.skip_space(turn.position)
        yield from self._read_json(turn, partial(_read, name, call_id))

    def _read_json(self, turn: Turn, read: Callable[[str], ReadCall]) -> Steps[bool]:
        """Read an object; tell whether it has an end. Without one, go to the next tag."""
        start = turn.position
        end, is_complete = yield from turn.bracketed(start)
        if is_complete:
            turn.position = end
        else:
            # A tag in what may be a string, or may be a call behind a string that was not closed: it is taken for the call.
            tag, at = _OPEN, turn.text.find(_OPEN, start, end)
            if at < 0:  # a tag's own bracket counts as one in JSON: the tag at which the object breaks begins with it
                tag, at = yield from turn.find(_BORDERS, max(start, end - 1))
            end = at
            turn.position = end
            if not tag:
                turn.add_error(
                    f"a tool call is never closed: {turn.text[start : start + 60]!r}; write its closing braces"
                )
                return False
        call = read(turn.text[start:end])
        turn.add_call(*(call if _is_id(call.call_id) else call._replace(call_id=None)))
        return is_complete

    def _skip_broken(self, turn: Turn, start: int, error: str) -> Steps[None]:
        _, turn.position = yield from turn.find(_BORDERS, start)
        turn.add_error(error)


def _read(name: str, call_id: str | None, body: str) -> ReadCall:
    if not name:
        return ReadCall("", None, body, f"the name of a tool call must not be empty; write {_SHAPE}", call_id)
    return read_arguments(name, body, _SHAPE, call_id)


def _is_id(call_id: str | None) -> bool:
    return call_id is not None and _GOOD_ID.fullmatch(call_id) is not None
