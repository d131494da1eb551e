"""`RankWeights`: the weights of a group of ranks, which go to engines along routes or, where there is none, through this process.

Knows which rank sends to whom, and where those meet that broadcast; carries no tensor but for whoever reads it like an ordinary stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_engines import CollectiveRoute, SocketRoute, WeightManifest, WeightPlace, WeightRoute
from ostinato_engines.weight_transfer import decline
from ostinato_rollout.route_choice import RoutePlan, SocketLane
from ostinato_trainer.backends.ranks.calls import RankCalls
from ostinato_trainer.backends.ranks.outlets import COLLECTIVE, SendOrder
from ostinato_trainer.backends.ranks.store import listening_store

_STORE_S: Final = 60.0


@dataclass
class Meeting:
    """Where members of broadcasts meet; one for all updates of a group of ranks.

    Args:
        host_for: The address of this process, for others of its host or for other hosts, and the interface between processes of one host.
    """

    host_for: Callable[[bool], tuple[str, str | None]]
    _store: TCPStore | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _members: Any = None
    _name: str = ""

    def route(self, plan: RoutePlan, processes: Sequence[int]) -> CollectiveRoute:
        """Where the members of a plan meet: where they met before, unless others did, or they were disturbed."""
        host, interface = self.host_for(plan.is_beyond_host)
        if self._store is None or self._store.host != host:
            self._store, self._members = listening_store(host, _STORE_S), None
        members = (plan.members, tuple(processes))
        if members != self._members:
            self._members, self._name = members, str(next(self._numbers))
        return CollectiveRoute(
            host=host,
            port=self._store.port,
            name=self._name,
            world_size=1 + sum(count for _, count in plan.members),
            first_rank=1,
            interface=interface,
        )

    def disturbed(self) -> None:
        """The next ones meet anew."""
        self._members = None


class RankWeights:
    """See `ostinato_rollout.routed_update.WeightSource`.

    Args:
        calls: To the ranks.
        places: Where each has its weights.
        meeting: For broadcasts.
        stream: The tensors in this process.
    """

    def __init__(
        self,
        calls: RankCalls,
        places: Sequence[WeightPlace],
        meeting: Meeting,
        stream: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        self._calls, self._meeting, self._stream = calls, meeting, stream
        self.places = tuple(places)
        self._route: CollectiveRoute | None = None

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in order, in this process; each is good until the next is taken."""
        return self._stream()

    def open(self, plan: RoutePlan, processes: Sequence[int]) -> dict[int, WeightRoute]:
        """See `WeightSource.open`.

        Raises:
            BackendError: A rank failed or died.
        """
        names = [tuple(_name(lane) for lane in lanes) for lanes in self._lanes_by_rank(plan)]
        opened = self._calls.ask_each("listen_for_workers", [(each,) for each in names]) if plan.lanes else []
        paths = {name: path for found in opened for name, path in found.items()}
        routes: dict[int, WeightRoute] = {}
        for replica in {lane.replica for lane in plan.lanes}:
            lanes = sorted((lane for lane in plan.lanes if lane.replica == replica), key=lambda lane: lane.worker)
            routes[replica] = SocketRoute(tuple(paths[_name(lane)] for lane in lanes))
        self._route, first_rank = None, 1
        if plan.members:
            self._route = self._meeting.route(plan, processes)
        for replica, num_workers in plan.members:
            assert self._route is not None
            routes[replica] = msgspec.structs.replace(self._route, first_rank=first_rank)
            first_rank += num_workers
        return routes

    def send(self, manifest: WeightManifest, plan: RoutePlan) -> dict[int, str]:
        """See `WeightSource.send`.

        Raises:
            BackendError: A rank failed or died.
        """
        everywhere = any(lane.rank for lane in plan.lanes)
        orders = [
            SendOrder(
                manifest=manifest,
                sockets={_name(lane): lane.shares_device for lane in lanes},
                route=self._route if rank == 0 else None,
                everywhere=everywhere,
            )
            for rank, lanes in enumerate(self._lanes_by_rank(plan))
        ]
        answers: list[Mapping[str, str]] = self._calls.ask_each("send_weights", [(order,) for order in orders])
        told: dict[int, str] = {}
        for lane in plan.lanes:
            if wrong := answers[lane.rank][_name(lane)]:
                told.setdefault(lane.replica, wrong)
        if self._route is not None and (wrong := answers[0][COLLECTIVE]):
            self._meeting.disturbed()
            told |= {replica: wrong for replica, _ in plan.members}
        return told

    def decline(self, route: WeightRoute, why: str) -> None:
        """See `WeightSource.decline`."""
        if isinstance(route, CollectiveRoute):
            self._meeting.disturbed()
        decline(route, why)

    def _lanes_by_rank(self, plan: RoutePlan) -> list[list[SocketLane]]:
        return [[lane for lane in plan.lanes if lane.rank == rank] for rank in range(len(self.places))]


def _name(lane: SocketLane) -> str:
    return f"{lane.replica}/{lane.worker}"
