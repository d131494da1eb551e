"""A local cluster whose node is slower than Ray allows. Ray itself is replaced: waiting for its limit would take minutes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
pytest.importorskip("zmq")

import ray
from ray._private import services

from ostinato_rollout.ray_cluster import ClusterError, cluster, connected
from ostinato_rollout.ray_cluster.testing import is_running

TOO_SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


@pytest.fixture
def starts(monkeypatch):
    """Lets the first starts fail with these errors, each after it has started a process; the processes."""
    begun: list[subprocess.Popen] = []
    errors: list[Exception] = []

    def init(**options):
        begun.append(subprocess.Popen(["sleep", "600"]))
        if errors:
            raise errors.pop(0)

    def shutdown():
        begun[-1].kill()

    replaced = SimpleNamespace(init=init, shutdown=shutdown, is_initialized=lambda: False)
    monkeypatch.setattr(cluster, "ray", replaced)
    monkeypatch.delenv(cluster.ADDRESS_VARIABLE, raising=False)
    yield SimpleNamespace(begun=begun, errors=errors)
    for process in begun:
        process.kill()
        process.wait()


def test_a_cluster_that_was_too_slow_is_started_again(starts, caplog):
    """What was started before is ended first, and the log says that it took another attempt."""
    starts.errors.append(Exception(TOO_SLOW))
    with connected():
        failed, running = starts.begun
        assert (is_running(failed.pid), is_running(running.pid)) == (False, True)
    assert "at attempt 1 of 3" in caplog.text


def test_a_cluster_that_is_always_too_slow_is_an_error(starts):
    """The number of attempts has an end, and nothing is left of any."""
    starts.errors.extend(Exception(TOO_SLOW) for _ in range(9))
    with pytest.raises(ClusterError, match="got Exception: The current node timed out"), connected():
        pass
    assert len(starts.begun) == cluster.NUM_STARTS
    assert not any(is_running(process.pid) for process in starts.begun)


def test_processes_of_a_cluster_lead_groups_of_their_own(starts, monkeypatch):
    """A signal to the group of a command, as `timeout` sends it, leaves the cluster to the command, which needs it for its own end."""

    def init(**options):
        starts.begun.append(services.start_ray_process(["sleep", "600"], "raylet", fate_share=True).process)

    monkeypatch.setattr(cluster.ray, "init", init)
    plain = services.ConsolePopen
    with connected():
        (process,) = starts.begun
        assert os.getpgid(process.pid) == process.pid
    assert services.ConsolePopen is plain


def test_the_server_of_a_cluster_does_not_take_sigterm(starts, monkeypatch, tmp_path):
    """SIGTERM to all processes of a service or job leaves the command what it needs for its own end. What runs the actors takes it: they would
    inherit that it does not."""
    masks = {}

    def init(**options):
        for name in ("gcs_server", "raylet"):
            (tmp_path / name).symlink_to(sys.executable)
            command = [str(tmp_path / name), "-c", "import time; time.sleep(600)"]
            process = services.start_ray_process(command, name, fate_share=True).process
            starts.begun.append(process)
            (blocked,) = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
            masks[name] = {number for number in (signal.SIGINT, signal.SIGTERM) if int(blocked, 16) >> (number - 1) & 1}

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: [process.kill() for process in starts.begun])
    with connected():
        assert masks == {"gcs_server": {signal.SIGINT, signal.SIGTERM}, "raylet": {signal.SIGINT}}


@pytest.fixture
def head():
    """Something that listens, as the head of a cluster does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_answers_is_an_error_in_time(starts, monkeypatch, caplog, scheme):
    """Ray would go on for minutes; it is not even asked."""
    monkeypatch.setattr(cluster, "HEAD_TIMEOUT_S", 1.0)
    address = scheme + unused_address()
    with (
        pytest.raises(ClusterError, match=f"at {address}, nothing answers there: .*refused"),
        connected(address=address),
    ):
        pass
    assert not starts.begun
    assert [record.levelname for record in caplog.records if "waiting for a head" in record.getMessage()] == ["WARNING"]


def test_a_head_that_is_starting_is_waited_for(starts):
    """A command that is run together with `ray start` finds the head a little later."""
    address = unused_address()
    host, port = address.split(":")
    late: list[socket.socket] = []
    timer = threading.Timer(1.0, lambda: late.append(socket.create_server((host, int(port)))))
    timer.start()
    try:
        with connected(address=address):
            assert len(starts.begun) == len(late) == 1
    finally:
        timer.join()
        for listening in late:
            listening.close()


def test_settings_that_come_too_late_are_said(starts, monkeypatch, caplog):
    """A program that has connected itself has decided; what the run's settings ask for beyond that is not lost in silence."""
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    with connected():
        assert not caplog.records
    with connected(num_cpus=4, runtime_env={"pip": ["numpy"]}):
        pass
    assert "num_cpus, runtime_env is not read" in caplog.text
    assert not starts.begun


def test_the_address_of_jobs_is_not_that_of_a_cluster(starts, monkeypatch):
    """RAY_ADDRESS may be set for `ray job submit`, which wants another one."""
    monkeypatch.setenv(cluster.ADDRESS_VARIABLE, "http://127.0.0.1:8265")
    with pytest.raises(ClusterError, match=r"ray job submit --address http://127.0.0.1:8265"), connected():
        pass
    assert not starts.begun


@pytest.mark.parametrize("address", ["auto", "ray://somewhere", "kept://by-others"])
def test_an_address_without_a_port_is_left_to_ray(starts, address):
    """Ray knows where such a cluster is."""
    with connected(address=address):
        assert len(starts.begun) == 1


def test_a_port_that_is_none_is_an_error(starts):
    """The number is looked at before anything is tried."""
    with pytest.raises(ClusterError, match=r"HOST:PORT, got 10.0.0.1:six"), connected(address="10.0.0.1:six"):
        pass


def test_a_cluster_that_wants_a_token_is_said_to(starts, head):
    """Ray's own error says that it could not connect, and why only in its cause."""
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    error.__cause__ = RuntimeError("Last connection error: AuthenticationError: RPC error: InvalidAuthToken: missing")
    starts.errors.append(error)
    message = r"Failed to connect .*; the cluster wants a token: set RAY_AUTH_MODE=token"
    with pytest.raises(ClusterError, match=message), connected(address=head):
        pass


def test_other_errors_of_a_start_are_not_tried_again(starts):
    """A setting that Ray refuses is refused again; also a bare Exception of it is an error of the cluster."""
    starts.errors.extend([Exception("no such thing"), ValueError("no such setting")])
    for what in ("no such thing", "no such setting"):
        with pytest.raises(ClusterError, match=what), connected():
            pass
    assert len(starts.begun) == 2


async def test_a_wait_for_places_ends_once_it_is_in_vain(monkeypatch, caplog):
    """What looks meanwhile whether the cluster still has them ends the wait with its error, long before the deadline; nothing stays reserved.
    That it waits is said once, and what of the wanted is free: Ray has many resources of its own, and does not name those of which none is."""
    freed = []
    group = SimpleNamespace(wait=lambda timeout_s: False)
    monkeypatch.setattr(cluster, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(cluster, "remove_placement_group", freed.append)
    free = {"GPU": 3.0, "GPU_group_0_5f": 1.0, "node:10.0.0.1": 1.0, "object_store_memory": 5e9}
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    monkeypatch.setattr(cluster, "_LOOK_S", 0.0)
    looks = iter([None, None, ValueError("a node is gone")])

    def check() -> None:
        error = next(looks)
        if error is not None:
            raise error

    with pytest.raises(ValueError, match="a node is gone"):
        await cluster.reserve([{"CPU": 1.0, "GPU": 1.0}] * 4, timeout_s=3600.0, check=check)
    assert freed == [group]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "waiting up to 3600 s for 4 CPU, 4 GPU on one node, while 0 CPU, 3 GPU are free in the whole cluster",
        )
    ]
