"""Comparison of a ledger with a fresh rendering of the conversation that it stands for.

What the policy sampled is compared as text (its ids need not be canonical), everything else as ids. Linear in the number
of tokens. Invariant: the ledger is never changed by this, and a difference that is a choice is not reported: reasoning,
or earlier messages of one turn, that the ledger keeps and the template drops, the closing of a truncated turn, words of
the generation prompt that a fresh encoding merges with what was said, and another way of writing what the caller takes
for the same turn.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.control_text import MaskTable
from ostinato_tokenization.delta import as_chat_tokenizer
from ostinato_tokenization.errors import ChatTemplateError, TokenizationMismatchError
from ostinato_tokenization.ledger import Origin, TokenLedger
from ostinato_tokenization.messages import Message
from ostinato_tokenization.recorded_pieces import ids_as_recorded

_logger = logging.getLogger(__name__)

_RUNS = re.compile(rb"\x02+|\x03+|[\x00\x01]+")
_REASONING = re.compile(r"\s*(?:<think>.*?(?:</think>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z))\s*", re.DOTALL)
_REASONING_END = re.compile(r"\A.*?(?:</think>|\[/THINK\])\s*", re.DOTALL)
_TAG = re.compile(r"</?think>|\[/?THINK\]")
_STRIPPABLE = str.maketrans("", "", " \t\n\r")
_WINDOW = 8
_MAX_PARTS = 8
"""How many messages within one turn are told apart."""

_lock = threading.Lock()
_num_mismatches = 0


def num_mismatches() -> int:
    """How many differences this process has reported, for a counter among one's metrics."""
    return _num_mismatches


class SanityCheckMode(StrEnum):
    """How strictly `check_ledger` compares."""

    STRICT = "strict"
    """Every difference counts."""
    IGNORE_STRIPPABLE = "ignore_strippable"
    """Differences that are only spaces, tabs, newlines or carriage returns do not count."""
    DISABLE = "disable"
    """Nothing is compared."""


class SanityReport(msgspec.Struct, frozen=True):
    """The first difference between a ledger and the rendering of its conversation."""

    position: int
    """Offset in the ledger's ids."""
    turn: int
    """How many sampled turns lie before it."""
    message_index: int | None
    """The message in which it lies, as far as can be told."""
    recorded_id: int | None
    """The id in the ledger; None at its end."""
    rendered_id: int | None
    """The id in the rendering; None at its end."""
    recorded_text: str
    """Text around it in the ledger."""
    rendered_text: str
    """Text around it in the rendering."""
    template_hash: str
    reason: str
    """What differs, in words."""

    def __str__(self) -> str:
        where = "" if self.message_index is None else f", message {self.message_index}"
        return (
            f"Inconsistent training and inference tokenization detected: {self.reason} at token {self.position}"
            f" (turn {self.turn}{where}, template {self.template_hash}); recorded {self.recorded_id}"
            f" {self.recorded_text!r}, rendered {self.rendered_id} {self.rendered_text!r}"
        )


def check_ledger(
    ledger: TokenLedger,
    tokenizer: ChatTokenizer | Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    mode: SanityCheckMode,
    template_kwargs: Mapping[str, Any] | None = None,
    same_turn: Callable[[str, str], bool] | None = None,
    raise_on_mismatch: bool = False,
) -> SanityReport | None:
    """Compare a ledger with a fresh rendering; a difference is logged as a warning, counted and returned.

    Args:
        tokenizer: A ChatTokenizer, or a fast tokenizer of transformers, or a processor with one.
        messages: The conversation that the ledger holds, the assistant's messages as they were parsed.
        same_turn: Asked about a turn whose recorded and rendered texts differ: whether they say the same, as JSON with
            other spaces does, or cannot be told to say different things. None: texts that differ say different things.

        raise_on_mismatch: Raise instead of logging a warning.

    Returns:
        The first difference, or None.

    Raises:
        TokenizationMismatchError: There is a difference, and `raise_on_mismatch` was asked for.
    """
    global _num_mismatches
    if SanityCheckMode(mode) == SanityCheckMode.DISABLE:
        return None
    tokenizer = as_chat_tokenizer(tokenizer)
    report = _Comparison(ledger, tokenizer, messages, tools, SanityCheckMode(mode), template_kwargs, same_turn).run()
    if report is not None:
        with _lock:
            _num_mismatches += 1
        if raise_on_mismatch:
            raise TokenizationMismatchError(str(report))
        _logger.warning("%s", report)
    return report


class _Comparison:
    """One walk along both sequences: `_at` counts in the ledger, `_pos` in the rendering."""

    def __init__(
        self,
        ledger: TokenLedger,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        mode: SanityCheckMode,
        template_kwargs: Mapping[str, Any] | None,
        same_turn: Callable[[str, str], bool] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._same_turn = same_turn
        self._profile = tokenizer.profile(template_kwargs)
        self._messages = messages
        self._render = partial(
            tokenizer.render_masked, tools=tools, template_kwargs=template_kwargs, started_at=ledger.started_at
        )
        self._lenient = mode == SanityCheckMode.IGNORE_STRIPPABLE
        self._stops, self._controls = tokenizer.end_token_ids, tokenizer.control_token_ids
        self._recorded = ledger.token_ids
        self._runs = [match.span() for match in _RUNS.finditer(ledger.origins)]
        self._origins = ledger.origins
        self._prefill = tokenizer.encode_masked(self._profile.frame.prefill, MaskTable(), continues=True)
        self._turn = 0
        self._pos = 0
        self._rendered: list[int] = []
        self._refusal = ""
        answered = bool(messages) and messages[-1].get("role") == "assistant"
        try:
            text, table = self._render(messages, add_generation_prompt=not answered)
        except ChatTemplateError as error:
            self._refusal = str(error)
        else:
            same = None if table else ids_as_recorded(tokenizer, text, ledger)
            self._rendered = tokenizer.encode_masked(text, table) if same is None else same

    def run(self) -> SanityReport | None:
        if self._refusal:
            return self._report(0, 0, f"the conversation no longer renders ({self._refusal})")
        if self._rendered[: len(self._recorded)] == self._recorded:  # id by id, as most are: nothing to walk along
            self._pos, self._turn = (
                len(self._recorded),
                sum(self._origins[at] == Origin.SAMPLED for at, _ in self._runs),
            )
            return self._compare_rest()
        lead: list[int] = []
        for number, (start, end) in enumerate(self._runs):
            origin = self._origins[start]
            following = self._origins[self._runs[number + 1][0]] if number + 1 < len(self._runs) else None
            if origin == Origin.SAMPLED:
                report = self._compare_sampled(start, end, lead, repaired=following == Origin.REPAIR)
                self._turn += 1
            elif origin == Origin.REPAIR:
                report = self._skip_repair(start, end)
            else:
                words = end if following is None else self._prompt_words(start, end)
                report = self._compare_context(start, words)
                lead = [] if report else self._step_over_common(self._recorded[words:end])
            if report is not None:
                return report
        return self._compare_rest()

    def _compare_rest(self) -> SanityReport | None:
        rest = [token_id for token_id in self._rendered[self._pos :] if token_id not in self._stops]
        if self._tokenizer.decode(rest).strip() and rest != self._profile.frame.ids_at_end[-len(rest) :].tolist():
            return self._report(len(self._recorded), self._pos, "the rendering goes on where the record ends")
        return None

    def _prompt_words(self, start: int, end: int) -> int:
        """Where the plain words at the end of a generation prompt begin: a fresh encoding may merge them with what is said,
        and some, such as `<think>`, stand for the beginning of that."""
        words = end
        count = len(self._prefill)
        if count and end - start >= count and self._recorded[end - count : end] == self._prefill:
            words -= count
        limit = max(start, words - _WINDOW)
        while words > limit and self._recorded[words - 1] not in self._controls:
            words -= 1
        return words

    def _step_over_common(self, words: list[int]) -> list[int]:
        """Step over the words that the rendering has as well; the rest of them is compared with what is said."""
        common = _common_length(words, self._rendered[self._pos : self._pos + len(words)])
        self._pos += common
        return words[common:]

    def _compare_context(self, start: int, end: int) -> SanityReport | None:
        recorded = self._recorded[start:end]
        rendered = self._rendered[self._pos : self._pos + len(recorded)]
        if recorded == rendered:
            self._pos += len(recorded)
            return None
        if self._lenient and self._resync(recorded):
            return None
        pairs = zip(recorded, rendered, strict=False)
        offset = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(recorded), len(rendered)))
        return self._report(start + offset, self._pos + offset, "text that was not sampled differs")

    def _resync(self, recorded: list[int]) -> bool:
        """Find the end of a run whose text is the same but for whitespace."""
        wanted = self._tokenizer.decode(recorded).translate(_STRIPPABLE)
        low, limit = self._pos, min(len(self._rendered), self._pos + 2 * len(recorded) + _WINDOW)
        high, known, num_known = limit, low, 0  # text up to `known` has that many characters: each step decodes half
        while low < high:
            middle = (low + high) // 2
            more = self._text(known, middle)
            if "\ufffd" in more:  # a character may lie across the cut
                known, num_known, more = self._pos, 0, self._text(self._pos, middle)
            if num_known + len(more) < len(wanted):
                low, known, num_known = middle + 1, middle, num_known + len(more)
            else:
                high = middle
        if self._text(self._pos, low) != wanted:
            return False
        blank = low
        while blank < limit and not self._text(blank, blank + 1):
            blank += 1
        self._pos = blank
        return True

    def _text(self, start: int, end: int) -> str:
        """Text of a part of the rendering without its white space."""
        return self._tokenizer.decode(self._rendered[start:end]).translate(_STRIPPABLE)

    def _compare_sampled(self, start: int, end: int, lead: list[int], *, repaired: bool) -> SanityReport | None:
        if not lead and self._step_over_same(self._recorded[start:end]):
            return None
        said_end = end
        while said_end > max(start, end - 4) and self._recorded[said_end - 1] not in self._stops:
            said_end -= 1
        stopped = said_end > start and self._recorded[said_end - 1] in self._stops
        after_stop = self._recorded[said_end:end] if stopped else []
        body = self._recorded[start : said_end - 1 if stopped else end]
        cut_off = not stopped and (repaired or end == len(self._recorded))
        ways = self._ways(lead + body)
        close = next((close for said, shown, close in ways if self._same(said, shown, cut_off=cut_off)), None)
        if close is None and not stopped and not repaired:  # a template that ends turns with words, not with a token
            after = self._pos + len(lead) + len(body)
            close = after if self._rendered[self._pos : after] == lead + body else None
        if close is None:
            shown_ids = self._rendered[self._pos : self._next_stop(self._pos)]
            common = _common_length(lead + body, shown_ids)
            return self._report(start - len(lead) + common, self._pos + common, "sampled text differs")
        self._pos = close
        if stopped and close < len(self._rendered):
            shown_stop = self._rendered[close]
            if shown_stop == self._recorded[said_end - 1] or not self._profile.opens_turn(shown_stop):
                self._pos += 1
            if self._rendered[self._pos : self._pos + len(after_stop)] == after_stop:
                self._pos += len(after_stop)
        return None

    def _step_over_same(self, said: list[int]) -> bool:
        """Step over a turn that the rendering has id by id, up to the one token that ends it: most turns are such."""
        if said[-1] not in self._stops or self._rendered[self._pos : self._pos + len(said)] != said:
            return False
        if not self._stops.isdisjoint(said[:-1]):
            return False
        self._pos += len(said)
        return True

    def _ways(self, body: list[int]) -> Iterator[tuple[str, str, int]]:
        """Recorded and rendered texts of a turn, and where the rendered one ends.

        Where end tokens stand within the turn it holds several messages, and the template may have dropped the first
        ones: reasoning, as a rule.
        """
        starts = [0, *(at + 1 for at, token_id in enumerate(body) if token_id in self._stops)]
        closes = [self._next_stop(self._pos)]
        while len(closes) < len(starts) and closes[-1] < len(self._rendered):
            closes.append(self._next_stop(closes[-1] + 1))
        header = list(self._profile.frame.generation_prompt_ids)
        for number, start in enumerate(starts):
            later = len(starts) - 1 - number
            if later >= len(closes) or (number and later >= _MAX_PARTS):
                continue
            if number and body[start : start + len(header)] == header:
                start += len(header)
            close = closes[later]
            yield self._tokenizer.decode(body[start:]), self._tokenizer.decode(self._rendered[self._pos : close]), close

    def _next_stop(self, start: int) -> int:
        """The next end token in the rendering, or its end."""
        while start < len(self._rendered) and self._rendered[start] not in self._stops:
            start += 1
        return start

    def _skip_repair(self, start: int, end: int) -> None:
        """Step over the close of a truncated turn; the framework wrote it, whatever the template makes of the turn."""
        self._pos = self._next_stop(self._pos)
        if self._recorded[end - 1] in self._stops and self._pos < len(self._rendered):
            self._pos += 1

    def _same(self, said: str, shown: str, *, cut_off: bool) -> bool:
        ask = self._same_turn
        if ask is not None and said != shown and ask(said, shown):
            return True
        if self._lenient:
            said, shown = said.translate(_STRIPPABLE), shown.translate(_STRIPPABLE)
        said, shown = self._tokenizer.normalize(said), self._tokenizer.normalize(shown)
        if said == shown:
            return True
        (answer, reasoning), (shown_answer, shown_reasoning) = map(_split_reasoning, (said, shown))
        with_reasoning = answer != said or shown_answer != shown  # else white space in front is a difference
        if with_reasoning:
            answer, shown_answer = answer.lstrip("\n"), shown_answer.lstrip("\n")
        if not (reasoning and shown_reasoning) and (
            answer == shown_answer or (ask is not None and ask(answer, shown_answer))
        ):
            return True
        if not cut_off:
            return False
        without_tags = _TAG.sub("", said), _TAG.sub("", shown)
        if without_tags == (said, shown):
            return said.rstrip() == shown.rstrip()
        return without_tags[0].strip() == without_tags[1].strip()

    def _report(self, position: int, rendered_position: int, reason: str) -> SanityReport:
        def at(ids: list[int], index: int) -> tuple[int | None, str]:
            around = self._tokenizer.decode(ids[max(0, index - _WINDOW) : index + _WINDOW])
            return (ids[index] if index < len(ids) else None), around

        recorded_id, recorded_text = at(self._recorded, position)
        rendered_id, rendered_text = at(self._rendered, rendered_position)
        return SanityReport(
            position=position,
            turn=self._turn,
            message_index=self._message_at(rendered_position),
            recorded_id=recorded_id,
            rendered_id=rendered_id,
            recorded_text=recorded_text,
            rendered_text=rendered_text,
            template_hash=self._tokenizer.template_hash,
            reason=reason,
        )

    def _message_at(self, rendered_position: int) -> int | None:
        """The first message whose rendering reaches beyond this place; None where prefixes do not render."""
        low, high = 1, len(self._messages)
        while low < high:
            middle = (low + high) // 2
            try:
                rendered = self._render(self._messages[:middle], add_generation_prompt=False)
            except ChatTemplateError:
                return None
            if len(self._tokenizer.encode_masked(*rendered)) <= rendered_position:
                low = middle + 1
            else:
                high = middle
        return low - 1 if self._messages else None


def _split_reasoning(text: str) -> tuple[str, str]:
    """Answer and reasoning; the latter is empty where there is none or only its tags."""
    blocks = _REASONING.findall(text)
    rest = _REASONING.sub("", text)
    if not blocks and (match := _REASONING_END.match(text)):
        blocks, rest = [match.group()], text[match.end() :]
    return rest, _TAG.sub("", "".join(blocks)).strip()


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(left), len(right)))
