"""The places of a run, reserved in a cluster for as long as it runs.

Invariants: what the cluster does not have at all is refused at once, by name; what it has but others use is waited for, within a deadline; and
however the run ends, all places are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from ostinato_rollout.ray_cluster import (
    ActorBody,
    ActorPlacement,
    ActorProcess,
    ClusterError,
    cluster_nodes,
    connected,
    free,
    reserve,
)
from ostinato_trainer.config import Config
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.home_paths import home_path
from ostinato_trainer.placement.layout import Layout, layout_of, missing_places
from ostinato_trainer.placement.user_files import named_files

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
        ConfigError: The cluster does not have the places, or a node lacks a file.
        ClusterError: Others have them for longer than `ray_kwargs.start_timeout_s`.
    """
    nodes = cluster_nodes()
    layout = layout_of(config, nodes)
    if (missing := missing_places(layout, nodes)) is not None:
        raise ConfigError(
            f"the cluster must have {missing}; ask for less with {_KEYS}, or start more nodes. A cluster that the run starts itself can be told"
            " to have more CPUs by ray_kwargs.ray_init.num_cpus"
        )
    if layout.on_devices and not layout.num_ranks:
        raise ConfigError(
            "actor_rollout_ref.actor.strategy must have ranks, which Ray can give devices to, got local, which trains in the command's own process; "
            "write actor_rollout_ref.actor.strategy=fsdp2, or trainer.device=cpu"
        )
    timeout_s = config.ray_kwargs.start_timeout_s
    async with contextlib.AsyncExitStack() as stack:
        groups = []
        for machine in layout.machines:
            group = await reserve(machine.bundles(on_devices=layout.on_devices), timeout_s=timeout_s)
            stack.callback(free, group)
            groups.append(group)
        logger.info("placed in the cluster: %s", layout.text())
        await _check_files(config, layout, groups)
        yield _placed(layout, groups)


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
    """Raise unless every machine has the files that the configuration names, under the same paths."""
    files, timeout_s = named_files(config), config.ray_kwargs.start_timeout_s
    for machine, group in enumerate(groups):
        process = ActorProcess(_LookingBody, layout.placement(machine, (0,), group, is_worker=True))
        try:
            async with asyncio.timeout(timeout_s):
                place = await process.start()
                missing = await process.ask("missing", list(files.values()))
        except TimeoutError as error:
            raise ClusterError(
                f"a process must start on each node within {timeout_s:g} s, got {process.unplaced()}; see Ray's logs"
            ) from error
        finally:
            await process.end()
        if lacking := [f"{key}={path}" for key, path in files.items() if path in missing]:
            raise ConfigError(
                f"{', '.join(lacking)} must be on every node of the cluster, got {place.host} without; put it in a folder that all nodes "
                "share, or send it along (`ray job submit --working-dir`, or ray_kwargs.ray_init.runtime_env.working_dir) and give its path in there"
            )
