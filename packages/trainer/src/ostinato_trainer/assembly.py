"""From a configuration to a running trainer: builds the components, runs the loop, takes everything down again.

Invariant: what can be known to be wrong is refused before the first step (names, files, agents, tools, what this version cannot run), and
whatever was started is shut down, however the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ostinato_engines.device import seed_all
from ostinato_engines.versions import installed_versions
from ostinato_rollout import dumps_on_signal
from ostinato_trainer.algorithms.advantages import needs_critic
from ostinato_trainer.algorithms.kl_control import KLController
from ostinato_trainer.backends.base import TrainingBackend
from ostinato_trainer.backends.choice import build_backend, build_critic
from ostinato_trainer.backends.local import LocalBackendOptions
from ostinato_trainer.backends.lora import lora_options
from ostinato_trainer.backends.memory import EngineShare, out_of_memory_named
from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.checkpoints.resume import ResumePoint, resume_point, take_up
from ostinato_trainer.checkpoints.run_state import Stateful
from ostinato_trainer.checkpoints.saving import RunCheckpoints, restore_run
from ostinato_trainer.checkpoints.whole_folder import check_root
from ostinato_trainer.config import Config
from ostinato_trainer.config.checks import check_runnable
from ostinato_trainer.heap import lasting_objects
from ostinato_trainer.interrupts import run_interruptibly
from ostinato_trainer.loggers.base import RunEnd
from ostinato_trainer.loggers.group import Loggers
from ostinato_trainer.loop.callbacks import StepFunction, load_callbacks
from ostinato_trainer.loop.critic_update import critic_update_settings
from ostinato_trainer.loop.experience import needs_reference
from ostinato_trainer.loop.parts import Critic, Sampling, TrainerParts
from ostinato_trainer.loop.ppo_trainer import PPOTrainer
from ostinato_trainer.loop.sampling import sampling_of
from ostinato_trainer.metrics.generations import GenerationWatch
from ostinato_trainer.model_files import check_model_folder, check_positions, check_same_tokenizer
from ostinato_trainer.placement.executor import cluster_of, places_of
from ostinato_trainer.restarts import restart_metrics, run_with_restarts
from ostinato_trainer.rollouts import Rollouts, build_rollouts
from ostinato_trainer.run_log import run_log

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
    check_positions(config)
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
            run_log(folder.root, is_held=lambda: folder.is_held),
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
    rollouts = build_rollouts(config, point, places)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(rollouts.loader)
    if _nothing_is_left(config, point, total_steps):
        return
    learner = _build_learner(config, rollouts, places, total_steps, owned)
    if point is not None:
        val_only = config.trainer.val_only
        restore_run(point, config, learner.backend, learner.critic, {} if val_only else learner.stateful)
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
        await rollouts.start(stack)
        loggers.describe(
            {"versions/trainer": installed_versions(), "versions/engine": rollouts.pool.servers[0].versions}
            | ({} if point is None else {"resumed_from": str(point.directory)})
            | ({f"restart_{number}": cause for number, cause in enumerate(causes, 1)})
        )
        checkpoints = await stack.enter_async_context(
            RunCheckpoints(folder, config, learner.backend, loggers, critic=learner.critic, parts=learner.stateful)
        )
        parts = TrainerParts(
            sampling=learner.sampling,
            val_rows=rollouts.val_rows,
            manager=rollouts.manager,
            pool=rollouts.pool,
            backend=learner.backend,
            checkpoints=checkpoints,
            callbacks=[
                StepFunction(lambda step, metrics: loggers.log(step, {**metrics, **restart_metrics(causes)})),
                GenerationWatch(config.trainer, loggers, rollouts.tokenizer.decode),
                *learner.callbacks,
                *callbacks,
            ],
            critic=learner.critic,
            kl_controller=learner.kl_controller,
        )
        trainer = PPOTrainer(config, parts, total_steps=total_steps, steps_done=0 if point is None else point.step)
        if point is not None:
            point.state.restore_random()
        with lasting_objects():
            await trainer.fit()


def _nothing_is_left(config: Config, point: ResumePoint | None, total_steps: int) -> bool:
    """Whether the run has taken all its steps; says so where it has."""
    if point is None or point.step < total_steps or config.trainer.val_only:
        return False
    logger.warning(
        "Nothing is left to do: %s is step %d of %d; more trainer.total_training_steps or total_epochs would go on from there",
        point.directory,
        point.step,
        total_steps,
    )
    return True


@dataclass(frozen=True)
class _Learner:
    """What learns from trajectories."""

    sampling: Sampling
    callbacks: Sequence[object]
    """The user's own."""
    backend: TrainingBackend
    critic: Critic | None
    kl_controller: KLController | None

    @property
    def stateful(self) -> dict[str, Stateful]:
        """The parts whose state a checkpoint keeps beside the models."""
        parts: dict[str, Stateful] = {"sampling": self.sampling}
        return parts if self.kl_controller is None else {**parts, "kl_controller": self.kl_controller}


def _build_learner(
    config: Config, rollouts: Rollouts, places: Places | None, total_steps: int, owned: ExitStack
) -> _Learner:
    """Load the models; `owned` closes them."""
    sampling = sampling_of(config, rollouts.manager, rollouts.loader, total_steps=total_steps)
    callbacks = load_callbacks(config.trainer.callbacks)
    of_critic = critic_options(config, total_steps)
    backend = build_backend(config, backend_options(config, total_steps), places, critic=of_critic)
    owned.callback(backend.close)
    critic = None if of_critic is None else build_critic(config, of_critic, backend)
    kl_controller = KLController(config.algorithm.kl_ctrl) if config.algorithm.use_kl_in_reward else None
    return _Learner(sampling, callbacks, backend, critic, kl_controller)


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
        use_torch_compile=config.actor_rollout_ref.actor.use_torch_compile,
        engine=engine_share(config),
    )
