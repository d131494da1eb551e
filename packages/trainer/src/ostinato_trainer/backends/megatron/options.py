"""`MegatronOptions` and the factory of ranks: what the controller says of a backend that only the ranks import Megatron for."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import msgspec
import torch

from ostinato_trainer.backends.adamw import AdamWOptions
from ostinato_trainer.backends.megatron.shape import MegatronLayout
from ostinato_trainer.backends.memory import EngineShare
from ostinato_trainer.backends.ranks.base import RankAddress
from ostinato_trainer.errors import BackendError

if TYPE_CHECKING:
    from ostinato_trainer.backends.megatron.rank import MegatronRank

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronOptions(AdamWOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank needs to know besides the model; names follow `actor_rollout_ref.actor`."""

    layout: MegatronLayout = MegatronLayout()
    """Ranks of one model."""
    dtype: str = "float32"
    """Of the parameters and of what is computed: float32 or bfloat16. Gradients, moments and the weights that steps are taken of stay float32."""
    keep_reference: bool = False
    """Keep the model as it is at construction, the reference of a KL term, as a second copy."""
    engine: EngineShare = EngineShare()
    """What an engine takes of the same device."""
    enable_gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again."""

    def check(self) -> None:
        """Raises BackendError where a value is out of range."""
        if self.dtype not in _DTYPES:
            raise BackendError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}; float32 is safe")
        super().check()

    @property
    def parameter_dtype(self) -> torch.dtype:
        """What the model's parameters are and compute in."""
        return _DTYPES[self.dtype]


class MegatronRankFactory(msgspec.Struct, frozen=True, kw_only=True):
    """A `RankFactory` that loads a model folder."""

    path: str
    """Folder or hub id of the model."""
    options: MegatronOptions
    critic: tuple[str, MegatronOptions] | None = None
    """The same of a critic that is trained beside it, in the same layout."""

    def __call__(self, address: RankAddress, device: torch.device) -> MegatronRank:
        """Builds the rank; the default process group stands."""
        from ostinato_trainer.backends.megatron.rank import MegatronRank

        return MegatronRank(self.path, self.options, device=device, timeout_s=address.timeout_s, critic=self.critic)


def is_megatron_installed() -> bool:
    """Whether megatron.core can be found; it is not imported, which takes many seconds."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False
