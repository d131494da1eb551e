"""What every parser gives, and what every parser is."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ostinato_tools.calls import ToolCall


class ParsedTurn(msgspec.Struct, frozen=True):
    """An assistant turn, taken apart."""

    content: str
    """What is neither reasoning nor a call."""
    reasoning: str | None
    """The reasoning; None where there was none."""
    tool_calls: tuple[ToolCall, ...]
    """Calls in order, malformed ones among them (they carry an `error`); drafts inside reasoning are not calls."""
    errors: tuple[str, ...]
    """What is wrong with the turn and belongs to no call: an unclosed call or reasoning, a closing tag without an opening."""


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the content."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the reasoning; empty where it only begins."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """A call that has ended, well or with an error. Half a call is never shown, since it may yet turn out malformed."""

    call: ToolCall


class ErrorDelta(msgspec.Struct, frozen=True, gc=False):
    """Something is wrong with the turn."""

    message: str


Delta = ContentDelta | ReasoningDelta | CallDelta | ErrorDelta
"""What a stream tells. The deltas of a turn, put together, are the turn (see `assemble`)."""


def assemble(deltas: Sequence[Delta]) -> ParsedTurn:
    """Put the deltas of a turn together."""
    content: list[str] = []
    reasoning: list[str] | None = None
    calls: list[ToolCall] = []
    errors: list[str] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning = [] if reasoning is None else reasoning
            if delta.text:
                reasoning.append(delta.text)
        elif isinstance(delta, CallDelta):
            calls.append(delta.call)
        else:
            errors.append(delta.message)
    return ParsedTurn("".join(content), None if reasoning is None else "".join(reasoning), tuple(calls), tuple(errors))


class TurnStream(Protocol):
    """A turn that is parsed while it is sampled."""

    def feed(self, text: str) -> list[Delta]:
        """Take more of the text and return what has become certain by it."""
        ...

    def finish(self) -> ParsedTurn:
        """The text has ended: return the whole turn. `drain` then gives the last deltas."""
        ...

    def drain(self) -> list[Delta]:
        """Return what has become certain and was not returned before."""
        ...


class ToolParser(Protocol):
    """A format in which models write calls. Takes linear time on any text and raises for none."""

    name: str
    """The name under which `get_parser` knows it."""
    stop_tokens: tuple[str, ...]
    """Tokens, as text, that must end generation besides the template's own; empty where there are none."""

    def parse(
        self,
        text: str,
        tools: Sequence[dict] | None = None,
        *,
        id_prefix: str = "call_",
        end_tokens: Sequence[str] | None = None,
        in_reasoning: bool = False,
    ) -> ParsedTurn:
        """Take a turn apart.

        Args:
            text: The sampled text, special tokens included.
            tools: OpenAI-style schemas, for formats whose arguments carry no types.
            id_prefix: Call ids are this and a number from 0; give each turn of a trajectory its own.
            end_tokens: Tokens, as text, that are taken off the end; None for the usual ones of the format.
            in_reasoning: The prompt ended inside reasoning, so the text begins there.
        """
        ...

    def stream(
        self,
        tools: Sequence[dict] | None = None,
        *,
        id_prefix: str = "call_",
        end_tokens: Sequence[str] | None = None,
        in_reasoning: bool | None = None,
    ) -> TurnStream:
        """Begin to take a turn apart that is being sampled; the arguments are those of `parse`."""
        ...


def strip_end_tokens(text: str, end_tokens: Sequence[str]) -> str:
    """Take end tokens, and white space after them, off the end of `text`; without an end token it stays as it is."""
    if not text.rstrip().endswith(tuple(end_tokens)):
        return text
    end = len(text)
    cut = end
    while True:
        while end > 0 and text[end - 1].isspace():
            end -= 1
        token = next((token for token in end_tokens if token and text.endswith(token, 0, end)), None)
        if token is None:
            return text[:cut]
        end -= len(token)
        cut = end
