"""Formats in which every argument is text between tags: `<parameter=path>\\n/tmp/a\\n</parameter>`.

Such text has no escapes, so a value may hold what looks like a tag. What a tag is, is therefore decided by what follows:
a value ends at its closing tag only if the next parameter or the end of the call comes next; any other closing tag in a
value is part of the value. A whole call inside of a value (an example, say) is part of the value, too: calls nest, and only
outermost ones are calls. If an outer one is never closed, it is an error and those inside of it are calls after all: a
call that lacks its end does not take the next one with it.

What stays ambiguous, for no reader could know: a value that holds a closing tag followed by the format's own next tag is
read as ending there. A parameter that is then there twice makes the call an error.

Every text is read once, whatever nests in what: open calls are kept on a stack.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from ostinato_tools.parsers.grammar import TagFormat
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.schema_types import ParameterTypes
from ostinato_tools.parsers.turn import Steps, Turn


class _Next(Enum):
    """What can follow an opened call, a value or a call."""

    PARAMETER = auto()
    CALL = auto()
    END = auto()


class _Follow(NamedTuple):
    """What follows, up to where."""

    what: _Next
    position: int
    name: str = ""  # of the parameter or of the call
    call_end: int = 0  # where the arguments of the call that ends before a CALL or END end


class _Found(NamedTuple):
    """A call with its arguments as text; one with an error is malformed."""

    name: str
    values: tuple[tuple[str, str], ...]
    raw: str
    error: str | None = None


@dataclass(slots=True)
class _Section:
    """What stands, or begins to stand, between `begin` and `end`."""

    name: str = ""
    raw_start: int = 0
    values: list[tuple[str, str]] = field(default_factory=list)
    key: str | None = None  # of the value that is being read; None between values
    value_start: int = 0
    bare_end: int = -1  # behind an `end` inside of this value: there the section ends if it has no better end
    calls: list[_Found] = field(default_factory=list)  # those that are complete
    inner: list[_Found] = field(default_factory=list)  # those inside of this value
    inner_end: int = 0


class TaggedFormat(TagFormat):
    """A format of this kind. A subclass says how its tags are written."""

    is_json = False
    begin: str
    """Opens a section of calls, or a call."""
    end: str
    """Closes it."""
    call_tags: tuple[str, str, str]
    """What stands before a call's name, behind it, and at the call's end."""
    parameter_tags: tuple[str, str, str]
    """What stands before a parameter's name, behind it, and behind its value."""
    shape: str
    """How a call is written, for messages."""

    def __init__(self) -> None:
        self.openers, self.closers = (self.begin,), (self.end,)
        super().__init__()
        call, named, _ = self.call_tags
        parameter, keyed, value_end = self.parameter_tags
        self._inside = Tags(self.begin, self.end, value_end)
        self._borders = Tags(*filter(None, (self.begin, self.end, call)))
        self._name_ends = Tags(named or "<", "\n", *filter(None, (call,)), parameter) if named else Tags("<", "\n")
        self._key_ends = Tags(*dict.fromkeys(filter(None, (keyed, "\n", call, parameter))))
        self._alone = {tag: Tags(tag) for tag in (*self.call_tags, *self.parameter_tags, self.end) if tag}

    # What a subclass may say otherwise

    def read_name(self, turn: Turn, position: int) -> Steps[tuple[str, int]]:
        """Return the name of the call that begins at `position`, and where it ends; ("", position) if none begins."""
        return (yield from self._read_word(turn, position, self.call_tags, self._name_ends))

    def read_key(self, turn: Turn, position: int) -> Steps[tuple[str, int]]:
        """Return the name of the parameter that begins at `position`, and where its value begins; else ("", position)."""
        return (yield from self._read_word(turn, position, self.parameter_tags, self._key_ends))

    def value_text(self, text: str) -> str:
        """Return a value as it was meant, from all that stands between its tags."""
        return text

    def value(self, types: ParameterTypes, key: str, text: str) -> object:
        """Return the value that `text` means."""
        return types.read(key, text)

    # Reading

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read the section that begins at the position."""
        stack = [_Section(raw_start=turn.position)]
        position = yield from turn.skip_space(turn.position)
        stack[0].name, position = yield from self.read_name(turn, position)
        if stack[0].name:
            stack[0].raw_start = position
        while True:
            section = stack[-1]
            if section.key is None:  # a call was opened
                follow = (yield from self._follow(turn, position)) if section.name else None
                if follow is not None:
                    position = self._take(turn, section, follow)
                elif len(stack) == 1:
                    if (position := (yield from self._skip_broken(turn, section, position))) < 0:
                        return
                    continue
                else:  # it was none, so it is text of the value that it stands in
                    stack.pop()
                    stack[-1].inner += section.calls
                    continue
            else:
                tag, at = yield from turn.find(self._inside, position)
                if not tag:
                    self._give_up(turn, stack)
                    return
                position = at + len(tag)
                if tag == self.begin:
                    start = yield from turn.skip_space(position)
                    name, start = yield from self.read_name(turn, start)
                    if name:
                        stack.append(_Section(name=name, raw_start=start))
                        position = start
                elif tag == self.end:
                    if section.bare_end < 0:
                        section.bare_end = position
                elif (follow := (yield from self._follow(turn, position))) is not None:
                    section.values.append((section.key, self.value_text(turn.text[section.value_start : at])))
                    section.key, section.bare_end, section.inner = None, -1, []
                    position = self._take(turn, section, follow)
                continue
            if follow.what is _Next.END:
                stack.pop()
                if not stack:
                    self._tell(turn, section.calls)
                    turn.position = position
                    return
                stack[-1].inner += section.calls
                stack[-1].inner_end = position
