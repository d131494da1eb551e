"""From a chat request to its answer: conversations, generations, and the choices that they give.

Invariant: `n` samples of a prompt are `n` conversations with the same prompt. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid

import msgspec

from ostinato_engines import EngineInputError, SamplingParams
from ostinato_rollout.openai_app.answers import Answer, Choice, finish_reason, visible_message
from ostinato_rollout.openai_app.conversations import SessionStore
from ostinato_rollout.openai_app.errors import ApiError
from ostinato_rollout.openai_app.request import ChatRequest
from ostinato_rollout.seeds import derive_seed
from ostinato_tokenization import TokenizationError, TokenLedger


async def answer_request(
    request: ChatRequest, store: SessionStore, *, session: str | None, model: str, logprobs_known: bool
) -> Answer:
    """Sample what a request asks for.

    Args:
        request: What is asked.
        store: Where its conversation is, or will be.
        session: The name of the session that it belongs to.
        model: The name that the answer bears.
        logprobs_known: Whether the engine gives logprobs.

    Raises:
        ApiError: The request asks for logprobs that the engine does not give.
        RolloutError: What sessions and engines raise.
    """
    if request.logprobs and not logprobs_known:
        raise _no_logprobs()
    # What a trainer takes needs them, and what nobody takes is cheaper without.
    wanted = logprobs_known and (request.logprobs or session is not None)
    params = msgspec.structs.replace(request.params, logprobs=wanted)
    if request.n == 1:
        choices = [await _sample(request, store, session, params, anew=False)]
    else:
        store.check_room(session, request.n)  # a request that is refused has sampled nothing
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_sample(request, store, session, _with_seed(params, index), anew=True))
                    for index in range(request.n)
                ]
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
            raise first from first.__cause__  # as it would be with one sample
        choices = [task.result() for task in tasks]
    return Answer(id=f"chatcmpl-{uuid.uuid4().hex}", created=int(time.time()), model=model, choices=choices)


async def _sample(
    request: ChatRequest, store: SessionStore, session: str | None, params: SamplingParams, *, anew: bool
) -> Choice:
    async with store.conversation(session, request.messages, request.tools, anew=anew) as conversation:
        chat = conversation.chat
        ledger = chat.ledger
        assert ledger is not None  # it was extended
        prompt_ids, num_cached = ledger.snapshot(), chat.metrics.num_cached_tokens
        goes_on = ledger.num_sampled > 0
        try:
            reply = await chat.generate(params)
        except (TokenizationError, EngineInputError) as error:
            # What an engine refuses is a ReplicaError: this is about what it answered.
            raise ApiError(f"the engine failed: {error}", status=502, code="engine_error") from error
        message, errors = visible_message(reply, calls_allowed=request.calls_allowed)
        if reply.num_tokens:
            conversation.answer(message)
        token_ids = ledger.tail_ids(reply.num_tokens)
        return Choice(
            message=message,
            errors=errors,
            finish_reason=finish_reason(reply, message),
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=_last_logprobs(ledger, len(token_ids)) if request.logprobs else None,
            num_cached=chat.metrics.num_cached_tokens - num_cached,
            request_id=chat.request_id,
            goes_on=goes_on,
        )


def _last_logprobs(ledger: TokenLedger, num_tokens: int) -> list[float]:
    """Return those of the last turn, or raise where the engine did not give them after all."""
    logprobs = ledger.response_logprobs if num_tokens else []
    last = [] if logprobs is None else logprobs[len(logprobs) - num_tokens :]
    if len(last) != num_tokens or any(map(math.isnan, last)):
        raise _no_logprobs()
    return last


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    """Give each sample of a prompt a seed of its own, the first one that of the request."""
    if params.seed is None or not index:
        return params
    return msgspec.structs.replace(params, seed=derive_seed(params.seed, index))


def _no_logprobs() -> ApiError:
    return ApiError(
        "logprobs must be left out, got true; this server's engine gives none",
        param="logprobs",
        code="unsupported_field",
    )
