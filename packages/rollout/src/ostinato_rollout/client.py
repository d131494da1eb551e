"""One `generate` over many replicas: conversations with their places and deadlines, from their first turn to their release.

Invariants: a conversation has one turn under way at a time; however a call ends, its place is given back. Knows token ids, no
messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from ostinato_engines import AsyncServerBase, SamplingParams, StopReason, TokenOutput
from ostinato_rollout.activity import ClientActivity
from ostinato_rollout.attempts import Attempts
from ostinato_rollout.config import AdmissionConfig
from ostinato_rollout.conversation import Conversation, Stage
from ostinato_rollout.decision_log import DecisionLog
from ostinato_rollout.diagnostics import ago, log_dump, register
from ostinato_rollout.errors import NoReplicaError, RequestTimeoutError, SessionInputError
from ostinato_rollout.gate import Gate
from ostinato_rollout.generating import Generating
from ostinato_rollout.placement import Placement
from ostinato_rollout.releasing import end_conversation
from ostinato_rollout.routing import BalancedTokens, ReplicaPolicy

_RELEASE_TIMEOUT_S = 60.0
_MAX_NAMED = 4


class LLMServerClient:
    """Token ids in, token ids out, over replicas that serve one policy.

    A conversation's first turn goes to the replica whose conversations hold the least, later turns to the same one while it
    is in service and no other one holds far less. With admission, a new conversation waits, in order of arrival, while the
    replicas hold as many as their memory has room for. An aborted generation goes on from its last token, under whatever policy then serves,
    within its first budget. A replica that has failed for good is taken out, and its turns begin again elsewhere.

    Args:
        servers: The replicas, at least one; they get the ids 0, 1, ...
        seed: Decides between equally busy replicas.
        timeout_s: Longest time that one `generate` may take, all resumptions included, the wait for a place not.
        policy: How replicas are chosen; BalancedTokens(seed) unless given.
        admission: When new conversations wait for a place; None: never. Whoever lets them wait sees to it that those under
            way do not depend on those that wait: see `admit`.
        decision_log: Is told every choice of a replica.
        on_lost: Is told of a replica that has failed for good, and why.
        num_clients: Clients over the same replicas, this one included: each admits to its part of what they hold, so that
            together they hold no more. Give them seeds of their own, or they all begin at the same replica.
    """

    def __init__(
        self,
        servers: Sequence[AsyncServerBase],
        *,
        seed: int = 0,
        timeout_s: float = 600.0,
        policy: ReplicaPolicy | None = None,
        admission: AdmissionConfig | None = None,
        decision_log: DecisionLog | None = None,
        on_lost: Callable[[AsyncServerBase, BaseException], None] | None = None,
        num_clients: int = 1,
    ) -> None:
        if num_clients < 1:
            raise SessionInputError(f"num_clients must be at least 1, got {num_clients}; count this one as well")
        if not timeout_s > 0:
            raise SessionInputError(f"timeout_s must be positive, got {timeout_s}; give seconds")
        if not servers:
            raise NoReplicaError("servers must hold at least one replica, got none; start one first")
        self._timeout_s = timeout_s
        self._placement = Placement(
            BalancedTokens(seed) if policy is None else policy,
            AdmissionConfig(enable=False) if admission is None else admission,
            decision_log,
            num_clients=num_clients,
        )
        self._conversations = self._placement.conversations
        self._gate, self._attempts = Gate(), Attempts()
        self._generating = Generating(self._placement, self._gate, self._attempts, on_lost)
        self._ending: set[asyncio.Task[None]] = set()  # of conversations whose release was cancelled
        for server in servers:
            self.add_server(server)
        register(self)

    @property
    def servers(self) -> tuple[AsyncServerBase, ...]:
        """Replicas in service."""
        return tuple(self._placement.servers.values())

    @property
    def num_in_flight(self) -> dict[int, int]:
        """Generations under way by replica id; replicas in service only."""
        return dict(self._placement.in_flight)

    @property
    def num_sticky(self) -> int:
        """Conversations under way, waiting ones included; returns to zero when all are released."""
        return len(self._conversations)

    def replica_of(self, request_id: str) -> int | None:
        """Return the replica that serves a conversation now; None: it waits for a place, or is not under way."""
        conversation = self._conversations.get(request_id)
        return None if conversation is None else conversation.replica

    @property
    def admission_timeout_s(self) -> float:
        """Longest time that a conversation waits for its place."""
        return self._placement.admission.config.timeout_s

    @property
    def num_waiting(self) -> int:
        """Conversations that wait for a place."""
        return len(self._placement.admission.queue())

    def add_server(self, server: AsyncServerBase) -> int:
        """Put a replica into service; return its id, which is never used again."""
        return self._placement.add(server)

    def remove_server(self, server: AsyncServerBase, *, reason: str = "was removed", take_back: bool = False) -> None:
        """Take a replica out of service; its conversations move at their next turn. Unknown servers are no error.

        Args:
            server: The replica.
            reason: Completes `replica 0 ...` in errors.
            take_back: What is inside of it begins again elsewhere; else it may end there.
        """
        self._placement.remove(server, reason)
        if take_back:
            self._attempts.take_back(server)

    def take_back(self, server: AsyncServerBase) -> int:
        """Cancel the generations inside of a replica, which begin again, there or elsewhere; return how many those are."""
        return self._attempts.take_back(server)

    async def left(self, server: AsyncServerBase) -> None:
        """Wait until no generation is inside of a replica; the deadline is the caller's."""
        await self._attempts.left(server)

    def hold(self, reason: str) -> None:
        """Let turns and new conversations wait, each within its own deadline, until `proceed`.

        Args:
            reason: Completes `it waits, since ...` in errors.
        """
        self._gate.close(reason)
        self._placement.admission.hold()

    def proceed(self, why_none: str = "") -> None:
        """Let those go on who wait since `hold`.

        Args:
            why_none: What is told to those who find no replica in service; empty: what became of the last one.
        """
        self._placement.why_none = why_none
        self._gate.open()
        self._placement.admission.proceed()

    async def heard(self) -> None:
        """Wait until what it was told is so: at once."""

    def refresh_capacities(self) -> None:
        """Ask replicas again how much they hold; the pool does so when they have started."""
        self._placement.refresh()

    def activity(self) -> ClientActivity:
        """Return what every replica and conversation is doing now."""
        return self._placement.activity()

    async def admit(
        self, request_id: str, *, num_prompt_tokens: int, max_growth: int | None = None, group: str | None = None
    ) -> float:
        """Wait until a conversation may begin; `generate` does so itself for one that was not admitted.

        Args:
            request_id: The conversation; nothing happens if it is under way.
            num_prompt_tokens: Length of its first prompt.
            max_growth: Tokens that it may add over all its turns, as far as known.
            group: Conversations of one group belong together, for example those of one trajectory. Where one of them has
                a place, the others get theirs at once: they would wait for each other else.

        Returns:
            Seconds waited.

        Raises:
            RequestTimeoutError: There was no place within the deadline.
            NoReplicaError: No replica is in service.
        """
        if request_id in self._conversations:
            return 0.0
        began = time.monotonic()
        await self._admit(request_id, group, num_prompt_tokens, max_growth)
        return time.monotonic() - began

    async def _admit(
        self, request_id: str, group: str | None, num_prompt_tokens: int, max_growth: int | None
    ) -> Conversation:
        placement = self._placement
        conversation = placement.open(request_id, group, num_prompt_tokens=num_prompt_tokens, max_growth=max_growth)
        try:
            if placement.admission.must_wait(conversation):
                await self._wait_for_place(conversation)
                conversation.since = time.monotonic()
            else:
                placement.place(conversation)
        except BaseException:
            placement.close(conversation)
            raise
        conversation.stage = Stage.BETWEEN_TURNS
        return conversation

    async def _wait_for_place(self, conversation: Conversation) -> None:
        admission = self._placement.admission
        deadline = asyncio.timeout(admission.config.timeout_s)
        try:
            async with deadline:
                await admission.wait(conversation)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            held = "; ".join(replica.text() for replica in self._placement.activity().replicas[:_MAX_NAMED])
            raise self._overdue(
                f"request {conversation.request_id!r} must get a place within {admission.config.timeout_s:g} s, got none;"
                f" waited since {ago(conversation.since)}, last progress: a place was given"
                f" {ago(admission.last_admission)}; {self._gate.reason or held}; release conversations at their end,"
                " or raise admission.timeout_s"
            ) from error
        if conversation.is_released:
            raise conversation.released()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping,
        media: Sequence = (),
    ) -> TokenOutput:
        """Continue `prompt_ids`.

        Args:
            request_id: The conversation; keep it over its turns and call `release` at its end.
            prompt_ids: The whole context; copied only if a generation has to be resumed.
            sampling_params: `max_tokens` bounds the result over all resumptions; 0 returns at once.
            media: What the ids have places for; the replica refuses what it cannot take.

        Raises:
            RequestTimeoutError: The deadline passed.
            ReplicaError: The replica failed or broke its contract; its own error is the cause.
            NoReplicaError: No replica is in service.
            SessionStateError: A turn of this conversation is under way, or it was released meanwhile.
        """
        params = (
            sampling_params
            if isinstance(sampling_params, SamplingParams)
            else SamplingParams.from_mapping(sampling_params)
        )
        if params.max_tokens is not None and params.max_tokens <= 0:
            return TokenOutput(token_ids=[], logprobs=[] if params.logprobs else None, stop_reason=StopReason.LENGTH)
        conversation = self._conversations.get(request_id)
        if conversation is None:
            conversation = await self._admit(request_id, None, len(prompt_ids), params.max_tokens)
        deadline = asyncio.timeout(self._timeout_s)
        conversation.begin(deadline)
        began = conversation.since
        try:
            async with deadline:
                output = await self._generating.generate(conversation, prompt_ids, params, media)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            if conversation.is_released:
                raise conversation.released() from error
            held = f" ({self._gate.reason})" if conversation.stage is Stage.HELD else ""
            raise self._overdue(
                f"generate must finish within {self._timeout_s:g} s, got none for request {request_id!r};"
                f" it {conversation.stage}{held} on replica {conversation.replica} since {ago(conversation.since)},"
                f" began {ago(began)}, last progress: {conversation.num_partial} tokens after"
                f" {conversation.num_aborts} aborted attempts; look at that replica's health"
            ) from error
        finally:
            conversation.end()
        conversation.num_turns += 1
        self._placement.admission.grow(conversation, len(prompt_ids) + len(output.token_ids))
        return output

    async def release(self, request_id: str) -> None:
        """End a conversation: its turn under way is given up, its place is free, all replicas that served it free what they kept.

        What goes wrong at a replica is logged; unknown ids are no error.
        """
        conversation = self._conversations.get(request_id)
        if conversation is None or conversation.is_released:
            return
        conversation.is_released = True
        limit_s = min(self._timeout_s, _RELEASE_TIMEOUT_S)
        if conversation.replica is None:
            self._placement.admission.refuse(conversation, conversation.released())
        try:
            await end_conversation(conversation, self._placement, limit_s)
        except asyncio.CancelledError:
            # Its replicas are told all the same.
            ending = asyncio.ensure_future(end_conversation(conversation, self._placement, limit_s))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise
        finally:
            self._placement.close(conversation)

    def _overdue(self, message: str) -> RequestTimeoutError:
        """Build the error of a wait that has passed its deadline, and log what everybody is doing."""
        log_dump(message)
        return RequestTimeoutError(message)
