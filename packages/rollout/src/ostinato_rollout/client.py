"""One `generate` over many replicas: routing, counting, deadlines, and the resumption of aborted generations.

Invariants: a replica's counter is raised exactly while a call of ours is inside that replica, and belongs to one
incarnation of it; what a resumed generation returns never exceeds what was asked for. Knows token ids, no messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from ostinato_engines import AsyncServerBase, PolicySpan, SamplingParams, StopReason, TokenOutput, as_token_output
from ostinato_rollout.errors import NoReplicaError, ReplicaError, RequestTimeoutError, RolloutError, SessionInputError
from ostinato_rollout.routing import LeastInFlight, ReplicaPolicy
from ostinato_rollout.seeds import derive_seed

logger = logging.getLogger(__name__)

_MAX_STICKY = 100_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5


class LLMServerClient:
    """Token ids in, token ids out, over replicas that serve one policy.

    A conversation's first turn goes to the replica with the least under way, later turns to the same one while it is in
    service. An aborted generation goes on from its last token, under whatever policy then serves, within its first budget.

    Args:
        servers: The replicas, at least one; they get the ids 0, 1, ...
        seed: Decides between equally busy replicas.
        timeout_s: Longest time that one `generate` may take, all resumptions included.
        policy: How replicas are chosen; LeastInFlight(seed) unless given.
    """

    def __init__(
        self,
        servers: Sequence[AsyncServerBase],
        *,
        seed: int = 0,
        timeout_s: float = 600.0,
        policy: ReplicaPolicy | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise SessionInputError(f"timeout_s must be positive, got {timeout_s}; give seconds")
        self._timeout_s = timeout_s
        self._policy = policy or LeastInFlight(seed)
        self._servers: dict[int, AsyncServerBase] = {}
        self._in_flight: dict[int, int] = {}
        self._sticky: OrderedDict[str, int] = OrderedDict()
        self._next_id = 0
        for server in servers:
            self.add_server(server)
        if not self._servers:
            raise NoReplicaError("servers must hold at least one replica, got none; start one first")

    @property
    def num_in_flight(self) -> dict[int, int]:
        """Generations under way by replica id; replicas in service only."""
        return dict(self._in_flight)

    @property
    def num_sticky(self) -> int:
        """Conversations that have a place; returns to zero when all are released."""
        return len(self._sticky)

    def add_server(self, server: AsyncServerBase) -> int:
        """Put a replica into service; return its id, which is never used again."""
        replica = self._next_id
        self._next_id += 1
        self._servers[replica] = server
        self._in_flight[replica] = 0
        return replica

    def remove_server(self, server: AsyncServerBase) -> None:
        """Take a replica out of service; its conversations move at their next turn. Unknown servers are no error."""
        for replica in [replica for replica, known in self._servers.items() if known is server]:
            del self._servers[replica]
            del self._in_flight[replica]

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
        """
        params = (
            sampling_params
            if isinstance(sampling_params, SamplingParams)
            else SamplingParams.from_mapping(sampling_params)
        )
        if params.max_tokens is not None and params.max_tokens <= 0:
            return TokenOutput(token_ids=[], logprobs=[] if params.logprobs else None, stop_reason=StopReason.LENGTH)
        attempts = _Attempts(params.max_tokens)
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._until_done(request_id, prompt_ids, params, media, attempts)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RequestTimeoutError(
                f"generate must finish within {self._timeout_s:g} s, got none for request {request_id!r};"
                f" waited for replica {attempts.replica} since {attempts.started}, last progress:"
                f" {len(attempts.token_ids)} tokens after {attempts.number} aborted attempts; look at that replica's health"
            ) from error

    async def _until_done(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence, attempts: _Attempts
    ) -> TokenOutput:
        """Call replicas until a generation ends otherwise than by an abort."""
        prompt, current, pause_s = prompt_ids, params, 0.0
        while True:
            output = await self._call(request_id, prompt, current, media, attempts)
            if output is not None:
                if output.stop_reason is not StopReason.ABORTED and not attempts.number:
                    return output
                attempts.add(output)
                if output.stop_reason is not StopReason.ABORTED:
                    return attempts.merged(output)
                pause_s = 0.0 if output.token_ids else min(max(pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            attempts.number += 1
            left = attempts.left()
            if left == 0:
                return attempts.merged(
                    msgspec.structs.replace(output, stop_reason=StopReason.LENGTH) if output else None
                )
            prompt = [*prompt_ids, *attempts.token_ids]
            seed = None if params.seed is None else derive_seed(params.seed, attempts.number)
            current = msgspec.structs.replace(params, max_tokens=left, seed=seed)
            await asyncio.sleep(pause_s)

    async def _call(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, media: Sequence, attempts: _Attempts
    ) -> TokenOutput | None:
        """Call one replica, counted. None: the replica failed because it was taken out of service; try another."""
        replica = self._choose(request_id)
        server = self._servers[replica]
        attempts.goes_to(replica)
        self._in_flight[replica] += 1
        try:
            raw = await server.generate(prompt, params, request_id, media)
        except RolloutError:
            raise
        except Exception as error:
            if replica not in self._servers:
                logger.warning("replica %d failed after it was taken out of service: %s", replica, error)
                return None
            raise ReplicaError(
                f"replica {replica} failed to generate for request {request_id!r}: {type(error).__name__}: {error}",
                replica=replica,
            ) from error
        finally:
            if replica in self._in_flight:
                self._in_flight[replica] -= 1
        output = as_token_output(raw)
        _check_output(output, params, replica)
        return output

    def _choose(self, request_id: str) -> int:
        """Pick a replica and remember it for the conversation."""
        if not self._servers:
            raise NoReplicaError(
                f"at least one replica must be in service for request {request_id!r}, got none; restart one"
            )
        previous = self._sticky.get(request_id)
        if previous is not None and previous not in self._servers:
            previous = None
        replica = self._policy.choose(request_id, self._in_flight, previous)
        if replica not in self._servers:
            raise ReplicaError(f"the policy must choose one of {sorted(self._servers)}, got {replica!r}; correct it")
        if replica != previous:
            self._sticky[request_id] = replica
            if len(self._sticky) > _MAX_STICKY:
                self._sticky.popitem(last=False)
        return replica

    async def release(self, request_id: str) -> None:
        """End a conversation: forget its place, and let its replica free what it kept. Unknown ids are no error."""
        replica = self._sticky.pop(request_id, None)
        server = None if replica is None else self._servers.get(replica)
        if server is None:
            return
        try:
            await server.release(request_id)
        except Exception as error:
            logger.warning(
                "replica %s failed to release request %s: %s: %s", replica, request_id, type(error).__name__, error
            )


class _Attempts:
    """What the aborted parts of one generation have brought so far."""

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = []
        self.spans: list[PolicySpan] = []
        self.num_cached: int | None = None
        self.num_preempted = 0
        self.number = 0
        self.replica = -1
        self._since = time.time()

    def goes_to(self, replica: int) -> None:
        self.replica, self._since = replica, time.time()

    @property
    def started(self) -> str:
        return f"{time.strftime('%H:%M:%S', time.localtime(self._since))} ({time.time() - self._since:.1f} s)"

    def left(self) -> int | None:
        """Tokens that may still be sampled; None: as many as there is room for."""
        return None if self.max_tokens is None else self.max_tokens - len(self.token_ids)

    def add(self, output: TokenOutput) -> None:
        if output.num_cached_tokens is not None and self.num_cached is None:
            self.num_cached = output.num_cached_tokens
        self.num_preempted += output.num_preempted
        if not output.token_ids:
            return
        offset = len(self.token_ids)
        for span in output.policy_versions:
            last = self.spans[-1] if self.spans else None
            if last is None or (last.version, last.exact) != (span.version, span.exact):
                self.spans.append(PolicySpan(span.start + offset, span.version, span.exact))
        self.token_ids.extend(output.token_ids)
        if output.logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs.extend(output.logprobs)

    def merged(self, last: TokenOutput | None) -> TokenOutput:
        """Return everything as one output that ended as `last` did (LENGTH without one)."""
        return TokenOutput(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            stop_reason=StopReason.LENGTH if last is None else last.stop_reason,
            stop_token_id=None if last is None else last.stop_token_id,
            policy_versions=tuple(self.spans) or (PolicySpan(0, 0) if last is None else last.policy_versions[0],),
            num_cached_tokens=self.num_cached,
            num_preempted=self.num_preempted,
        )


def _check_output(output: TokenOutput, params: SamplingParams, replica: int) -> None:
    """Raise ReplicaError where an answer breaks the contract that everything above relies on."""
    num = len(output.token_ids)
    if params.max_tokens is not None and num > params.max_tokens:
        raise ReplicaError(
            f"token_ids must hold at most max_tokens ({params.max_tokens}), got {num} from replica {replica}; correct that server",
            replica=replica,
        )
    if output.logprobs is not None and len(output.logprobs) != num:
        raise ReplicaError(
            f"logprobs must be as long as token_ids ({num}), got {len(output.logprobs)} from replica {replica};"
            " correct that server or let it report None",
            replica=replica,
        )
