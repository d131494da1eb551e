"""A look at one tokenizer and its chat template: which conversations it can continue, and how.

Invariant: a verdict says what happened with the tokens, compared with one rendering of the whole conversation; nothing
here depends on the name of a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.continuous import ContinuousTokens
from ostinato_tokenization.delta import as_chat_tokenizer
from ostinato_tokenization.errors import ChatTemplateError, TokenizationError
from ostinato_tokenization.ledger import Origin
from ostinato_tokenization.messages import Message
from ostinato_tokenization.template_probe import PROBE_TOOL, calling_message, tool_message

_CONTROL_WORD = "harmless"


class Verdict(StrEnum):
    """What became of one kind of conversation."""

    EXACT = "exact"
    """Prompt, sampled tokens and what is appended are the tokens of the whole conversation rendered at once."""
    APPENDED = "appended"
    """The template rewrites earlier turns; what is appended is what it writes after the turn."""
    REFUSED = "refused"
    """The template renders the conversation, and it cannot be continued: a new segment begins."""
    ABSENT = "absent"
    """The template does not render such a conversation."""
    WRONG = "wrong"
    """The tokens are not those of the template: please report it."""


class KindResult(msgspec.Struct, frozen=True):
    """One kind of conversation."""

    kind: str
    verdict: Verdict
    detail: str = ""


class TemplateReport(msgspec.Struct, frozen=True):
    """What `check_template` found; `print` it."""

    template_hash: str
    stop_tokens: tuple[str, ...]
    generation_prompt: str
    rewrites_history: bool
    prints_date: bool
    results: tuple[KindResult, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(result.verdict != Verdict.WRONG for result in self.results)

    def __str__(self) -> str:
        lines = [
            f"template {self.template_hash}",
            f"  a turn ends with   {' or '.join(map(repr, self.stop_tokens)) or 'nothing that is known'}",
            f"  generation prompt  {self.generation_prompt!r}",
            f"  rewrites history   {'yes: reasoning or calls of earlier turns change' if self.rewrites_history else 'no'}",
            f"  prints the date    {'yes: frozen when a conversation begins' if self.prints_date else 'no'}",
        ]
        lines += [
            f"  {result.kind:18} {result.verdict}{': ' * bool(result.detail)}{result.detail}" for result in self.results
        ]
        return "\n".join(lines)


class _Kind(msgspec.Struct, frozen=True):
    name: str
    messages: Sequence[Message]
    tools: bool = False
    cut: bool = False


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


_SECOND_ID = "call00002"
_KINDS = (
    _Kind("question, answer", (_user("Hello there."), _said("Good day."), _user("And now?"))),
    _Kind(
        "system text", ({"role": "system", "content": "Be brief."}, _user("Hello."), _said("Good day."), _user("Now?"))
    ),
    _Kind("several turns", (_user("One."), _said("Two."), _user("Three."), _said("Four."), _user("Five."))),
    _Kind("a tool", (_user("Look."), calling_message("", "bird"), tool_message("A swallow.")), tools=True),
    _Kind(
        "tools, then answer",
        (_user("Look."), calling_message("", "bird"), tool_message("A swallow."), _said("Seen."), _user("More?")),
        tools=True,
    ),
    _Kind(
        "parallel tools",
        (
            _user("Look."),
            calling_message("", "bird", "call00001", _SECOND_ID),
            tool_message("A swallow."),
            tool_message("A crow.", _SECOND_ID),
        ),
        tools=True,
    ),
    _Kind("reasoning", (_user("Hello."), _said("Good day.", reasoning_content="Greet."), _user("And now?"))),
    _Kind("cut off", (_user("Hello."), _said("Good"), _user("Go on.")), cut=True),
)


def check_template(tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None) -> TemplateReport:
    """Play conversations of several kinds over a tokenizer and its chat template.

    Args:
        tokenizer: A ChatTokenizer, or a fast tokenizer of transformers or a processor with one; with the latter two,
            whole conversations are also compared with `apply_chat_template`.
        template_kwargs: Variables of the template, such as `enable_thinking`.
    """
    ours = as_chat_tokenizer(tokenizer)
    reference = None if tokenizer is ours else tokenizer
    results = [_result(ours, reference, kind, template_kwargs) for kind in _KINDS]
    results.append(_injection(ours, template_kwargs))
    profile = ours.profile(template_kwargs)
    return TemplateReport(
        template_hash=ours.template_hash,
        stop_tokens=tuple(ours.decode([token_id]) for token_id in ours.stop_token_ids),
        generation_prompt=profile.frame.generation_prompt,
        rewrites_history=not profile.extends_history,
        prints_date=ours.is_dated,
        results=tuple(results),
    )


def _result(ours: ChatTokenizer, reference: Any, kind: _Kind, template_kwargs: Mapping[str, Any] | None) -> KindResult:
    tools = [PROBE_TOOL] if kind.tools else None
    try:
        whole = ours.encode_chat(kind.messages, tools, template_kwargs=template_kwargs)
    except ChatTemplateError as error:
        return KindResult(kind.name, Verdict.ABSENT, str(error))
    shown = ours.decode(whole)
    missing = [message["content"] for message in kind.messages if message["content"] not in shown]
    if any(message["content"] in missing for message in kind.messages if message["role"] != "assistant"):
        return KindResult(kind.name, Verdict.ABSENT, f"the template leaves out {missing[0]!r}")
    if reference is not None:
        theirs = reference.apply_chat_template(
            list(kind.messages), tools=tools, add_generation_prompt=True, return_dict=False, **(template_kwargs or {})
        )
        if theirs != whole and not ours.is_dated:
            return KindResult(kind.name, Verdict.WRONG, "apply_chat_template gives other ids")
    try:
        return _play(ours, kind, tools, template_kwargs)
    except TokenizationError as error:
        return KindResult(kind.name, Verdict.REFUSED, str(error))


def _play(
    ours: ChatTokenizer, kind: _Kind, tools: list[Any] | None, template_kwargs: Mapping[str, Any] | None
) -> KindResult:
    """Build the conversation turn by turn, each turn saying what the whole rendering shows of it."""
    tokens = ContinuousTokens(ours, template_kwargs=template_kwargs)
    turns = [index for index, message in enumerate(kind.messages) if message["role"] == "assistant"]
    ledger = tokens.build_initial_tokens(kind.messages[: turns[0]], tools)
    started_at, verdict = ledger.started_at, Verdict.EXACT
    for number, at in enumerate(turns):
        end = turns[number + 1] if number + 1 < len(turns) else len(kind.messages)
        before, after = kind.messages[: at + 1], kind.messages[at + 1 : end]
        whole = ours.encode_chat(kind.messages[:end], tools, template_kwargs=template_kwargs, started_at=started_at)
        trial = ledger.fork()
        stop = tokens.opener_after(before, after, tools)
        stop = ours.stop_token_ids[0] if stop is None and ours.stop_token_ids else stop
        trial.append_sampled([] if stop is None else [stop], None)
        start = len(trial)
        tokens.merge_context_messages(trial, before, after, tools)
        delta = trial.token_ids[start:]
        if whole[len(whole) - len(delta) :] != delta:
            return KindResult(kind.name, Verdict.WRONG, f"what is appended is {ours.decode(delta)!r}")
        text = ours.decode(delta)
        if any(message["content"] not in text for message in after):
            return KindResult(kind.name, Verdict.WRONG, f"a message is not in what is appended, {text!r}")
        said = whole[len(ledger) : len(whole) - len(delta)]
        if (
            verdict == Verdict.EXACT
            and whole[: len(ledger)] == ledger.token_ids
            and _says(ours, said, kind.messages[at])
        ):
            if kind.cut and said and said[-1] in ours.end_token_ids:
                said = said[:-1]
        else:
            verdict, said = Verdict.APPENDED, [*ours.encode_text("x"), *([] if stop is None or kind.cut else [stop])]
        tokens.merge_assistant_tokens(ledger, said, None)
        sampled_end = len(ledger)
        tokens.merge_context_messages(ledger, before, after, tools)
        if verdict == Verdict.EXACT and ledger.token_ids != whole:
            return KindResult(kind.name, Verdict.WRONG, f"the conversation is {ours.decode(ledger.token_ids)!r}")
        if Origin.SAMPLED in ledger.origins[sampled_end:]:
            return KindResult(kind.name, Verdict.WRONG, "what is appended counts as sampled")
    return KindResult(kind.name, verdict)


def _says(ours: ChatTokenizer, said: list[int], message: Message) -> bool:
    """Whether these ids hold the words of the message, its calls included."""
    text = ours.decode(said)
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    words = [message["content"], *(str(value) for given in arguments for value in given.values())]
    return all(word in text or json.dumps(word) in text for word in words)


def _injection(ours: ChatTokenizer, template_kwargs: Mapping[str, Any] | None) -> KindResult:
    """Control strings in what users and tools say stay text."""
    hostile = " ".join(ours.control_strings[:500])
    counts = []
    for text in (_CONTROL_WORD, f"{_CONTROL_WORD} {hostile}"):
        try:
            ids = ours.encode_chat([_user(text)], template_kwargs=template_kwargs)
        except TokenizationError as error:
            return KindResult("control strings", Verdict.ABSENT, str(error))
        counts.append([token_id for token_id in ids if token_id in ours.control_token_ids])
    if counts[0] != counts[1]:
        return KindResult("control strings", Verdict.WRONG, "a control string in a user's text became a control token")
    return KindResult("control strings", Verdict.EXACT)
