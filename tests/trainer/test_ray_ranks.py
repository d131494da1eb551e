"""Training ranks as actors, on a real cluster of this host."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_rollout.ray_cluster import ActorPlacement
from ostinato_rollout.ray_cluster.testing import local_cluster, wait_until_gone
from ostinato_trainer.backends.fsdp2 import Fsdp2Factory, Fsdp2Options
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.backends.ranks.ray_workers import RankActors
from ostinato_trainer.backends.ranks.workers import RankDiedError, RankTimeoutError
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, CheckpointError
from ostinato_trainer.heartbeat import num_beats

SETTINGS = {"dtype": "float32", "lr": 1e-3, "total_steps": 4, "device": "cpu"}
PLACES = (ActorPlacement(num_cpus=0.5),) * 2


@pytest.fixture(scope="session", autouse=True)
def cluster():
    """A cluster for all tests here."""
    with local_cluster():
        yield


@pytest.fixture
def group_of(quickstart_home: Path):
    """Makes a group of two actors; ends it."""
    made: list[RankGroup] = []

    def make(**options) -> tuple[RankGroup, RankActors]:
        workers = RankActors(PLACES, **options)
        made.append(RankGroup(workers, Fsdp2Factory(str(quickstart_home / "model"), Fsdp2Options(**SETTINGS))))
        return made[-1], workers

    yield make
    for group in made:
        group.close()


def batch() -> Batch:
    """Three sequences of uneven lengths."""
    lengths = (7, 4, 11)
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    return Batch(
        token_ids=torch.randint(0, 64, (total,), generator=generator),
        loss_mask=torch.cat([torch.arange(length) >= 2 for length in lengths]),
        rollout_log_probs=torch.full((total,), float("nan")),
        cu_seqlens=torch.tensor([0, 7, 11, 22]),
        group_index=torch.zeros(3, dtype=torch.long),
        trajectory_index=torch.arange(3),
        prompt_lengths=torch.full((3,), 2),
        rewards=torch.zeros(3, dtype=torch.float64),
        group_ids=("g",),
        trajectory_ids=("a", "b", "c"),
    )


def all_gone(pids: list[int]) -> bool:
    """Whether no process is left, after a while."""
    return not wait_until_gone(set(pids))


@pytest.mark.slow
def test_ranks_that_are_actors_say_what_one_device_says(quickstart_home: Path, group_of) -> None:
    """Log-probabilities and weights of two actors are those of the local backend, and no process is left after the end."""
    local = LocalBackend.from_pretrained(str(quickstart_home / "model"), LocalBackendOptions(**SETTINGS))
    group, workers = group_of()
    pids = workers.process_ids
    assert len(set(pids)) == 2
    expected = local.log_probs(batch(), temperature=1.0)
    beats = num_beats()
    torch.testing.assert_close(group.log_probs(batch(), temperature=1.0), expected, rtol=1e-5, atol=1e-5)
    assert num_beats() >= beats + 2  # each answer is a heartbeat of this process
    manifest, open_stream = group.weights(version=3)
    own_manifest, own_stream = local.weights(version=3)
    assert manifest == own_manifest
    own = dict(own_stream())
    streamed = [(name, tensor) for name, tensor in open_stream()]
    assert [name for name, _ in streamed] == [spec.name for spec in manifest.tensors]
    for name, tensor in streamed:
        torch.testing.assert_close(tensor, own[name], rtol=0, atol=0)
    with pytest.raises(CheckpointError):
        group.load("no/such/folder")
    group.log_probs(batch(), temperature=1.0)  # all ranks have refused alike, so they go on
    group.close()
    assert all_gone(pids)
    with pytest.raises(BackendError, match="closed"):
        group.log_probs(batch(), temperature=1.0)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_takes_the_others_along(group_of) -> None:
    """The call that needs a killed rank raises at once with its number, and no rank is left."""
    group, workers = group_of()
    pids = workers.process_ids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankDiedError, match="rank 1 of 2 must live"):
        group.log_probs(batch(), temperature=1.0)
    assert all_gone(pids)


@pytest.mark.slow
def test_ranks_without_room_are_told_within_the_deadline(quickstart_home: Path) -> None:
    """Actors that no node can hold end the start with what they wait for; none is left."""
    workers = RankActors([ActorPlacement(num_cpus=1000)], start_timeout_s=2.0)
    with pytest.raises(RankTimeoutError, match="rank 0 had no process; no place for 1000 CPU"):
        RankGroup(workers, Fsdp2Factory(str(quickstart_home / "model"), Fsdp2Options(**SETTINGS)))
    assert workers.process_ids == []
