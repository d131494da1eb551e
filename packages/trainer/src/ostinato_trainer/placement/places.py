"""The places of a run, reserved in a cluster for as long as it runs.

Invariants: what the cluster does not have at all is refused at once, by name; what it has but others use is waited for, within a deadline; and
however the run ends, all places are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato_rollout.ray_cluster import (
    ActorBody,
    ActorPlacement,
    ActorProcess,
    ClusterError,
    ClusterNode,
    cluster_nodes,
    connected,
    free,
    reserve,
)
from ostinato_trainer.checkpoints.whole_folder import writing_below
from ostinato_trainer.config import Config
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.home_paths import home_path
from ostinato_trainer.placement.layout import Layout, layout_of, missing_places
from ostinato_trainer.placement.user_files import files_of_ranks, named_files

__all__ = ["Places", "cluster_of", "reserved"]

logger = logging.getLogger(__name__)

_KEYS = "trainer.nnodes, trainer.n_gpus_per_node, actor_rollout_ref.rollout.nnodes or actor_rollout_ref.rollout.n_gpus_per_node"


@dataclass(frozen=True)
class Places:
    """Where each actor of a run goes."""

    layout: Layout
    replicas: tuple[ActorPlacement, ...]
    ranks: tuple[ActorPlacement, ...]
    workers: tuple[ActorPlacement, ...]


@contextlib.contextmanager
def cluster_of(config: Config) -> Iterator[None]:
    """This process connected to the cluster that `ray_kwargs` names.

    Raises:
        ClusterError: There is none, or Ray does not take the settings.
    """
    init = config.ray_kwargs.ray_init
    with connected(address=init.address, num_cpus=init.num_cpus, runtime_env=init.runtime_env):
        yield


@contextlib.asynccontextmanager
async def reserved(config: Config) -> AsyncIterator[Places]:
    """The places that `config` asks for; a file that it names is on each of them.

    Raises:
        ConfigError: The cluster does not have the places, a node lacks a file, or ranks do not share the folder of checkpoints.
        CheckpointError: That folder cannot be written.
        ClusterError: Others have them for longer than `ray_kwargs.start_timeout_s`.
    """
    nodes = cluster_nodes()
    layout = layout_of(config, nodes)
    _check_places(layout, nodes)
    if layout.on_devices and not layout.num_ranks:
        raise ConfigError(
            "actor_rollout_ref.actor.strategy must have ranks, which Ray can give devices to, got local, which trains in the command's own process; "
            "write actor_rollout_ref.actor.strategy=fsdp2, or trainer.device=cpu"
        )
    timeout_s = config.ray_kwargs.start_timeout_s
    async with contextlib.AsyncExitStack() as stack:
        groups = []
        for machine in layout.machines:
            group = await reserve(
                machine.bundles(on_devices=layout.on_devices),
                timeout_s=timeout_s,
                check=lambda: _check_places(
                    layout, cluster_nodes()
                ),  # a node that was lost may still be counted at first
            )
            stack.callback(free, group)
            groups.append(group)
        logger.info("placed in the cluster: %s", layout.text())
        await _check_files(config, layout, groups)
        yield _placed(layout, groups)


def _check_places(layout: Layout, nodes: Sequence[ClusterNode]) -> None:
    """Raise unless the nodes had room for everything, were nothing taken."""
    if (missing := missing_places(layout, nodes)) is not None:
        raise ConfigError(
            f"the cluster must have {missing}; ask for less with {_KEYS}, or start more nodes. A cluster that the run starts itself can be told"
            " to have more CPUs by ray_kwargs.ray_init.num_cpus"
        )


def _placed(layout: Layout, groups: list) -> Places:
    replicas = [layout.placement(machine, bundles, groups[machine]) for machine, bundles in layout.replicas]
    ranks = [layout.placement(machine, (bundle,), groups[machine]) for machine, bundle in layout.ranks]
    beside = [(machine, bundles[:1]) for machine, bundles in layout.replicas]
    workers = [
        layout.placement(machine, bundles, groups[machine], is_worker=True)
        for machine, bundles in (beside[number % len(beside)] for number in range(layout.num_workers))
    ]
    return Places(layout, tuple(replicas), tuple(ranks), tuple(workers))


class _LookingBody(ActorBody):
    """Looks at files of its node."""

    async def missing(self, paths: list[str]) -> list[str]:
        """Those that are not there."""
        return [path for path in paths if not _is_there(path)]


def _is_there(path: str) -> bool:
    """Whether a path leads to something on this node; one that begins with the home of somebody unknown here does not."""
    try:
        return home_path(path, "a file's path").exists()
    except ConfigError:
        return False


async def _check_files(config: Config, layout: Layout, groups: list) -> None:
    """Raise unless every machine has the files that the configuration names, under the same paths, and those of ranks the checkpoints' folder."""
    of_ranks = {machine for machine, _ in layout.ranks}
    with _mark_of_checkpoints(config, layout) as mark:
        for machine, group in enumerate(groups):
            files = named_files(config) | (files_of_ranks(config) if machine in of_ranks else {})
            marks = [mark] if mark is not None and machine in of_ranks else []
            placement = layout.placement(machine, (0,), group, is_worker=True)
            host, missing = await _missing(placement, [*files.values(), *marks], config.ray_kwargs.start_timeout_s)
            if lacking := [f"{key}={path}" for key, path in files.items() if path in missing]:
                raise ConfigError(
                    f"{', '.join(lacking)} must be on every node of the cluster, got {host} without; put it in a folder that all nodes share, "
                    "or send it along (`ray job submit --working-dir`, or ray_kwargs.ray_init.runtime_env.working_dir) and give its path in there"
                )
            if set(marks) & set(missing):
                raise ConfigError(
                    f"trainer.default_local_dir must be a folder that the nodes of all ranks share, for each writes its part of a checkpoint, "
                    f"got {config.trainer.local_dir}, where {host} does not see what this host writes; choose a folder of a shared file system"
                )


async def _missing(placement: ActorPlacement, paths: list[str], timeout_s: float) -> tuple[str, list[str]]:
    """The host of a place, and those of the paths that are not there.

    Raises:
        ClusterError: No process has started there in time.
    """
    process = ActorProcess(_LookingBody, placement)
    try:
        async with asyncio.timeout(timeout_s):
            place = await process.start()
            return place.host, await process.ask("missing", paths)
    except TimeoutError as error:
        raise ClusterError(
            f"a process must start on each node within {timeout_s:g} s, got {process.unplaced()}; see Ray's logs"
        ) from error
    finally:
        await process.end()


@contextlib.contextmanager
def _mark_of_checkpoints(config: Config, layout: Layout) -> Iterator[str | None]:
    """The path of a new file in the folder of checkpoints, for as long as the block lasts; None where ranks write none."""
    if not layout.num_ranks or not config.trainer.save_freq:
        yield None
        return
    folder = Path(config.trainer.local_dir).absolute()
    with contextlib.ExitStack() as stack:
        with writing_below(folder):
            folder.mkdir(parents=True, exist_ok=True)
            mark = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-"))
        yield mark.name
