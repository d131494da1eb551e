"""Conversations over every chat template of some folders, compared with transformers: `python -m benchmarks.template_matrix DIR ...`.

Every conversation is built turn by turn with `ContinuousTokens`. What it must come to is taken from `apply_chat_template`: where the template
renders a longer conversation as a continuation of a shorter one, its ids; else the ids behind the assistant's stop token in that rendering,
a place that is found by rendering the conversation with two different last words. Conversations that a template refuses, or whose messages
it leaves out, do not count. The last line is JSON; the exit status is 1 where something is wrong.
"""

import argparse
import contextlib
import json
import logging
import sys
from collections import Counter
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.matrix_script import CONVERSATIONS, HARMLESS, TOOLS, Conversation, hostile_text
from benchmarks.matrix_templates import TEMPLATES, Tokenizers, templates_in, variables_of
from ostinato_tokenization import (
    ChatTokenizer,
    ContinuousTokens,
    Origin,
    SanityCheckMode,
    TokenizationError,
    TokenLedger,
    check_ledger,
)
from ostinato_tokenization.control_text import MaskTable

DEFAULT_TOKENIZERS = ("qwen", "llama3", "llama2")


class Verdict(NamedTuple):
    """How one conversation went: exact, refused, wrong, or absent where the template does not render it."""

    name: str
    detail: str = ""


class Wrong(Exception):
    """Ours differs from the oracle."""


class Absent(Exception):
    """The template itself does not render the conversation."""


class Oracle:
    """What transformers makes of a conversation.

    Args:
        tokenizer: A fast tokenizer of transformers, with its chat template.
        tools: Schemas that every rendering gets.
        variables: More variables of the template.
    """

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None, variables: dict[str, str]) -> None:
        self.tokenizer, self.tools, self.variables = tokenizer, tools, variables

    def text(self, messages: list[dict[str, Any]], prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, add_generation_prompt=prompt, tokenize=False, **self.variables
            )
        except Exception as error:  # whatever a template raises is its refusal
            raise Absent(f"{type(error).__name__}: {error}") from error

    def ids(self, messages: list[dict[str, Any]], prompt: bool) -> list[int]:
        self.text(messages, prompt)
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tools, add_generation_prompt=prompt, return_dict=False, **self.variables
        )

    def tail(self, before: list[dict[str, Any]], turn: dict[str, Any], new: list[dict[str, Any]], prompt: bool) -> str:
        """What stands behind the last words of the assistant's turn."""
        one, other = (self.text([*before, _ending(turn, mark), *new], prompt) for mark in ("Q", "Z"))
        if one == other:
            raise Absent("the assistant's words are not rendered")
        return commonprefix((one[::-1], other[::-1]))[::-1]  # noqa: RUF071  # of texts, not of paths


def _ending(turn: dict[str, Any], mark: str) -> dict[str, Any]:
    """The turn with one more letter at its end."""
    if not turn.get("tool_calls"):
        return {**turn, "content": turn["content"] + mark}
    *calls, last = turn["tool_calls"]
    arguments = last["function"]["arguments"]
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    key = list(parsed)[-1]
    changed = {**parsed, key: parsed[key] + mark}
    function = {**last["function"], "arguments": json.dumps(changed) if isinstance(arguments, str) else changed}
    return {**turn, "tool_calls": [*calls, {**last, "function": function}]}


class Turn(NamedTuple):
    """What the oracle says of one assistant turn and the messages behind it."""

    prompt_text: str
    whole_text: str
    whole_ids: list[int]
    stop: str | None
    """The control string that ends the turn; None where the template writes none."""
    delta: str
    """The text behind the stop string, or behind the assistant's last words where there is none."""


def look_at_turn(
    oracle: Oracle, ours: ChatTokenizer, before: list[dict[str, Any]], turn: dict[str, Any], new: list[dict[str, Any]]
) -> Turn:
    """Find where the turn ends in the oracle's rendering.

    Raises:
        Absent: The template refuses the conversation or leaves out what is new.
    """
    prompt_text = oracle.text(before, True)
    whole = oracle.text([*before, turn, *new], True)
    if not all(message["content"].strip() in whole for message in new):
        raise Absent("a new message is not rendered")
    tail = oracle.tail(before, turn, new, True)
    end = _end_of_turn(oracle, ours, before, turn, new, tail)
    if end is None and turn.get("tool_calls"):
        with contextlib.suppress(Absent):
            plain_tail = oracle.tail(before, {"role": "assistant", "content": "x"}, new, True)
            tail = plain_tail if tail.endswith(plain_tail) else tail
    stop, delta = (None, tail) if end is None else (end[1], tail[end[0] + len(end[1]) :])
    return Turn(prompt_text, whole, oracle.ids([*before, turn, *new], True), stop, delta)


def _end_of_turn(
    oracle: Oracle,
    ours: ChatTokenizer,
    before: list[dict[str, Any]],
    turn: dict[str, Any],
    new: list[dict[str, Any]],
    tail: str,
) -> tuple[int, str] | None:
    """The control string that ends the turn, and its place in `tail`; None where there is none.

    A turn with calls ends as one without does, where that one is rendered before the same messages.
    """
    limit = min(tail.find(message["content"].strip()) for message in new)
    if turn.get("tool_calls"):
        plain = {"role": "assistant", "content": "x"}
        for following in (new, [{"role": "user", "content": "y"}]):
            try:
                plain_tail = oracle.tail(before, plain, following, True)
            except Absent:
                continue
            end = _end_of_turn(oracle, ours, before, plain, following, plain_tail)
            if end is not None and following is new and tail.endswith(plain_tail):
                return len(tail) - len(plain_tail) + end[0], end[1]
            if end is not None and 0 <= (at := tail.find(end[1])) < limit:
                return at, end[1]
    alone = oracle.tail(before, turn, [], False).rstrip()
    closes = ours.find_control(alone)
    if closes and tail.startswith(alone) and closes[-1][0] + len(closes[-1][1]) == len(alone):
        return closes[-1]
    found = ours.find_control(tail)
    if turn.get("tool_calls"):
        return next(((at, text) for at, text in found if at < limit and not text.startswith("</")), None)
    return found[0] if found and not tail[: found[0][0]].strip() else None


class Player:
    """Plays one conversation against the oracle."""

    def __init__(self, reference: Any, ours: ChatTokenizer, conversation: Conversation) -> None:
        self.ours, self.conversation = ours, conversation
        self.tools = TOOLS if conversation.tools else None
        self.variables = variables_of(reference.chat_template)
        self.oracle = Oracle(reference, self.tools, self.variables)
        self.tokens = ContinuousTokens(ours, template_kwargs=self.variables)

    def play(self) -> Verdict:
        messages = [dict(message) for message in self.conversation.messages]
        try:
            for form in ("mapping", "string"):
                try:
                    return self._play(_with_arguments(messages, form))
                except Absent as error:
                    absent = error
            return Verdict("absent", str(absent))
        except Wrong as error:
            return Verdict("wrong", str(error))
        except TokenizationError as error:
            return Verdict("refused", f"{type(error).__name__}: {error}")

    def _play(self, messages: list[dict[str, Any]]) -> Verdict:
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        plan = []
        for number, at in enumerate(turns):
            end = turns[number + 1] if number + 1 < len(turns) else len(messages)
            plan.append(
                (at, end, look_at_turn(self.oracle, self.ours, messages[:at], messages[at], messages[at + 1 : end]))
            )
        first = messages[: turns[0]]
        expected = self.oracle.ids(first, True)
        tokens = self.tokens
        ledger = tokens.build_initial_tokens(first, self.tools)
        _same("first prompt", self.ours, ledger.token_ids, expected)
        stable = True
        for at, end, turn in plan:
            start = len(ledger)
            stable = (
                stable and turn.whole_text.startswith(turn.prompt_text) and turn.whole_ids[:start] == ledger.token_ids
            )
            stable = stable and (turn.stop is not None or _ids_before(turn, self.ours) is not None)
            cut = self._sample(tokens, ledger, messages[at], turn, stable)
            sampled_end = len(ledger)
            tokens.merge_context_messages(ledger, messages[: at + 1], messages[at + 1 : end], self.tools)
            if stable:
                _same("conversation", self.ours, ledger.token_ids, turn.whole_ids)
            else:
                self._check_delta(ledger, sampled_end, turn, cut)
        if stable:
            report = check_ledger(
                ledger, self.ours, messages, self.tools, mode=SanityCheckMode.STRICT, template_kwargs=self.variables
            )
            if report is not None:
                raise Wrong(f"the sanity check reports {report}")
        self._check_forms(messages)
        if self.conversation.hostile:
            self._check_hostile(messages)
        return Verdict("exact", "stable" if stable else "by delta")

    def _sample(self, tokens: ContinuousTokens, ledger: TokenLedger, message: Any, turn: Turn, stable: bool) -> bool:
        """Let the policy say what the template shows of the turn; returns whether it was cut off."""
        start, stop_id = len(ledger), self.ours.token_id(turn.stop) if turn.stop else None
        if stop_id is not None and stop_id not in self.ours.end_token_ids:
            raise Wrong(f"{turn.stop!r} ends the turn and is not known to")
        cut = self.conversation.cut or stop_id is None
        if stable:
            end = _delta_start(turn, stop_id, self.ours) if stop_id is not None else _ids_before(turn, self.ours)
            said = turn.whole_ids[start : end - 1 if cut and stop_id is not None else end]
        else:
            text = message["content"] or "".join(call["function"]["name"] for call in message.get("tool_calls", ()))
            said = [*self.ours.encode_text(text), *([] if cut else [stop_id])]
        tokens.merge_assistant_tokens(ledger, said, [-0.5] * len(said))
        return cut

    def _check_delta(self, ledger: TokenLedger, sampled_end: int, turn: Turn, cut: bool) -> None:
        delta = ledger.token_ids[sampled_end:]
        if turn.stop is None:
            new, shown = self.ours.decode(delta), self.ours.normalize(turn.whole_text)
            if not shown.rstrip().endswith(new.strip()) or len(new.strip()) < len(
                self.ours.normalize(turn.delta).strip()
            ):
                raise Wrong(f"delta {new!r} for {turn.delta!r}")
            return
        stop_id = self.ours.token_id(turn.stop)
        expected = turn.whole_ids[_delta_start(turn, stop_id, self.ours) :]
        if cut:
            repaired = ledger.origins[sampled_end:].count(Origin.REPAIR)
            expected = [*delta[: max(0, repaired - 1)], stop_id, *expected]
        _same("delta", self.ours, delta, expected)

    def _check_forms(self, messages: list[dict[str, Any]]) -> None:
        """Both forms of arguments are the same conversation, where the template takes both."""
        if any(message.get("tool_calls") for message in messages):
            one, other = (
                self.ours.encode_chat(_with_arguments(messages, form), self.tools, template_kwargs=self.variables)
                for form in ("mapping", "string")
            )
            _same("arguments as string", self.ours, other, one)

    def _check_hostile(self, messages: list[dict[str, Any]]) -> None:
        """Control strings in text are text: the rest of the ids is as if a harmless word stood there."""
        text = hostile_text(self.ours.control_strings)
        changed = [
            {**message, "content": message["content"].replace(HARMLESS, text)}
            if message["role"] != "assistant"
            else message
            for message in messages
        ]
        ids, harmless = (
            self.ours.encode_chat(version, self.tools, template_kwargs=self.variables)
            for version in (changed, messages)
        )
        controls = [
            [token_id for token_id in side if token_id in self.ours.control_token_ids] for side in (ids, harmless)
        ]
        if controls[0] != controls[1]:
            raise Wrong("a control string in content became a control token")
        wanted = self.ours.decode(harmless).replace(HARMLESS, self.ours.normalize(text))
        if _without_spaces(self.ours.decode(ids)) != _without_spaces(wanted):
            raise Wrong("a control string in content was lost")
        at = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        end = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        deltas = []
        for version in (changed, messages):
            tokens = self.tokens
            ledger = tokens.build_initial_tokens(version[:at], self.tools)
            tokens.merge_assistant_tokens(ledger, [*self.ours.encode_text("x"), self.ours.stop_token_ids[0]], None)
            start = len(ledger)
            tokens.merge_context_messages(ledger, version[: at + 1], version[at + 1 : end], self.tools)
            deltas.append([i for i in ledger.token_ids[start:] if i in self.ours.control_token_ids])
        if deltas[0] != deltas[1]:
            raise Wrong("a control string in a delta became a control token")


def _without_spaces(text: str) -> str:
    return "".join(text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").split())


def _delta_start(turn: Turn, stop_id: int, ours: ChatTokenizer) -> int:
    """The place behind the stop token of the turn: as many of its kind follow as the text behind it shows."""
    later = sum(text == turn.stop for _, text in ours.find_control(turn.delta))
    places = [index for index, token_id in enumerate(turn.whole_ids) if token_id == stop_id]
    if len(places) <= later:
        raise Wrong(f"{turn.stop!r} stands {len(places)} times in the oracle's ids")
    return places[-1 - later] + 1


def _ids_before(turn: Turn, ours: ChatTokenizer) -> int | None:
    """The number of ids before the delta of a turn without a stop token; None where a token lies across."""
    head = turn.whole_text[: len(turn.whole_text) - len(turn.delta)]
    ids = ours.encode_masked(head, MaskTable())
    return len(ids) if turn.whole_ids[: len(ids)] == ids else None


def _with_arguments(messages: list[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """The messages with arguments of calls as mapping or as JSON text."""

    def convert(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if form == "string" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif form == "mapping" and isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [convert(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _same(what: str, ours: ChatTokenizer, ids: list[int], expected: list[int]) -> None:
    if ids == expected:
        return
    at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected)))
    got, wanted = (ours.decode(side[max(0, at - 6) : at + 12]) for side in (ids, expected))
    raise Wrong(f"{what} differs at id {at}: {got!r} for {wanted!r}")


def main(arguments: list[str] | None = None) -> int:
    """Print a line per template and the totals as JSON; 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.template_matrix", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[TEMPLATES], help="folders with *.jinja files")
    parser.add_argument("--tokenizers", default=",".join(DEFAULT_TOKENIZERS), help="names of folders, or `all`")
    parser.add_argument("--only", default="", help="templates whose name holds this")
    parser.add_argument("-v", "--verbose", action="store_true", help="say why for every conversation")
    options = parser.parse_args(arguments)
    for name in ("transformers", "ostinato_tokenization"):
        logging.getLogger(name).setLevel(logging.ERROR)
    tokenizers = Tokenizers(options.tokenizers)
    totals, kinds = Counter(), {}
    paths = [path for path in templates_in(options.folders) if options.only in path.stem]
    for path in paths:
        verdicts: dict[str, list[Verdict]] = {}
        for name in tokenizers.names:
            reference = tokenizers.make(name, path.read_text(encoding="utf-8"))
            try:
                ours = ChatTokenizer.from_transformers(reference)
            except TokenizationError as error:
                verdicts.setdefault("load", []).append(Verdict("refused", f"{type(error).__name__}: {error}"))
                continue
            for conversation in CONVERSATIONS:
                verdict = Player(reference, ours, conversation).play()
                verdicts.setdefault(conversation.kind, []).append(verdict)
                if verdict.name in ("wrong", "refused") or options.verbose:
                    print(f"    {path.stem} [{name}] {conversation.name}: {verdict.name} {verdict.detail[:400]}")
        result = _worst([verdict for found in verdicts.values() for verdict in found])
        totals[result] += 1
        for kind, found in verdicts.items():
            kinds.setdefault(kind, Counter())[_worst(found)] += 1
        marks = " ".join(f"{kind}={_worst(found)}" for kind, found in verdicts.items())
        print(f"{result:8} {path.stem:55} {marks}", flush=True)
    for kind, counts in kinds.items():
        print(f"{kind:12} " + " ".join(f"{name}={counts[name]}" for name in ("exact", "refused", "wrong", "absent")))
    counts = {name: totals[name] for name in ("exact", "refused", "wrong")}
    if totals["absent"]:
        counts["absent"] = totals["absent"]
    print(json.dumps({"templates": len(paths), **counts}))
    return 1 if totals["wrong"] or not paths else 0


def _worst(verdicts: list[Verdict]) -> str:
    names = {verdict.name for verdict in verdicts}
    return next((name for name in ("wrong", "refused", "exact") if name in names), "absent")


if __name__ == "__main__":
    sys.exit(main())
