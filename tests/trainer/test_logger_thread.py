"""A logger in a thread of its own: the run never waits for it, and hears of its failure."""

import logging
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.group import Loggers
from ostinato_trainer.loggers.thread import LoggerThread


class Recorder:
    """A logger that remembers what it was told, and may stand still until it is let go."""

    name = "recorder"

    def __init__(self, *, gate: threading.Event | None = None, fail_at: int | None = None) -> None:
        self.run_id = "run-7"
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.facts: dict[str, str] = {}
        self.threads: set[threading.Thread] = set()
        self.num_closed = 0
        self._gate, self._fail_at = gate, fail_at

    def describe(self, facts: Mapping[str, str]) -> None:
        self.facts |= facts

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._gate is not None:
            assert self._gate.wait(60)
        if step == self._fail_at:
            raise OSError("no route to host")
        self.threads.add(threading.current_thread())
        self.steps.append((step, dict(metrics)))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.samples = (step, list(rows))

    def close(self, end: object = None) -> None:
        self.num_closed += 1


def test_everything_arrives_in_order_before_close_returns() -> None:
    """Facts and steps reach the logger in another thread, as they were when they were given, and it is closed once."""
    inner = Recorder()
    log = LoggerThread("recorder", lambda: inner)
    log.describe({"a": "b"})
    metrics = {"x": 0.0}
    for step in range(50):
        metrics["x"] = float(step)
        log.log(step, metrics)
    log.log_generations(7, [{"output": "yes"}])
    log.close()
    assert inner.samples == (7, [{"output": "yes"}])
    assert inner.steps == [(step, {"x": float(step)}) for step in range(50)]
    assert inner.facts == {"a": "b"}
    assert threading.current_thread() not in inner.threads
    assert (inner.num_closed, log.run_id) == (1, "run-7")


def test_a_failure_is_raised_by_the_next_call_and_drops_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    """What the library raised is reported once through Loggers, and the run goes on without that logger."""
    inner = Recorder(fail_at=2)
    thread = LoggerThread("recorder", lambda: inner)
    log = Loggers([thread])
    with caplog.at_level(logging.ERROR, logger="ostinato_trainer"):
        for step in (1, 2):
            log.log(step, {})
        thread._thread.join(60)
        for step in (3, 4):
            log.log(step, {})
    assert log.names == ()
    assert caplog.text.count("gets no further metrics") == 1
    assert "no route to host" in caplog.text
    assert (inner.steps, inner.num_closed) == ([(1, {})], 1)


def test_a_failure_at_the_last_step_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """A logger that fails after the last call is reported when it is closed."""
    log = Loggers([LoggerThread("recorder", lambda: Recorder(fail_at=1))])
    log.log(1, {})
    log.close()
    assert "no route to host" in caplog.text


def test_a_logger_that_stands_still_costs_its_records_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """What does not fit into the queue is dropped, counted and said once; closing gives up after its deadline."""
    gate = threading.Event()
    log = LoggerThread("recorder", lambda: Recorder(gate=gate), queue_size=2, close_timeout_s=0.05)
    for step in range(20):
        log.log(step, {})
    assert log.num_dropped >= 17
    assert caplog.text.count("slower than the run") == 1
    with pytest.raises(LoggerError, match=r"within 0\.05 s"):
        log.close()
    gate.set()
    log._thread.join(60)


def test_a_logger_that_cannot_be_made_is_an_error_before_the_run() -> None:
    """What its constructor raises is raised; one that is not ready in time is an error, and closed if it is made later."""

    def refuse() -> Recorder:
        raise LoggerError("the logger recorder must have an account")

    with pytest.raises(LoggerError, match="must have an account"):
        LoggerThread("recorder", refuse)
    gate, inner = threading.Event(), Recorder()

    def late() -> Recorder:
        assert gate.wait(60)
        return inner

    with pytest.raises(LoggerError, match=r"ready within 0\.05 s"):
        LoggerThread("recorder", late, open_timeout_s=0.05)
    gate.set()
    for thread in [each for each in threading.enumerate() if each.name == "logger-recorder"]:
        thread.join(60)
    assert inner.num_closed == 1


def test_a_full_queue_does_not_delay_the_end_of_a_logger_that_has_failed() -> None:
    """Once the library has failed, nobody takes from the queue; dropping the logger does not wait for room in it."""
    gate = threading.Event()
    thread = LoggerThread("recorder", lambda: Recorder(gate=gate, fail_at=0), queue_size=2, close_timeout_s=3600)
    log = Loggers([thread])
    for step in range(5):
        log.log(step, {})
    gate.set()
    thread._thread.join(60)
    log.log(5, {})
    assert log.names == ()


GIVEN_UP = """
import atexit, sys, threading
from ostinato_trainer.loggers.group import Loggers
from ostinato_trainer.loggers.thread import LoggerThread, end_in_time

class Hanging:
    name = "hanging"
    def log(self, step, metrics): threading.Event().wait()
    def close(self, end=None): pass

atexit.register(threading.Event().wait)
log = Loggers([LoggerThread("hanging", Hanging, close_timeout_s=0.01)])
log.log(1, {})
log.close()
print("trained")
end_in_time(3, timeout_s=0.01)
sys.exit(3)
"""


def test_a_process_ends_though_a_library_waits_for_ever() -> None:
    """A logger that was given up does not keep the process either: it ends with its own status, its output written out."""
    ended = subprocess.run([sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (3, "trained\n")
    assert "must write out its last metrics" in ended.stderr


def test_a_process_whose_loggers_ended_ends_in_its_own_time() -> None:
    """Where no logger was given up, nothing cuts the end of the process short."""
    code = GIVEN_UP.replace("threading.Event().wait()", "pass").replace("0.01", "60")
    code = code.replace("atexit.register(threading.Event().wait)", "atexit.register(print, 'the end')")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (3, "trained\nthe end\n")
