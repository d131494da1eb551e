"""`PPOTrainer`: sample, score, log-probabilities, advantages, update, weights to the engines, validate, save.

Invariant: what is trained on is what was sampled: ids, masks and log-probabilities come from the trajectories' own record. A failed
trajectory is counted and left out; it is never a reward of 0. The loop knows no engine, no device and no layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ostinato_trainer.advantages import advantage_estimator
from ostinato_trainer.config import Config
from ostinato_trainer.experience import batch_of, prepare_batch
from ostinato_trainer.log_prob_gap import LogProbGapWatch
from ostinato_trainer.memory_metrics import memory_metrics
from ostinato_trainer.metrics import step_metrics, timing_metrics
from ostinato_trainer.policy_update import PolicyUpdate
from ostinato_trainer.trainer_parts import Stopwatch, TrainerParts
from ostinato_trainer.validation import validation_metrics


class PPOTrainer:
    """Synchronous, on-policy reinforcement learning of an agent.

    Args:
        config: The whole tree; checked by `assembly`.
        parts: The components, started.
        total_steps: Steps of the run.

    Raises:
        AlgorithmError: `algorithm.adv_estimator` names no estimator; it may be one that the user's code has registered.
    """

    def __init__(self, config: Config, parts: TrainerParts, *, total_steps: int) -> None:
        self.config = config
        self.parts = parts
        self.total_steps = total_steps
        self.step = 0
        advantage_estimator(config.algorithm.adv_estimator)
        self._policy_update = PolicyUpdate(config)
        self._gap_watch = LogProbGapWatch(config)

    async def fit(self) -> None:
        """Run all steps.

        Raises:
            TrainingInterrupted: a step ended without a trajectory to learn from.
        """
        config, parts = self.config.trainer, self.parts
        await self._send_weights()
        if config.val_before_train and parts.val_rows:
            self._report(await self.validate())
        while self.step < self.total_steps:
            self.step += 1
            is_last = self.step == self.total_steps
            clock = Stopwatch()
            with clock("step"):
                metrics = await self.train_step(parts.loader.next_batch(), clock)
                if parts.val_rows and config.test_freq > 0 and (is_last or self.step % config.test_freq == 0):
                    with clock("testing"):
                        metrics |= await self.validate()
                if config.save_freq and (is_last or (config.save_freq > 0 and self.step % config.save_freq == 0)):
                    with clock("save_checkpoint"):
                        parts.checkpoints.save(self.step)
            self._report(metrics | timing_metrics(clock.seconds, metrics) | memory_metrics(config.device or "auto"))

    async def train_step(self, rows: Sequence[Mapping], clock: Stopwatch) -> dict[str, float]:
        """One step on `rows`: from sampling to the new weights in the engines. Returns its metrics, without timings."""
        rollout_config, parts = self.config.actor_rollout_ref.rollout, self.parts
        with clock("gen"):
            rollout = await parts.manager.generate_sequences(
                rows, n=rollout_config.n, sampling_params=rollout_config.sampling_params(), step=self.step
            )
        sampled = batch_of(rollout.trajectories, step=self.step)
        batch, metrics = prepare_batch(sampled, self.config, parts, clock)
        with clock("update_actor"):
            await parts.pool.withdraw_weights()
            metrics |= self._policy_update.run(batch, parts.backend)
        with clock("update_weights"):
            await self._send_weights()
        return {
            **rollout.metrics,
            **step_metrics(batch, rollout.trajectories, max_prompt_length=self.config.data.max_prompt_length),
            **self._gap_watch.observe(batch, rollout.trajectories, policy_version=self.step - 1),
            **metrics,
            "training/epoch": parts.loader.epoch,
        }

    async def validate(self) -> dict[str, float]:
        """Sample the validation rows with `val_kwargs` and return the metrics `val-core/...` and `val-aux/...`."""
        rollout_config = self.config.actor_rollout_ref.rollout
        rollout = await self.parts.manager.generate_sequences(
            self.parts.val_rows,
            n=rollout_config.val_kwargs.n,
            sampling_params=rollout_config.sampling_params(validate=True),
            step=self.step,
            validate=True,
        )
        return validation_metrics(rollout.trajectories)

    async def _send_weights(self) -> None:
        """Bring every engine replica to the trained weights; the version is the number of finished steps.

        A replica that is restarted before these weights change takes them then.
        """
        manifest, open_stream = self.parts.backend.weights(version=self.step)
        pause = self.config.actor_rollout_ref.rollout.pool.sync_pause
        await self.parts.pool.update_weights(manifest, open_stream, pause=pause, replayable=True)

    def _report(self, metrics: Mapping[str, float]) -> None:
        record = {**metrics, "training/global_step": float(self.step)}
        for callback in self.parts.callbacks:
            callback.on_step_end(self.step, record)
