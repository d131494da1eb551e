"""`PPOTrainer`: sample, score, log-probabilities, advantages, update, weights to the engines, validate, save.

Invariant: what is trained on is what was sampled: ids, masks and log-probabilities come from the trajectories' own record. A failed
trajectory is counted and left out; it is never a reward of 0. The loop knows no engine, no device and no layout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ostinato_agent_loop import RolloutBatch, Trajectory
from ostinato_engines import SamplingParams
from ostinato_rollout import ServerPool
from ostinato_trainer.advantages import AdvantageOptions, advantage_estimator, with_advantages
from ostinato_trainer.aggregation import with_loss_weights
from ostinato_trainer.backend import EntropyMode, OptimizerStats, TrainingBackend
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import Config
from ostinato_trainer.errors import TrainingInterrupted
from ostinato_trainer.metrics import step_metrics, timing_metrics, validation_metrics
from ostinato_trainer.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.segments import Segment, segments_of


class PromptStream(Protocol):
    """An endless, resumable stream of batches of dataset rows."""

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        ...

    def next_batch(self) -> list[dict]:
        """The next `data.train_batch_size` rows."""
        ...


class Manager(Protocol):
    """`AgentLoopManager`, or a class of the user's own in its place."""

    async def generate_sequences(
        self, rows: Sequence[Mapping], *, n: int, sampling_params: SamplingParams, step: int, validate: bool = False
    ) -> RolloutBatch:
        """`n` trajectories for each row, scored."""
        ...


class TrainerCallback(Protocol):
    """What a run can be watched through; called in the loop, so it should return soon."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """After a step was trained, its weights sent and its metrics known."""
        ...


class CheckpointWriter(Protocol):
    """Writes the state of a step, whole or not at all."""

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`."""
        ...


@dataclass
class TrainerParts:
    """The components of a run; `assembly` builds them from a configuration."""

    loader: PromptStream
    val_rows: Sequence[Mapping]
    manager: Manager
    pool: ServerPool
    backend: TrainingBackend
    checkpoints: CheckpointWriter
    callbacks: Sequence[TrainerCallback] = ()


@dataclass
class Stopwatch:
    """Seconds by phase, under the field's names `timing_s/...`."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin


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
        actor = config.actor_rollout_ref.actor
        self._options = PolicyLossOptions(
            clip_ratio=actor.clip_ratio,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
            kl_loss_type=actor.kl_loss_type,
            entropy_coeff=actor.entropy_coeff,
        )
        self._loss_fn = policy_loss_fn(self._options)

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
            num_tokens = int(metrics["perf/total_num_tokens"])
            self._report(metrics | timing_metrics(clock.seconds, num_tokens=num_tokens))

    async def train_step(self, rows: Sequence[Mapping], clock: Stopwatch) -> dict[str, float]:
        """One step on `rows`: from sampling to the new weights in the engines. Returns its metrics, without timings."""
        algorithm, rollout_config = self.config.algorithm, self.config.actor_rollout_ref.rollout
        with clock("gen"):
            rollout = await self.parts.manager.generate_sequences(
                rows, n=rollout_config.n, sampling_params=rollout_config.sampling_params(), step=self.step
            )
        batch = Batch.from_segments(self._segments(rollout.trajectories))
        with clock("old_log_prob"):
            batch = batch.with_columns(
                old_log_probs=self.parts.backend.log_probs(batch, temperature=rollout_config.temperature)
            )
        if self._options.kl_loss_coef:
            with clock("ref"):
                reference = self.parts.backend.log_probs(batch, temperature=rollout_config.temperature, reference=True)
                batch = batch.with_columns(ref_log_probs=reference)
        with clock("adv"):
            options = AdvantageOptions(norm_by_std=algorithm.norm_adv_by_std_in_grpo)
            batch = with_advantages(batch, algorithm.adv_estimator, options)
        with clock("update_actor"):
            await self.parts.pool.withdraw_weights()
            update_metrics = self._update(batch)
        with clock("update_weights"):
            await self._send_weights()
        return {
            **rollout.metrics,
            **step_metrics(batch, rollout.trajectories),
            **update_metrics,
            "training/epoch": self.parts.loader.epoch,
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

    def _segments(self, trajectories: Sequence[Trajectory]) -> list[Segment]:
        """Healthy trajectories as the segments of a batch."""
        segments = segments_of(trajectories)
        if not segments:
            failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
            first = f"; the first failed in {failures[0].where}: {failures[0].message}" if failures else ""
            raise TrainingInterrupted(
                f"step {self.step} must have at least one trajectory to learn from, but all {len(trajectories)} failed{first}"
            )
        return segments

    def _update(self, batch: Batch) -> dict[str, float]:
        """`ppo_epochs` passes over the batch in mini-batches; returns the mean of their metrics."""
        actor, backend = self.config.actor_rollout_ref.actor, self.parts.backend
        rollout_config = self.config.actor_rollout_ref.rollout
        entropy = EntropyMode.GRADIENT if actor.entropy_coeff else EntropyMode.OFF
        updates: list[dict[str, float]] = []
        num_skipped = 0
        for _ in range(actor.ppo_epochs):
            for mini_batch in batch.mini_batches(actor.ppo_mini_batch_size * rollout_config.n):
                weighted = with_loss_weights(
                    mini_batch, actor.loss_agg_mode, loss_scale_factor=float(self.config.data.max_response_length)
                )
                micro_batches = self._micro_batches(weighted)
                metrics = backend.forward_backward(
                    micro_batches, self._loss_fn, temperature=rollout_config.temperature, entropy=entropy
                )
                stats: OptimizerStats = backend.optimizer_step()
                num_skipped += stats.skipped
                updates.append({**metrics, "actor/grad_norm": stats.grad_norm, "actor/lr": stats.lr})
        means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        return {**means, "actor/num_skipped_steps": float(num_skipped)}

    def _micro_batches(self, mini_batch: Batch) -> list[Batch]:
        """The parts of a mini-batch that go through the model at once."""
        actor = self.config.actor_rollout_ref.actor
        if actor.use_dynamic_bsz:
            return mini_batch.split_by_tokens(actor.ppo_max_token_len_per_gpu)
        return mini_batch.split_by_count(actor.ppo_micro_batch_size_per_gpu or mini_batch.num_sequences)

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
