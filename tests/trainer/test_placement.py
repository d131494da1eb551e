"""Which places a run with actors needs, and what is refused before anything is placed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.placement.checks import executor_problems
from ostinato_trainer.placement.user_files import files_of_ranks, named_files

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_rollout.ray_cluster import ClusterNode
from ostinato_trainer.placement import places
from ostinato_trainer.placement.agent_workers import RewardShare
from ostinato_trainer.placement.layout import Layout, Machine, layout_of, missing_places

CPUS = ClusterNode("a", "10.0.0.1", {"CPU": 4.0})
DEVICES = ClusterNode("b", "10.0.0.2", {"CPU": 32.0, "GPU": 8.0})


def config_of(*overrides: str) -> Config:
    """A configuration of a run with actors."""
    return load_config([], ["trainer.executor=ray", *overrides])


def test_engines_share_the_places_of_training_unless_they_have_their_own() -> None:
    """A replica a place by default; with `rollout.nnodes` on machines of their own."""
    shared = layout_of(config_of("trainer.n_gpus_per_node=4"), [CPUS])
    assert shared.machines == (Machine("engines", 4),)
    assert shared.replicas == [(0, (0,)), (0, (1,)), (0, (2,)), (0, (3,))]
    separate = layout_of(
        config_of(
            "trainer.n_gpus_per_node=4",
            "actor_rollout_ref.rollout.nnodes=2",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
        ),
        [CPUS],
    )
    assert separate.machines == (Machine("engines", 1),) * 2
    assert separate.replicas == [(0, (0,)), (1, (0,))]


def test_tensor_parallel_replicas_have_several_places_of_one_machine() -> None:
    """The bundles of a replica are on one machine, and no place belongs to two."""
    overrides = (
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    layout = layout_of(config_of(*overrides), [DEVICES])
    assert layout.replicas == [(0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3))]


def test_places_are_devices_where_the_cluster_has_any_or_the_run_says_so() -> None:
    """`trainer.device` decides; without it, what the nodes have."""
    assert not layout_of(config_of(), [CPUS]).on_devices
    assert layout_of(config_of(), [CPUS, DEVICES]).on_devices
    assert not layout_of(config_of("trainer.device=cpu"), [CPUS, DEVICES]).on_devices
    assert layout_of(config_of("trainer.device=cuda"), [CPUS]).on_devices


@given(
    places=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    num_ranks=st.integers(0, 12),
    first_engine=st.integers(0, 3),
    on_devices=st.booleans(),
)
def test_actors_of_a_place_never_ask_for_more_than_it_has(
    places: list[int], num_ranks: int, first_engine: int, on_devices: bool
) -> None:
    """Ranks and replicas of a place together take at most what is reserved for it."""
    machines = tuple(Machine("any", count) for count in places)
    engines = tuple(range(min(first_engine, len(places) - 1), len(places)))
    layout = Layout(machines, num_ranks, engines, 1, 2, on_devices)
    taken: dict[tuple[int, int], float] = {}
    actors = [*layout.ranks, *((machine, bundle) for machine, bundles in layout.replicas for bundle in bundles)]
    for machine, bundle in actors:
        taken[machine, bundle] = taken.get((machine, bundle), 0.0) + layout.share(machine)
    assert all(amount <= 1.0 for amount in taken.values())
    assert len(layout.ranks) == min(num_ranks, sum(places))


def test_what_the_cluster_lacks_is_named() -> None:
    """Too few places on a node, and too few nodes, are told with what each node has; what fits is not."""
    needs = Layout((Machine("engines", 8),) * 2, 0, (0, 1), 1, 1, on_devices=True)
    missing = missing_places(needs, [CPUS, DEVICES])
    assert missing is not None
    assert "8 CPU, 8 GPU on one node for engines, 2 such in all" in missing
    assert "10.0.0.1: 4 CPU, 0 GPU; 10.0.0.2: 32 CPU, 8 GPU" in missing
    assert missing_places(needs, [DEVICES, msgspec.structs.replace(DEVICES, node_id="c")]) is None
    assert missing_places(needs, []) is not None


def test_a_small_machine_does_not_take_the_place_of_a_large_one() -> None:
    """Machines that need more are placed first."""
    layout = Layout((Machine("engines", 1), Machine("training", 4)), 4, (0,), 1, 1, on_devices=False)
    assert missing_places(layout, [CPUS, ClusterNode("c", "h", {"CPU": 1.0})]) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.executor=local", "actor_rollout_ref.rollout.nnodes=1"), "write actor_rollout_ref.rollout.nnodes=0"),
        (("actor_rollout_ref.rollout.tensor_model_parallel_size=2",), "trainer.n_gpus_per_node must be a multiple"),
        (
            (
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=3",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            ),
            "actor_rollout_ref.rollout.n_gpus_per_node must be a multiple",
        ),
        (
            (
                "trainer.executor=local",
                "trainer.max_staleness=1",
                "actor_rollout_ref.rollout.free_cache_engine=true",
            ),
            "write actor_rollout_ref.rollout.free_cache_engine=null",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_keys(overrides: tuple[str, ...], message: str) -> None:
    """Each problem names the keys to change."""
    (problem,) = executor_problems(config_of(*overrides))
    assert message in problem


def test_keys_of_the_cluster_have_no_effect_in_one_process(caplog: pytest.LogCaptureFixture) -> None:
    """Keys of Ray that are written for a run in one process are said to do nothing."""
    load_config([], ["ray_kwargs.ray_init.num_cpus=4", "actor_rollout_ref.rollout.n_gpus_per_node=2"])
    assert "ray_kwargs.ray_init.num_cpus has no effect while trainer.executor is local" in caplog.text
    assert (
        "actor_rollout_ref.rollout.n_gpus_per_node has no effect while actor_rollout_ref.rollout.nnodes is 0"
        in caplog.text
    )


def test_files_of_the_user_are_those_that_actors_read() -> None:
    """Tools, agents, rewards and the model are looked for on every node; modules by name are not files."""
    config = config_of(
        "actor_rollout_ref.model.path=/m",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py",
        "reward.custom_reward_function.path=file:///r.py",
        "actor_rollout_ref.rollout.agent.custom_async_server={path: a.module, name: Server}",
    )
    assert named_files(config) == {
        "actor_rollout_ref.model.path": "/m",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path": "tools.py",
        "reward.custom_reward_function.path": "/r.py",
    }


def test_files_of_ranks_are_looked_for_where_ranks_are() -> None:
    """The model, adapters to go on from, the critic where there is one, and a loss of one's own."""
    keys = ("actor_rollout_ref.model={path: /m, lora_adapter_path: /l}", "critic.model.path=/c")
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    ours = {"actor_rollout_ref.model.path": "/m", "actor_rollout_ref.model.lora_adapter_path": "/l"}
    assert files_of_ranks(config_of(*keys)) == ours
    assert files_of_ranks(config_of(*keys, f"{loss}=a.module:loss")) == ours
    gae = config_of(*keys, f"{loss}=losses.py:mine", "algorithm.adv_estimator=gae")
    assert files_of_ranks(gae) == {**ours, "critic.model.path": "/c", loss: "losses.py"}


async def test_a_file_that_a_rank_lacks_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of engines alone need not have it."""
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    own = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1")
    config = config_of("actor_rollout_ref.actor.strategy=fsdp2", "trainer.save_freq=0", f"{loss}=losses.py:mine", *own)
    layout = layout_of(config, [CPUS])
    engines = next(number for number in range(2) if number not in {machine for machine, _ in layout.ranks})
    asked = []

    async def missing(placement: object, paths: list[str], timeout_s: float) -> tuple[str, list[str]]:
        asked.append(paths)
        return "10.0.0.2", [path for path in paths if path == "losses.py"]

    monkeypatch.setattr(places, "_missing", missing)
    with pytest.raises(ConfigError, match=rf"{loss}=losses\.py must be on every node"):
        await places._check_files(config, layout, [object(), object()])
    assert len(asked) == (2 if engines == 0 else 1)


def test_workers_share_what_a_reward_may_take() -> None:
    """All workers together compute as many scores at a time, and make as many calls a minute, as one process would."""
    config = load_config([], ["reward.num_workers=8", "reward.max_rpm=60"]).reward
    share = RewardShare(config, tiny_chat_tokenizer(), 64, num_workers=3)()
    assert share._config.num_workers == 3
    assert share._config.max_rpm == 20


@pytest.mark.parametrize("save_freq", [0, 1])
async def test_ranks_that_do_not_share_the_folder_of_checkpoints_are_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_freq: int
) -> None:
    """A host that does not see what this one writes there would be found out at the first checkpoint; without checkpoints it does not matter."""
    folder = tmp_path / "run"
    overrides = ("actor_rollout_ref.actor.strategy=fsdp2", f"trainer.default_local_dir={folder}", "trainer.device=cpu")
    config = config_of(*overrides, f"trainer.save_freq={save_freq}", f"actor_rollout_ref.model.path={tmp_path}")
    seen = []

    async def missing(placement: object, paths: list[str], timeout_s: float) -> tuple[str, list[str]]:
        seen.extend(Path(path).exists() for path in paths)
        return "10.0.0.2", [path for path in paths if Path(path).parent == folder]

    monkeypatch.setattr(places, "_missing", missing)
    looking = places._check_files(config, layout_of(config, [CPUS]), [object()])
    if save_freq:
        with pytest.raises(ConfigError, match=r"default_local_dir must be a folder .* share.*10\.0\.0\.2 does not see"):
            await looking
        assert list(folder.iterdir()) == []
    else:
        await looking
    assert all(seen)


async def test_what_was_lost_is_noticed_while_places_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has just gone may be counted at first; once it is not, nothing waits for it any more."""
    nodes = iter([[CPUS], []])
    monkeypatch.setattr(places, "cluster_nodes", lambda: next(nodes))

    async def reserve(bundles: object, *, timeout_s: float, check: Callable[[], None]) -> None:
        check()

    monkeypatch.setattr(places, "reserve", reserve)
    with pytest.raises(ConfigError, match="the cluster must have 1 CPU on one node for engines"):
        async with places.reserved(config_of("trainer.device=cpu")):
            pass
