"""By which route each replica's workers get the weights, from where ranks and workers are. Pure: asks nobody.

A worker gets what it can reach best: the memory of a device that it shares with a rank; the host's memory from a rank of its host; a broadcast
where it has a device of its own or is on another host. A broadcast needs a device for each of its members, or none for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ostinato_engines import WeightPlace


class SocketLane(msgspec.Struct, frozen=True):
    """From one rank to one worker of its host."""

    replica: int
    worker: int
    rank: int
    shares_device: bool
    """The rank's device is the worker's: nothing need leave it."""


class RoutePlan(msgspec.Struct, frozen=True):
    """Who is sent what by whom."""

    lanes: tuple[SocketLane, ...] = ()
    """All workers of a replica, or none."""
    members: tuple[tuple[int, int], ...] = ()
    """Replicas that take part in a broadcast of rank 0, with the numbers of their workers."""
    is_beyond_host: bool = False
    """Whether the broadcast leaves the host of rank 0."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """Those that have a route."""
        return tuple(sorted({*(lane.replica for lane in self.lanes), *(replica for replica, _ in self.members)}))

    def without(self, replicas: Sequence[int]) -> RoutePlan:
        """The same for the others."""
        return RoutePlan(
            tuple(lane for lane in self.lanes if lane.replica not in replicas),
            tuple(member for member in self.members if member[0] not in replicas),
            self.is_beyond_host,
        )

    def text(self) -> str:
        """For people."""
        ways = {
            "the memory of devices that ranks and workers share": [e.replica for e in self.lanes if e.shares_device],
            "memory of the host": [e.replica for e in self.lanes if not e.shares_device],
            "a broadcast of rank 0": [replica for replica, _ in self.members],
        }
        return ", ".join(
            f"to replica(s) {', '.join(map(str, sorted(set(replicas))))} through {way}"
            for way, replicas in ways.items()
            if replicas
        )


def choose_routes(ranks: Sequence[WeightPlace], workers: Mapping[int, Sequence[WeightPlace]]) -> RoutePlan:
    """The routes of one update.

    Args:
        ranks: Where each rank has its weights; all can have all tensors.
        workers: The same of the workers of each replica that can follow routes; the others are not named.

    Returns:
        A plan; a replica that it does not name has no route.
    """
    lanes: list[SocketLane] = []
    members: list[tuple[int, int]] = []
    taken = {ranks[0]}  # of devices, by those who broadcast
    given: dict[str, int] = {}
    is_beyond_host = False
    for replica, places in sorted(workers.items()):
        own = _lanes(replica, places, ranks, given)
        is_near = own is not None and all(lane.shares_device or not places[lane.worker].device for lane in own)
        if places and not is_near and _goes_with(places, taken, ranks[0]):
            members.append((replica, len(places)))
            taken |= set(places)
            is_beyond_host = is_beyond_host or any(place.host != ranks[0].host for place in places)
        elif own is not None:
            lanes += own
    return RoutePlan(tuple(lanes), tuple(members), is_beyond_host)


def _lanes(
    replica: int, places: Sequence[WeightPlace], ranks: Sequence[WeightPlace], given: dict[str, int]
) -> list[SocketLane] | None:
    """One from a rank of each worker's host; None where a worker's host has no rank."""
    lanes = []
    for worker, place in enumerate(places):
        beside = [rank for rank, at in enumerate(ranks) if at.host == place.host]
        if not beside:
            return None
        same = [rank for rank in beside if place.device and ranks[rank].device == place.device]
        turn = given.get(place.host, 0)
        if not same:
            given[place.host] = turn + 1  # in turn, so that no rank has all
        lanes.append(SocketLane(replica, worker, same[0] if same else beside[turn % len(beside)], bool(same)))
    return lanes


def _goes_with(places: Sequence[WeightPlace], taken: set[WeightPlace], root: WeightPlace) -> bool:
    """Whether workers can be in one group with rank 0 and those who are in it already."""
    if not root.device:
        return not any(place.device for place in places)
    return all(place.device for place in places) and len({*places, *taken}) == len(places) + len(taken)
