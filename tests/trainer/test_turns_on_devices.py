"""Engines and training that take turns on devices: who gives memory back before whom."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ostinato_rollout import ServerPool
from ostinato_trainer.assembly import run_training
from ostinato_trainer.backends.local import LocalBackend
from ostinato_trainer.backends.ranks import host
from ostinato_trainer.config.loading import load_config

KEYS = (
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=-1",
    "trainer.logger=[jsonl]",
    "trainer.device=cpu",
    "data.train_batch_size=1",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.n=2",
    "algorithm.filter_groups.enable=false",
)


@pytest.mark.parametrize("takes_turns", [True, False])
def test_training_gives_memory_back_before_engines_wake(
    quickstart_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_turns: bool
) -> None:
    """Before the new weights, with which the engine's weights wake, and after them, before its cache does; not where nobody waits for it."""
    seen: list[str] = []
    update = ServerPool.update_weights

    async def watched(self: ServerPool, *arguments: Any, **named: Any) -> None:
        seen.append("new weights")
        await update(self, *arguments, **named)

    monkeypatch.setattr(ServerPool, "update_weights", watched)
    monkeypatch.setattr(LocalBackend, "free_cached_memory", lambda self: seen.append("free"))
    own = (
        f"trainer.default_local_dir={tmp_path}",
        f"actor_rollout_ref.rollout.free_cache_engine={str(takes_turns).lower()}",
    )
    run_training(load_config([quickstart_home / "config.yaml"], [*KEYS, *own]))
    assert seen == (["free", "new weights", "free"] * 2 if takes_turns else ["new weights"] * 2)


def test_a_rank_frees_the_cache_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes of their own: what the controller's torch frees is not theirs."""
    freed: list[Any] = []
    monkeypatch.setattr(host, "empty_cache", freed.append)
    rank = cast("host.RankHost", SimpleNamespace(_device=torch.device("cuda:1")))
    host.RankHost.free_cached_memory(rank)
    assert freed == [torch.device("cuda:1")]
