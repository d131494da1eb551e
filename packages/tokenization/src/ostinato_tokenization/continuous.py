"""Conversations whose tokens are recorded once: sampled ids stay as they are, only what is new is encoded.

Invariant: after every call the ledger holds exactly what the model has seen and said, earlier ids are a prefix of later
ones, and a call that raises has changed nothing. It knows neither engines nor how messages came about.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.control_text import MaskTable
from ostinato_tokenization.delta import as_chat_tokenizer
from ostinato_tokenization.errors import LedgerError, MessageError, TruncatedTurnError
from ostinato_tokenization.ledger import FIRST_POLICY, Origin, TokenLedger
from ostinato_tokenization.messages import Message

_MAX_SEPARATOR = 4
"""How many tokens of what follows its stop token a policy may say itself."""
_REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class TruncatedTurn(StrEnum):
    """What to do when the conversation goes on after a turn that was cut off before its stop token."""

    CLOSE = "close"
    """Close it with tokens of the framework (`Origin.REPAIR`, mask 0)."""
    STOP = "stop"
    """End the conversation: nothing is added."""
    ERROR = "error"
    """Raise TruncatedTurnError."""


class ContinuousTokens:
    """Keeps ledgers equal to what the model saw. Stateless and shared: one per tokenizer and template variables.

    Args:
        tokenizer: Tokenizer and template; a fast tokenizer of transformers, or a processor with one, is taken over.
        template_kwargs: Variables of the template, such as `enable_thinking`.
        truncated_turn: What happens to turns without a stop token.
        trusted_control_text: Control strings, such as the placeholder `<image>`, that become control tokens also where they
            stand in message text; all others never do.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer | Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        truncated_turn: TruncatedTurn = TruncatedTurn.CLOSE,
        trusted_control_text: Collection[str] = (),
    ) -> None:
        tokenizer = as_chat_tokenizer(tokenizer)
        if trusted_control_text:
            tokenizer = tokenizer.trusting(trusted_control_text)
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.truncated_turn = TruncatedTurn(truncated_turn)
        self._profile = tokenizer.profile(template_kwargs)
        self._prompt_ids = self._profile.frame.generation_prompt_ids
        self._stop_ids = frozenset(tokenizer.stop_token_ids)
        self._end_ids = tokenizer.end_token_ids

    @property
    def generation_prompt_ids(self) -> array[int]:
        """What the template writes where the assistant's turn begins; empty where that is not known."""
        return self._prompt_ids

    def build_initial_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        started_at: float | None = None,
    ) -> TokenLedger:
        """A ledger with the first prompt, generation prompt included.

        Args:
            started_at: When the conversation began, in seconds since 1970, for templates that print the date; None for now.

        Raises:
            MessageError, ChatTemplateError: The conversation cannot be rendered.
        """
        ledger = TokenLedger()
        if self.tokenizer.is_dated:
            ledger.started_at = time.time() if started_at is None else started_at
        self._append_prompt(ledger, messages, tools)
        return ledger

    def _append_prompt(
        self, ledger: TokenLedger, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        ids = self.tokenizer.encode_chat(
            messages,
            tools,
            add_generation_prompt=True,
            template_kwargs=self.template_kwargs,
            started_at=ledger.started_at,
        )
        self._append_context(ledger, array("i", ids))

    def merge_assistant_tokens(
        self,
        ledger: TokenLedger,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        *,
        policy_versions: Sequence[tuple[int, int]] = FIRST_POLICY,
    ) -> None:
        """Record what the policy sampled, verbatim, stop token included.

        Raises:
            LedgerError: Ids, log-probabilities and versions do not fit together.
        """
        ledger.append_sampled(token_ids, logprobs, policy_versions=policy_versions)

    def merge_context_messages(
        self,
        ledger: TokenLedger,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Append the close of the last turn, the new messages and a generation prompt.

        Where `previous_messages` does not end with the assistant's message, nothing was sampled since the last call:
        the unanswered messages are then rendered again together with the new ones.

        Args:
            previous_messages: The whole conversation that the ledger holds.
            new_messages: What comes after it; consecutive tool messages belong in one call.

        Returns:
            Number of tokens by which the ledger grew; 0 if a truncated turn ends the conversation (`STOP`).

        Raises:
            HistoryRewrittenError: The template cannot extend the conversation: begin a new segment.
            TruncatedTurnError: The last turn has no stop token, and the policy is `ERROR`.
            MessageError: Messages cannot be rendered.
            LedgerError: The ledger is empty.
        """
        if not new_messages:
            raise MessageError("new_messages must not be empty, got none; generate without calling this")
        if not previous_messages:
            raise MessageError("previous_messages must not be empty, got none; use build_initial_tokens")
        before = len(ledger)
        if not before:
            raise LedgerError("ledger must hold previous_messages, got an empty one; use build_initial_tokens first")
        if previous_messages[-1].get("role") != "assistant":
            self._replace_unanswered(ledger, previous_messages, new_messages, tools)
            return len(ledger) - before
        num_sampled, said = self._last_turn(ledger)
        ids = self._profile.continuation_ids(previous_messages, new_messages, tools, started_at=ledger.started_at)
        if said is not None:
            ids = self._without_said(ids, said[0], said[1:])
        else:
            called = "tool_calls" in previous_messages[-1]
            repair, rest = self._split_repair(ledger, ids, called=called, next_role=new_messages[0]["role"])
            ids = array("i", rest)
            if repair is not None and self.truncated_turn == TruncatedTurn.STOP:
                return 0
            if repair is not None and self.truncated_turn == TruncatedTurn.ERROR:
                raise TruncatedTurnError(
                    f"the last turn must end with a stop token, got {num_sampled} tokens without one;"
                    " raise the length limit or choose TruncatedTurn.CLOSE"
                )
            ledger.append(repair or (), Origin.REPAIR)
        self._append_context(ledger, ids)
        return len(ledger) - before

    def opener_after(
        self,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int | None:
        """The stop token of the last turn where it is the opener of the next one (GLM style); else None."""
        if not self._profile.has_opening_stops:
            return None
        first = self._profile.continuation_ids(previous_messages, new_messages, tools)[0]
        return first if first in self._stop_ids and self._profile.opens_turn(first) else None

    def _last_turn(self, ledger: TokenLedger) -> tuple[int, list[int] | None]:
        """How many ids at the end of the ledger were sampled, and the stop token that ended them with what follows it."""
        length = ledger.sampled_run
        last = ledger.tail_ids(min(length, _MAX_SEPARATOR))
        for at in range(len(last) - 1, -1, -1):
            if last[at] in self._end_ids:
                rest = last[at + 1 :]
                return length, last[at:] if not rest or not self.tokenizer.decode(rest).strip() else None
        return length, None

    def _without_said(self, ids: array[int], stop_id: int, said_after: list[int]) -> array[int]:
        """The continuation without what the policy said itself: its stop token, and a separator after that."""
        first = ids[0]
        said = int(first in self._end_ids and (first == stop_id or not self._profile.opens_turn(first)))
        if said_after and ids[said : said + len(said_after)].tolist() == said_after:
            said += len(said_after)
        return ids[said:]

    def _split_repair(
        self, ledger: TokenLedger, ids: array[int], *, called: bool, next_role: str
    ) -> tuple[list[int] | None, list[int]]:
        """The tokens that close a turn without a known stop token, and the rest of the continuation.

        A turn may have been cut off within its close; what the policy said of that is not written twice. None where it
        said all of it.
        """
        lead = [] if called else list(self._profile.frame.close_lead_ids)
        close = [*lead, *ids]
        num_close = len(lead) + (ids[0] in self._end_ids and not self._profile.opens_turn(ids[0]))
        reach = num_close + _MAX_SEPARATOR
        if not num_close:  # words of the template only: those of the next message may be the same as the policy's
            words = self._profile.frame.words_before(next_role)
            reach = next(
                (at for at, (one, other) in enumerate(zip(words, ids, strict=False)) if one != other), len(words)
            )
        last = ledger.tail_ids(min(ledger.sampled_run, reach))
        said = next((size for size in range(len(last), 0, -1) if last[-size:] == close[:size]), 0)
        if said >= max(num_close, 1):
            return None, close[said:]
        if repair := self._reasoning_repair(ledger):
            said = 0
        return [*repair, *close[said:num_close]], close[num_close:]

    def _reasoning_repair(self, ledger: TokenLedger) -> list[int]:
        turn = ledger.sampled_run + len(self._prompt_ids)
        text = self.tokenizer.decode(ledger.tail_ids(min(turn, len(ledger))))
        for opener, closer in _REASONING_TAGS:
            if text.rfind(opener) > text.rfind(closer):
                close = self._profile.frame.reasoning_close
                close = close if closer in close else f"\n{closer}\n\n"
                return self.tokenizer.encode_masked(close, MaskTable())
        return []

    def _replace_unanswered(
        self,
        ledger: TokenLedger,
        previous: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Render unanswered messages again with those that follow, in place of their tokens."""
        scratch = ledger.fork()
        if not ledger.num_sampled:
            scratch.truncate(0)
            self._append_prompt(scratch, [*previous, *new], tools)
        else:
            answered = max(index for index, message in enumerate(previous) if message.get("role") == "assistant") + 1
            scratch.truncate(ledger.end_of_sampled())
            self.merge_context_messages(scratch, previous[:answered], [*previous[answered:], *new], tools)
        ledger.replace_with(scratch)

    def _append_context(self, ledger: TokenLedger, ids: array[int]) -> None:
        prompt = self._prompt_ids
        prompted = prompt and ids[-len(prompt) :] == prompt
        ledger.append(ids, Origin.CONTEXT, template_tail=len(prompt) if prompted else 0)
