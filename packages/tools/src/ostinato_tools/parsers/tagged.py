r"""Formats in which every argument is text between tags: `<parameter=path>\n/tmp/a\n</parameter>`.

Such text has no escapes, so a value may hold what looks like a tag. What a tag is, is therefore decided by what follows:
a value ends at its closing tag only if the next parameter or the end of the call comes next; any other tag in a value is
part of the value. A whole call inside of a value (an example, say) is part of the value, too: calls nest, and only the
outermost are calls. If an outer one is never closed, it is an error, and those inside of it are calls after all: a call
that lacks its end does not take the next one with it.

What stays ambiguous, for no reader could know: a value that holds its closing tag followed by the tag that comes next in
the format is read as ending there. A parameter that is then there twice makes the call an error, and so does one that the
tool has and the call lacks, but that begins inside of a value: that value has lost its closing tag.

Every text is read once, whatever nests in what: open calls are kept on a stack.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from ostinato_tools.parsers.grammar import TagFormat, unclosed
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.schema_types import ParameterTypes
from ostinato_tools.parsers.turn import Steps, Turn

_EXCERPT = 60


class TaggedFormat(TagFormat):
    """A format of this kind. A subclass says how its tags are written."""

    is_json = False
    begin: str
    """Opens a section of calls."""
    end: str
    """Closes it."""
    call_tags: tuple[str, str, str]
    """What stands before a call's name, behind it, and at the end of the call."""
    parameter_tags: tuple[str, str, str]
    """What stands before a parameter's name, behind it, and behind its value."""
    shape: str
    """How a call is written, for messages."""
    other_openers: tuple[str, ...] = ()
    """Tags that begin calls written otherwise, which the subclass reads itself; `other_closers` close them."""
    other_closers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.openers, self.closers = (self.begin, *self.other_openers), (self.end, *self.other_closers)
        super().__init__()
        call, name_end, call_end = self.call_tags
        parameter, key_end, value_end = self.parameter_tags
        self.in_value = Tags(self.begin, self.end, value_end)
        self.borders = Tags(self.begin, self.end, *filter(None, (call,)))
        self.section_end = Tags(self.end)
        self.call_end = Tags(call_end) if call_end else None
        self._call = Tags(call) if call else None
        self._parameter = Tags(parameter)
        self._name_end = _word_end(call, name_end)
        self._key_end = _word_end(parameter, key_end)

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read the section that begins at the position."""
        yield from _Reading(self, turn).read()

    def read_name(self, turn: Turn, position: int) -> Steps[tuple[str, int]]:
        """Return the name of the call that begins at `position`, and where the name's tag ends; "" if none begins."""
        return (yield from _read_word(turn, position, self._call, self._name_end, self.call_tags))

    def read_key(self, turn: Turn, position: int) -> Steps[tuple[str, int]]:
        """Return the name of the parameter that begins at `position`, and where its value begins; "" if none begins."""
        return (yield from _read_word(turn, position, self._parameter, self._key_end, self.parameter_tags))

    def value_text(self, text: str) -> str:
        """Return a value's text from all that stands between its tags."""
        return text

    def value(self, types: ParameterTypes, key: str, text: str) -> Any:
        """Return the value that a text means."""
        return types.read(key, text)


def _word_end(before: str, behind: str) -> Tags:
    """Return where a word is over, at the latest at a line end or the next such word, so that all searches are one pass."""
    return Tags(before, behind, "\n") if behind.startswith("<") else Tags("<", *filter(None, (behind,)), "\n")


def _read_word(
    turn: Turn, position: int, opening: Tags | None, ends: Tags, tags: tuple[str, str, str]
) -> Steps[tuple[str, int]]:
    if opening is None or not (yield from turn.tag_at(opening, position)):
        return "", position
    start = position + len(tags[0])
    tag, at = yield from turn.find(ends, start)
    return (turn.text[start:at], at + len(tag)) if tag == tags[1] else ("", position)


class _Next(Enum):
    """What can follow a name or a value."""

    PARAMETER = auto()
    CALL = auto()
    END = auto()


class _Follow(NamedTuple):
    """What follows, and where to go on behind it."""

    what: _Next
    position: int
    name: str = ""
    """Name of the parameter, or of the call."""
    values_end: int = 0
    """Where the parameters of the call before a CALL or END end."""


class _Found(NamedTuple):
    """A call that has an end, as places in the text: calls nest, and copies of what holds them would grow with the square."""

    name: str
    values: list[tuple[str, int, int]]
    """Of each parameter its name, and where its value begins and ends."""
    start: int
    end: int


@dataclass(slots=True)
class _Section:
    """What stands behind a `begin` that has no `end` yet."""

    name: str
    start: int
    """Where the parameters of the call under way begin."""
    values: list[tuple[str, int, int]] = field(default_factory=list)
    key: str | None = None
    """Of the value under way; None between values."""
    value_start: int = 0
    bare_end: int = -1
    """Where an `end` ends that stands in this value: the end of a call that lacks the value's closing tag, perhaps."""
    calls: list[_Found] = field(default_factory=list)
    """Calls before the one under way."""
    inner: list[_Found] = field(default_factory=list)
    """Calls in the value under way."""
    inner_end: int = -1


class _Reading:
    """One section of calls, with those inside of its values."""

    def __init__(self, tags: TaggedFormat, turn: Turn) -> None:
        self.format, self.turn = tags, turn
        self.position = turn.position
        self.open: list[_Section] = []  # each inside of a value of the one before

    def read(self) -> Steps[None]:
        """Read it, and leave the turn behind it."""
        yield from self._begin(self.position, is_inner=False)
        while self.open:
            if self.open[-1].key is not None:
                yield from self._read_value(self.open[-1])
            elif (follow := (yield from self._follow(self.position))) is not None and self.open[-1].name:
                self._take(self.open[-1], follow)
            elif len(self.open) == 1:
                yield from self._skip(self.open[0])
            else:  # it was no call, so it is text of the value in which it stands
                dropped = self.open.pop()
                self.open[-1].inner += dropped.calls

    def _begin(self, position: int, *, is_inner: bool) -> Steps[None]:
        """A section begins at `position`. One that is inner and has no name is text."""
        name, start = yield from self.format.read_name(self.turn, (yield from self.turn.skip_space(position)))
        if name or not is_inner:
            self.open.append(_Section(name, start))
            self.position = start

    def _read_value(self, section: _Section) -> Steps[None]:
        """Go on to the next tag that may matter to the value under way."""
        turn = self.turn
        tag, at = yield from turn.find(self.format.in_value, self.position)
        self.position = at + len(tag)
        if not tag:
            self._give_up()
        elif tag == self.format.begin:
            yield from self._begin(self.position, is_inner=True)
        elif tag == self.format.end:
            if section.bare_end < 0:
                section.bare_end = self.position
        elif (follow := (yield from self._follow(self.position))) is not None:
            assert section.key is not None
            section.values.append((section.key, section.value_start, at))
            section.key, section.bare_end, section.inner, section.inner_end = None, -1, [], -1
            self._take(section, follow)

    def _follow(self, position: int) -> Steps[_Follow | None]:
        """Return what follows a name or a value that ends at `position`; None if what follows fits not."""
        turn, tags = self.turn, self.format
        values_end = yield from turn.skip_space(position)
        key, start = yield from tags.read_key(turn, values_end)
        if key:
            return _Follow(_Next.PARAMETER, start, key)
        position = values_end
        if tags.call_end is not None:
            tag = yield from turn.tag_at(tags.call_end, position)
            if not tag:
                return None
            position = yield from turn.skip_space(position + len(tag))
        if (yield from turn.tag_at(tags.section_end, position)):
            return _Follow(_Next.END, position + len(tags.end), values_end=values_end)
        if tags.call_end is None:
            return None
        name, start = yield from tags.read_name(turn, position)
        return _Follow(_Next.CALL, start, name, values_end) if name else None

    def _take(self, section: _Section, follow: _Follow) -> None:
        """Go behind what follows."""
        self.position = follow.position
        if follow.what is _Next.PARAMETER:
            section.key, section.value_start = follow.name, follow.position
            return
        section.calls.append(_Found(section.name, section.values, section.start, follow.values_end))
        section.name, section.start, section.values = follow.name, follow.position, []
        if follow.what is _Next.CALL:
            return
        self.open.pop()
        if self.open:
            self.open[-1].inner += section.calls
            self.open[-1].inner_end = self.position
        else:
            self._tell(section.calls)
            self.turn.position = self.position

    def _skip(self, section: _Section) -> Steps[None]:
        """The outermost call is broken behind its name: go to its end, or to the next call."""
        turn, tags = self.turn, self.format
        self._tell(section.calls)
        section.calls = []
        tag, at = yield from turn.find(tags.borders, self.position)
        if tag in ("", tags.begin):
            turn.add_error(unclosed(turn.text[section.start : at][:_EXCERPT], tags.end))
            turn.position = at
            self.open.clear()
            return
        got = turn.text[self.position : at][:_EXCERPT].strip() or "nothing"
        where = f"behind the name {section.name}" if section.name else "where its name should be"
        error = f"the tool call must be {tags.shape}, got {got!r} {where}; write it like that"
        turn.add_call(section.name, None, turn.text[section.start : at], error)
        if tag == tags.end:
            turn.position = at + len(tag)
            self.open.clear()
            return
        section.name, self.position = yield from tags.read_name(turn, at)
        self.position = max(self.position, at + len(tag))
        section.start = self.position

    def _give_up(self) -> None:
        """The text has ended in a value. Calls inside of a call that is never closed are calls."""
        turn, tags = self.turn, self.format
        for section in self.open:
            self._tell(section.calls)
            if section.bare_end >= 0:
                raw = turn.text[section.start : section.bare_end - len(tags.end)]
                closing = tags.parameter_tags[2]
                error = f"the value of {section.key} of {section.name} is never closed; write {closing} behind it"
                turn.add_call(section.name, None, raw, error)
            else:
                turn.add_error(unclosed(turn.text[section.start : section.start + _EXCERPT], tags.end))
            self._tell(section.inner)
        last = self.open[-1]
        resume = max(last.bare_end, last.inner_end)
        turn.position = resume if resume >= 0 else len(turn.text)
        self.open.clear()

    def _tell(self, calls: list[_Found]) -> None:
        text, tags = self.turn.text, self.format
        for name, places, start, end in calls:
            types = self.turn.types.of(name)
            values = [(key, tags.value_text(text[begin:stop])) for key, begin, stop in places]
            error = _fault(tags, types, name, values)
            arguments = {key: tags.value(types, key, value) for key, value in values} if error is None else None
            self.turn.add_call(name, arguments, text[start:end], error)


def _fault(tags: TaggedFormat, types: ParameterTypes, name: str, values: list[tuple[str, str]]) -> str | None:
    """Say what is wrong with the parameters of a call, if anything is."""
    opening, behind, closing = tags.parameter_tags
    keys = Counter(key for key, _ in values)
    if len(keys) < len(values):
        ((twice, _),) = keys.most_common(1)
        return f"the parameters of {name} must each be there once, got {twice} more often; write each once"
    for key, text in values:
        if opening in text:  # a parameter that the call lacks, in a value: then the value lacks its closing tag
            lost = next(
                (other for other in types.names if other not in keys and opening + other + behind in text), None
            )
            if lost is not None:
                return f"the value of {key} of {name} must end before {lost} begins; write {closing} behind it"
    return None
