"""A local cluster whose node is slower than Ray allows. Ray itself is replaced: waiting for its limit would take minutes."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
pytest.importorskip("zmq")

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


def test_other_errors_of_a_start_are_not_tried_again(starts):
    """A setting that Ray refuses is refused again; also a bare Exception of it is an error of the cluster."""
    starts.errors.extend([Exception("no such thing"), ValueError("no such setting")])
    for what in ("no such thing", "no such setting"):
        with pytest.raises(ClusterError, match=what), connected():
            pass
    assert len(starts.begun) == 2
