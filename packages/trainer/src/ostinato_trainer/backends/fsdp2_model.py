"""`ShardedModel`: a Hugging Face causal language model of which every rank holds a slice, by `fully_shard`.

Invariants: the model is whole nowhere but in the host memory of rank 0, once, while it is loaded; a layer's parameters are gathered for its own
pass only; and gradients are summed over ranks in the type of the parameters. It knows no loss and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
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
from torch.utils.checkpoint import checkpoint

from ostinato_engines.device import HOST
from ostinato_trainer.backends.causal_lm import CausalLM, load_causal_lm, persistent_tensors
from ostinato_trainer.backends.packing import layers_of
from ostinato_trainer.backends.ranks.agreement import raise_alike
from ostinato_trainer.backends.sequence_ranks import SequenceRanks
from ostinato_trainer.backends.state import fingerprint
from ostinato_trainer.errors import BackendError

_ROOT_PREFIX = "model."

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
        path: Folder or hub id of the model; read by rank 0.
        device: What this rank computes on.
        mesh: Of one dimension, over all ranks.
        options: See `ShardOptions`.
        sequence_ranks: With whom this rank shares packed rows; see there.
        admit: Is shown the model while nothing of it is on the device; what it raises, it raises on all ranks.

    Raises:
        BackendError: the path holds no model that can be loaded, or the model cannot be cut up; on all ranks alike.
    """

    def __init__(
        self,
        path: str | Path,
        device: torch.device,
        mesh: DeviceMesh,
        options: ShardOptions,
        *,
        sequence_ranks: SequenceRanks | None = None,
        admit: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.device, self.mesh, self.options = device, mesh, options
        source, config = _loaded_on_first(path, options.parameter_dtype)
        self.model = _without_memory(config, options.parameter_dtype)
        if sequence_ranks is not None and (num_heads := getattr(config.get_text_config(), "num_attention_heads", None)):
            sequence_ranks.check_heads(num_heads)
        if admit is not None:
            admit(self.model)
        layers = layers_of(self.model)
        if options.gradient_checkpointing:
            for layer in layers:
                layer.forward = _recomputing(layer.forward)
        self._root = _sharded(self.model, layers, mesh, options)
        self.fingerprint = _fingerprint_on_first(source)
        """Of the weights that it began with; see `state.fingerprint`."""
        self._fill(source)
        del source
        with torch.no_grad():
            self.lm: CausalLM = self.run(
                lambda: CausalLM(self.model, remove_padding=options.use_remove_padding, sequence_ranks=sequence_ranks)
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

    def tensors(self) -> dict[str, Tensor]:
        """This rank's slices (as DTensors) and the persistent buffers, by their names in the model, in its order."""
        return self.lm.named_tensors()

    def parameters(self) -> dict[str, nn.Parameter]:
        """The slices that are trained."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def whole(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All of a tensor, on this rank's device and in `dtype` where it is a sharded one."""
        return gathered(tensor, self.device, dtype)

    def whole_tensors(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """All tensors in order, each gathered when it is asked for; a sharded one in `dtype`."""
        for name, tensor in self.tensors().items():
            yield name, self.whole(tensor, dtype)

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


def _loaded_on_first(path: str | Path, dtype: torch.dtype) -> tuple[nn.Module | None, Any]:
    """The model, on rank 0 only and in the host's memory, and its configuration, on all."""
    model, error = None, None
    if dist.get_rank() == 0:
        try:
            model = load_causal_lm(path, dtype=dtype, device=torch.device(HOST))
        except BackendError as failure:
            error = failure
    raise_alike(error)
    config = [None if model is None else model.config]
    dist.broadcast_object_list(config, src=0)
    return model, config[0]


def _fingerprint_on_first(model: nn.Module | None) -> str:
    """The fingerprint of parameters and persistent buffers, on all ranks."""
    found: list[str | None] = [None]
    if model is not None:
        found[0] = fingerprint(persistent_tensors(model))
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


def _without_memory(config: Any, dtype: torch.dtype) -> Any:
    """The model of a configuration on the device `meta`, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    for name, module in model.named_modules():
        loose = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        if loose:
            raise BackendError(
                f"the model must keep its tensors as parameters or buffers to be sharded, got {name}.{loose[0]}; use strategy=local"
            )
    return model.eval()


def _sharded(model: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, options: ShardOptions) -> Any:
    """Cuts up each layer, then the rest with the root, so that a backward pass gathers one layer at a time."""
    precision = MixedPrecisionPolicy()
    if options.compute_dtype is not None:
        precision = MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=options.parameter_dtype)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != HOST) if options.param_offload else OffloadPolicy()
    root = _Root(model)
    for module in (*layers, root):
        reshard = options.reshard_after_forward and module is not root
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are sums with their weights set, so gradients add up
            module.set_force_sum_reduction_for_comms(True)
    return root


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward pass that keeps its inputs only."""

    def recomputed(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)

    return recomputed
