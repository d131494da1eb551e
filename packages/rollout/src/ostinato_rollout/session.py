"""One conversation with a policy, exact to the token.

Invariants: every sampled token stands in exactly one ledger, once, in the order in which it was sampled; a call that
raises leaves ledgers and history as they were; no ledger outgrows the budget. Agent programs see messages, never ids.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence

import msgspec

from ostinato_engines import SamplingParams, StopReason, TokenOutput
from ostinato_rollout.client import LLMServerClient
from ostinato_rollout.config import SessionConfig
from ostinato_rollout.errors import BudgetExceededError, SessionInputError, SessionStateError
from ostinato_rollout.seeds import derive_seed
from ostinato_rollout.turns import assistant_message, checked_messages, empty_reply, same_turn
from ostinato_rollout.types import Reply, SessionBudget, SessionMetrics
from ostinato_tokenization import (
    ContinuousTokens,
    HistoryRewrittenError,
    Origin,
    SanityCheckMode,
    TokenLedger,
    check_ledger,
)
from ostinato_tools import ParsedTurn, ToolParser

logger = logging.getLogger(__name__)

_TAIL_LENGTH = 8


class ChatSession:
    """One conversation: `extend` with messages, `generate` a turn, and so on; `close` at the end.

    Usable as an asynchronous context manager. Not for two tasks at once.

    Args:
        client: Where generations come from.
        tokens: How messages become token ids; shared between sessions.
        config: The parser's name is not read here, `parser` is.
        budget: How long the conversation may get.
        parser: Reads tool calls from what was sampled; None takes the text as it is.
        tools: Schemas that the chat template shows to the model; None or empty: no tools.
        request_id: Identifies the conversation to the replicas; drawn if None.

    Raises:
        SessionInputError: The tokenizer has no single token for a stop token of the parser.
    """

    def __init__(
        self,
        *,
        client: LLMServerClient,
        tokens: ContinuousTokens,
        config: SessionConfig,
        budget: SessionBudget,
        parser: ToolParser | None = None,
        tools: Sequence[dict] | None = None,
        request_id: str | None = None,
    ) -> None:
        self.request_id = request_id if request_id is not None else uuid.uuid4().hex
        self.config, self.budget = config, budget
        self.messages: list[dict] = []
        """The conversation so far, in OpenAI form; read it, do not write it."""
        self.metrics = SessionMetrics()
        """What the conversation cost; complete after `close`."""
        self.inexact_versions: set[int] = set()
        """Policy versions whose spans an engine reported as approximate."""
        self._client, self._tokens, self._parser = client, tokens, parser
        self._tools = list(tools) if tools else None
        self._stop_ids = _stop_ids(tokens, parser)
        self._ledger: TokenLedger | None = None
        self._finished: list[tuple[TokenLedger, int]] = []  # earlier segments, with the messages that each one holds
        self._finished_response = 0
        self._prompt_length = 0
        self._length = 0
        self._unanswered = 0  # messages at the end that no turn has answered yet
        self._mark_length = 0
        self._mark: int | None = None  # where the ledger stood before them; None: the segment began with them
        self._turn = 0
        self._busy = self._closed = False

    @property
    def room(self) -> int:
        """Response tokens left, sampled or not."""
        if self._ledger is None:
            return self.budget.max_response_tokens
        return self._room(self._prompt_length, self._length)

    @property
    def ledger(self) -> TokenLedger | None:
        """The segment that grows now, to be read, not written; None before the first `extend`."""
        return self._ledger

    @property
    def segments(self) -> tuple[TokenLedger, ...]:
        """Ledgers in which something was sampled, in order; the first prompt's if nothing was."""
        current = () if self._ledger is None else (self._ledger,)
        everything = (*(ledger for ledger, _ in self._finished), *current)
        return tuple(ledger for ledger in everything if ledger.num_sampled) or everything[:1]

    async def extend(self, messages: Sequence[dict]) -> None:
        """Append messages and the generation prompt; the first call sets the prompt.

        Raises:
            BudgetExceededError: They do not fit, or would leave no room to answer them. A first prompt that fills the
                context to the last token is accepted: the turn after it is empty.
            SessionInputError: No messages, or something that is no message.
            SessionStateError: The session is closed or generating.
        """
        self._check_free("extend")
        new = checked_messages(messages)
        if self._ledger is None:
            self._begin(new)
        elif not self._unanswered:
            self._continue(self._ledger, self.messages, new)
        elif self._mark is None:
            self._begin([*self.messages, *new])
        else:
            self._continue_again(self._ledger, self._mark, new)
        self.messages.extend(new)
        self._unanswered += len(new)

    async def generate(self, sampling_params: SamplingParams) -> Reply:
        """Sample one turn, record it, and append it to the history.

        `max_tokens` is lowered to `room`; with no room the reply is empty with reason LENGTH, and no replica is asked.
        A seed makes the whole conversation reproducible: turn k > 0 samples with a seed derived from it and k.
        An empty turn is not recorded, and leaves the conversation waiting for `generate` or more messages.

        Raises:
            SessionStateError: There is nothing to answer, or the session is closed or generating.
            RolloutError: What the client raises; the session is as before and may try again.
        """
        self._check_free("generate")
        ledger = self._ledger
        if ledger is None or not self._unanswered:
            raise SessionStateError(
                "generate must follow extend, got no new message to answer; extend the session first"
            )
        limit = self.room if sampling_params.max_tokens is None else min(sampling_params.max_tokens, self.room)
        if limit <= 0:
            return empty_reply(StopReason.LENGTH)
        params = self._params(sampling_params, limit)
        prompt = ledger.snapshot()
        self._busy = True
        began = time.perf_counter()
        try:
            output = await self._client.generate(self.request_id, prompt, params)
        finally:
            self._busy = False
            self.metrics.generate_s += time.perf_counter() - began
        self._count(output)
        if not output.token_ids:
            return empty_reply(output.stop_reason)
        return self._record(ledger, output, in_reasoning=self._opens_reasoning(prompt))

    async def close(self) -> None:
        """End the conversation: free the replica's place, drop messages that nothing answered, run the sanity check.

        The check's result is in `metrics`; it never raises. Closing again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        try:
            num_messages = len(self.messages)
            if self._ledger is not None and self._unanswered and self._mark is not None:
                self._ledger.truncate(self._mark)
                self._length = self._mark_length
                num_messages -= self._unanswered
            if self._ledger is not None and self.config.tokenization_sanity_check_mode is not SanityCheckMode.DISABLE:
                for ledger, count in (*self._finished, (self._ledger, num_messages)):
                    if ledger.num_sampled:
                        self._check(ledger, self.messages if count == len(self.messages) else self.messages[:count])
        finally:
            await self._client.release(self.request_id)

    async def __aenter__(self) -> ChatSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _check_free(self, what: str) -> None:
        if self._closed:
            raise SessionStateError(f"{what} must come before close, got a closed session; open another one")
        if self._busy:
            raise SessionStateError(f"{what} must wait for the turn under way, got a busy session; await its generate")

    def _room(self, prompt_length: int, length: int) -> int:
        response = self.budget.max_response_tokens - self._finished_response - (length - prompt_length)
        return max(0, min(response, self.budget.max_context_tokens - length))

    def _over_budget(self, needed: int, room: int, *, limit: str = "") -> BudgetExceededError:
        """Build the error for an addition of `needed` tokens where `room` are left."""
        if not limit:
            model_len = self.budget.max_model_len
            tight = model_len is not None and model_len - self._length <= room
            limit = "max_model_len" if tight else "max_response_tokens"
        return BudgetExceededError(
            f"the messages must need fewer tokens than there is room for ({room} under {limit}), got {needed};"
            f" shorten them or raise {limit}",
            limit=limit,
            needed=needed,
            room=room,
        )

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
            for name in ("max_prompt_tokens", "max_model_len"):
                bound = getattr(self.budget, name)
                if bound is not None and length > bound:
                    raise BudgetExceededError(
                        f"the prompt must hold at most {name} ({bound}) tokens, got {length}; shorten it or raise {name}",
                        limit=name,
                        needed=length,
                        room=bound,
                    )
        self._ledger, self._length, self._prompt_length, self._mark = ledger, length, length, None

    def _continue(self, ledger: TokenLedger, previous: list[dict], new: list[dict]) -> None:
        """Append `new` after `previous`, which the ledger holds: in place, or as a new segment where it must be."""
        if self.config.use_inference_chat_template:
            self._rerender(ledger, previous, new)
            return
        mark, length, room = ledger.mark(), self._length, self.room
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
        self._mark, self._mark_length, self._length = mark, length, length + added

    def _continue_again(self, ledger: TokenLedger, mark: int, new: list[dict]) -> None:
        """Append `new` after messages that were not answered yet: all of them are merged again, together."""
        saved = ledger.fork()
        state = (saved, self._length, mark, self._mark_length)
        split = len(self.messages) - self._unanswered
        ledger.truncate(mark)
        self._length = self._mark_length
        try:
            self._continue(ledger, self.messages[:split], [*self.messages[split:], *new])
        except BaseException:
            self._ledger, self._length, self._mark, self._mark_length = state
            raise

    def _rerender(self, ledger: TokenLedger, previous: list[dict], new: list[dict]) -> None:
        """Render the whole conversation; append to the ledger if that extends it, else begin a new segment."""
        fresh = self._tokens.build_initial_tokens([*previous, *new], self._tools)
        token_ids, known = fresh.snapshot(), ledger.snapshot()
        length, added = self._length, len(token_ids) - len(known)
        if added > 0 and token_ids[: len(known)] == known:
            if added >= self.room:
                raise self._over_budget(added, self.room)
            self._mark, self._mark_length, self._length = ledger.mark(), length, length + added
            ledger.append(token_ids[len(known) :], Origin.CONTEXT)
            return
        self._finished_response += length - self._prompt_length
        try:
            self._check_new_segment(len(token_ids))
        except BudgetExceededError:
            self._finished_response -= length - self._prompt_length
            raise
        self._finished.append((ledger, len(previous)))
        self._ledger, self._length, self._prompt_length, self._mark = fresh, len(token_ids), len(token_ids), None

    def _check_new_segment(self, length: int) -> None:
        """Raise BudgetExceededError unless a segment that begins with `length` tokens leaves room to answer."""
        if self._room(length, length) < 1:
            room = max(0, self.budget.max_context_tokens - 1)
            limit = (
                "max_model_len"
                if self.budget.max_context_tokens == self.budget.max_model_len
                else "max_response_tokens"
            )
            raise self._over_budget(length, room, limit=limit)

    def _params(self, given: SamplingParams, limit: int) -> SamplingParams:
        """Complete what the caller gave: bound, stop tokens, and this turn's seed."""
        stops = self._stop_ids
        if given.stop_token_ids:
            stops = tuple(dict.fromkeys((*given.stop_token_ids, *stops)))
        seed = given.seed
        if seed is not None and self._turn:
            seed = derive_seed(seed, self._turn)
        return msgspec.structs.replace(given, max_tokens=limit, stop_token_ids=stops, seed=seed)

    def _count(self, output: TokenOutput) -> None:
        self.metrics.num_generations += 1
        self.metrics.num_sampled_tokens += len(output.token_ids)
        self.metrics.num_cached_tokens += output.num_cached_tokens or 0
        self.metrics.num_preempted += output.num_preempted

    def _record(self, ledger: TokenLedger, output: TokenOutput, *, in_reasoning: bool) -> Reply:
        """Put a turn into the ledger and the history."""
        self._tokens.merge_assistant_tokens(
            ledger,
            output.token_ids,
            output.logprobs,
            policy_versions=[(span.start, span.version) for span in output.policy_versions],
        )
        self.inexact_versions.update(span.version for span in output.policy_versions if not span.exact)
        self._length += len(output.token_ids)
        text = self._decode(output.token_ids)
        parsed = self._parse(text, in_reasoning=in_reasoning)
        message = assistant_message(parsed, text)
        self.messages.append(message)
        self._unanswered, self._mark = 0, None
        self._turn += 1
        return Reply(
            message=message,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            errors=parsed.errors,
            stop_reason=output.stop_reason,
            num_tokens=len(output.token_ids),
            text=text,
        )

    def _opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Tell whether the generation prompt has opened the reasoning, so that the turn begins inside it."""
        openers = getattr(self._parser, "reasoning_openers", ("<think>",))
        if self._parser is None or not openers:
            return False
        return self._tokens.tokenizer.decode(prompt[-_TAIL_LENGTH:]).rstrip().endswith(tuple(openers))

    def _decode(self, token_ids: list[int]) -> str:
        """Return the text of a turn, control tokens kept; the token that ends a turn is no part of it."""
        tokenizer = self._tokens.tokenizer
        if token_ids[-1] in tokenizer.stop_token_ids:
            token_ids = token_ids[:-1]
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    def _parse(self, text: str, *, in_reasoning: bool = False) -> ParsedTurn:
        """Read the calls of a turn."""
        if self._parser is None:
            return ParsedTurn(content=text, reasoning=None, tool_calls=(), errors=())
        prefix = f"call_{self._turn}_"
        return self._parser.parse(text, self._tools, id_prefix=prefix, in_reasoning=in_reasoning)

    def _check(self, ledger: TokenLedger, messages: list[dict]) -> None:
        """Count a difference (which the check itself logs) between a ledger and its messages' render; a check that fails
        is one, too."""
        try:
            report = check_ledger(
                ledger,
                self._tokens.tokenizer,
                messages,
                self._tools,
                mode=self.config.tokenization_sanity_check_mode,
                template_kwargs=self._tokens.template_kwargs,
                same_turn=lambda said, shown: same_turn(self._parse(said), self._parse(shown)),
            )
        except Exception as error:
            logger.exception("the sanity check of request %s failed", self.request_id)
            self.metrics.mismatch_reports.append(f"the check failed: {type(error).__name__}: {error}")
            self.metrics.num_mismatches += 1
            return
        if report is not None:
            logger.debug("the warning about inconsistent tokenization is about request %s", self.request_id)
            self.metrics.mismatch_reports.append(str(report))
            self.metrics.num_mismatches += 1


def _stop_ids(tokens: ContinuousTokens, parser: ToolParser | None) -> tuple[int, ...]:
    """Return the ids that end a turn: the template's, and those that the parser names as text."""
    ids = list(tokens.tokenizer.stop_token_ids)
    for token in () if parser is None else parser.stop_tokens:
        token_id = tokens.tokenizer.token_id(token)
        if token_id is None:
            name = parser.name if parser is not None else ""
            raise SessionInputError(
                f"the stop token of format {name!r} must be a token of the tokenizer, got {token!r}, which it does not have;"
                " choose the format that the model was trained with"
            )
        ids.append(token_id)
    return tuple(dict.fromkeys(ids))
