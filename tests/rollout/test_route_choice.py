"""Which way is chosen, from where ranks and workers are."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato_engines import WeightPlace
from ostinato_rollout.route_choice import RoutePlan, SocketLane, choose_routes

A, B = WeightPlace("one", "GPU-a"), WeightPlace("one", "GPU-b")
C, D = WeightPlace("one", "GPU-c"), WeightPlace("two", "GPU-d")
HOST, OTHER = WeightPlace("one"), WeightPlace("two")


def test_a_worker_on_a_ranks_device_gets_the_weights_from_that_rank() -> None:
    """Colocated: each replica from the rank of its device, through the memory of the device; a tensor-parallel one from several ranks."""
    assert choose_routes([A, B], {0: [A], 1: [B]}) == RoutePlan((SocketLane(0, 0, 0, True), SocketLane(1, 0, 1, True)))
    assert choose_routes([A, B], {0: [A, B]}) == RoutePlan((SocketLane(0, 0, 0, True), SocketLane(0, 1, 1, True)))
    assert (
        choose_routes([A, B], {0: [B]}).text()
        == "to replica(s) 0 through the memory of devices that ranks and workers share"
    )


def test_workers_with_devices_of_their_own_get_a_broadcast() -> None:
    """Separate devices, of this host or another, are in one group with rank 0."""
    plan = choose_routes([A, B], {0: [C], 1: [D]})
    assert plan == RoutePlan(members=((0, 1), (1, 1)), is_beyond_host=True)
    assert plan.text() == "to replica(s) 0, 1 through a broadcast of rank 0"
    assert choose_routes([A], {0: [B, C]}) == RoutePlan(members=((0, 2),))


def test_without_devices_memory_of_the_host_serves_there_and_a_broadcast_beyond() -> None:
    """Replicas of this host are shared out among the ranks; those of another host are in a group."""
    plan = choose_routes([HOST, HOST], {0: [HOST], 1: [HOST], 2: [OTHER]})
    assert [lane.rank for lane in plan.lanes] == [0, 1]
    assert not any(lane.shares_device for lane in plan.lanes)
    assert (plan.members, plan.is_beyond_host) == (((2, 1),), True)
    assert "to replica(s) 0, 1 through memory of the host, to replica(s) 2 through a broadcast of rank 0" in plan.text()


def test_two_members_are_never_on_one_device() -> None:
    """Two engines on one device that no rank has: one is in the group, the other has the host's memory; on another host it has no route."""
    plan = choose_routes([A], {0: [C], 1: [C]})
    assert (plan.members, [lane.replica for lane in plan.lanes]) == (((0, 1),), [1])
    plan = choose_routes([A], {0: [D], 1: [D]})
    assert (plan.members, plan.lanes, plan.replicas) == (((0, 1),), (), (0,))


def test_members_have_devices_all_or_none() -> None:
    """An engine on the CPU of another host is not in one group with a rank that has a device; beside a rank it has the host's memory."""
    assert choose_routes([A], {0: [OTHER]}) == RoutePlan()
    assert choose_routes([A], {0: [HOST]}).lanes == (SocketLane(0, 0, 0, False),)
    assert choose_routes([HOST], {0: [D]}) == RoutePlan()


PLACES = st.builds(WeightPlace, st.sampled_from(["one", "two"]), st.sampled_from(["", "GPU-a", "GPU-b", "GPU-c"]))


@given(st.lists(PLACES, min_size=1, max_size=4), st.lists(st.lists(PLACES, min_size=1, max_size=3), max_size=4))
def test_whatever_the_places_each_replica_has_one_way_that_can_work(ranks, replicas) -> None:
    """All workers of a replica have a lane from a rank of their host, or all are in the group, or none has a route; the group's devices are
    distinct."""
    plan = choose_routes(ranks, dict(enumerate(replicas)))
    for index, places in enumerate(replicas):
        lanes = [lane for lane in plan.lanes if lane.replica == index]
        members = [count for replica, count in plan.members if replica == index]
        assert sorted([len(lanes), *members]) in ([0], [0, len(places)], [len(places)])
        for lane in lanes:
            rank, place = ranks[lane.rank], places[lane.worker]
            assert rank.host == place.host
            assert lane.shares_device == (bool(place.device) and rank.device == place.device)
    group = [ranks[0], *(place for index, _ in plan.members for place in replicas[index])]
    with_devices = [place for place in group if place.device]
    assert len(set(with_devices)) == len(with_devices)
    assert len(with_devices) in (0, len(group)) or not plan.members
    assert plan.without(plan.replicas).replicas == ()
