"""What gives trajectories, built from a configuration: rows, agents with their tools and rewards, engines.

Invariant: files, rows, agents, tools and rewards that cannot be used are refused before anything is started. Knows nothing of training.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ostinato_agent_loop import (
    AgentLoopManager,
    RolloutManager,
    agent_loop_class,
    load_manager_class,
    make_tool_executor,
)
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_rollout.tracing import completed
from ostinato_tokenization import ChatTokenizer, ContinuousTokens
from ostinato_tools import ToolExecutor
from ostinato_trainer.checkpoints.resume import ResumePoint, check_same_run
from ostinato_trainer.config import Config
from ostinato_trainer.data.assembly import build_datasets
from ostinato_trainer.data.dataset import PromptDataset
from ostinato_trainer.data.prompt_loader import PromptLoader
from ostinato_trainer.model_files import check_vocabulary, load_tokenizer
from ostinato_trainer.placement.executor import AgentWorkers, manager_and_workers
from ostinato_trainer.rewards.manager import RewardManager
from ostinato_trainer.rollout_engine import build_pool

if TYPE_CHECKING:
    from ostinato_trainer.placement.places import Places

__all__ = ["Rollouts", "build_manager", "build_rollouts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollouts:
    """The parts that make trajectories, checked against each other and not started."""

    tokenizer: ChatTokenizer
    tools: ToolExecutor
    rewards: RewardManager
    pool: ServerPool
    manager: RolloutManager
    workers: AgentWorkers | None
    """Those that are actors."""
    loader: PromptLoader
    val_rows: Sequence[Mapping]

    async def start(self, stack: AsyncExitStack) -> None:
        """Start engines and workers; `stack` takes down what there is, also where the start fails."""
        stack.push_async_callback(self.rewards.aclose)
        stack.push_async_callback(self.manager.close)
        stack.push_async_callback(self.pool.shutdown)
        stack.push_async_callback(self.tools.close)
        await self.pool.start()
        if self.workers is not None:
            stack.push_async_callback(self.workers.shutdown)
            await self.workers.start()


def build_rollouts(config: Config, point: ResumePoint | None, places: Places | None) -> Rollouts:
    """Make the parts, and check each row's agent, tools and scorer.

    Args:
        config: The whole tree.
        point: Where the run is taken up; what it was begun with is compared before rows are read.
        places: Where actors go; None: everything is in this process.

    Raises:
        TrainerError, or the root error of another package: one of the parts cannot be used.
    """
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model)
    vocab_size = check_vocabulary(tokenizer, model, config.data.apply_chat_template_kwargs)
    if point is not None:
        check_same_run(point, config, tokenizer)
    tools = make_tool_executor(config.actor_rollout_ref.rollout.multi_turn, tokenizer)
    rewards = RewardManager(config.reward, tokenizer, max_response_length=config.data.max_response_length)
    pool = build_pool(config, places)
    manager, workers = build_manager(config, tokenizer, pool, tools, rewards, places)
    train_rows, val_rows = build_datasets(config, tokenizer, tools, vocab_size=vocab_size)
    _check_scorers(config, rewards, train_rows, val_rows)
    manager.check_agents(name for name in _distinct("agent_names", train_rows, val_rows) if name is not None)
    batch_size = config.data.train_batch_size
    if config.trainer.val_only:
        batch_size = min(batch_size, len(train_rows))  # of which none is drawn
    loader = PromptLoader(train_rows, batch_size=batch_size, shuffle=config.data.shuffle, seed=config.data_seed)
    validated = [] if val_rows is None else [val_rows[index] for index in range(len(val_rows))]
    return Rollouts(tokenizer, tools, rewards, pool, manager, workers, loader, validated)


def build_manager(
    config: Config,
    tokenizer: ChatTokenizer,
    pool: ServerPool,
    tools: ToolExecutor,
    rewards: RewardManager,
    places: Places | None = None,
) -> tuple[RolloutManager, AgentWorkers | None]:
    """`AgentLoopManager`, or the class that `agent.agent_loop_manager_class` names, and the workers that are actors, not started.

    A class of the user's own runs trajectories in this process, as it would without places.
    """
    rollout = config.actor_rollout_ref.rollout
    trace = completed(
        rollout.trace,
        project_name=config.trainer.project_name,
        experiment_name=config.trainer.experiment_name,
        folder=config.trainer.local_dir,
        rows_per_step=config.data.train_batch_size,
    )
    rollout = msgspec.structs.replace(rollout, trace=trace)
    tokens = ContinuousTokens(tokenizer, template_kwargs=config.data.apply_chat_template_kwargs)
    budget = SessionBudget(
        max_prompt_tokens=config.data.max_prompt_length,
        max_response_tokens=config.data.max_response_length,
        max_model_len=rollout.max_model_len,
        max_turn_tokens=rollout.multi_turn.max_turn_tokens,
    )
    manager_class = load_manager_class(rollout.agent)
    if places is not None and manager_class is AgentLoopManager:
        return manager_and_workers(config, rollout, tokens, budget, pool, places)
    turns = {"colocated": True} if config.engines_sleep else {}  # a class of the user's own may not know it
    manager = manager_class(
        rollout,
        tokens=tokens,
        budget=budget,
        pool=pool,
        tools=tools,
        reward_fn=rewards,
        seed=config.rollout_seed,
        **turns,
    )
    return manager, None


def _check_scorers(config: Config, rewards: RewardManager, *datasets: PromptDataset | None) -> None:
    """Refuse rows that nobody can score. Where each row's agent brings its own score, none is needed; a `reward` that was set is then said
    to have no effect."""
    rollout = config.actor_rollout_ref.rollout
    names = _distinct("agent_names", *datasets) or [None]
    if not all(agent_loop_class(name or rollout.agent.default_agent_loop).gives_reward(rollout) for name in names):
        rewards.check_data_sources(_distinct("data_sources", *datasets))
    elif config.reward != type(config.reward)():
        logger.warning("The settings of reward have no effect: the agent of every row gives the reward itself")


def _distinct(attribute: str, *datasets: PromptDataset | None) -> list[str | None]:
    """The different values over all datasets; a dataset of the user's own may not know them beforehand."""
    return list(dict.fromkeys(value for dataset in datasets for value in getattr(dataset, attribute, ())))
