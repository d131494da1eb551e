"""What workers elsewhere are told of a pool's replicas."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_agent_loop import AgentConfigError
from ostinato_engines.testing import ScriptedServer

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_agent_loop.ray_workers.following import Reachable, ReplicaFollower, unreachable
from ostinato_rollout.ray_cluster import ReplicaEndpoint


class Elsewhere(ScriptedServer):
    """A server with an endpoint, which can fail."""

    def __init__(self, number):
        super().__init__([])
        self.endpoint = ReplicaEndpoint(f"tcp://127.0.0.1:{number}")
        self.told = []

    def when_failed(self, call):
        self.told.append(call)


class Watched:
    """A follower with all that it has said."""

    def __init__(self):
        self.num_changes, self.failed, self.asked = 0, [], []
        self.follower = ReplicaFollower(self.count, lambda server, error: self.failed.append(server), self.ask)

    def count(self):
        self.num_changes += 1

    async def ask(self, *call):
        self.asked.append(call)

    @property
    def view(self):
        return self.follower.view


def test_replicas_come_drain_and_go():
    """One that is drained stays reachable for the turns that it has, until they are taken back; each change is told."""
    watched, server = Watched(), Elsewhere(1)
    follower, endpoint = watched.follower, server.endpoint
    follower.add_server(server)
    assert (watched.view.endpoints, watched.view.draining) == ((endpoint,), ())
    follower.remove_server(server, reason="is drained")
    assert (watched.view.endpoints, watched.view.draining) == ((), (endpoint,))
    follower.add_server(server)
    assert (watched.view.endpoints, watched.view.draining) == ((endpoint,), ())
    follower.remove_server(server)
    follower.take_back(server)
    assert (watched.view.endpoints, watched.view.draining) == ((), ())
    assert watched.num_changes == 5
    follower.remove_server(server, take_back=True)
    follower.take_back(server)
    assert watched.num_changes == 5


def test_whether_turns_wait_is_part_of_the_view():
    """A reason to wait, and what is told where there is no replica, are what was said last."""
    watched = Watched()
    watched.follower.hold("replicas are asleep")
    assert (watched.view.held, watched.view.why_none) == ("replicas are asleep", "")
    watched.follower.proceed("all are lost")
    assert (watched.view.held, watched.view.why_none) == ("", "all are lost")


async def test_all_workers_have_the_view_before_it_counts_as_heard():
    """They are told it, and nothing more."""
    watched = Watched()
    watched.follower.hold("replicas are given new weights")
    await watched.follower.heard()
    assert watched.asked == [()]


async def test_what_is_inside_of_a_replica_is_taken_back_before_it_is_waited_for():
    """Workers are asked in this order, so that nobody waits for what will not be told to begin again."""
    watched, server = Watched(), Elsewhere(1)
    watched.follower.add_server(server)
    assert watched.follower.take_back(server) == 0
    await watched.follower.left(server)
    assert watched.asked == [("take_back", server.endpoint), ("left", server.endpoint)]
    await watched.follower.left(Elsewhere(2))
    assert len(watched.asked) == 2


async def test_a_replica_that_was_drained_is_let_go_of():
    """Once nothing is inside of it, workers need not reach it; one in service that was only waited for stays."""
    watched, server = Watched(), Elsewhere(1)
    watched.follower.add_server(server)
    await watched.follower.left(server)
    assert watched.view.endpoints == (server.endpoint,)
    watched.follower.remove_server(server)
    await watched.follower.left(server)
    assert (watched.view.endpoints, watched.view.draining) == ((), ())
    watched.follower.add_server(server)
    assert watched.view.endpoints == (server.endpoint,)


def test_a_replica_that_knows_of_its_failure_is_told_of():
    """Whoever is called by the replica passes it on; one that has just been lost is not in the view."""
    watched, server = Watched(), Elsewhere(1)
    server.endpoint = None
    watched.follower.add_server(server)
    assert watched.view.endpoints == ()
    for call in server.told:
        call(server, RuntimeError("gone"))
    assert watched.failed == [server]


def test_a_replica_of_this_process_is_not_told_to_workers():
    """It is logged where the pool changes, and an error where workers start."""
    watched, server = Watched(), ScriptedServer([])
    watched.follower.add_server(server)
    assert watched.view.endpoints == ()
    assert not isinstance(server, Reachable)
    assert isinstance(Elsewhere(1), Reachable)
    with pytest.raises(AgentConfigError, match="use RayReplica"):
        raise unreachable(server)


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "drain", "lose", "take_back", "hold", "proceed"]), st.integers(0, 2)),
        max_size=30,
    )
)
def test_the_view_is_the_whole_truth(steps):
    """After any order of changes the view holds each replica once: in service, draining, or not at all."""

    async def walk():
        watched, servers = Watched(), [Elsewhere(number) for number in range(3)]
        serving, draining, held = set(), set(), False
        for what, number in steps:
            server = servers[number]
            if what == "add" and number not in serving:  # as a pool does, which adds what is not in service
                watched.follower.add_server(server)
                serving.add(number)
                draining.discard(number)
            elif what in ("drain", "lose") and number in serving:
                watched.follower.remove_server(server, take_back=what == "lose")
                serving.discard(number)
                if what == "drain":
                    draining.add(number)
            elif what == "take_back":
                watched.follower.take_back(server)
                draining.discard(number)
            elif what in ("hold", "proceed"):
                held = what == "hold"
                (watched.follower.hold if held else watched.follower.proceed)("a reason")
            assert sorted(one.address for one in watched.view.endpoints) == [
                servers[one].endpoint.address for one in sorted(serving)
            ]
            assert sorted(one.address for one in watched.view.draining) == [
                servers[one].endpoint.address for one in sorted(draining)
            ]
            assert bool(watched.view.held) == held
        await watched.follower.left(servers[0])

    asyncio.run(walk())
