"""One conversation with a policy, exact to the token.

Invariants: every sampled token stands in exactly one ledger, once, in the order in which it was sampled; a call that
raises leaves ledgers and history as they were; no ledger outgrows the budget. Agent programs see messages, never ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from ostinato_engines import SamplingParams, StopReason, TokenOutput
from ostinato_rollout.activity import SessionActivity
from ostinato_rollout.client import LLMServerClient
from ostinato_rollout.config import SessionConfig
from ostinato_rollout.diagnostics import discard, register
from ostinato_rollout.errors import SessionStateError
from ostinato_rollout.seeds import derive_seed
from ostinato_rollout.segments import Segments
from ostinato_rollout.tracing.trajectory_trace import GenerationTrace, TrajectoryTrace
from ostinato_rollout.turn_reader import TurnReader
from ostinato_rollout.turns import assistant_message, checked_messages, empty_reply, num_characters
from ostinato_rollout.types import Reply, SessionBudget, SessionMetrics
from ostinato_tokenization import ContinuousTokens, SanityCheckMode, TokenLedger, check_ledger
from ostinato_tools import ToolParser

logger = logging.getLogger(__name__)

MANY_CHARACTERS = 100_000
"""Text that is tokenized in a thread: on the event loop it would hold up all conversations for 25 to 120 ms, and eight megabytes for
seconds."""


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
        group: Sessions of one group belong together, as those of one trajectory do: where one is under way, the others
            need not wait for a place. None: it is alone.
        waiting: Entered while the conversation waits for a place: whoever keeps a clock may stop it.
        call_id_prefix: What the ids of its calls begin with, but for those that the model writes itself. Conversations of
            which one may hold what another one said need different ones.
        number: Its place among the conversations of its group: with the same seed, each of them samples differently.
        trace: Records its generations; None: nobody does.

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
        group: str | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        call_id_prefix: str = "call_",
        number: int = 0,
        trace: TrajectoryTrace | None = None,
    ) -> None:
        self.request_id = request_id if request_id is not None else uuid.uuid4().hex
        self.config = config
        self.messages: list[dict] = []
        """The conversation so far, in OpenAI form; read it, do not write it."""
        self.num_turns = 0
        """Turns so far, recorded ones of the policy and those of others: messages that come together count as one, the prompt too."""
        self.metrics = SessionMetrics()
        """What the conversation cost; complete after `close`."""
        self.inexact_versions: set[int] = set()
        """Policy versions whose spans an engine reported as approximate."""
        self._client, self._tokens = client, tokens
        self._tools = list(tools) if tools else None
        self._reader = TurnReader(
            tokens.tokenizer,
            parser,
            self._tools,
            call_id_prefix=call_id_prefix,
            generation_prompt_ids=tokens.generation_prompt_ids,
        )
        self._segments = Segments(tokens, self._tools, budget, rerender=config.use_inference_chat_template)
        self._unanswered = 0  # messages at the end that no turn has answered yet
        self._number, self._turn = number, 0
        self._group, self._waiting = group, waiting
        self._trace = None if trace is None else trace.session(self.request_id)
        self._is_admitted = self._busy = self._closed = False
        self._doing, self._since = "was opened", time.monotonic()
        register(self)

    @property
    def budget(self) -> SessionBudget:
        """How long the conversation may get; who shares it among several may set it between turns."""
        return self._segments.budget

    @budget.setter
    def budget(self, budget: SessionBudget) -> None:
        self._segments.budget = budget

    @property
    def room(self) -> int:
        """Response tokens left, sampled or not."""
        return self._segments.room

    @property
    def num_response_tokens(self) -> int:
        """Length of the response so far, sampled or not, over all segments."""
        return self._segments.num_response_tokens

    @property
    def ledger(self) -> TokenLedger | None:
        """The segment that grows now, to be read, not written; None before the first `extend`."""
        return self._segments.ledger

    @property
    def segments(self) -> tuple[TokenLedger, ...]:
        """Ledgers in which something was sampled, in order; the first prompt's if nothing was."""
        everything = [ledger for ledger, _ in self._segments.with_lengths(len(self.messages))]
        return tuple(ledger for ledger in everything if ledger.num_sampled) or tuple(everything[:1])

    async def extend(self, messages: Sequence[dict]) -> None:
        """Append messages and the generation prompt; the first call sets the prompt.

        Raises:
            BudgetExceededError: They do not fit, or would leave no room to answer them. A first prompt that fills the
                context to the last token is accepted: the turn after it is empty.
            SessionInputError: No messages, or something that is no message.
            SessionStateError: The session is closed or generating, or was closed meanwhile.
        """
        self._check_free("extend")
        new = checked_messages(messages)
        shown = [*self.messages, *new] if self.config.use_inference_chat_template else new
        if num_characters(shown) < MANY_CHARACTERS:
            self._segments.extend(self.messages, new, num_unanswered=self._unanswered)
        else:
            self._segments = await self._extended_in_thread(new)
        self.messages.extend(new)
        self.num_turns += not self._unanswered
        self._unanswered += len(new)

    async def _extended_in_thread(self, new: list[dict]) -> Segments:
        """The segments with more messages; those of the session stay as they are, whatever becomes of the caller."""
        segments, messages = self._segments.fork(), list(self.messages)
        self._busy = True
        self._enter("tokenizes a long text")
        try:
            await asyncio.to_thread(segments.extend, messages, new, num_unanswered=self._unanswered)
        finally:
            self._busy = False
            self._enter("is between turns")
        if self._closed:
            raise SessionStateError(
                "extend must end before close, got a session that was closed meanwhile; open another one"
            )
        return segments

    async def generate(self, sampling_params: SamplingParams) -> Reply:
        """Sample one turn, record it, and append it to the history.

        `max_tokens` is lowered to `room` and to the budget of a turn; with no room the reply is empty with reason LENGTH,
        and no replica is asked. The first turn waits for a place on a replica, apart from the time that generating takes.
        A seed makes the whole conversation reproducible: turn k > 0 samples with a seed derived from it and k.
        An empty turn is not recorded, and leaves the conversation waiting for `generate` or more messages.

        Raises:
            SessionStateError: There is nothing to answer, or the session is closed or generating.
            RolloutError: What the client raises; the session is as before and may try again.
        """
        self._check_free("generate")
        ledger = self._segments.ledger
        if ledger is None or not self._unanswered:
            raise SessionStateError(
                "generate must follow extend, got no new message to answer; extend the session first"
            )
        limit = self.budget.turn_limit(self.room, sampling_params.max_tokens)
        if limit <= 0:
            return empty_reply(StopReason.LENGTH)
        params = self._params(sampling_params, limit)
        prompt = ledger.snapshot()
        if self._trace is None:
            return await self._take_turn(prompt, params)
        asked, segment = self.messages[-self._unanswered :], self._segments.num_finished
        with self._trace.generation(prompt, asked, params, turn=self._turn, segment=segment) as trace:
            return await self._take_turn(prompt, params, trace)

    async def _take_turn(
        self, prompt: Sequence[int], params: SamplingParams, trace: GenerationTrace | None = None
    ) -> Reply:
        """Have a turn generated, and record it."""
        self._busy = True
        try:
            output = await self._sample(prompt, params)
        finally:
            self._busy = False
            self._enter("is between turns")
            if trace is not None:
                trace.replica = self._client.replica_of(self.request_id)
        self._count(output)
        if trace is not None:
            trace.sampled(output, admission_s=self.metrics.admission_s if self.metrics.num_generations == 1 else 0.0)
        if not output.token_ids:
            return empty_reply(output.stop_reason)
        reply = self._record(output, in_reasoning=self._reader.opens_reasoning(prompt))
        if trace is not None:
            trace.read(reply)
        return reply

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> TokenOutput:
        """Have a turn generated, and measure the waits."""
        if not self._is_admitted:
            self._enter("waits for a place")
            with self._waiting():
                self.metrics.admission_s += await self._client.admit(
                    self.request_id, num_prompt_tokens=len(prompt), max_growth=self.room, group=self._group
                )
            self._is_admitted = True
        self._enter("generates")
        began = self._since
        try:
            return await self._client.generate(self.request_id, prompt, params)
        finally:
            self.metrics.generate_s += time.monotonic() - began

    async def close(self) -> None:
        """End the conversation: free the replica's place, drop messages that nothing answered, run the sanity check.

        A turn under way in another task is given up first. The check's result is in `metrics`; it never raises. Closing again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._enter("is being closed")
        try:
            await self._client.release(self.request_id)
        finally:
            try:
                await self._finish()
            finally:
                discard(self)

    async def _finish(self) -> None:
        """Drop what nothing answered, and check what is left."""
        num_messages = len(self.messages)
        if self._unanswered and self._segments.drop_unanswered():
            num_messages -= self._unanswered
        if self.config.tokenization_sanity_check_mode is not SanityCheckMode.DISABLE:
            for ledger, count in self._segments.with_lengths(num_messages):
                if ledger.num_sampled:
                    messages = self.messages if count == len(self.messages) else self.messages[:count]
                    if num_characters(messages) < MANY_CHARACTERS:
                        self._check(ledger, messages)
                    else:
                        await asyncio.to_thread(self._check, ledger, messages)

    def activity(self) -> SessionActivity:
        """Return what the conversation is doing now."""
        return SessionActivity(
            request_id=self.request_id,
            doing=self._doing,
            since_s=time.monotonic() - self._since,
            num_messages=len(self.messages),
            num_tokens=self._segments.length,
            room=self.room,
        )

    def _enter(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()

    async def __aenter__(self) -> ChatSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _check_free(self, what: str) -> None:
        if self._closed:
            raise SessionStateError(f"{what} must come before close, got a closed session; open another one")
        if self._busy:
            raise SessionStateError(f"{what} must wait for the turn under way, got a busy session; await its generate")

    def _params(self, given: SamplingParams, limit: int) -> SamplingParams:
        """Complete what the caller gave: bound, stop tokens, and this turn's seed."""
        stops = self._reader.stop_ids
        if given.stop_token_ids:
            stops = tuple(dict.fromkeys((*given.stop_token_ids, *stops)))
        seed = given.seed
        if seed is not None and self._number:
            seed = derive_seed(seed, self._number, 0)
        if seed is not None and self._turn:
            seed = derive_seed(seed, self._turn)
        return msgspec.structs.replace(given, max_tokens=limit, stop_token_ids=stops, seed=seed)

    def _count(self, output: TokenOutput) -> None:
        self.metrics.num_generations += 1
        self.metrics.num_sampled_tokens += len(output.token_ids)
        self.metrics.num_cached_tokens += output.num_cached_tokens or 0
        self.metrics.num_preempted += output.num_preempted

    def _record(self, output: TokenOutput, *, in_reasoning: bool) -> Reply:
        """Read a turn, then put it into the ledger and the history: a parser that raises has changed neither."""
        text = self._reader.text(output.token_ids)
        parsed = self._reader.parse(text, turn=self._turn, in_reasoning=in_reasoning)
        self._segments.record(output)
        self.inexact_versions.update(span.version for span in output.policy_versions if not span.exact)
        message = assistant_message(parsed, text)
        self.messages.append(message)
        self._unanswered = 0
        self.num_turns += 1
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
                same_turn=self._reader.same_turn,
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
