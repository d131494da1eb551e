"""Requests and replies of SGLang's native endpoints, as far as they matter here. Unknown fields of replies are left alone."""

from typing import Any

import msgspec

from ostinato_engines.errors import SamplingParamsError
from ostinato_engines.types import SamplingParams

LOWEST_TEMPERATURE = 1e-6
"""SGLang takes what is below for greedy. At this one, too, everything but the most probable token is out of reach."""
HIGHEST_PENALTY = 2.0


class FinishReason(msgspec.Struct, frozen=True):
    """Why a generation ended there: "stop", "length" or "abort"."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    """What is told of a generation beside its tokens."""

    finish_reason: FinishReason
    cached_tokens: int | None = None
    """Absent where a request was aborted before it was begun."""
    num_retractions: int = 0
    output_token_logprobs: list[tuple[float, int, Any]] = []
    """Logprob, token id and, where it was asked for, text."""


class Generated(msgspec.Struct, frozen=True):
    """The answer to `/generate` for one prompt."""

    output_ids: list[int]
    meta_info: MetaInfo


class ModelInfo(msgspec.Struct, frozen=True):
    """The answer to `/model_info`."""

    model_path: str
    is_generation: bool = True


class ServerInfo(msgspec.Struct, frozen=True):
    """The answer to `/server_info`: SGLang's arguments as they are in effect, and what came of them."""

    version: str
    max_req_input_len: int
    max_total_num_tokens: int
    sampling_backend: str | None = None
    page_size: int | None = None
    disable_radix_cache: bool = False
    enable_memory_saver: bool = False
    skip_tokenizer_init: bool = False


class Updated(msgspec.Struct, frozen=True):
    """The answer to the endpoints that update weights."""

    success: bool
    message: str = ""


def sampling_body(params: SamplingParams, *, max_new_tokens: int, seed: int, vocab_size: int) -> dict[str, Any]:
    """SGLang's `sampling_params` for one request.

    Raises:
        SamplingParamsError: A penalty that SGLang does not take.
    """
    if params.repetition_penalty > HIGHEST_PENALTY:
        raise SamplingParamsError(
            f"repetition_penalty must be at most {HIGHEST_PENALTY:g} for sglang, got {params.repetition_penalty}; lower it"
        )
    greedy = is_greedy(params)
    stops = [token_id for token_id in params.stop_token_ids if token_id < vocab_size]
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": 0.0 if greedy else max(params.temperature, LOWEST_TEMPERATURE),
        "top_p": 1.0 if greedy else params.top_p,
        "top_k": params.top_k if 0 < params.top_k < vocab_size and not greedy else -1,
        "min_p": 0.0 if greedy else params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "sampling_seed": seed,
        "stop_token_ids": stops,
        "ignore_eos": not stops,
        "skip_special_tokens": False,
    }


def is_greedy(params: SamplingParams) -> bool:
    """Whether there is nothing to draw."""
    return params.temperature == 0 or params.top_k == 1


def is_only_choice(params: SamplingParams) -> bool:
    """Whether each token was the only one that was left, so that its logprob is 0."""
    return params.top_k == 1 and params.temperature > 0
