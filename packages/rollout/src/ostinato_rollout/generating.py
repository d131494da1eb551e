"""The generation of one turn: replicas are called, one after the other, until one of them has ended it.

Invariants: what a resumed generation returns never exceeds what was asked for; however a call ends, its counter is given back.
Knows no deadline: that is its caller's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ostinato_engines import AsyncServerBase, EngineNotReadyError, SamplingParams, StopReason, TokenOutput
from ostinato_rollout.attempts import Attempts
from ostinato_rollout.contract import checked_output
from ostinato_rollout.conversation import Conversation, Stage, num_cancellations
from ostinato_rollout.errors import ReplicaError, RolloutError
from ostinato_rollout.gate import Gate
from ostinato_rollout.placement import Placement
from ostinato_rollout.replica_calls import is_gone, leave
from ostinato_rollout.resumption import PartialGeneration

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5


class Generating:
    """The generations of one client.

    Args:
        placement: Chooses the replica of each call; one that has failed for good is removed from it.
        gate: Calls begin while it is open.
        attempts: Lists the calls that are under way; one that is taken back begins again.
        on_lost: Is told of a replica that has failed for good, and why.
    """

    def __init__(
        self,
        placement: Placement,
        gate: Gate,
        attempts: Attempts,
        on_lost: Callable[[AsyncServerBase, BaseException], None] | None,
    ) -> None:
        self._placement, self._gate, self._attempts = placement, gate, attempts
        self._on_lost = on_lost

    async def generate(
        self, conversation: Conversation, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence
    ) -> TokenOutput:
        """Continue `prompt_ids` in the turn that is under way; see `LLMServerClient.generate` for what is raised."""
        output = await self._call(conversation, prompt_ids, params, media)
        if output is None or output.stop_reason is StopReason.ABORTED:
            output = await self._resume(conversation, prompt_ids, params, media, output)
        return output

    async def _resume(
        self,
        conversation: Conversation,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        media: Sequence,
        output: TokenOutput | None,
    ) -> TokenOutput:
        """Call replicas until a generation ends otherwise than by an abort; `output` is the first attempt's."""
        partial = PartialGeneration(prompt_ids, params)
        pause_s, version, number = 0.0, 0, 0
        while True:
            if output is not None:
                partial.add(output)
                version = output.policy_versions[0].version
                if output.stop_reason is not StopReason.ABORTED:
                    return partial.merged(output.stop_reason, output.stop_token_id, version)
                if partial.is_full:
                    return partial.merged(StopReason.LENGTH, None, version)
                # Whoever aborts without a token in between gets less and less to abort.
                pause_s = 0.0 if output.token_ids else min(max(pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            number += 1
            prompt, rest = partial.rest(number)
            conversation.num_aborts, conversation.num_partial = number, len(partial)
            conversation.enter(Stage.PAUSED)
            await asyncio.sleep(pause_s)
            conversation.enter(Stage.GENERATING)
            output = await self._call(conversation, prompt, rest, media)

    async def _call(
        self, conversation: Conversation, prompt: Sequence[int], params: SamplingParams, media: Sequence
    ) -> TokenOutput | None:
        """Call one replica, counted. None: the replica failed for good or was taken out of service; try another."""
        placement = self._placement
        if not self._gate.is_open:
            await self._pass(conversation)
        previous, replica = conversation.replica, placement.enter(conversation)
        server, num_closings = placement.servers[replica], self._gate.num_closings
        attempt = None
        try:
            with self._attempts.at(server) as attempt:
                async with attempt:
                    if placement.is_left(previous, conversation):
                        await leave(previous, placement.servers[previous], conversation)
                        conversation.check_goes_on()
                    raw = await server.generate(prompt, params, conversation.request_id, media)
        except Exception as error:
            conversation.check_goes_on()
            if self._begins_again(attempt, error, num_closings) or await self._is_lost(replica, server, error):
                conversation.check_goes_on()
                return None
            if isinstance(error, RolloutError):
                raise
            raise ReplicaError(
                f"replica {replica} failed to generate for request {conversation.request_id!r}:"
                f" {type(error).__name__}: {error}",
                replica=replica,
            ) from error
        except asyncio.CancelledError as error:
            if num_cancellations():
                raise
            raise ReplicaError(
                f"replica {replica} must not cancel itself, got CancelledError for request {conversation.request_id!r};"
                " see its log",
                replica=replica,
            ) from error
        finally:
            placement.exit(replica)
        conversation.check_goes_on()
        return checked_output(raw, params, replica)

    async def _pass(self, conversation: Conversation) -> None:
        """Wait before the gate, in the turn's deadline."""
        conversation.enter(Stage.HELD)
        await self._gate.passed()
        conversation.check_goes_on()
        conversation.enter(Stage.GENERATING)

    def _begins_again(self, attempt: asyncio.Timeout | None, error: Exception, num_closings: int) -> bool:
        """Tell whether an attempt failed because it was taken back, or because its replica was given new weights meanwhile.

        Args:
            attempt: Its scope; None where it had not begun.
            error: What it failed with.
            num_closings: Of the gate when it began.
        """
        if attempt is not None and attempt.expired():
            return True
        was_held = not self._gate.is_open or self._gate.num_closings > num_closings
        return isinstance(error, EngineNotReadyError) and was_held

    async def _is_lost(self, replica: int, server: AsyncServerBase, error: Exception) -> bool:
        """Tell whether a replica that failed to generate is out of service; take it out if it has failed for good."""
        if replica in self._placement.servers:
            if not await is_gone(replica, server):
                return False
            if replica in self._placement.servers:
                if self._on_lost is not None:
                    self._on_lost(server, error)
                self._placement.remove(server, f"failed: {type(error).__name__}: {error}")
        logger.warning("replica %d failed and is out of service: %s: %s", replica, type(error).__name__, error)
        return True
