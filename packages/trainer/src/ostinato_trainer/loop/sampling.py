"""Where a step's trajectories come from: `GroupSampling`, over `AgentLoopManager.stream`, and `BatchSampling`, over a manager without one.

Invariants: a step gets `data.train_batch_size` good groups, or the run ends with an error that counts what was dropped; no group is
older than `trainer.max_staleness` versions when it is taken. With 0 each step has a stream of its own, whose seeds know nothing but
(seed, step, row): nothing is sampled while the policy changes. With more, one stream lasts for the run and samples ahead.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
import numpy as np

from ostinato_agent_loop import (
    AgentLoopManager,
    RolloutBatch,
    RolloutManager,
    Trajectory,
    TrajectoryStream,
    check_rollout,
)
from ostinato_rollout import Leftover, OnFailure, StreamOptions, StreamState
from ostinato_trainer.algorithms.advantages import needs_baseline
from ostinato_trainer.config import Config
from ostinato_trainer.data.prompt_rows import PromptRows, PromptStream
from ostinato_trainer.errors import CheckpointError, ConfigError, TrainingInterrupted
from ostinato_trainer.loop.group_filter import DropCounts, DropLimits, GroupFilter, is_good
from ostinato_trainer.loop.parts import Sampling

__all__ = ["BatchSampling", "GroupSampling", "sampling_of"]


def sampling_of(config: Config, manager: RolloutManager, loader: PromptStream, *, total_steps: int) -> Sampling:
    """What `config` asks for, as far as the manager can do it.

    Raises:
        ConfigError: A key needs the manager's `stream`, and its class has none that goes with its `generate_sequences`.
    """
    rows = PromptRows(loader)
    if not _has_stream(manager):
        _check_needs_no_stream(config, manager)
        return BatchSampling(config, manager, rows)
    return GroupSampling(config, cast(AgentLoopManager, manager), rows, total_steps=total_steps)


class BatchSampling:
    """One call of `generate_sequences` for each step; groups with too few good trajectories are left out, and nothing takes their place."""

    def __init__(self, config: Config, manager: RolloutManager, rows: PromptRows) -> None:
        self._config, self._manager, self._rows = config, manager, rows

    @property
    def epoch(self) -> int:
        """See `Sampling`."""
        return self._rows.epoch

    async def next_step(self, step: int) -> RolloutBatch:
        """See `Sampling`.

        Raises:
            TrainingInterrupted: No group is good.
            AgentLoopOutputError: The manager returned something else than it was asked for.
        """
        rollout, batch_size = self._config.actor_rollout_ref.rollout, self._config.data.train_batch_size
        rows = [next(self._rows) for _ in range(batch_size)]
        batch = await self._manager.generate_sequences(
            rows, n=rollout.n, sampling_params=rollout.sampling_params(), step=step
        )
        check_rollout(batch, num_rows=batch_size, n=rollout.n)
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in batch.trajectories:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        num_good = self._config.trainer.good_per_group(rollout.n)
        kept = [group for group in groups.values() if sum(map(is_good, group)) >= num_good]
        if not kept:
            failures = [trajectory.failure for trajectory in batch.trajectories if trajectory.failure is not None]
            first = f"; the first failure was in {failures[0].where}: {failures[0].message}" if failures else ""
            raise TrainingInterrupted(
                f"step {step} must have a group of which {num_good} trajectories have a reward, got none of {len(groups)}{first}"
            )
        dropped = DropCounts(drawn=len(groups), failed=len(groups) - len(kept))
        metrics = {**batch.metrics, **dropped.metrics(batch_size)}
        return RolloutBatch([trajectory for group in kept for trajectory in group], metrics)

    async def aclose(self) -> None:
        """See `Sampling`; nothing is under way between two steps."""

    def state_dict(self) -> dict:
        """See `Sampling`."""
        return {"rows": self._rows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Sampling`."""
        self._rows.load_state_dict(_part(state, "rows"))


class GroupSampling:
    """Groups from a stream; those that fail, are filtered or become stale are counted, and other prompts take their place.

    Args:
        config: The whole tree.
        manager: Whose stream.
        rows: Where prompts come from.
        total_steps: Of the run; no prompt is drawn for a step beyond them.
    """

    def __init__(self, config: Config, manager: AgentLoopManager, rows: PromptRows, *, total_steps: int) -> None:
        trainer, algorithm = config.trainer, config.algorithm
        self._config, self._manager, self._rows, self._total_steps = config, manager, rows, total_steps
        self._batch_size, self._max_staleness = config.data.train_batch_size, trainer.max_staleness
        filtering = algorithm.filter_groups
        self._filter = GroupFilter(
            min_group_size=trainer.good_per_group(config.actor_rollout_ref.rollout.n),
            metric=filtering.metric if filtering.enable else None,
        )
        self._limits = DropLimits(
            batch_size=self._batch_size,
            max_failed_batches=trainer.max_failed_batches,
            max_num_gen_batches=filtering.max_num_gen_batches,
        )
        self._stream: TrajectoryStream | None = None
        self._saved: StreamState[Mapping, Trajectory] | None = None
        self._first_step: int | None = None
        self._steps_given = 0
        self._dropped = DropCounts()

    @property
    def epoch(self) -> int:
        """See `Sampling`."""
        return self._rows.epoch

    async def next_step(self, step: int) -> RolloutBatch:
        """See `Sampling`.

        Raises:
            TrainingInterrupted: Too many groups were dropped, or the rows came to an end.
            AlgorithmError: The metric of `filter_groups` is no number that the reward function gives.
        """
        self._steps_given = step - 1
        stream = self._stream or self._open(step)
        batch = await stream.take_batch(self._batch_size)
        if not batch.trajectories:
            raise TrainingInterrupted(
                f"step {step} must have groups to learn from, got none; the stream of prompts has ended"
            )
        counts = DropCounts.of(stream.counts())
        metrics = {**batch.metrics, **counts.since(self._dropped).metrics(self._batch_size)}
        self._dropped, self._steps_given = counts, step
        if not self._max_staleness:
            await self.aclose()
        return msgspec.structs.replace(batch, metrics=metrics)

    async def aclose(self) -> None:
        """See `Sampling`."""
        stream, self._stream = self._stream, None
        self._dropped = DropCounts()
        if stream is not None:
            await stream.aclose()

    def state_dict(self) -> dict:
        """See `Sampling`; with what has been sampled ahead, finished groups and finished trajectories of others, as base64 of msgpack."""
        state = self._saved if self._stream is None else self._stream.state()
        if state is None or not self._max_staleness:
            return {"rows": self._rows.state_dict(), "stream": None, "first_step": None}
        return {"rows": self._rows.state_dict(), "stream": _encoded(state), "first_step": self._first_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Sampling`.

        Raises:
            CheckpointError: The state is damaged, or of a run with another `trainer.max_staleness`.
        """
        stream = state.get("stream")
        if stream is not None and not self._max_staleness:
            raise CheckpointError(
                "trainer.max_staleness must be above 0 to take up groups that were sampled ahead, got 0; write the value of that run"
            )
        self._rows.load_state_dict(_part(state, "rows"))
        self._saved = None if stream is None else _decoded(stream)
        self._first_step = state.get("first_step")

    def _open(self, step: int) -> TrajectoryStream:
        trainer, rollout = self._config.trainer, self._config.actor_rollout_ref.rollout
        num_good = self._config.trainer.good_per_group(rollout.n)
        is_ahead = self._max_staleness > 0
        if self._first_step is None or not is_ahead:
            self._first_step = step  # names the stream and its seeds, also where the run is taken up again
        options = StreamOptions(
            queue_size=None,
            in_order=True,
            max_reruns=trainer.max_reruns,
            on_failure=OnFailure.DROP if num_good == rollout.n else OnFailure.KEEP,
            max_dropped_in_row=1000 * self._batch_size,
            num_groups=self._batch_size * (self._total_steps - step + 1 if is_ahead else 1),
            leftover=Leftover.CANCEL,
            max_staleness=self._max_staleness if is_ahead else None,
            groups_per_version=self._batch_size if is_ahead else None,
        )
        self._stream = self._manager.stream(
            self._bounded_rows(),
            n=rollout.n,
            sampling_params=rollout.sampling_params(),
            step=self._first_step,
            options=options,
            keep_group=self._filter,
            state=self._saved,
            greedy_baseline=needs_baseline(self._config.algorithm.adv_estimator),
        )
        self._saved = None
        return self._stream

    def _bounded_rows(self) -> Iterator[Mapping]:
        """The rows, until more groups were dropped than may be."""
        while True:
            if self._stream is not None:
                if self._filter.error is not None:
                    raise self._filter.error
                dropped = DropCounts.of(self._stream.counts()).since(self._dropped)
                failure = _last_failure(self._stream) or self._filter.last_failure
                num_steps = min(self._max_staleness + 1, self._total_steps - self._steps_given)
                self._limits.check(dropped, failure, num_steps=num_steps)
            yield next(self._rows)


def _last_failure(stream: TrajectoryStream) -> str:
    failure = next((group.failure for group in reversed(stream.dropped) if group.failure is not None), None)
    return "" if failure is None else f"{failure.where}: {failure.message}"


def _has_stream(manager: RolloutManager) -> bool:
    """Whether the manager's stream gives what its `generate_sequences` gives: a subclass that defines only the latter anew changes what is
    sampled, and the stream that it has inherited knows nothing of that."""
    for kind in type(manager).__mro__:
        if "stream" in vars(kind):
            return True
        if "generate_sequences" in vars(kind):
            return False
    return False


def _check_needs_no_stream(config: Config, manager: RolloutManager) -> None:
    needing = {
        f"trainer.max_staleness={config.trainer.max_staleness}": config.trainer.max_staleness,
        f"trainer.max_reruns={config.trainer.max_reruns}": config.trainer.max_reruns,
        "algorithm.filter_groups.enable=true": config.algorithm.filter_groups.enable,
        f"algorithm.adv_estimator={config.algorithm.adv_estimator}": needs_baseline(config.algorithm.adv_estimator),
    }
    if asking := [key for key, is_asked in needing.items() if is_asked]:
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class must define stream where it defines generate_sequences, for"
            f" {', '.join(asking)}, got {type(manager).__name__} without; define it, or leave these keys out"
        )


def _part(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise CheckpointError(
            f"the state of sampling must have {name}, got {', '.join(state) or 'nothing'}; take it from state_dict()"
        )
    return part


def _encoded(state: StreamState[Mapping, Trajectory]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        raise CheckpointError(
            f"rows and extra_fields of trajectories must be plain data to be saved, got a {type(value).__name__}; leave it out"
        )

    return base64.b64encode(msgspec.msgpack.encode(state, enc_hook=plain)).decode("ascii")


def _decoded(text: str) -> StreamState[Mapping, Trajectory]:
    try:
        return msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=StreamState[Mapping, Trajectory])
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"the stream's state must be as state_dict() gave it, got: {error}; take another checkpoint"
        ) from error
