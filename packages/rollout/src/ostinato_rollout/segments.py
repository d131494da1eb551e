"""The ledgers of one conversation: how messages extend the one that grows, when a new one begins, what room there is.

Invariants: a call that raises leaves all as it was; no ledger outgrows the budget. Knows messages and ids, no replica.
"""

from __future__ import annotations

import copy

from ostinato_engines import TokenOutput
from ostinato_rollout.errors import BudgetExceededError, SessionInputError
from ostinato_rollout.types import SessionBudget
from ostinato_tokenization import ContinuousTokens, HistoryRewrittenError, Origin, TokenLedger


class Segments:
    """The segments of a conversation.

    Args:
        tokens: How messages become token ids.
        tools: What the chat template shows to the model.
        budget: How long they may get.
        rerender: Render the whole conversation at every turn, as the configuration may ask for.
    """

    def __init__(
        self, tokens: ContinuousTokens, tools: list[dict] | None, budget: SessionBudget, *, rerender: bool
    ) -> None:
        self.budget = budget
        """May be set between turns."""
        self.ledger: TokenLedger | None = None
        """The segment that grows now; None before the first messages."""
        self.length = 0
        """Of that segment, in tokens."""
        self._tokens, self._tools, self._always_rerender = tokens, tools, rerender
        self._finished: list[tuple[TokenLedger, int]] = []  # earlier segments, with the messages that each one holds
        self._finished_response = 0
        self._prompt_length = 0
        self._mark_length = 0
        self._mark: int | None = None  # where the ledger stood before what is unanswered; None: it began with that

    @property
    def room(self) -> int:
        """Response tokens left, sampled or not."""
        if self.ledger is None:
            return self.budget.max_response_tokens
        return self._room(self._prompt_length, self.length)

    @property
    def num_response_tokens(self) -> int:
        """Length of the response so far, sampled or not, over all segments."""
        return self._finished_response + self.length - self._prompt_length

    @property
    def num_finished(self) -> int:
        """Segments before the one that grows."""
        return len(self._finished)

    def with_lengths(self, num_messages: int) -> list[tuple[TokenLedger, int]]:
        """Return all segments in order, each with the number of messages that it holds, the last one with `num_messages`."""
        return self._finished if self.ledger is None else [*self._finished, (self.ledger, num_messages)]

    def fork(self) -> Segments:
        """The same segments, of which the one that grows does so apart from this one's."""
        other = copy.copy(self)
        other._finished = list(self._finished)
        other.ledger = None if self.ledger is None else self.ledger.fork()
        return other

    def extend(self, messages: list[dict], new: list[dict], *, num_unanswered: int) -> None:
        """Append `new` and the generation prompt after `messages`, the conversation so far.

        Args:
            messages: What was said.
            new: What is said now.
            num_unanswered: Messages at the end of `messages` that no turn has answered.

        Raises:
            BudgetExceededError: They do not fit, or would leave no room to answer them.
            SessionInputError: The first messages render to nothing.
        """
        if self.ledger is None:
            self._begin(new)
        elif not num_unanswered:
            self._continue(self.ledger, messages, new)
        elif self._mark is None:
            self._begin([*messages, *new])
        else:
            split = len(messages) - num_unanswered
            self._continue_again(self.ledger, self._mark, messages[:split], messages[split:], new)

    def record(self, output: TokenOutput) -> None:
        """Append a turn as it was sampled."""
        assert self.ledger is not None
        self._tokens.merge_assistant_tokens(
            self.ledger,
            output.token_ids,
            output.logprobs,
            policy_versions=[(span.start, span.version) for span in output.policy_versions],
        )
        self.length += len(output.token_ids)
        self._mark = None

    def drop_unanswered(self) -> bool:
        """Take back the messages that no turn has answered; tell whether they stood behind something else."""
        if self.ledger is None or self._mark is None:
            return False
        self.ledger.truncate(self._mark)
        self.length = self._mark_length
        return True

    def _room(self, prompt_length: int, length: int) -> int:
        response = self.budget.max_response_tokens - self._finished_response - (length - prompt_length)
        return max(0, min(response, self.budget.max_context_tokens - length))

    def _over_budget(self, needed: int, room: int) -> BudgetExceededError:
        """Build the error for an addition of `needed` tokens where `room` are left."""
        model_len = self.budget.max_model_len
        tight = model_len is not None and model_len - self.length <= room
        return self.budget.exceeded(needed, room, "max_model_len" if tight else "max_response_tokens")

    def _begin(self, messages: list[dict]) -> None:
        """Make the ledger of the current segment from `messages` alone."""
        ledger = self._tokens.build_initial_tokens(messages, self._tools)
        length = len(ledger)
        if not length:
            raise SessionInputError(
                "the first messages must render to at least one token, got none; check the chat template"
            )
        if self._finished:
            self._check_new_segment(length)
        else:
            self.budget.check_prompt(length)
        self.ledger, self.length, self._prompt_length, self._mark = ledger, length, length, None

    def _continue(self, ledger: TokenLedger, previous: list[dict], new: list[dict]) -> None:
        """Append `new` after `previous`, which the ledger holds: in place, or as a new segment where it must be."""
        if self._always_rerender:
            self._rerender(ledger, previous, new)
            return
        mark, length, room = ledger.mark(), self.length, self.room
        try:
            added = self._tokens.merge_context_messages(ledger, previous, new, self._tools)
        except HistoryRewrittenError:
            self._rerender(ledger, previous, new)
            return
        if not added:
            raise BudgetExceededError(
                "the last turn must end with a stop token to be continued, got one that was cut off;"
                " raise max_tokens or let ContinuousTokens close such turns",
                limit="max_tokens",
            )
        if added >= room:
            ledger.truncate(mark)
            raise self._over_budget(added, room)
        self._mark, self._mark_length, self.length = mark, length, length + added

    def _continue_again(
        self, ledger: TokenLedger, mark: int, answered: list[dict], unanswered: list[dict], new: list[dict]
    ) -> None:
        """Append `new` after messages that were not answered yet: all of them are merged again, together."""
        saved = ledger.fork()
        state = (saved, self.length, mark, self._mark_length)
        ledger.truncate(mark)
        self.length = self._mark_length
        try:
            self._continue(ledger, answered, [*unanswered, *new])
        except BaseException:
            self.ledger, self.length, self._mark, self._mark_length = state
            raise

    def _rerender(self, ledger: TokenLedger, previous: list[dict], new: list[dict]) -> None:
        """Render the whole conversation; append to the ledger if that extends it, else begin a new segment."""
        fresh = self._tokens.build_initial_tokens([*previous, *new], self._tools)
        token_ids, known = fresh.snapshot(), ledger.snapshot()
        length, added = self.length, len(token_ids) - len(known)
        if added > 0 and token_ids[: len(known)] == known:
            if added >= self.room:
                raise self._over_budget(added, self.room)
            self._mark, self._mark_length, self.length = ledger.mark(), length, length + added
            ledger.append(token_ids[len(known) :], Origin.CONTEXT)
            return
        self._finished_response += length - self._prompt_length
        try:
            self._check_new_segment(len(token_ids))
        except BudgetExceededError:
            self._finished_response -= length - self._prompt_length
            raise
        self._finished.append((ledger, len(previous)))
        self.ledger, self.length, self._prompt_length, self._mark = fresh, len(token_ids), len(token_ids), None

    def _check_new_segment(self, length: int) -> None:
        """Raise BudgetExceededError unless a segment that begins with `length` tokens leaves room to answer."""
        if self._room(length, length) < 1:
            room = max(0, self.budget.max_context_tokens - 1)
            limit = (
                "max_model_len"
                if self.budget.max_context_tokens == self.budget.max_model_len
                else "max_response_tokens"
            )
            raise self.budget.exceeded(length, room, limit)
