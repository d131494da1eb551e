"""Which places a run needs, and whether a cluster has them. Pure arithmetic: knows no Ray.

A place is one device with a CPU beside it, or, where the run is on CPUs, one CPU. Invariant: a rank and the engine that shares its place never
ask for more than the place together, for the engine sleeps while the rank computes, or was told to do without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from ostinato_engines.device import HOST, device_kind
from ostinato_rollout.ray_cluster import ActorPlacement, ClusterNode
from ostinato_trainer.config import Config

__all__ = ["Layout", "Machine", "layout_of", "missing_places"]

DEVICE: Final = "GPU"
"""Ray's name of a device."""


class Machine(msgspec.Struct, frozen=True):
    """Places that must be on one node."""

    role: str
    """`training`, `engines`, or both."""
    places: int

    def bundles(self, *, on_devices: bool) -> list[dict[str, float]]:
        """As Ray reserves them."""
        return [{"CPU": 1.0, **({DEVICE: 1.0} if on_devices else {})} for _ in range(self.places)]


class Layout(msgspec.Struct, frozen=True):
    """The machines of a run, and who is on them."""

    machines: tuple[Machine, ...]
    num_ranks: int
    """Of training, on the first machines, a place each; 0 where the policy is trained in the command's own process."""
    engine_machines: tuple[int, ...]
    """Which machines have engines."""
    places_per_replica: int
    """Engines with tensor parallelism have several."""
    num_workers: int
    """Agent-loop workers; they take no place of their own."""
    on_devices: bool
    """Whether places are devices; else they are CPUs."""

    @property
    def replicas(self) -> list[tuple[int, tuple[int, ...]]]:
        """Machine and bundles of each replica."""
        size = self.places_per_replica
        return [
            (machine, tuple(range(first, first + size)))
            for machine in self.engine_machines
            for first in range(0, self.machines[machine].places, size)
        ]

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """Machine and bundle of each rank."""
        places = [(index, place) for index, machine in enumerate(self.machines) for place in range(machine.places)]
        return places[: self.num_ranks]

    def share(self, machine: int) -> float:
        """Part of a place that each of those on it takes."""
        with_ranks = machine in {index for index, _ in self.ranks}
        return 0.5 if with_ranks and machine in self.engine_machines else 1.0

    def placement(
        self, machine: int, bundles: Sequence[int], group: object, *, is_worker: bool = False
    ) -> ActorPlacement:
        """Where one actor goes.

        Args:
            machine: Which machine.
            bundles: Places on it.
            group: The machine's placement group.
            is_worker: It waits more than it computes, and takes nothing.
        """
        share = 0.0 if is_worker else self.share(machine)
        return ActorPlacement(
            num_cpus=share,
            num_gpus=share if self.on_devices else 0.0,
            placement_group=group,  # pyright: ignore[reportArgumentType]  Ray's type, which this module does not know
            bundles=tuple(bundles),
        )

    def text(self) -> str:
        """For people."""
        ranks = f"{self.num_ranks} training ranks, " if self.num_ranks else ""
        kind = "devices" if self.on_devices else "CPUs"
        places = " + ".join(f"{machine.places} {kind} for {machine.role}" for machine in self.machines)
        return f"{ranks}{len(self.replicas)} engine replicas, {self.num_workers} agent workers on {places}"


def layout_of(config: Config, nodes: Sequence[ClusterNode]) -> Layout:
    """The places that `config` asks for.

    Args:
        config: The whole tree.
        nodes: Those of the cluster: where `trainer.device` says nothing, places are devices if the cluster has any.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    has_ranks = config.actor_rollout_ref.actor.strategy != "local"
    training = [Machine("training", trainer.n_gpus_per_node)] * trainer.nnodes
    if rollout.nnodes:
        places = rollout.n_gpus_per_node or trainer.n_gpus_per_node
        training = training if has_ranks else []
        machines = [*training, *[Machine("engines", places)] * rollout.nnodes]
        engines = range(len(training), len(machines))
    else:
        machines = [
            Machine("training and engines" if has_ranks else "engines", trainer.n_gpus_per_node)
        ] * trainer.nnodes
        engines = range(len(machines))
    if trainer.device is None:
        on_devices = any(node.resources.get(DEVICE, 0) > 0 for node in nodes)
    else:
        on_devices = device_kind(trainer.device) != HOST
    return Layout(
        machines=tuple(machines),
        num_ranks=trainer.nnodes * trainer.n_gpus_per_node if has_ranks else 0,
        engine_machines=tuple(engines),
        places_per_replica=rollout.tensor_model_parallel_size,
        num_workers=rollout.agent.num_workers,
        on_devices=on_devices,
    )


def missing_places(layout: Layout, nodes: Sequence[ClusterNode]) -> str | None:
    """A sentence about what the cluster does not have, were nothing taken; None where all has room."""
    left = [dict(node.resources) for node in nodes]
    for machine in sorted(layout.machines, key=lambda machine: -machine.places):
        wanted: dict[str, float] = {}
        for bundle in machine.bundles(on_devices=layout.on_devices):
            for name, amount in bundle.items():
                wanted[name] = wanted.get(name, 0.0) + amount
        free = next((node for node in left if all(node.get(name, 0.0) >= wanted[name] for name in wanted)), None)
        if free is None:
            return (
                f"{_amounts(wanted, wanted)} on one node for {machine.role}, {len(layout.machines)} such in all, while the nodes of the "
                f"cluster have {'; '.join(f'{node.host}: {_amounts(node.resources, wanted)}' for node in nodes) or 'nothing'}"
            )
        for name, amount in wanted.items():
            free[name] -= amount
    return None


def _amounts(amounts: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names)
