"""Agent-loop workers as actors: what each is made from, and the manager over them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from ostinato_agent_loop import AgentLoopManager, RolloutManager
from ostinato_agent_loop.config import RolloutConfig
from ostinato_agent_loop.ray_workers import RayWorkers, WorkerSpec
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_tokenization import ChatTokenizer, ContinuousTokens
from ostinato_trainer.config import Config
from ostinato_trainer.config.reward import RewardConfig
from ostinato_trainer.placement.places import Places
from ostinato_trainer.rewards.manager import RewardManager

__all__ = ["RewardShare", "build_workers", "manager_of"]


@dataclass(frozen=True)
class RewardShare:
    """Makes the reward of one worker, which scores its share of a run's trajectories: so many at a time and so often that all together keep
    to what the run allows."""

    config: RewardConfig
    tokenizer: ChatTokenizer
    max_response_length: int
    num_workers: int

    def __call__(self) -> RewardManager:
        """See `WorkerSpec.make_reward_fn`."""
        max_rpm = self.config.max_rpm
        share = msgspec.structs.replace(
            self.config,
            num_workers=math.ceil(self.config.num_workers / self.num_workers),
            max_rpm=None if max_rpm is None else max_rpm / self.num_workers,
        )
        return RewardManager(share, self.tokenizer, max_response_length=self.max_response_length)


def build_workers(
    config: Config,
    rollout: RolloutConfig,
    tokens: ContinuousTokens,
    budget: SessionBudget,
    pool: ServerPool,
    places: Places,
) -> RayWorkers:
    """The workers of a run, not started.

    Args:
        config: The whole tree.
        rollout: Its node of that name, completed.
        tokens: How messages become token ids.
        budget: How long a trajectory may get.
        pool: The replicas.
        places: Where they go.
    """
    make_reward = RewardShare(
        config.reward, tokens.tokenizer, config.data.max_response_length, rollout.agent.num_workers
    )
    spec = WorkerSpec(
        config=rollout, tokens=tokens, budget=budget, make_reward_fn=make_reward, seed=config.rollout_seed
    )
    return RayWorkers(spec, pool, placements=places.workers, start_timeout_s=config.ray_kwargs.start_timeout_s)


def manager_of(
    config: Config,
    rollout: RolloutConfig,
    tokens: ContinuousTokens,
    budget: SessionBudget,
    pool: ServerPool,
    workers: RayWorkers,
) -> RolloutManager:
    """The manager over `workers`, which lets engines sleep while they share places with training. Arguments as `build_workers`."""
    return AgentLoopManager(
        rollout,
        tokens=tokens,
        budget=budget,
        pool=pool,
        seed=config.rollout_seed,
        colocated=config.engines_sleep,
        workers=workers.workers,
    )
