"""`ModelSource`: what a sharded model is made from: read whole by one rank, then made without memory by all.

It knows nothing of shards: a model on the device `meta` is an ordinary model whose tensors have no values yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ostinato_engines.device import HOST
from ostinato_trainer.backends.causal_lm import load_causal_lm, persistent_tensors
from ostinato_trainer.backends.lora import LoraAdapters, LoraOptions
from ostinato_trainer.backends.ranks.agreement import raise_alike
from ostinato_trainer.backends.state import fingerprint
from ostinato_trainer.backends.value_model import ValueModel, load_value_model
from ostinato_trainer.errors import BackendError


@dataclass(frozen=True)
class ModelSource:
    """A folder or hub id, and what is made of its model."""

    path: str | Path
    lora: LoraOptions | None = None
    """Adapters that are put into it."""
    is_critic: bool = False
    """Make it a `ValueModel`."""

    def outlined(self, dtype: torch.dtype) -> tuple[nn.Module | None, ModelOutline]:
        """The model, on rank 0 only and in the host's memory, and its outline, on all ranks. Collective.

        Raises:
            TrainerError: what rank 0 found wrong with the path, the model or the adapters; on all ranks alike.
        """
        found: list[ModelOutline | None] = [None]
        model, error = None, None
        if dist.get_rank() == 0:
            try:
                model, found[0] = self._read(dtype)
            except Exception as failure:  # whatever it was, the other ranks must hear of it
                error = failure
        raise_alike(error)
        dist.broadcast_object_list(found, src=0)
        assert found[0] is not None
        return model, found[0]

    def without_memory(self, outline: ModelOutline, dtype: torch.dtype) -> tuple[Any, LoraAdapters | None]:
        """A model of the outline on the device `meta`, in evaluation mode, and its adapters.

        Raises:
            BackendError: it keeps tensors where nobody can give them values.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(outline.config, dtype=dtype)
            if outline.value_head is not None:
                model = ValueModel(model.base_model, nn.Linear(*outline.value_head, dtype=dtype))
        if outline.value_head is None:
            model.tie_weights()
        adapters = None
        if self.lora is not None:
            adapters = LoraAdapters(model, self.lora, config=outline.adapters)
        for name, module in model.named_modules():
            loose = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
            if loose:
                raise BackendError(
                    f"the model must keep its tensors as parameters or buffers to be sharded, got {name}.{loose[0]}; use strategy=local"
                )
        return model.eval(), adapters

    def _read(self, dtype: torch.dtype) -> tuple[nn.Module, ModelOutline]:
        host = torch.device(HOST)
        if self.is_critic:
            critic, head = (model := load_value_model(self.path, dtype=dtype, device=host)), model.score
            shape = (head.in_features, head.out_features, head.bias is not None)
            return critic, ModelOutline(critic.config, fingerprint(persistent_tensors(critic)), value_head=shape)
        model = load_causal_lm(self.path, dtype=dtype, device=host)
        found = fingerprint(persistent_tensors(model))
        adapters = None if self.lora is None else LoraAdapters(model, self.lora).config
        return model, ModelOutline(model.config, found, adapters=adapters)


@dataclass(frozen=True)
class ModelOutline:
    """What all ranks must know of a model that one of them has read."""

    config: Any
    """Of `transformers`."""
    fingerprint: str
    """Of its weights, without adapters; see `state.fingerprint`."""
    adapters: Any = None
    """See `LoraAdapters.config`."""
    value_head: tuple[int, int, bool] | None = None
    """Widths of a critic's head, and whether it has a bias."""
