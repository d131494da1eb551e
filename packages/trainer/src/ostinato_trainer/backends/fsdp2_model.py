"""`ShardedModel`: a Hugging Face causal language model, or a critic, of which every rank holds a slice, by `fully_shard`.

Invariants: the model is whole nowhere but in the host memory of rank 0, once, while it is loaded; a layer's parameters are gathered for its own
pass only; and gradients are summed over ranks in the type of the parameters. It knows no loss and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ostinato_engines.device import HOST
from ostinato_trainer.backends.causal_lm import CausalLM
from ostinato_trainer.backends.fsdp2_mesh import ShardMesh
from ostinato_trainer.backends.fsdp2_source import ModelSource
from ostinato_trainer.backends.packing import layers_of
from ostinato_trainer.backends.value_model import ValueModel

Result = TypeVar("Result")


class ShardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is cut up and computed with."""

    parameter_dtype: torch.dtype
    """Of the slices that are kept, and of gradients."""
    compute_dtype: torch.dtype | None = None
    """What layers are gathered and computed in, where it is another."""
    param_offload: bool = False
    """Keep the slices in the host's memory and bring them over for each pass."""
    reshard_after_forward: bool = True
    """Give a layer's parameters back after its forward pass and gather them again for the backward pass."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and compute the rest again."""
    use_remove_padding: bool = True
    compiled: bool = False
    """Let torch.compile fuse each layer, between the gathering of its parameters and their giving back."""


class _Root(nn.Module):
    """Runs a function while the parameters that belong to no layer (embeddings, last norm, output layer) are whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class ShardedModel:
    """One rank's slice of a model, in evaluation mode. Making one, and every method, is collective.

    Args:
        source: What it is made from; read by rank 0.
        mesh: Where this rank stands.
        options: See `ShardOptions`.
        admit: Is shown the model while nothing of it is on the device; what it raises, it raises on all ranks.

    Raises:
        TrainerError: the source holds no model that can be loaded, or the model cannot be cut up; on all ranks alike.
    """

    def __init__(
        self,
        source: ModelSource,
        mesh: ShardMesh,
        options: ShardOptions,
        *,
        admit: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.device, self.mesh, self.options = mesh.device, mesh.slices, options
        whole, outline = source.outlined(options.parameter_dtype)
        self.fingerprint = outline.fingerprint
        """Of the weights that it began with, without adapters; see `state.fingerprint`."""
        self.model, self.adapters = source.without_memory(outline, options.parameter_dtype)
        num_heads = getattr(outline.config.get_text_config(), "num_attention_heads", None)
        if mesh.sequence_ranks is not None and isinstance(num_heads, int):  # where layers differ, each is asked itself
            mesh.sequence_ranks.check_heads(num_heads)
        if admit is not None:
            admit(self.model)
        layers = layers_of(self.model)
        self._root = _sharded(self.model, layers, self.mesh, options)
        self._fill(whole)
        del whole
        with torch.no_grad():
            self.lm: CausalLM = self.run(
                lambda: CausalLM(
                    self.model,
                    remove_padding=options.use_remove_padding,
                    compiled=options.compiled,
                    recomputed=options.gradient_checkpointing,
                    sequence_ranks=mesh.sequence_ranks,
                )
            )

    def run(self, function: Callable[[], Result]) -> Result:
        """Calls a function that uses the model; gradients flow through what it returns, a tensor or a tuple. Their backward pass must follow
        before anything else is asked."""
        try:
            return self._root(function)
        finally:
            if not torch.is_grad_enabled():  # else the backward pass does it
                for module in self._root.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    def give_up(self) -> None:
        """Forgets a pass that failed on the way, on this rank; slices and whole values are as before it."""
        if hasattr(self._root, "reset_iter_state"):  # since torch 2.13
            self._root.reset_iter_state()

    def parameters(self) -> dict[str, nn.Parameter]:
        """The slices that are trained."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def trained_tensors(self) -> Mapping[str, Tensor]:
        """What training may change, by its names in the model: all slices (as DTensors) and persistent buffers, or those of the adapters alone."""
        return self.lm.named_tensors() if self.adapters is None else self.adapters.parameters()

    def tensors(self) -> dict[str, Tensor]:
        """Slices and persistent buffers of the model without its adapters, by their names there, in its order."""
        tensors = self.lm.named_tensors()
        return tensors if self.adapters is None else self.adapters.base_tensors(tensors)

    def whole_tensors(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """All of `tensors` in order, on this rank's device, with what adapters add to them; each is gathered when it is asked for, and a sharded
        one is in `dtype`."""
        trained = self.trained_tensors()
        for name, tensor in self.tensors().items():
            parts = () if self.adapters is None else self.adapters.parts_of(name)
            if self.adapters is None or not parts:
                yield name, gathered(tensor, self.device, dtype)
                continue
            updates = {part: gathered(trained[part], self.device) for part in parts}
            merged = self.adapters.merge(name, gathered(tensor, self.device), updates)
            yield name, merged.to(dtype or merged.dtype)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside the block the model is the one that was loaded."""
        return nullcontext() if self.adapters is None else self.adapters.off()

    def _fill(self, source: nn.Module | None) -> None:
        """Gives slices and buffers their values from the whole model, which only rank 0 has."""
        self._root.to_empty(device=HOST if self.options.param_offload else self.device)
        values: Mapping[str, Tensor] = (
            {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
        )
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                assert isinstance(parameter, DTensor)
                value = self._from_first(values.get(name), tuple(parameter.shape), parameter.dtype)
                part = distribute_tensor(value, self.mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(part.to_local())
            for module in self.model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty_like(buffer, device=self.device)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._from_first(values.get(name), tuple(buffer.shape), buffer.dtype))

    def _from_first(self, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        received = torch.empty(shape, dtype=dtype, device=self.device)
        if dist.get_rank() == 0:
            assert value is not None
            received.copy_(value)
        dist.broadcast(received, src=0)
        return received


def gathered(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """All of a sharded tensor, on `device` and in `dtype`; any other tensor as it is. Collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local = tensor.to_local().detach().to(device, dtype or tensor.dtype)
    part = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return part.full_tensor()


def _sharded(model: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, options: ShardOptions) -> Any:
    """Cuts up each layer, then the rest with the root, so that a backward pass gathers one layer at a time."""
    precision = MixedPrecisionPolicy()
    if options.compute_dtype is not None:
        precision = MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=options.parameter_dtype)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != HOST) if options.param_offload else OffloadPolicy()
    root = _Root(model)
    if isinstance(model, ValueModel):  # its head is computed in the slices' own type
        fully_shard(model.score, mesh=mesh, offload_policy=offload, reshard_after_forward=options.reshard_after_forward)
    for module in (*layers, root):
        reshard = options.reshard_after_forward and module is not root
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are sums with their weights set, so gradients add up
            module.set_force_sum_reduction_for_comms(True)
    return root
