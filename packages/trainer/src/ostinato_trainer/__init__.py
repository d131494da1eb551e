"""Reinforcement learning of language-model agents: data, rewards, algorithms, the training loop and the `ostinato` command.

What it is not: an inference engine, an agent framework or a tokenizer; those are the packages below. Names load when they are
first used, so that the command line answers without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato_trainer.algorithms.advantages import with_advantages
    from ostinato_trainer.assembly import run_training
    from ostinato_trainer.batch import Batch
    from ostinato_trainer.config import Config
    from ostinato_trainer.config.loading import load_config
    from ostinato_trainer.data.dataset import RLHFDataset
    from ostinato_trainer.errors import TrainerError
    from ostinato_trainer.loop.callbacks import TrainerCallback
    from ostinato_trainer.loop.ppo_trainer import PPOTrainer
    from ostinato_trainer.rewards.manager import RewardManager
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
    "PPOTrainer": "loop.ppo_trainer",
    "RLHFDataset": "data.dataset",
    "RewardManager": "rewards.manager",
    "Segment": "segments",
    "TrainerCallback": "loop.callbacks",
    "TrainerError": "errors",
    "load_config": "config.loading",
    "run_training": "assembly",
    "with_advantages": "algorithms.advantages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
