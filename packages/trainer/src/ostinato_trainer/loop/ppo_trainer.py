"""`PPOTrainer`: sample, score, log-probabilities, advantages, update, weights to the engines, validate, save.

Invariant: what is trained on is what was sampled: ids, masks and log-probabilities come from the trajectories' own record. A failed
trajectory is counted and left out; it is never a reward of 0. What computes does so in one thread, one call at a time, so that sampling ahead
goes on meanwhile. The loop knows no engine, no device and no layout.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from ostinato_agent_loop import Trajectory, check_rollout
from ostinato_trainer.algorithms.advantages import advantage_estimator
from ostinato_trainer.config import Config
from ostinato_trainer.loggers.base import STEP_METRIC
from ostinato_trainer.loop.callbacks import Callbacks
from ostinato_trainer.loop.critic_update import CriticUpdate
from ostinato_trainer.loop.experience import batch_of, prepare_batch, with_baselines
from ostinato_trainer.loop.parts import Stopwatch, TrainerParts
from ostinato_trainer.loop.policy_update import PolicyUpdate
from ostinato_trainer.loop.watchdog import Watchdog
from ostinato_trainer.loop.weight_probe import sample_probe
from ostinato_trainer.loop.work_thread import WorkThread
from ostinato_trainer.metrics.learning_watch import LearningWatch
from ostinato_trainer.metrics.log_prob_gap import LogProbGapWatch
from ostinato_trainer.metrics.memory import memory_metrics
from ostinato_trainer.metrics.staleness import staleness_metrics
from ostinato_trainer.metrics.step import step_metrics, timing_metrics
from ostinato_trainer.metrics.validation import validation_metrics

logger = logging.getLogger(__name__)


class PPOTrainer:
    """Reinforcement learning of an agent: in turn with `trainer.max_staleness` 0, a step ahead with 1, further ahead with more.

    Args:
        config: The whole tree; checked by `assembly`.
        parts: The components, started.
        total_steps: Steps of the run.
        steps_done: Steps that were done before, of a run that is taken up again.

    Raises:
        AlgorithmError: `algorithm.adv_estimator` names no estimator; it may be one that the user's code has registered.
    """

    def __init__(self, config: Config, parts: TrainerParts, *, total_steps: int, steps_done: int = 0) -> None:
        self.config = config
        self.parts = parts
        self.total_steps = total_steps
        self.step = steps_done
        advantage_estimator(config.algorithm.adv_estimator)
        if parts.critic is not None and config.trainer.critic_warmup >= total_steps:
            logger.warning(
                "trainer.critic_warmup is %d and the run has %d steps: the policy is never trained; write less, or more steps",
                config.trainer.critic_warmup,
                total_steps,
            )
        self._policy_update, self._critic_update = PolicyUpdate(config), CriticUpdate(config)
        self._gap_watch = LogProbGapWatch(config)
        self._learning_watch = LearningWatch()
        self._thread = WorkThread()
        self._watchdog = Watchdog(config.trainer.watchdog)
        self._callbacks = Callbacks(parts.callbacks, self._watchdog.phase)

    async def fit(self) -> None:
        """Run all steps, once.

        Raises:
            TrainingInterrupted: A step found no groups to learn from.
            CheckpointError: A checkpoint could not be written.
            PolicyMismatchError: Engine and trainer do not compute the same policy, and `log_prob_check.action` is stop.
            CallbackError: A callback raised.
            StalledError: Nothing happened for as long as the watchdog allows.
        """
        config, parts = self.config.trainer, self.parts
        async with self._running():
            with self._watchdog.phase("update_weights"):
                await self._send_weights()
            if parts.val_rows and (config.val_only or (config.val_before_train and self.step == 0)):
                self._report(await self.validate())
            while self.step < self.total_steps and not config.val_only:
                self.step += 1
                parts.checkpoints.check()
                self._callbacks.tell("on_step_begin", self.step)
                clock = Stopwatch(self._watchdog.phase)
                with clock("step"):
                    metrics = await self.train_step(clock)
                    self._learning_watch.observe(self.step, metrics)
                    if parts.val_rows and config.test_freq > 0 and self._is_due(config.test_freq):
                        with clock("testing"):
                            metrics |= await self.validate()
                    if config.save_freq and self._is_due(config.save_freq):
                        with clock("save_checkpoint"):
                            await parts.checkpoints.save(self.step, self._record(metrics))
                timings = timing_metrics(clock.seconds, metrics, num_devices=self.config.num_training_devices)
                self._report(metrics | timings | memory_metrics(config.device or "auto"))
            with self._watchdog.phase("save_checkpoint"):
                await parts.checkpoints.finish()

    async def train_step(self, clock: Stopwatch) -> dict[str, float]:
        """One step: from sampling to the new weights in the engines. Returns its metrics, without timings."""
        config, parts, compute = self.config, self.parts, self._thread.run
        with clock("gen"):
            rollout = await parts.sampling.next_step(self.step)
        self._callbacks.tell("on_sample_end", self.step, rollout.trajectories, False)
        sampled = with_baselines(batch_of(rollout.trajectories, step=self.step), rollout.baselines)
        batch, metrics = await compute(prepare_batch, sampled, config, parts, clock)
        metrics |= self._gap_watch.observe(
            sampled.with_columns(old_log_probs=batch.old_log_probs),  # with what the rollout correction rejected
            rollout.trajectories,
            policy_version=self.step - 1,
        )
        if self._gap_watch.wants_probe:
            metrics |= await self._probe(rollout.trajectories)
        if parts.critic is not None:
            with clock("update_critic"):
                metrics |= await compute(self._critic_update.run, batch, parts.critic)
        if parts.critic is None or self.step > config.trainer.critic_warmup:
            with clock("update_actor"):
                await parts.pool.withdraw_weights()
                metrics |= await compute(self._policy_update.run, batch, parts.backend)
        with clock("update_weights"):
            await self._send_weights()
        return {
            **rollout.metrics,
            **step_metrics(batch, rollout.trajectories, max_prompt_length=config.data.max_prompt_length),
            **staleness_metrics(rollout.trajectories, policy_version=self.step - 1),
            **metrics,
            "training/epoch": parts.sampling.epoch,
        }

    async def _probe(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Whether engines have the weights that the next update begins with."""
        temperature, version = self.config.actor_rollout_ref.rollout.temperature, self.step - 1
        probe = await sample_probe(self.parts.pool.servers, trajectories, version=version, temperature=temperature)
        if probe is None:
            return {}
        log_probs = await self._thread.run(partial(self.parts.backend.log_probs, probe, temperature=temperature))
        return self._gap_watch.observe_probe(probe.with_columns(old_log_probs=log_probs), version)

    async def validate(self) -> dict[str, float]:
        """Sample the validation rows with `val_kwargs` and return the metrics `val-core/...` and `val-aux/...`."""
        rollout_config = self.config.actor_rollout_ref.rollout
        with self._watchdog.phase("testing"):
            rollout = await self.parts.manager.generate_sequences(
                self.parts.val_rows,
                n=rollout_config.val_kwargs.n,
                sampling_params=rollout_config.sampling_params(validate=True),
                step=self.step,
                validate=True,
            )
        check_rollout(rollout, num_rows=len(self.parts.val_rows), n=rollout_config.val_kwargs.n)
        self._callbacks.tell("on_sample_end", self.step, rollout.trajectories, True)
        metrics = validation_metrics(rollout.trajectories)
        self._callbacks.tell("on_validate_end", self.step, metrics)
        return metrics

    async def _send_weights(self) -> None:
        """Bring every engine replica to the trained weights; the version is the number of finished steps.

        A replica that is restarted before these weights change takes them then.
        """
        backend, wakes_engines = self.parts.backend, self.config.engines_sleep
        manifest, open_stream = backend.weights(version=self.step)
        pause = self.config.actor_rollout_ref.rollout.pool.sync_pause
        if wakes_engines:
            await self._thread.run(backend.free_cached_memory)
        await self.parts.pool.update_weights(manifest, open_stream, pause=pause, replayable=True)
        if wakes_engines:  # for what of them wakes with the next batch
            await self._thread.run(backend.free_cached_memory)

    def _is_due(self, freq: int) -> bool:
        """Whether this step ends an interval of so many steps, or the run."""
        return self.step == self.total_steps or (freq > 0 and self.step % freq == 0)

    def _report(self, metrics: Mapping[str, float]) -> None:
        self._callbacks.tell("on_step_end", self.step, self._record(metrics))

    def _record(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {**metrics, STEP_METRIC: float(self.step)}

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """What a run needs around it; however it ends, nothing is sampled or computed afterwards, and callbacks know why."""
        error: BaseException | None = None
        try:
            async with self._watchdog.watching():
                try:
                    self._callbacks.tell("on_train_begin", self.step, self.total_steps)
                    yield
                finally:
                    await self.parts.sampling.aclose()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._thread.close()
            async with self._watchdog.watching():
                self._callbacks.tell_of_the_end(self.step, error)
