"""Each step gets its groups: the same as a batch in turn, ahead within the bound, others in place of those that were dropped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_agent_loop import AgentLoopManager, AgentLoopOutput, RewardResult, RolloutBatch, Trajectory
from ostinato_engines import PolicySpan, WeightManifest
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import Failure, FailureKind, ServerPool, SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.data.prompt_rows import PromptRows
from ostinato_trainer.errors import AlgorithmError, CheckpointError, ConfigError, DatasetError, TrainingInterrupted
from ostinato_trainer.loop.sampling import BatchSampling, GroupSampling, sampling_of
from ostinato_trainer.metrics.staleness import staleness_metrics

NUM_ROWS = 12


class Rows:
    """A loader of numbered rows, in order, epoch after epoch, in batches of two."""

    def __init__(self, batch_size: int = 2, num_rows: int = NUM_ROWS) -> None:
        self.batch_size, self.num_rows, self.place = batch_size, num_rows, 0

    @property
    def epoch(self) -> int:
        """Of the next batch."""
        return self.place // self.num_rows

    def next_batch(self) -> list[dict]:
        """Rows of the next batch."""
        first, self.place = self.place, self.place + self.batch_size
        return [
            {"raw_prompt": [{"role": "user", "content": "Please."}], "index": number % self.num_rows}
            for number in range(first, self.place)
        ]

    def state_dict(self) -> dict:
        """See PromptStream."""
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See PromptStream."""
        self.place = state["place"]


Reward = Callable[[Mapping, Sequence[AgentLoopOutput]], float]


class World:
    """A manager over a scripted engine, and the policy version that it serves."""

    def __init__(self, *overrides: str, reward: Reward | None = None, total_steps: int = 4) -> None:
        self.config: Config = load_config(
            [],
            [
                "data.train_batch_size=2",
                "actor_rollout_ref.rollout.n=2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                *overrides,
            ],
        )
        self.tokenizer = tiny_chat_tokenizer()
        self.server = ScriptedServer(lambda request: str(request.params.seed), encode=self.tokenizer.encode_text)
        self.pool = ServerPool([self.server])
        self.reward = reward or (lambda row, outputs: float(row["index"]))
        self.rows = Rows()
        self.total_steps = total_steps
        self.manager = self.make_manager(AgentLoopManager)
        self.sampling = self.make_sampling()

    def make_manager(self, kind: type[AgentLoopManager]) -> AgentLoopManager:
        """A manager of that class."""

        async def score(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> RewardResult:
            return RewardResult(self.reward(row, outputs), {"acc": float(row["index"] % 2)})

        return kind(
            self.config.actor_rollout_ref.rollout,
            tokens=ContinuousTokens(self.tokenizer),
            budget=SessionBudget(200, 100),
            pool=self.pool,
            reward_fn=score,
        )

    def make_sampling(self) -> GroupSampling:
        """From the start."""
        sampling = sampling_of(self.config, self.manager, self.rows, total_steps=self.total_steps)
        assert isinstance(sampling, GroupSampling)
        return sampling

    async def serve(self, version: int) -> None:
        """Give the engine the weights of a version."""
        await self.pool.update_weights(WeightManifest(version=version, tensors=()), lambda: iter(()))


def seen(batch: RolloutBatch) -> list[tuple]:
    """What training gets of a batch."""
    return [
        (one.group_id, one.trajectory_id, one.row["index"], [part.response_ids for part in one.segments], one.reward)
        for one in batch.trajectories
    ]


def rows_of(batch: RolloutBatch) -> list[int]:
    """The rows of a batch's groups."""
    return list(dict.fromkeys(one.row["index"] for one in batch.trajectories))


async def test_in_turn_a_step_is_the_batch_that_a_manager_gives() -> None:
    """With max_staleness 0 each step's trajectories are those of generate_sequences over the loader's rows: names, tokens, and so
    seeds; and nothing is under way between two steps."""
    world, rows = World(), Rows()
    for step in (1, 2, 3):
        batch = await world.sampling.next_step(step)
        num_requests = len(world.server.requests)
        again = await world.manager.generate_sequences(rows.next_batch(), n=2, step=step)
        assert seen(batch) == seen(again)
        assert num_requests == (2 * step - 1) * 4
        assert batch.metrics["training/num_gen_batches"] == 1


@pytest.mark.parametrize("max_staleness", [1, 3])
async def test_ahead_no_group_is_older_than_the_bound(max_staleness: int) -> None:
    """With max_staleness n no group is more than n versions old when a step takes it, every row comes once and in order, and nothing is
    sampled for a step after the last."""
    world = World(f"trainer.max_staleness={max_staleness}", total_steps=6)
    await world.serve(0)
    rows, worst = [], []
    for step in range(1, 7):
        batch = await world.sampling.next_step(step)
        rows += rows_of(batch)
        metrics = staleness_metrics(batch.trajectories, policy_version=step - 1)
        worst.append(metrics["training/off_policy/trajectory_staleness_worst/max"])
        for _ in range(50):
            await asyncio.sleep(0)
        await world.serve(step)
    assert rows == list(range(12))
    assert worst == [min(step, max_staleness) for step in range(6)]
    assert len(world.server.requests) == 6 * 2 * 2
    await world.sampling.aclose()


async def test_sampling_ahead_goes_on_while_nobody_takes() -> None:
    """Between two steps the next one's groups are sampled; with max_staleness 0 they are not."""
    for max_staleness, num_requests in ((0, 4), (1, 8), (2, 12)):
        world = World(f"trainer.max_staleness={max_staleness}")
        await world.serve(0)
        await world.sampling.next_step(1)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(world.server.requests) == num_requests
        await world.sampling.aclose()


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_group_that_failed_is_counted_and_replaced(max_staleness: int) -> None:
    """A group with too few good trajectories is in no batch; the next rows take its place, across the loader's batches."""

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        if row["index"] in (1, 2):
            raise ValueError("the judge is out")
        return 1.0

    world = World(f"trainer.max_staleness={max_staleness}", reward=reward, total_steps=3)
    await world.serve(0)
    dropped, rows = 0.0, []
    for step in (1, 2, 3):
        batch = await world.sampling.next_step(step)
        rows += rows_of(batch)
        dropped += batch.metrics["training/num_dropped_groups/failed"]
        assert all(trajectory.failure is None for trajectory in batch.trajectories)
        await world.serve(step)
    assert (rows, dropped) == ([0, 3, 4, 5, 6, 7], 2)


async def test_too_many_failures_end_the_run_with_their_cause() -> None:
    """Where more groups fail than max_failed_batches allows, the step ends with an error that counts them and says what failed."""

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        raise ValueError("the judge is out")

    for limit, num_groups in ((0, 2), (1, 4), (3, 8)):
        world = World(f"trainer.max_failed_batches={limit}", reward=reward)
        with pytest.raises(TrainingInterrupted, match=r"max_failed_batches=\d.*failed, 0 filtered.*the judge is out"):
            await world.sampling.next_step(1)
        assert num_groups - 2 < len(world.server.requests) / 2 <= num_groups
        await world.sampling.aclose()


@pytest.mark.parametrize("max_staleness", [0, 3])
async def test_sampling_ahead_may_drop_what_each_step_may(max_staleness: int) -> None:
    """Groups that fail while several steps are sampled at once count for all of those: what a run in turn bears, one ahead bears too."""

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        if row["index"] % 2:
            raise ValueError("the judge is out")
        return 1.0

    world = World(f"trainer.max_staleness={max_staleness}", reward=reward, total_steps=4)
    await world.serve(0)
    rows = []
    for step in (1, 2, 3, 4):
        rows += rows_of(await world.sampling.next_step(step))
        await world.serve(step)
    assert rows == [0, 2, 4, 6, 8, 10, 0, 2]
    await world.sampling.aclose()


@pytest.mark.parametrize(("steps_left", "num_failed"), [(1, 3), (2, 5), (9, 7)])
async def test_no_more_may_be_dropped_ahead_than_steps_are_left(steps_left: int, num_failed: int) -> None:
    """Where every group fails, sampling ahead ends with the limit of the steps under way: no more than are left of the run."""

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        raise ValueError("the judge is out")

    world = World("trainer.max_staleness=2", reward=reward, total_steps=steps_left)
    await world.serve(0)
    with pytest.raises(TrainingInterrupted, match=f"got {num_failed} failed"):
        await world.sampling.next_step(1)
    await world.sampling.aclose()


async def test_a_smaller_group_may_be_kept() -> None:
    """With min_group_size 1 a group of which one trajectory has a reward is trained on, the failed one in its place."""
    calls: list[int] = []

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        calls.append(row["index"])
        if calls.count(row["index"]) == 1:
            raise ValueError("not the first time")
        return 1.0

    world = World("trainer.min_group_size=1", reward=reward)
    batch = await world.sampling.next_step(1)
    assert rows_of(batch) == [0, 1]
    assert sum(trajectory.failure is not None for trajectory in batch.trajectories) == 2


async def test_failed_trajectories_are_done_again() -> None:
    """With max_reruns a trajectory that failed is sampled anew, with another seed, and its group stays."""
    failed: list[str] = []

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        if len(failed) < 2:
            failed.append(outputs[0].trajectory_id)
            raise ValueError("not yet")
        return 1.0

    world = World("trainer.max_reruns=2", reward=reward)
    batch = await world.sampling.next_step(1)
    assert rows_of(batch) == [0, 1]
    assert batch.metrics["training/num_reruns"] == 2
    assert len({request.params.seed for request in world.server.requests}) == 6


@pytest.mark.parametrize("metric", ["score", "acc"])
async def test_groups_that_are_all_alike_are_sampled_anew(metric: str) -> None:
    """With filter_groups a group whose trajectories do not differ in the metric is filtered, counted, and replaced by other prompts."""
    calls: list[int] = []

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        calls.append(row["index"])
        return 0.0 if row["index"] in (0, 3) else float(calls.count(row["index"]))

    overrides = ("algorithm.filter_groups.enable=true", f"algorithm.filter_groups.metric={metric}")
    world = World(*overrides, "algorithm.filter_groups.max_num_gen_batches=3", reward=reward)
    if metric == "acc":  # it is a function of the row here, so that no group differs
        with pytest.raises(TrainingInterrupted, match=r"max_num_gen_batches=3 batches.* 0 failed, 5 filtered"):
            await world.sampling.next_step(1)
        return
    batch = await world.sampling.next_step(1)
    assert rows_of(batch) == [1, 2]
    assert batch.metrics["training/num_dropped_groups/filtered"] == 1
    assert rows_of(await world.sampling.next_step(2)) == [4, 5]


async def test_an_unknown_metric_ends_the_run_at_once() -> None:
    """A metric that the reward function does not give is an error that lists what it gives."""
    world = World("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=akk")
    with pytest.raises(AlgorithmError, match="got akk; it gives score, acc"):
        await world.sampling.next_step(1)


async def test_remax_has_a_greedy_trajectory_for_each_group() -> None:
    """Where the estimator needs a baseline each group has one, sampled greedily and in no batch; one that fails drops its group."""

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        if row["index"] == 0 and outputs[0].trajectory_id.endswith("/2"):
            raise ValueError("no baseline")
        return float(row["index"])

    world = World("algorithm.adv_estimator=remax", reward=reward)
    batch = await world.sampling.next_step(1)
    assert rows_of(batch) == [1, 2]
    assert len(batch.trajectories) == 4
    rewards = {group: one.reward.score for group, one in batch.baselines.items() if one.reward is not None}
    assert rewards == {"train-1-1": 1.0, "train-1-2": 2.0}


class OwnSequences(AgentLoopManager):
    """A manager of the user's own that knows batches only."""

    async def generate_sequences(self, rows: Sequence[Mapping[str, Any]], **options: Any) -> RolloutBatch:
        """See AgentLoopManager."""
        batch = await super().generate_sequences(rows, **options)
        for trajectory in batch.trajectories[::2]:
            trajectory.reward = RewardResult(-1.0)
        return batch


async def test_a_manager_of_ones_own_is_asked_for_batches() -> None:
    """What a subclass does in generate_sequences happens in training too: the inherited stream, which knows nothing of it, is not used."""
    world = World()
    sampling = sampling_of(world.config, world.make_manager(OwnSequences), world.rows, total_steps=2)
    assert isinstance(sampling, BatchSampling)
    batch = await sampling.next_step(1)
    assert [one.reward.score for one in batch.trajectories if one.reward is not None] == [-1.0, 0.0, -1.0, 1.0]
    assert rows_of(await sampling.next_step(2)) == [2, 3]


async def test_batches_without_a_stream_leave_failed_groups_out() -> None:
    """A group with too few good trajectories is left out and counted; where all are, the run ends with the cause."""

    def reward(row: Mapping, outputs: Sequence[AgentLoopOutput]) -> float:
        if row["index"] in (0, 2, 3):
            raise ValueError("the judge is out")
        return 1.0

    world = World(reward=reward)
    sampling = BatchSampling(world.config, world.manager, PromptRows(world.rows))
    batch = await sampling.next_step(1)
    assert rows_of(batch) == [1]
    assert batch.metrics["training/num_dropped_groups/failed"] == 1
    with pytest.raises(TrainingInterrupted, match=r"got none of 2; the first failure was in .*the judge is out"):
        await sampling.next_step(2)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_staleness=1",
        "trainer.max_reruns=1",
        "algorithm.filter_groups.enable=true",
        "algorithm.adv_estimator=remax",
    ],
)
def test_what_needs_a_stream_is_refused_by_name(override: str) -> None:
    """Keys that a manager without a stream cannot follow are named before anything starts."""
    world = World(override)
    with pytest.raises(ConfigError, match=rf"{override.split('=')[0]}.*OwnSequences without"):
        sampling_of(world.config, world.make_manager(OwnSequences), world.rows, total_steps=2)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("steps_done", [1, 2, 3])
async def test_a_run_that_is_taken_up_again_gets_the_same_groups(max_staleness: int, steps_done: int) -> None:
    """The state after any step, through JSON, goes on with the groups of a run that never stopped: what was sampled ahead is not sampled
    again, in turn every trajectory is the same."""

    def world() -> World:
        return World(f"trainer.max_staleness={max_staleness}", total_steps=5)

    async def steps(one: World, first: int, last: int) -> list[list[tuple]]:
        found = []
        for step in range(first, last + 1):
            found.append(seen(await one.sampling.next_step(step)))
            for _ in range(50):
                await asyncio.sleep(0)
            await one.serve(step)
        return found

    whole, before, after = world(), world(), world()
    for one in (whole, before, after):
        await one.serve(0)
    expected = await steps(whole, 1, 5)
    found = await steps(before, 1, steps_done)
    state = json.loads(json.dumps(before.sampling.state_dict()))
    await before.sampling.aclose()
    await after.serve(steps_done)
    after.sampling.load_state_dict(state)
    assert after.sampling.state_dict() == state
    found += await steps(after, steps_done + 1, 5)
    assert found == expected
    assert len(before.server.requests) + len(after.server.requests) == len(whole.server.requests)


async def test_a_state_that_does_not_fit_is_refused() -> None:
    """A damaged state, and one with groups ahead for a run in turn, are refused by name."""
    ahead, turn = World("trainer.max_staleness=1"), World()
    await ahead.serve(0)
    await ahead.sampling.next_step(1)
    state = ahead.sampling.state_dict()
    await ahead.sampling.aclose()
    with pytest.raises(CheckpointError, match=r"trainer\.max_staleness must be above 0"):
        turn.sampling.load_state_dict(state)
    for damaged in ({}, {**state, "stream": "no base64!"}, {**state, "stream": "AAAA"}):
        with pytest.raises(CheckpointError):
            ahead.make_sampling().load_state_dict(damaged)


@given(batch_size=st.integers(1, 5), num_given=st.integers(0, 23))
def test_a_place_in_the_rows_is_exact(batch_size: int, num_given: int) -> None:
    """Rows go on from any place as if nothing had been, within a batch and at its ends."""
    rows, again = PromptRows(Rows(batch_size)), PromptRows(Rows(batch_size))
    for _ in range(num_given):
        next(rows)
    again.load_state_dict(json.loads(json.dumps(rows.state_dict())))
    assert [next(again)["index"] for _ in range(12)] == [next(rows)["index"] for _ in range(12)]


def test_places_that_are_none_are_refused() -> None:
    """A state that is none, a place outside a batch, and a loader that gives nothing are errors that say so."""
    rows = PromptRows(Rows(2))
    for state in ({}, {"loader": {"place": 0}, "num_given": -1}, {"loader": {"place": 0}, "num_given": 2}):
        with pytest.raises(DatasetError):
            rows.load_state_dict(state)
    with pytest.raises(DatasetError, match="at least one row"):
        next(PromptRows(Rows(0)))


def test_staleness_counts_from_the_version_that_is_trained() -> None:
    """Spans, newest and oldest versions of good trajectories against the version that is about to be trained; what is not known is in none."""

    def trajectory(*versions: int, failure: Failure | None = None) -> Trajectory:
        spans = tuple(PolicySpan(place, version) for place, version in enumerate(versions))
        output = AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3, 4], response_mask=[1, 1, 1], policy_versions=spans)
        return Trajectory(
            group_id="g", trajectory_id="t", row={}, segments=[output], reward=RewardResult(1.0), failure=failure
        )

    failed = trajectory(0, failure=Failure("here", FailureKind.AGENT, "no"))
    metrics = staleness_metrics([trajectory(5), trajectory(3, 4, 5), trajectory(), failed], policy_version=5)
    prefix = "training/off_policy/trajectory_"
    assert [metrics[f"{prefix}spans/{spread}"] for spread in ("mean", "max", "min")] == [2.0, 3.0, 1.0]
    assert [metrics[f"{prefix}staleness/{spread}"] for spread in ("mean", "max", "min")] == [0.0, 0.0, 0.0]
    assert [metrics[f"{prefix}staleness_worst/{spread}"] for spread in ("mean", "max", "min")] == [1.0, 2.0, 0.0]
    assert staleness_metrics([trajectory(), failed], policy_version=5) == {}


async def test_the_epoch_is_that_of_the_rows_that_were_drawn() -> None:
    """The last step of an epoch belongs to it, also where the run is taken up again before it."""
    world = World(total_steps=8)
    epochs = []
    for step in range(1, 9):
        if step == 6:
            state = json.loads(json.dumps(world.sampling.state_dict()))
            world.rows = Rows()
            world.sampling = world.make_sampling()
            world.sampling.load_state_dict(state)
        await world.sampling.next_step(step)
        epochs.append(world.sampling.epoch)
    assert epochs == [0] * 6 + [1] * 2


async def test_a_row_that_cannot_be_saved_is_named() -> None:
    """What is no plain data in a row that was sampled ahead is an error when the state is asked for; arrays are plain enough."""
    for value, is_plain in ((np.arange(3), True), (object(), False)):
        world = World("trainer.max_staleness=1")
        give = world.rows.next_batch
        world.rows.next_batch = lambda give=give, value=value: [{**row, "extra": value} for row in give()]
        await world.serve(0)
        await world.sampling.next_step(1)
        if is_plain:
            assert json.dumps(world.sampling.state_dict())
        else:
            with pytest.raises(CheckpointError, match="plain data to be saved, got a object"):
                world.sampling.state_dict()
        await world.sampling.aclose()
