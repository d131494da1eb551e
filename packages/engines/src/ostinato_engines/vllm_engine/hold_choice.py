"""Whether an engine can keep outputs until requests end, and how it is told to: a scheduler of ours in vLLM's configuration."""

from importlib import import_module
from typing import Any

_PACKAGE = __package__
_OURS = {"Scheduler": "HoldingScheduler", "AsyncScheduler": "AsyncHoldingScheduler"}
"""Which of our schedulers does what one of vLLM's does, and holds."""
_MODULES = {
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler",
}
_NEEDED_METHODS = ("add_request", "finish_requests", "update_from_output")
_NEEDED_FIELDS = ("finish_reason", "kv_transfer_params", "new_logprobs", "new_token_ids", "prefill_stats", "request_id")


def hold_outputs(config: Any) -> str:
    """Lets the engine of this VllmConfig hold outputs.

    Returns:
        Why it cannot; empty where it will.
    """
    if config.parallel_config.data_parallel_size > 1:
        return "there are several engine cores (data_parallel_size)"
    chosen = config.scheduler_config.get_scheduler_cls()
    try:
        known = {name: getattr(import_module(module), name) for name, module in _MODULES.items()}
        fields = import_module("vllm.v1.engine").EngineCoreOutput.__struct_fields__
    except (ImportError, AttributeError) as error:
        return f"this vllm has its parts elsewhere ({error})"
    ours = next((_OURS[name] for name, theirs in known.items() if theirs is chosen), None)
    if ours is None:
        return f"the scheduler is {chosen.__module__}.{chosen.__qualname__}"
    missing = [name for name in _NEEDED_METHODS if not hasattr(chosen, name)]
    missing += [name for name in _NEEDED_FIELDS if name not in fields]
    if missing:
        return f"this vllm's scheduler has no {', '.join(missing)}"
    config.scheduler_config.scheduler_cls = f"{_PACKAGE}.holding.{ours}"
    return ""
