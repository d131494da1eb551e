"""From a configuration to a running trainer: builds the components, runs the loop, takes everything down again.

Invariant: what can be known to be wrong is refused before the first step (names, files, agents, tools, what this version cannot run), and
whatever was started is shut down, however the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ostinato_agent_loop import (
    AgentLoopManager,
    RolloutManager,
    agent_loop_class,
    load_manager_class,
    make_tool_executor,
)
from ostinato_engines.device import empty_cache, pick_device, seed_all
from ostinato_engines.versions import installed_versions
from ostinato_rollout import ServerPool, SessionBudget, dumps_on_signal
from ostinato_rollout.tracing import completed
from ostinato_tokenization import ChatTokenizer, ContinuousTokens
from ostinato_tools import ToolExecutor
from ostinato_trainer.algorithms.advantages import needs_critic
from ostinato_trainer.algorithms.kl_control import KLController
from ostinato_trainer.backends.choice import build_backend, build_critic
from ostinato_trainer.backends.local import LocalBackendOptions
from ostinato_trainer.backends.lora import lora_options
from ostinato_trainer.backends.memory import EngineShare, out_of_memory_named
from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.checkpoints.resume import ResumePoint, check_same_run, resume_point, take_up
from ostinato_trainer.checkpoints.run_state import Stateful
from ostinato_trainer.checkpoints.saving import RunCheckpoints, restore_run
from ostinato_trainer.checkpoints.whole_folder import check_root
from ostinato_trainer.config import Config
from ostinato_trainer.config.checks import check_runnable
from ostinato_trainer.data.assembly import build_datasets
from ostinato_trainer.data.dataset import PromptDataset
from ostinato_trainer.data.prompt_loader import PromptLoader
from ostinato_trainer.heap import lasting_objects
from ostinato_trainer.interrupts import run_interruptibly
from ostinato_trainer.loggers.base import RunEnd
from ostinato_trainer.loggers.group import Loggers
from ostinato_trainer.loop.callbacks import StepFunction, load_callbacks
from ostinato_trainer.loop.critic_update import critic_update_settings
from ostinato_trainer.loop.experience import needs_reference
from ostinato_trainer.loop.parts import TrainerParts
from ostinato_trainer.loop.ppo_trainer import PPOTrainer
from ostinato_trainer.loop.sampling import sampling_of
from ostinato_trainer.metrics.generations import GenerationWatch
from ostinato_trainer.model_files import check_model_folder, check_same_tokenizer, check_vocabulary, load_tokenizer
from ostinato_trainer.placement.executor import AgentWorkers, cluster_of, manager_and_workers, places_of
from ostinato_trainer.restarts import restart_metrics, run_with_restarts
from ostinato_trainer.rewards.manager import RewardManager
from ostinato_trainer.rollout_engine import build_pool

if TYPE_CHECKING:
    from ostinato_trainer.placement.places import Places

logger = logging.getLogger(__name__)

_MEMORY_CURES: Final = "lower actor_rollout_ref.rollout.gpu_memory_utilization, or share the model out (actor_rollout_ref.actor.strategy=fsdp2)"
"""Where memory runs out in none of the phases that know better, as while weights go to engines."""


def run_training(config: Config, *, on_step: Callable[[int, Mapping[str, float]], None] | None = None) -> None:
    """Train by `config` to the end.

    Args:
        config: The whole tree.
        on_step: Is told the metrics of each step, of the validation before the first one too.

    Raises:
        TrainerError, or the root error of another package: something is wrong with configuration, files, model, agents or tools.
            Checkpoints written before are intact.
        KeyboardInterrupt: Ctrl-C; everything is shut down.
    """
    check_runnable(config)
    check_model_folder(str(config.actor_rollout_ref.model.path))
    lora_options(config.actor_rollout_ref.model, seed=config.trainer.seed)  # an extra that is missing is told at once
    if config.critic.model.path is not None and needs_critic(config.algorithm.adv_estimator):
        check_model_folder(config.critic.model.path, key="critic.model")
        check_same_tokenizer(str(config.actor_rollout_ref.model.path), config.critic.model.path)
    trainer = config.trainer
    check_root(Path(trainer.local_dir))
    callbacks = [StepFunction(on_step)] if on_step else []

    def attempt(config: Config, causes: Sequence[str]) -> None:
        with (
            out_of_memory_named("the run", _MEMORY_CURES),
            CheckpointManager(
                trainer.local_dir, max_to_keep=trainer.max_ckpt_to_keep, best_metric=trainer.best_metric
            ) as folder,
        ):
            point = resume_point(config.trainer, folder)
            run_interruptibly(_run_placed(config, folder, point, callbacks, causes))

    with cluster_of(config):
        run_with_restarts(config, attempt)


async def _run_placed(
    config: Config,
    folder: CheckpointManager,
    point: ResumePoint | None,
    callbacks: Sequence[object],
    causes: Sequence[str],
) -> None:
    async with places_of(config) as places:
        with ExitStack() as owned:
            await _run(config, folder, point, callbacks, places, causes, owned)


async def _run(
    config: Config,
    folder: CheckpointManager,
    point: ResumePoint | None,
    callbacks: Sequence[object],
    places: Places | None,
    causes: Sequence[str],
    owned: ExitStack,
) -> None:
    seed_all(config.trainer.seed)
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
    batch_size, val_only = config.data.train_batch_size, config.trainer.val_only
    if val_only:
        batch_size = min(batch_size, len(train_rows))  # of which none is drawn
    loader = PromptLoader(train_rows, batch_size=batch_size, shuffle=config.data.shuffle, seed=config.data_seed)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    if point is not None and point.step >= total_steps and not val_only:
        logger.warning(
            "Nothing is left to do: %s is step %d of %d; more trainer.total_training_steps or total_epochs would go on from there",
            point.directory,
            point.step,
            total_steps,
        )
        return
    sampling = sampling_of(config, manager, loader, total_steps=total_steps)
    own_callbacks = load_callbacks(config.trainer.callbacks)
    of_critic = critic_options(config, total_steps)
    backend = build_backend(config, backend_options(config, total_steps), places, critic=of_critic)
    owned.callback(backend.close)
    critic = None if of_critic is None else build_critic(config, of_critic, backend)
    kl_controller = KLController(config.algorithm.kl_ctrl) if config.algorithm.use_kl_in_reward else None
    stateful: dict[str, Stateful] = {"sampling": sampling}
    if kl_controller is not None:
        stateful["kl_controller"] = kl_controller
    if point is not None:
        restore_run(point, config, backend, critic, {} if val_only else stateful)
        if not val_only:  # a look at an old checkpoint undoes nothing that came after it
            take_up(folder, point)
    folder.hold()
    async with AsyncExitStack() as stack:
        stack.enter_context(dumps_on_signal())
        loggers = Loggers.from_config(
            config,
            steps_done=None if point is None else point.step,
            state=None if point is None else point.state.loggers,
        )
        stack.push(lambda _kind, error, _traceback: loggers.close(RunEnd.of(error)))
        stack.push_async_callback(rewards.aclose)
        stack.push_async_callback(manager.close)
        stack.push_async_callback(pool.shutdown)
        stack.push_async_callback(tools.close)
        await pool.start()
        if workers is not None:
            stack.push_async_callback(workers.shutdown)
            await workers.start()
        loggers.describe(
            {"versions/trainer": installed_versions(), "versions/engine": pool.servers[0].versions}
            | ({} if point is None else {"resumed_from": str(point.directory)})
            | ({f"restart_{number}": cause for number, cause in enumerate(causes, 1)})
        )
        checkpoints = await stack.enter_async_context(
            RunCheckpoints(folder, config, backend, loggers, critic=critic, parts=stateful)
        )
        parts = TrainerParts(
            sampling=sampling,
            val_rows=[] if val_rows is None else [val_rows[index] for index in range(len(val_rows))],
            manager=manager,
            pool=pool,
            backend=backend,
            checkpoints=checkpoints,
            callbacks=[
                StepFunction(lambda step, metrics: loggers.log(step, {**metrics, **restart_metrics(causes)})),
                GenerationWatch(config.trainer, loggers, tokenizer.decode),
                *own_callbacks,
                *callbacks,
                *making_room(config),
            ],
            critic=critic,
            kl_controller=kl_controller,
        )
        trainer = PPOTrainer(config, parts, total_steps=total_steps, steps_done=0 if point is None else point.step)
        if point is not None:
            point.state.restore_random()
        with lasting_objects():
            await trainer.fit()


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


def making_room(config: Config) -> list[StepFunction]:
    """Where engines slept during a step: what torch still holds of the device goes back before they wake."""
    if not config.engines_sleep:
        return []
    device = pick_device(config.trainer.device or "auto")
    return [StepFunction(lambda step, metrics: empty_cache(device))]


def backend_options(config: Config, total_steps: int) -> LocalBackendOptions:
    """What the local backend reads of the tree; the schedule counts optimizer steps, not training steps."""
    actor = config.actor_rollout_ref.actor
    warmup = config.trainer.critic_warmup if needs_critic(config.algorithm.adv_estimator) else 0
    updates_per_step = actor.ppo_epochs * max(1, config.data.train_batch_size // actor.ppo_mini_batch_size)
    return LocalBackendOptions(
        device=config.trainer.device or "auto",
        dtype=actor.dtype,
        **msgspec.structs.asdict(actor.optim),
        total_steps=max(1, total_steps - warmup) * updates_per_step,
        grad_clip=actor.grad_clip,
        keep_reference=needs_reference(config),
        max_tokens_per_forward=actor.ppo_max_token_len_per_gpu * actor.ranks_per_pass,
        use_remove_padding=config.actor_rollout_ref.model.use_remove_padding,
        use_torch_compile=actor.use_torch_compile,
        engine=engine_share(config),
        lora=lora_options(config.actor_rollout_ref.model, seed=config.trainer.seed),
    )


def engine_share(config: Config) -> EngineShare:
    """What the engine is told to take of the devices that the policy is trained on."""
    rollout = config.actor_rollout_ref.rollout
    fraction = 0.0 if rollout.nnodes else rollout.gpu_memory_utilization or 0.0
    return EngineShare(fraction=fraction, sleeps=config.engines_sleep)


def critic_options(config: Config, total_steps: int) -> LocalBackendOptions | None:
    """The same of the critic, where the advantage estimator reads values."""
    if not needs_critic(config.algorithm.adv_estimator):
        return None
    critic, settings = config.critic, critic_update_settings(config)
    trajectories = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    updates_per_step = settings.epochs * max(1, trajectories // settings.mini_batch_trajectories)
    return LocalBackendOptions(
        device=config.trainer.device or "auto",
        dtype=critic.dtype or config.actor_rollout_ref.actor.dtype,
        **msgspec.structs.asdict(critic.optim),
        total_steps=total_steps * updates_per_step,
        grad_clip=critic.grad_clip,
        max_tokens_per_forward=settings.max_tokens,
        use_remove_padding=config.actor_rollout_ref.model.use_remove_padding,
        engine=engine_share(config),
    )


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
