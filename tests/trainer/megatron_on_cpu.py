"""Lets megatron.core, which calls CUDA by name, run on a CPU with gloo. For tests alone: it shows that our code and its numbers are right, not that
streams, kernels or NCCL are. `install()` comes before `megatron.core` is imported, and refuses where there is a GPU."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_SPELLINGS = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


class _Nothing:
    """A stream or an event that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


class _OnCPU(TorchFunctionMode):
    """Takes `device="cuda"` out of every call that makes or moves a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args)
        return func(*args, **kwargs)


@functools.cache
def install() -> None:
    """Once in a process, for good."""
    if torch.cuda.is_available():
        raise RuntimeError("megatron.core must run without this where there is a GPU")
    _OnCPU().__enter__()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *_: _Nothing()
    cuda.stream = lambda *_: nullcontext()
    for name in ("synchronize", "empty_cache", "manual_seed", "set_device"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = (torch.default_generator,)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self  # pyright: ignore[reportAttributeAccessIssue]
    type_of = torch.Tensor.type

    def spelled(self: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
        return type_of(self, dtype, **options) if dtype is not None else _SPELLINGS.get(self.dtype, type_of(self))

    torch.Tensor.type = spelled  # pyright: ignore[reportAttributeAccessIssue]
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)


@dataclass(frozen=True)
class OnCPU:
    """A factory of ranks that makes Megatron run on a CPU first."""

    factory: Any

    def __call__(self, address: Any, device: Any) -> Any:
        install()
        return self.factory(address, device)


@dataclass(frozen=True)
class WeightedLogProbs:
    """A loss that travels: a gradient for every trained token, another for its entropy."""

    of_entropy: float = 0.0

    def __call__(self, output: Any, batch: Any) -> Any:
        weights = torch.cos(batch.token_ids.to(output.log_probs.dtype)) * batch.loss_mask
        loss = (output.log_probs * weights).sum()
        metrics = {
            "sum": loss.detach(),
            "tokens": float(batch.loss_mask.sum()),
            "lowest_min": output.log_probs.detach().min(),
        }
        if output.entropy is not None:
            loss = loss - self.of_entropy * output.entropy.sum()
        return loss, metrics
