"""Reinforcement learning of language-model agents: data, rewards, algorithms, the training loop and the `ostinato` command.

What it is not: an inference engine, an agent framework or a tokenizer; those are the packages below. Names load when they are
first used, so that the command line answers without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato_trainer.advantages import with_advantages
    from ostinato_trainer.assembly import run_training
    from ostinato_trainer.batch import Batch
    from ostinato_trainer.callbacks import TrainerCallback
    from ostinato_trainer.config import Config
    from ostinato_trainer.config_loading import load_config
    from ostinato_trainer.dataset import RLHFDataset
    from ostinato_trainer.errors import TrainerError
    from ostinato_trainer.ppo_trainer import PPOTrainer
    from ostinato_trainer.rewards import RewardManager
    from ostinato_trainer.segments import Segment

__all__ = [
    "Batch",
    "Config",
    "PPOTrainer",
    "RLHFDataset",
    "RewardManager",
    "Segment",
    "TrainerCallback",
    "TrainerError",
    "load_config",
    "run_training",
    "with_advantages",
]

_HOMES = {
    "Batch": "batch",
    "Config": "config",
    "PPOTrainer": "ppo_trainer",
    "RLHFDataset": "dataset",
    "RewardManager": "rewards",
    "Segment": "segments",
    "TrainerCallback": "callbacks",
    "TrainerError": "errors",
    "load_config": "config_loading",
    "run_training": "assembly",
    "with_advantages": "advantages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
