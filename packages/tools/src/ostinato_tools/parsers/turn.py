"""`Turn`: one text on its way to being taken apart, and `Steps`, in which a format's grammar is written once for whole
texts and for streams.

A grammar is a generator. It asks the turn for the next tag, the end of a JSON value and so on with `yield from`; where the
text that is there does not decide the answer, the question waits (it yields) until there is more text or the text has
ended. What the grammar finds it tells the turn at once, as deltas. So a stream needs no second grammar, and tells nothing
that later text could take back. A turn that has ended never waits.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from ostinato_tools.calls import ToolCall
from ostinato_tools.parsers.base import CallDelta, ContentDelta, Delta, ErrorDelta, ParsedTurn, ReasoningDelta, assemble
from ostinato_tools.parsers.scanning import JSON, Bracketed, Dialect, JsonRun, Tags, json_end
from ostinato_tools.parsers.schema_types import ToolTypes

_T = TypeVar("_T")
_SPACE = re.compile(r"\s*+")
Steps = Generator[None, None, _T]
"""A question that waits where the text does not decide it."""


class Turn:
    """The text so far, a position in it, and what was found."""

    def __init__(
        self,
        text: str,
        *,
        ended: bool,
        tools: Sequence[dict] | None = None,
        id_prefix: str = "call_",
        in_reasoning: bool = False,
        late_reasoning: bool = True,
        calls_in_reasoning: bool = False,
        make_id: Callable[[str, int], str] = "{}{}".format,
    ) -> None:
        self.text = text
        """The text so far, without end tokens."""
        self.ended = ended
        """Whether that is all of it."""
        self.position = 0
        """Where the grammar goes on."""
        self.types = ToolTypes(tools)
        """What the tools' schemas say about arguments."""
        self.in_reasoning = in_reasoning
        """The prompt ended inside reasoning."""
        self.undecided = late_reasoning and not in_reasoning
        """A closing tag of reasoning may yet make everything before it reasoning (`reason_so_far`)."""
        self.calls_in_reasoning = calls_in_reasoning
        """Calls inside reasoning count."""
        self.deltas: list[Delta] = []
        self._id_prefix = id_prefix
        self._make_id = make_id
        self._ids: set[str] = set()
        self._errors: set[str] = set()
        self._num_calls = 0
        self._has_broken_json = False
        self._content = _Passage(None)
        self._reasoning = _Passage("\n")

    def append(self, text: str) -> None:
        """Add text to the end."""
        # Only a local name refers to the string while it grows, so that it grows in place instead of being copied.
        grown, self.text = self.text, ""
        grown += text
        self.text = grown

    def parsed(self) -> ParsedTurn:
        """Return what was found."""
        return assemble(self.deltas)

    # Questions

    def find(self, tags: Tags, start: int) -> Steps[tuple[str, int]]:
        """Return the first of `tags` at or after `start`, and where it is; "" and the end of the text if there is none."""
        while True:
            match = tags.search(self.text, start)
            if match is not None:
                return match.group(), match.start()
            if self.ended:
                return "", len(self.text)
            start = max(start, len(self.text) - tags.longest + 1)
            yield

    def tag_at(self, tags: Tags, start: int) -> Steps[str]:
        """Return that one of `tags` which stands at `start`; "" if none does."""
        while True:
            match = tags.match(self.text, start)
            if match is not None:
                return match.group()
            if self.ended or tags.holds(self.text, start) != start or len(self.text) - start >= tags.longest:
                return ""
            yield

    def skip_space(self, start: int) -> Steps[int]:
        """Return where, from `start` on, the white space ends."""
        while True:
            space = _SPACE.match(self.text, start)
            start = space.end() if space is not None else start
            if start < len(self.text) or self.ended:
                return start
            yield

    def word_end(self, pattern: re.Pattern[str], start: int) -> Steps[int]:
        """Return where, from `start` on, what `pattern` matches ends. It must match only so many characters, and go on
        matching if there are more of the same."""
        while True:
            match = pattern.match(self.text, start)
            end = match.end() if match is not None else start
            if end < len(self.text) or self.ended:
                return end
            yield

    def json_run(self, start: int) -> Steps[int]:
        """Return where text from `start` on stops that could be JSON: at a `<` or backslash outside of a string, at the
        quote of a string that is never closed, or at the end."""
        run = JsonRun(start)
        while not run.advance(self.text) and not self.ended:
            yield
        return run.end

    def bracketed(self, start: int, dialect: Dialect = JSON) -> Steps[tuple[int, bool]]:
        """Return the end of what begins with a bracket at `start` (a JSON object, say), and True; where it is broken or
        never ends, how far it could be such a thing, and False."""
        if self.ended and dialect is JSON and not self._has_broken_json:
            if (end := json_end(self.text, start)) >= 0:
                return end, True
            self._has_broken_json = True  # the decoder's complaint takes time in proportion to the text: once is enough
        value = Bracketed(start, dialect)
        while not value.advance(self.text) and not self.ended:
            yield
        return value.end, value.complete

    def content_until(self, tags: Tags) -> Steps[str]:
        """Take content from the position to the first of `tags`, go behind the tag and return it; "" at the end.

        The content's white space beside the tag is not told: it only sets off the tag, unless `keep` says otherwise.
        """
        start = self.position
        while True:
            match = tags.search(self.text, start)
            if match is not None:
                self._say(self._content.upto(self.text, match.start()))
                self.position = match.end()
                return match.group()
            start = len(self.text) if self.ended else tags.holds(self.text, max(start, self.position))
            self._say(self._content.upto(self.text, start))
            self.position = start
            if self.ended:
                self._say(self._content.rest(self.text, start))
                return ""
            yield

    def reasoning_until(self, tags: Tags) -> Steps[str]:
        """Take reasoning from the position to the first of `tags`, go behind the tag and return it; "" at the end."""
        self.begin_reasoning()
        while True:
            match = tags.search(self.text, self.position)
            end = match.start() if match is not None else len(self.text)
            if match is None and not self.ended:
                end = tags.holds(self.text, self.position)
            self._think(self._reasoning.upto(self.text, end))
            self.position = match.end() if match is not None else end
            if match is not None or self.ended:
                return match.group() if match is not None else ""
            yield

    # Findings

    def begin_content(self, after: str | None = None) -> None:
        """More content may begin at the position; characters of `after` (None: white space) at its begin are dropped."""
        self._content.begin(self.position, after)

    def keep(self) -> None:
        """What stands before the position is content too: it was no tag after all."""
        self._say(self._content.upto(self.text, self.position))

    def begin_reasoning(self) -> None:
        """Reasoning begins at the position."""
        self.undecided = False
        self._reasoning.begin(self.position, "\n")
        self.deltas.append(ReasoningDelta(""))

    def reason_so_far(self, end: int) -> None:
        """All before `end` was reasoning, which the prompt had opened: what was found in it is dropped."""
        if self.calls_in_reasoning:
            self.deltas = [delta for delta in self.deltas if isinstance(delta, CallDelta)]
        else:
            self.deltas.clear()
            self._num_calls = 0
            self._ids.clear()
        self._errors.clear()
        self._content = _Passage(None)
        self.position = 0
        self.begin_reasoning()
        self._think(self._reasoning.upto(self.text, end))
        self.position = end

    def add_call(
        self, name: str, arguments: dict | None, raw: str, error: str | None = None, call_id: str | None = None
    ) -> None:
        """A call has ended.

        Args:
            name: Name of the tool; empty where it cannot be read.
            arguments: None for a malformed call.
            raw: The arguments as sampled; for a malformed call, all that was sampled of it.
            error: What is wrong with it, as a text for the model.
            call_id: The id that the model gave it; used unless the turn has another call of that id.
        """
        if not call_id or call_id in self._ids:
            call_id = self._make_id(self._id_prefix, self._num_calls)
            while call_id in self._ids:  # a model may write anything as an id, also this one
                call_id += "_"
        self._ids.add(call_id)
        self._num_calls += 1
        self.deltas.append(CallDelta(ToolCall(name, arguments, raw, call_id, error)))

    def add_error(self, message: str) -> None:
        """Something is wrong with the turn that belongs to no call. The same is said once."""
        if message not in self._errors:
            self._errors.add(message)
            self.deltas.append(ErrorDelta(message))

    def _say(self, text: str) -> None:
        if text:
            self.deltas.append(ContentDelta(text))

    def _think(self, text: str) -> None:
        if text:
            self.deltas.append(ReasoningDelta(text))


class _Passage:
    """Passages of content or of reasoning; the blank at the end of one is kept back until it is known to be inside."""

    __slots__ = ("_blank", "_joint", "_leading", "_said", "_seen", "_spoke")

    def __init__(self, blank: str | None) -> None:
        self._blank = blank  # the characters that are kept back; None: white space
        self._spoke = False  # whether any passage had text
        self.begin(0, "")

    def begin(self, at: int, leading: str | None) -> None:
        """Begin a passage at `at`; characters of `leading` (None: white space) at its beginning are dropped."""
        self._said = self._seen = at  # up to where text was returned, and was looked at
        self._leading = leading
        self._joint = "\n" if self._spoke else ""

    def upto(self, text: str, end: int) -> str:
        """`text` up to `end` belongs to the passage: return what of it is new and certain."""
        start, self._seen = self._seen, end
        if self._leading != "":
            while start < end and _is_blank(text[start], self._leading):
                start += 1
            self._said = start
            if start == end:
                return ""
            self._leading = ""
        while end > start and _is_blank(text[end - 1], self._blank):
            end -= 1
        return self._say(text, end) if end > start else ""

    def rest(self, text: str, end: int) -> str:
        """`text` ends at `end`: return what was kept back."""
        return self._say(text, end) if self._leading == "" and end > self._said else ""

    def _say(self, text: str, end: int) -> str:
        said = self._joint + text[self._said : end]
        self._said, self._joint, self._spoke = end, "", True
        return said


def _is_blank(char: str, blank: str | None) -> bool:
    return char.isspace() if blank is None else char in blank
