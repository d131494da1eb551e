"""How a chat template continues a conversation, under one set of template variables.

The text that continues a conversation (close of the assistant's turn, separator, new messages, generation prompt) is
what follows a sentinel in the last assistant turn. Probes at first use say how much of the real conversation that
rendering needs; the common answer is none of it, and then a turn costs the same however long the history is.
Invariant: a continuation is either cut at a found sentinel or behind a checked prefix, never at a length.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ostinato_tokenization.compiled_tail import CompiledTail, Shape, compile_tail, shape_of
from ostinato_tokenization.control_text import NEXT_SENTINEL, SENTINEL, MaskTable
from ostinato_tokenization.errors import ChatTemplateError, HistoryRewrittenError
from ostinato_tokenization.messages import Message
from ostinato_tokenization.rendering import compared_texts, counts_in_cycles, whole_numbers
from ostinato_tokenization.template_probe import (
    CALL_ID,
    PROBE_TOOL,
    SYSTEM,
    USER,
    calling_message,
    probe_histories,
    tool_message,
)
from ostinato_tokenization.turn_frame import PLAIN_TURN, TurnFrame

if TYPE_CHECKING:
    from ostinato_tokenization.chat_tokenizer import ChatTokenizer

_logger = logging.getLogger(__name__)

_MAX_TAILS = 256
_SECOND_ID = "call00002"
_USUAL_ROLES = frozenset(("user", "tool"))
_NUM_SHORT_HISTORIES = 5
_MIN_LONG_HISTORY = 40
_MAX_LONG_HISTORY = 400
_PROBE_TOOLS: tuple[Mapping[str, Any], ...] = (
    PROBE_TOOL,
    {"type": "function", "function": {**PROBE_TOOL["function"], "name": "lookup"}},
)
_ANSWER = {"role": "assistant", "content": "So many words, more than\nthirty characters: yes. "}


class Splice(IntEnum):
    """How much of a conversation is rendered to continue it, from cheapest to dearest."""

    SYNTHETIC = 0
    """A user message and a bare assistant turn."""
    SYNTHETIC_WITH_TOOLS = 1
    """The same, with the tool schemas."""
    REAL_TURN = 2
    """A user message, the real assistant turn, the tool schemas."""
    HISTORY = 3
    """Everything."""
    PREFIX = 4
    """Everything, with and without the new messages: for templates that do not write those behind the assistant's turn."""


class TemplateProfile:
    """One template under one set of variables; made by `ChatTokenizer.profile`."""

    def __init__(self, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self.frame = TurnFrame(tokenizer, self._kwargs)
        """What the template writes around the assistant's turns."""
        self._splices: dict[tuple[bool, frozenset[str]], Splice] = {}
        self._tails: dict[Shape, CompiledTail | None] = {}
        self._opener_ids = frozenset(
            token_id
            for text in tokenizer.boundaries.openers
            if (token_id := tokenizer.control_token_id(text)) is not None
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _profile_of, (self._tokenizer, self._kwargs)  # what was compiled is compiled again where it is needed

    @property
    def has_opening_stops(self) -> bool:
        """Whether a stop token can be the opener of the next turn."""
        return not self._opener_ids.isdisjoint(self._tokenizer.stop_token_ids)

    def opens_turn(self, token_id: int) -> bool:
        """Whether this stop token is at the same time the opener of a user or tool turn."""
        return token_id in self._opener_ids

    def continuation_ids(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        started_at: float | None = None,
    ) -> array[int]:
        """Ids that follow what the assistant said last: close, separator, new messages, generation prompt.

        Args:
            previous: The conversation so far; the last message is the assistant's.
            new: What comes after it.

        Raises:
            HistoryRewrittenError: The template cannot continue the conversation.
        """
        tail = self._compiled_tail(new)
        if tail is not None and (ids := tail.ids(new)) is not None:
            return ids
        return self.rendered_continuation_ids(previous, new, tools, started_at=started_at)

    def rendered_continuation_ids(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        started_at: float | None = None,
    ) -> array[int]:
        """The same, always by rendering."""
        table = MaskTable()
        masked = self._tokenizer.mask_messages(new, table)
        text = self._continuation(previous, masked, tools, table, started_at)
        if not text:
            raise HistoryRewrittenError(
                "new messages must be rendered by the template, got nothing; begin a new segment"
            )
        ids = self._tokenizer.encode_masked(text, table, continues=not self._tokenizer.starts_with_control(text))
        return array("i", ids)

    def _compiled_tail(self, new: Sequence[Message]) -> CompiledTail | None:
        """The tail for messages of this shape; made when the shape is first seen."""
        shape = shape_of(new)
        if shape is None:
            return None
        with suppress(KeyError):  # rather than looking first: another thread may clear them
            return self._tails[shape]
        tail = None
        roles = frozenset(role for role, _, _ in shape)
        if self.splice_for(shape[0][0] == "tool", roles) == Splice.SYNTHETIC:
            asked_for = frozenset().union(*map(compared_texts, self._tokenizer.template_sources))
            tail = compile_tail(self._tokenizer, shape, self._synthetic_text, asked_for)
        if len(self._tails) >= _MAX_TAILS:
            self._tails.clear()
        self._tails[shape] = tail
        _logger.debug("template %s: %s is %s", self._tokenizer.template_hash, shape, "compiled" if tail else "rendered")
        return tail

    def _synthetic_text(self, new: list[Message], started_at: float) -> str:
        table = MaskTable()
        masked = self._tokenizer.mask_messages(new, table)
        text = self._after_turn([USER], PLAIN_TURN, masked, None, started_at)
        if not text:
            raise HistoryRewrittenError("new messages must be rendered by the template, got nothing; render them")
        return table.restore(text)

    def _continuation(
        self,
        previous: Sequence[Message],
        new: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        table: MaskTable,
        started_at: float | None,
    ) -> str:
        refusal: Exception | None = None
        cheapest = self.splice_for(new[0]["role"] == "tool", frozenset(message["role"] for message in new))
        for splice in range(cheapest, Splice.PREFIX):
            if splice <= Splice.SYNTHETIC_WITH_TOOLS:
                history, turn = [USER], PLAIN_TURN
            else:
                masked = self._tokenizer.mask_messages(previous if splice == Splice.HISTORY else previous[-1:], table)
                history, turn = (masked[:-1], masked[-1]) if splice == Splice.HISTORY else ([USER], masked[-1])
            schemas = None if splice == Splice.SYNTHETIC else self._tokenizer.mask_tools(tools, table)
            try:
                text = self._after_turn(history, turn, new, schemas, started_at)
            except ChatTemplateError as error:
                refusal = error
                continue
            if text is not None:
                return text
        try:
            return self._after_prefix(previous, new, tools, table, started_at)
        except ChatTemplateError as error:
            raise HistoryRewrittenError(
                f"the chat template must render the messages that follow, got {refusal or error}; begin a new segment"
            ) from error

    def _after_turn(
        self,
        history: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        tools: list[Any] | None,
        started_at: float | None,
    ) -> str | None:
        """What follows the assistant's turn, from its close on; None where the turn's end cannot be found."""
        for candidate, num_marks in _marked(turn):
            text = self._tokenizer.render_as_is(
                [*history, candidate, *new],
                tools,
                add_generation_prompt=True,
                template_kwargs=self._kwargs,
                started_at=started_at,
            )
            if not 0 < text.count(SENTINEL) <= num_marks:  # repeated where another message quotes the turn
                continue
            after = text.rpartition(SENTINEL)[2]
            for offset, control in self._tokenizer.find_control(after):
                if control in self._tokenizer.boundaries.ends:
                    return after[offset:]
            if "tool_calls" not in candidate:
                return after
        return None

    def _after_prefix(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        table: MaskTable,
        started_at: float | None,
    ) -> str:
        """What the rendering of the whole conversation adds to that of its beginning, from the last close on."""
        masked = self._tokenizer.mask_messages(previous, table)
        schemas = self._tokenizer.mask_tools(tools, table)
        variables: dict[str, Any] = {"template_kwargs": self._kwargs, "started_at": started_at}
        before = self._tokenizer.render_as_is(masked, schemas, add_generation_prompt=False, **variables)
        whole = self._tokenizer.render_as_is([*masked, *new], schemas, add_generation_prompt=True, **variables)
        check_prefix(before, whole)
        ends = [at for at, text in self._tokenizer.find_control(before) if text in self._tokenizer.boundaries.ends]
        return whole[ends[-1] :] if ends else whole[len(before) :]

    def splice_for(self, tool: bool, roles: frozenset[str] = frozenset()) -> Splice:
        """The cheapest rendering that continues a conversation.

        Args:
            tool: Whether tool results come first.
            roles: Roles of the new messages; those other than user and tool are probed too.
        """
        key = tool, roles - _USUAL_ROLES
        splice = self._splices.get(key)
        if splice is None:
            splice = self._splices[key] = self._probe_splice(*key)
            _logger.debug("template %s: %s", self._tokenizer.template_hash, splice.name)
        return splice

    def _probe_splice(self, tool: bool, others: frozenset[str]) -> Splice:
        """The cheapest rendering whose result equals that of other histories, long ones among them, with tools and without."""
        cheap: set[Splice] = {Splice.SYNTHETIC, Splice.SYNTHETIC_WITH_TOOLS, Splice.REAL_TURN}
        sources = self._tokenizer.template_sources
        if any(map(counts_in_cycles, sources)):
            cheap.clear()
        numbers = (number for source in sources for number in whole_numbers(source) if number < _MAX_LONG_HISTORY)
        histories = probe_histories(max(_MIN_LONG_HISTORY, *numbers, 0) + 4)
        for number, (turn, new) in enumerate(_probe_cases(tool, others)):
            for tools in (None, list(_PROBE_TOOLS)):
                found = {splice: self._try_probe_turn(splice, turn, new, tools) for splice in sorted(cheap)}
                for history in histories if number == 0 else histories[:_NUM_SHORT_HISTORIES]:
                    reference = self._try_after_turn(history, turn, new, tools)
                    if reference is None:
                        continue
                    if NEXT_SENTINEL not in reference:
                        return Splice.PREFIX
                    cheap.difference_update(splice for splice, text in found.items() if text != reference)
        return min({*cheap, Splice.HISTORY})

    def _try_probe_turn(self, splice: Splice, turn: Message, new: list[Message], tools: list[Any] | None) -> str | None:
        schemas = None if splice == Splice.SYNTHETIC else tools
        return self._try_after_turn([USER], turn if splice == Splice.REAL_TURN else PLAIN_TURN, new, schemas)

    def _try_after_turn(
        self, history: Sequence[Message], turn: Message, new: list[Message], tools: list[Any] | None
    ) -> str | None:
        try:
            return self._after_turn(history, turn, new, tools, 0.0)
        except ChatTemplateError:
            return None

    @cached_property
    def extends_history(self) -> bool:
        """Whether a longer conversation is rendered as a continuation of a shorter one, reasoning and calls included."""
        answer, reasoned = {"role": "assistant", "content": "x"}, "<think>\nr\n</think>\n\nx"
        conversations: tuple[tuple[list[Message], bool], ...] = (
            ([USER, {**answer, "content": reasoned}, USER], False),
            ([USER, answer, USER], False),
            ([USER, {**answer, "reasoning_content": "r"}, USER], False),
            ([SYSTEM, USER, answer, USER], True),
            ([USER, calling_message("x", "a"), tool_message("r"), answer, USER], True),
        )
        for messages, may_be_refused in conversations:
            extends = self._extends(messages)
            extends = self._extends([SYSTEM, *messages]) if extends is None else extends
            if not (may_be_refused if extends is None else extends):
                return False
        return True

    def _extends(self, messages: Sequence[Message]) -> bool | None:
        """Whether each rendering of these messages begins with that of one less; None where the template refuses one."""
        tools = [dict(PROBE_TOOL)] if any("tool_calls" in message for message in messages) else None
        first = 1 + (messages[0] is SYSTEM)
        try:
            for length in range(first, len(messages)):
                before, whole = (
                    self._tokenizer.render_as_is(
                        messages[:end],
                        tools,
                        add_generation_prompt=end == length and messages[length]["role"] == "assistant",
                        template_kwargs=self._kwargs,
                        started_at=0.0,
                    )
                    for end in (length, length + 1)
                )
                if not whole.startswith(before):
                    return False
        except ChatTemplateError:
            return None
        return True


def _probe_cases(tool: bool, others: frozenset[str]) -> list[tuple[Message, list[Message]]]:
    """Assistant turns and what follows them, a sentinel in the message whose place is asked for."""
    next_user = {"role": "user", "content": NEXT_SENTINEL}
    cases: list[tuple[Message, list[Message]]] = [(_ANSWER, [next_user]), ({**_ANSWER, "content": "."}, [next_user])]
    if tool:
        cases = [
            (calling_message("", "a"), [tool_message(NEXT_SENTINEL)]),
            (calling_message(_ANSWER["content"], "a"), [tool_message(NEXT_SENTINEL)]),
            (
                calling_message("", "a", CALL_ID, _SECOND_ID),
                [tool_message(NEXT_SENTINEL), tool_message("r2", _SECOND_ID)],
            ),
            (calling_message("", "a"), [tool_message(NEXT_SENTINEL), next_user]),
        ]
    turn, first = (calling_message("x", "a"), [tool_message("r")]) if tool else (_ANSWER, [])
    for role in sorted(others):
        other = {"role": role, "content": NEXT_SENTINEL}
        cases += [(turn, [*first, other]), (turn, [*first, other, USER])]
    return cases


def _marked(turn: Message) -> list[tuple[Message, int]]:
    """The turn with sentinels at its last words, and how many: what follows the last of them follows the turn."""
    content = turn["content"]
    if not turn.get("tool_calls"):
        return [(turn if content == SENTINEL else {**turn, "content": content + SENTINEL}, 1)]
    *calls, last = turn["tool_calls"]
    marked = {**last.get("function", last), "arguments": {"q": SENTINEL}}
    last = {**last, "function": marked} if "function" in last else marked
    called = {**turn, "tool_calls": [*calls, last]}
    without = ({**called, "content": ""}, 1)
    return [({**called, "content": content + SENTINEL}, 2), without] if content else [without]


def check_prefix(before: str, whole: str) -> None:
    """Check that one rendering begins with another.

    Raises:
        HistoryRewrittenError: It does not; the message shows the first differing characters.
    """
    if whole.startswith(before):
        return
    at = next((i for i, (old, new) in enumerate(zip(before, whole, strict=False)) if old != new), len(whole))
    raise HistoryRewrittenError(
        "the rendered conversation must begin with what was rendered before, got a difference at character"
        f" {at}: {before[at : at + 40]!r} became {whole[at : at + 40]!r}; begin a new segment"
    )


def _profile_of(tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> TemplateProfile:
    return tokenizer.profile(template_kwargs)
