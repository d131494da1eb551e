"""`ValueModel`: the backbone of a causal language model with a scalar head: one number for what is to come after each token.

The head begins at zero, so a critic that has learned nothing predicts 0 and takes no random number; a folder that brings a scalar head
(a reward model, say) keeps it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ostinato_trainer.backends.causal_lm import load_causal_lm, model_folder
from ostinato_trainer.errors import BackendError

_HEAD_NAME = "score"
"""Attribute of the head here and in the field's token and sequence classifiers."""


class ValueModel(nn.Module):
    """A backbone and a linear layer of width one, with the face of a `transformers` language model.

    Args:
        backbone: A `transformers` model that returns `last_hidden_state`.
        head: From hidden states to one number; None makes one that is zero.
    """

    def __init__(self, backbone: Any, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.model = backbone
        if head is None:
            head = nn.Linear(
                int(backbone.config.get_text_config().hidden_size), 1, device=backbone.device, dtype=backbone.dtype
            )
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.score = head

    @property
    def base_model(self) -> Any:
        """The backbone."""
        return self.model

    @property
    def config(self) -> Any:
        """The backbone's."""
        return self.model.config

    def get_input_embeddings(self) -> nn.Module:
        """The backbone's."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """The head, as what stands at the end of the model."""
        return self.score

    def forward(self, **inputs: Any) -> SimpleNamespace:
        """`logits`: the values, float [N, width, 1]. Arguments as the backbone's."""
        states = self.model(**inputs).last_hidden_state
        return SimpleNamespace(
            logits=self.score(states.to(self.score.weight.dtype))
        )  # sharded, the backbone has another type


def load_value_model(path: str | Path, *, dtype: torch.dtype, device: torch.device) -> ValueModel:
    """The model of a folder or hub id as a critic: its own scalar head where the folder has one, else one that is zero.

    Raises:
        BackendError: the path holds no causal language model, or one whose output layer cannot be taken off.
    """
    whole = load_causal_lm(path, dtype=dtype, device=device, key="critic.model.path", needs_head=False)
    if whole.base_model is whole:
        raise BackendError(
            f"critic.model.path must hold a model of a backbone and an output layer, got {type(whole).__name__} in {str(path)!r}; "
            "name another model"
        )
    return ValueModel(
        whole.base_model, _stored_head(model_folder(path, "critic.model.path"), dtype=dtype, device=device)
    )


def _stored_head(folder: Path, *, dtype: torch.dtype, device: torch.device) -> nn.Linear | None:
    """The scalar head in a folder's files, if there is one."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  safetensors' handle is no mapping
                    if name in (f"{_HEAD_NAME}.weight", f"{_HEAD_NAME}.bias"):
                        tensors[name.removeprefix(f"{_HEAD_NAME}.")] = stored.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BackendError(
                f"critic.model.path must hold readable weights, got {file}: {error}; fetch it again"
            ) from error
    weight = tensors.get("weight")
    if weight is None:
        return None
    if weight.ndim != 2 or weight.shape[0] != 1:
        raise BackendError(
            f"critic.model.path must hold a head of width 1 or none, got {_HEAD_NAME}.weight of shape {list(weight.shape)} in {folder}; "
            "name a model with a scalar head, or a language model"
        )
    head = nn.Linear(weight.shape[1], 1, bias="bias" in tensors, device=device, dtype=dtype)
    head.load_state_dict(tensors)
    return head
