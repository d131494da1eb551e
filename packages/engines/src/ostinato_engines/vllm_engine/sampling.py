"""Our sampling parameters in vLLM's words.

vLLM applies repetition_penalty, temperature, min_p, top_k, top_p in this order, raises temperatures below 0.01, and takes
those below 1e-5 for greedy. Where that is not what our parameters mean, the request goes through `exact_filters`, so that
what is sampled, and its logprob, are exact for every request.
"""

from typing import Any

from ostinato_engines.types import SamplingParams
from ostinato_engines.vllm_engine.held import HOLD_KEY
from ostinato_engines.vllm_engine.probe import VLLMParts

FILTERS = f"{__package__}.exact_filters:ExactFilters"
"""The logits processor that vLLM is given for such requests."""
SEEDS = f"{__package__}.seeded_draw:RowSeeds"
"""The one that follows the seeds of the requests."""
OUR_PROCESSORS = (FILTERS, SEEDS)
FILTERS_KEY = "ostinato_filters"
"""In vLLM's extra_args: [temperature, top_k, top_p, min_p] for `exact_filters`."""
_LOWEST_TEMPERATURE = 0.01


def needs_exact_filters(params: SamplingParams) -> bool:
    """Whether vLLM's own order or limits would give another distribution."""
    if params.temperature == 0:
        return False
    return params.temperature < _LOWEST_TEMPERATURE or (params.min_p > 0 and params.top_p < 1)


def to_vllm(params: SamplingParams, *, max_tokens: int, parts: VLLMParts, hold: str | None = None) -> Any:
    """One vLLM `SamplingParams`: final output only, no text, no end of text but the request's own stop ids.

    Args:
        params: Ours.
        max_tokens: That there is room for.
        parts: Of vLLM.
        hold: Its name, where the engine core is to keep its outputs until it ends.
    """
    extra: dict[str, Any] = {} if hold is None else {HOLD_KEY: hold}
    filters: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
    }
    if needs_exact_filters(params):
        own = [float(params.temperature), max(params.top_k, 0), float(params.top_p), float(params.min_p)]
        filters = {"temperature": 1.0}
        extra[FILTERS_KEY] = own
    if extra:
        filters["extra_args"] = extra
    return parts.sampling_params(
        **filters,
        repetition_penalty=params.repetition_penalty,
        max_tokens=max_tokens,
        stop_token_ids=list(params.stop_token_ids),
        seed=params.seed,
        logprobs=0 if params.logprobs else None,
        flat_logprobs=True,
        output_kind=parts.final_only,
        ignore_eos=True,
        detokenize=False,
    )
