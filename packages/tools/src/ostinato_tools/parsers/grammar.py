"""What a format supplies, and what all formats share: reasoning, content, stray tags, whole texts and streams.

A format is one module with one class. Most derive from `TagFormat` and supply `openers` (the tags at which a call, or a
section of calls, begins) and `read_call`, a grammar that reads from `turn.position`, right behind the opener, adds what it
finds with `turn.add_call` and `turn.add_error`, and leaves `turn.position` where content goes on. A format without such
tags derives from `Format` and supplies the grammar of a whole turn.

Time must be linear on any text. A broken call should end where it broke, not at the end of the text: see `JsonRun` and
`Bracketed`. If openers cannot stand outside of a string in what is scanned, at most two scans cover the same text: of two
that are under way at one place, one is in a string where the other is not (a backslash outside of a string ends a scan, so
every quote toggles both), and where a third would begin, at an opener, one of the two ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ostinato_tools.parsers.base import CallDelta, ErrorDelta, ParsedTurn, TurnStream, strip_end_tokens
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.streaming import GrammarStream, check_text
from ostinato_tools.parsers.turn import Steps, Turn


class Format(ABC):
    """A format: a `ToolParser` made from a grammar."""

    name: str
    """The name under which `get_parser` knows it."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens, as text, that must end generation besides the template's own."""
    end_tokens: tuple[str, ...] = ()
    """Tokens, as text, that are usually taken off the end; they do not overlap."""
    reasoning_openers: tuple[str, ...] = ()
    """Texts with which a prompt ends that has opened reasoning: the turn is then parsed with `in_reasoning`."""
    is_json: bool = True
    """Whether arguments are JSON; else they are text that is typed by schema."""

    def parse(
        self,
        text: str,
        tools: Sequence[dict] | None = None,
        *,
        id_prefix: str = "call_",
        end_tokens: Sequence[str] | None = None,
        in_reasoning: bool = False,
        late_reasoning: bool = True,
        calls_in_reasoning: bool = False,
    ) -> ParsedTurn:
        """Take a turn apart; see `ToolParser.parse`.

        Args:
            text: The sampled text, special tokens included.
            tools: OpenAI-style schemas, for formats whose arguments carry no types.
            id_prefix: Call ids are this and a number from 0; give each turn of a trajectory its own.
            end_tokens: Tokens, as text, that are taken off the end; None for those of the format.
            in_reasoning: The prompt ended inside reasoning, so the text begins there.
            late_reasoning: A closing tag of reasoning that nothing opened makes everything before it reasoning, as if
                `in_reasoning` had been given. Else it is an error.
            calls_in_reasoning: Calls inside reasoning count, where the format sets them off by tags. Else they are drafts.

        Raises:
            ParserInputError: `text` is no string; nothing is raised for what stands in one.
        """
        check_text(text)
        tokens = self.end_tokens if end_tokens is None else end_tokens
        turn = Turn(
            strip_end_tokens(text, tokens),
            ended=True,
            tools=tools,
            id_prefix=id_prefix,
            in_reasoning=in_reasoning,
            late_reasoning=late_reasoning,
            calls_in_reasoning=calls_in_reasoning,
            make_id=self.make_id,
        )
        next(self.grammar(turn), None)
        return turn.parsed()

    def stream(
        self,
        tools: Sequence[dict] | None = None,
        *,
        id_prefix: str = "call_",
        end_tokens: Sequence[str] | None = None,
        in_reasoning: bool | None = None,
        late_reasoning: bool | None = None,
        calls_in_reasoning: bool = False,
    ) -> TurnStream:
        """Begin to parse a turn that is being sampled. The finished turn is that of `parse` with the same arguments.

        Say whether the prompt opened reasoning (it ends with one of `reasoning_openers`, then), and everything is told as
        it comes. Left open, a late closing tag may make all before it reasoning: then nothing is certain, so nothing is
        told, before reasoning begins or the text ends.

        Args:
            tools: As for `parse`, as are `id_prefix`, `end_tokens` and `calls_in_reasoning`.
            id_prefix: See there.
            end_tokens: See there.
            in_reasoning: Whether the prompt ended inside reasoning; None if that is not known.
            late_reasoning: As for `parse`; if None, as long as `in_reasoning` is not known.
            calls_in_reasoning: See there.

        Raises:
            ParserInputError: end tokens overlap or have white space around them.
        """
        turn = Turn(
            "",
            ended=False,
            tools=tools,
            id_prefix=id_prefix,
            in_reasoning=bool(in_reasoning),
            late_reasoning=(in_reasoning is None) if late_reasoning is None else late_reasoning,
            calls_in_reasoning=calls_in_reasoning,
            make_id=self.make_id,
        )
        return GrammarStream(self.grammar, turn, self.end_tokens if end_tokens is None else end_tokens)

    @abstractmethod
    def grammar(self, turn: Turn) -> Steps[None]:
        """Take a turn apart."""

    def make_id(self, prefix: str, index: int) -> str:
        """Return the id of a call to which the model gave none, from the caller's prefix and the call's number."""
        return f"{prefix}{index}"


class TagFormat(Format):
    """A format in which tags set off reasoning and calls from content."""

    openers: tuple[str, ...]
    """Tags at which a call, or a section of calls, begins."""
    closers: tuple[str, ...] = ()
    """Tags that close what `openers` open: anywhere else they are an error (and content)."""
    reasoning_tags: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    """Opening and closing tags of reasoning."""

    def __init__(self) -> None:
        self._closing = dict(self.reasoning_tags)
        self.reasoning_openers = tuple(self._closing)
        self._opening = Tags(*self._closing) if self._closing else None
        self._end_reasoning = {closing: Tags(closing) for closing in self._closing.values()}
        self._in_reasoning = {closing: Tags(closing, *self.openers) for closing in self._end_reasoning}
        self._tags = Tags(*self.openers, *self.closers, *self._closing, *self._end_reasoning)

    @abstractmethod
    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read what begins with `opener`, which ends at `turn.position`, and leave `turn.position` behind it."""

    def read_start(self, turn: Turn) -> Steps[None]:
        """Read calls that stand, without an opener, where content begins; for formats that have such calls. If there is
        none, leave the turn as it is; else call `turn.begin_content` behind them."""
        return
        yield

    def grammar(self, turn: Turn) -> Steps[None]:
        """Take a turn apart; the same for all formats of this kind."""
        if turn.in_reasoning and self._opening is not None:
            turn.position = yield from turn.skip_space(0)
            opener = yield from turn.tag_at(self._opening, turn.position)
            turn.position = turn.position + len(opener) if opener else 0
            yield from self._read_reasoning(turn, self._closing[opener] if opener else self.reasoning_tags[0][1])
        yield from self._read_start(turn)
        while tag := (yield from turn.content_until(self._tags)):
            if tag in self._closing:
                yield from self._read_reasoning(turn, self._closing[tag])
                yield from self._read_start(turn)
            elif tag in self.openers:
                yield from self._read_call(turn, tag)
            elif tag in self._end_reasoning and turn.undecided:
                yield from self._end_late_reasoning(turn, tag, turn.position - len(tag))
            else:
                turn.add_error(f"{tag} closes nothing; write the opening tag first")
                turn.keep()

    def _read_reasoning(self, turn: Turn, closing: str) -> Steps[None]:
        tags = self._in_reasoning[closing] if turn.calls_in_reasoning else self._end_reasoning[closing]
        while (tag := (yield from turn.reasoning_until(tags))) in self.openers:
            yield from self.read_call(turn, tag)
        if not tag:
            turn.add_error(f"the reasoning is never closed; write {closing} before the answer or a call")
        turn.begin_content("\n")

    def _read_call(self, turn: Turn, opener: str) -> Steps[None]:
        if not (yield from self._turned_out_reasoning(turn, self.read_call(turn, opener))):
            turn.begin_content()

    def _read_start(self, turn: Turn) -> Steps[None]:
        yield from self._turned_out_reasoning(turn, self.read_start(turn))

    def _turned_out_reasoning(self, turn: Turn, steps: Steps[None]) -> Steps[bool]:
        """Take steps that read calls. A broken call may be a draft in reasoning that the prompt opened: then the reasoning's
        end lies inside of it; go there and return True."""
        start, num_before = turn.position, len(turn.deltas)
        yield from steps
        if not turn.undecided or not any(map(_is_fault, turn.deltas[num_before:])):
            return False
        ends = [(turn.text.find(tag, start, turn.position), tag) for tag in self._end_reasoning]
        if not (found := [end for end in ends if end[0] >= 0]):
            return False
        at, tag = min(found)
        yield from self._end_late_reasoning(turn, tag, at)
        return True

    def _end_late_reasoning(self, turn: Turn, tag: str, at: int) -> Steps[None]:
        turn.reason_so_far(at)
        turn.position = at + len(tag)
        turn.begin_content("\n")
        yield from self.read_start(turn)


def _is_fault(delta: object) -> bool:
    return type(delta) is ErrorDelta or (type(delta) is CallDelta and delta.call.error is not None)


def unclosed(excerpt: str, closing: str) -> str:
    """Say that a call which begins with `excerpt` is never closed by `closing`."""
    return f"a tool call is never closed: {excerpt.strip()!r}; write {closing} at its end"
