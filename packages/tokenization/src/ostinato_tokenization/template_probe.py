"""What a chat template writes around turns, found by rendering short conversations with sentinels in them.

Invariant: nothing here depends on the name of a model; a template that refuses a probe only adds nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ostinato_tokenization.control_text import NEXT_SENTINEL, SENTINEL
from ostinato_tokenization.errors import ChatTemplateError

if TYPE_CHECKING:
    from ostinato_tokenization.chat_tokenizer import ChatTokenizer

CALL_ID = "call00001"
USER = {"role": "user", "content": "."}
SYSTEM = {"role": "system", "content": "s"}
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string", "description": "What to search."}},
            "required": ["q"],
        },
    },
}
_TAG = re.compile(r"[<\[]/?(\w+)[>\]]")


def tool_message(content: str, call_id: str = CALL_ID) -> dict[str, Any]:
    """A result of the probe's tool."""
    return {"role": "tool", "tool_call_id": call_id, "name": "search", "content": content}


def calling_message(content: str, argument: str, *call_ids: str) -> dict[str, Any]:
    """An assistant message that calls the probe's tool once per id."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "search", "arguments": {"q": argument}}}
        for call_id in call_ids or (CALL_ID,)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def probe_histories(num_messages: int) -> list[list[Mapping[str, Any]]]:
    """Beginnings of conversations that end with a question, of different lengths and words; some templates refuse some.

    Args:
        num_messages: The length of the longest ones, about.
    """
    answer, question = {"role": "assistant", "content": "x, y"}, {"role": "user", "content": "How many\nare there?"}
    looked_up = [question, calling_message("", "a"), tool_message("r"), answer]
    rounds, call_rounds = num_messages // 2, num_messages // 4
    return [
        [SYSTEM, *looked_up, USER],
        [*looked_up, USER],
        [SYSTEM, question, answer, USER],
        [question, answer, USER],
        [question],
        [SYSTEM, *looked_up * call_rounds, question],
        [*[question, answer] * rounds, USER],
        [SYSTEM, *[question, answer] * (rounds + 1), question],
    ]


class Boundaries(msgspec.Struct, frozen=True):
    """Control strings that a template writes between turns."""

    ends: frozenset[str]
    """Those that end what an assistant says: the last of the turn's close, at the end of a conversation or within it."""
    stops: frozenset[str]
    """Those of them that the assistant itself is to say: where the end of a conversation shows one, what an earlier
    turn is closed with does not count."""
    openers: frozenset[str]
    """Those that come last before what a user or tool says, and those that end a turn by opening the next."""
    structural: frozenset[str]
    """All of them, and those of the assistant's header."""


def probe_boundaries(tokenizer: ChatTokenizer) -> Boundaries:
    """Find the strings that end, separate and open turns. Called before the tokenizer masks assistant text."""
    assistant = {"role": "assistant", "content": SENTINEL}
    user_next = {"role": "user", "content": NEXT_SENTINEL}
    ends: set[str] = set()
    stops: set[str] = set()
    openers: set[str] = set()
    structural: set[str] = set()
    last_closes: set[str] = set()
    closed_at_last = unclosed = False  # unclosed: turns end with the opener of the next
    for turn, following in (
        (assistant, None),
        (assistant, user_next),
        (assistant, tool_message(NEXT_SENTINEL)),
        (calling_message("", SENTINEL), tool_message(NEXT_SENTINEL)),
    ):
        text = _render(tokenizer, [USER, turn] if following is None else [USER, turn, following], following)
        if text is None:
            continue
        zone, _, prompt = text.rpartition(SENTINEL)[2].partition(NEXT_SENTINEL)
        controls = [string for _, string in tokenizer.find_control(zone)]
        if controls:
            end = next((string for string in controls if string in ends or string == tokenizer.eos_token), None)
            if end is None:
                end = _close_of(tokenizer, turn, zone if following is not None else None) or controls[0]
            ends.add(end)
            if following is None or "tool_calls" in turn or not closed_at_last:
                stops.add(end)
            if following is None:
                closed_at_last, last_closes = True, last_closes | {end}
            structural.update(string for string in controls if not _is_tag_pair(tokenizer, string))
            if following is user_next:
                unclosed = end == controls[-1] and not closed_at_last
            if following is not None:
                openers.update({controls[-1], end} if unclosed else {controls[-1]})
        if following is user_next:
            structural.update(controls)
            header = (string for _, string in tokenizer.find_control(prompt))
            structural.update(string for string in header if not _is_tag_pair(tokenizer, string))
    return Boundaries(frozenset(ends), frozenset(stops), frozenset(openers - last_closes), frozenset(structural | ends))


class MessageForms(msgspec.Struct, frozen=True):
    """The forms in which a template wants what messages hold."""

    arguments_as_text: bool = False
    """Arguments of calls as JSON text: it pastes them."""
    contents_as_parts: bool = False
    """Contents as lists of parts: it leaves out any other."""
    part_separator: str = ""
    """What it writes between two parts of text."""


def probe_forms(tokenizer: ChatTokenizer) -> MessageForms:
    """Find them. Called while messages are still rendered as they are given."""
    one, two = ({"type": "text", "text": text} for text in (SENTINEL, NEXT_SENTINEL))
    as_text, as_parts = (_render(tokenizer, [{**USER, "content": content}], None) for content in (SENTINEL, [one]))
    both = _render(tokenizer, [{**USER, "content": [one, two]}], USER) or ""
    separator = both.partition(SENTINEL)[2].partition(NEXT_SENTINEL)[0]
    return MessageForms(
        arguments_as_text=_wants_arguments_as_text(tokenizer),
        contents_as_parts=as_text is None and as_parts is not None,
        part_separator="" if "text" in separator else separator,  # some print the list as it is
    )


def _wants_arguments_as_text(tokenizer: ChatTokenizer) -> bool:
    """Whether the template pastes the arguments of a call, so that only JSON text comes out as JSON.

    Called while arguments are still rendered as they are given.
    """
    arguments = {"q": SENTINEL}
    text = json.dumps(arguments, ensure_ascii=False)
    if (as_mapping := _render_call(tokenizer, arguments)) is not None and repr(arguments) not in as_mapping:
        return False
    return text in (_render_call(tokenizer, text) or "")


def _render_call(tokenizer: ChatTokenizer, arguments: Any) -> str | None:
    """A conversation that ends with a call, or with its result where the template asks for one."""
    turn = calling_message("", "")
    turn["tool_calls"][0]["function"]["arguments"] = arguments
    for following in (None, tool_message(NEXT_SENTINEL)):
        text = _render(tokenizer, [USER, turn, *([] if following is None else [following])], following)
        if text is not None:
            return text
    return None


def _close_of(tokenizer: ChatTokenizer, turn: Mapping[str, Any], zone: str | None) -> str | None:
    """The last control string of a turn's close, where the end of a conversation shows the same close as its middle.

    A close may hold several: `<|END_TEXT|><|END_OF_TURN_TOKEN|>`. What is not the same in both places may be the
    header of what comes next.

    Args:
        zone: What stands between this turn and the next; None takes that of a user's.
    """
    alone = _render(tokenizer, [USER, turn], None)
    if zone is None:
        following = {"role": "user", "content": NEXT_SENTINEL}
        text = _render(tokenizer, [USER, turn, following], following)
        zone = "" if text is None else text.rpartition(SENTINEL)[2].partition(NEXT_SENTINEL)[0]
    close = "" if alone is None else alone.rpartition(SENTINEL)[2].rstrip()
    controls = tokenizer.find_control(close)
    if not controls or not zone.startswith(close):
        return None
    at, string = controls[-1]
    return string if at + len(string) == len(close) else None


def _render(tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], following: Any) -> str | None:
    """The conversation with its sentinels, or None where the template refuses it or does not show them once each."""
    for opening, tools, variables in (
        ([], None, {}),
        ([], [PROBE_TOOL], {}),
        ([], [PROBE_TOOL], tokenizer.blank_variables),
        ([SYSTEM], None, {}),
        ([SYSTEM], [PROBE_TOOL], tokenizer.blank_variables),
    ):
        try:
            text = tokenizer.render_as_is(
                [*opening, *messages], tools, add_generation_prompt=following is not None, template_kwargs=variables
            )
        except ChatTemplateError:
            continue
        if text.count(SENTINEL) == 1 and text.count(NEXT_SENTINEL) == (following is not None):
            return text
    return None


def _is_tag_pair(tokenizer: ChatTokenizer, string: str) -> bool:
    """Whether it opens or closes a tag whose other half is a control string too, such as `<think>`."""
    match = _TAG.fullmatch(string)
    if match is None:
        return False
    name, left, right = match.group(1), string[0], string[-1]
    return all(tokenizer.control_token_id(f"{left}{slash}{name}{right}") is not None for slash in ("", "/"))
