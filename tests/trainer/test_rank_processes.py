"""Processes of ranks: what is told of one that dies, raises or keeps others waiting, and that none is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ostinato_trainer.backends.ranks import processes
from ostinato_trainer.backends.ranks.messages import error_of, failure_of
from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions
from ostinato_trainer.backends.ranks.workers import RankDiedError, RankExchangeError, RankTimeoutError
from ostinato_trainer.errors import BackendError, BatchError, OutOfMemoryError
from ostinato_trainer.heartbeat import num_beats
from ostinato_trainer.restarts import is_loss

MODULE = '''
import logging, time
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from ostinato_trainer.errors import BackendError, BatchError
from ostinato_trainer.heartbeat import beat


class Rank:
    """One that does as it is told by the directory's name."""

    def __init__(self, rank):
        self.rank = rank
        self.policy_version = rank

    def save(self, directory):
        logging.getLogger("ranks").warning("rank %d saves", self.rank)
        if directory == "all raise":
            raise BatchError(f"of rank {self.rank}")
        if directory == "one waits" and self.rank == 1:
            time.sleep(3600)
        if directory == "exchange without one":
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
            dist.all_reduce(torch.zeros(1)) if self.rank == 0 else time.sleep(3600)
        if directory == "share":
            ForkingPickler.dumps(torch.zeros(1).share_memory_())
        if directory == "memory":
            raise MemoryError("CUDA out of memory")

    def load(self, directory):
        beat()
        while not (Path(directory) / "go_on").exists():
            time.sleep(0.01)


def whole(address, device):
    return Rank(address.rank)


def broken(address, device):
    raise BackendError(f"no model on rank {address.rank}")
'''


@pytest.fixture
def ranks_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of ranks that compute nothing, importable here and in processes started from here."""
    (tmp_path / "ranks_of_this_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import ranks_of_this_test  # pyright: ignore[reportMissingImports]  written above

    yield ranks_of_this_test
    del sys.modules["ranks_of_this_test"]


def make(**options) -> RankProcesses:
    return RankProcesses(RankProcessOptions(**{"num_ranks": 2, **options}))


def is_there(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def go_on_after(num_before: int, file: Path) -> None:
    """Makes a file once this process has heard of progress."""
    while num_beats() == num_before:
        time.sleep(0.01)
    file.touch()


def test_calls_errors_and_a_death(ranks_module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Answers come in the order of ranks; progress within a call is a heartbeat here; an error of all is that error, or the one for memory, and they
    go on; a rank that is killed in a call ends it, by name and signal, and takes the others along."""
    ranks = make(call_timeout_s=300.0)
    try:
        ranks.start(ranks_module.whole)
        assert ranks.call("policy_version", [(), ()]) == [0, 1]
        before = num_beats()
        threading.Thread(target=go_on_after, args=(before, tmp_path / "go_on"), daemon=True).start()
        ranks.call("load", [(tmp_path,)] * 2)  # which ends once the file is there
        assert num_beats() >= before + 3  # the answers are some too
        with pytest.raises(OutOfMemoryError, match=r"it ran out: CUDA out of memory; lower"):
            ranks.call("save", [("memory",)] * 2)
        with pytest.raises(BatchError, match="of rank 0") as raised:
            ranks.call("save", [("all raise",)] * 2)
        assert "ranks 0, 1 of 2" in raised.value.__notes__[0]
        assert [record.getMessage() for record in caplog.records if record.name == "ranks"] == ["rank 0 saves"] * 2
        assert ranks.call("policy_version", [(), ()]) == [0, 1]
        pids = ranks.process_ids
        os.kill(pids[1], signal.SIGSTOP)  # it cannot answer before it is killed
        killer = threading.Timer(0.1, os.kill, (pids[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(
            RankDiedError,
            match="rank 1 of 2 must live to answer policy_version, but its process was killed by signal 9",
        ):
            ranks.call("policy_version", [(), ()])
        killer.join()
        assert not [pid for pid in pids if is_there(pid)]
        with pytest.raises(BackendError, match="must be running"):
            ranks.call("policy_version", [(), ()])
    finally:
        ranks.close()


def test_a_rank_that_others_wait_for_in_an_exchange_is_named(ranks_module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank is alive and does not take part, the error of those that waited for it is one that names it and begins a run again."""
    monkeypatch.setattr(processes, "_LATE_ERRORS_S", 0.5)
    ranks = make(call_timeout_s=300.0)
    ranks.start(ranks_module.whole)
    pids = ranks.process_ids
    with pytest.raises(
        RankExchangeError, match=r"within actor_rollout_ref\.nccl_timeout, but rank 1 did not"
    ) as raised:
        ranks.call("save", [("exchange without one",)] * 2)
    assert is_loss(raised.value)
    assert not [pid for pid in pids if is_there(pid)]


def test_what_lost_ranks_have_printed_is_kept(ranks_module, tmp_path: Path) -> None:
    """Those that take their place add to the same files, and an error shows what its own process has printed."""
    (tmp_path / "rank_0.log").write_text("of the ranks before\n")
    ranks = make(num_ranks=1, log_folder=str(tmp_path))
    ranks.start(ranks_module.whole)
    os.kill(ranks.process_ids[0], signal.SIGKILL)
    with pytest.raises(RankDiedError) as died:
        ranks.call("policy_version", [()])
    assert "of the ranks before" not in str(died.value)
    assert (tmp_path / "rank_0.log").read_text().startswith("of the ranks before\n")


def test_ranks_that_shared_memory_leave_no_folder(ranks_module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sockets by which a rank hands out what it shares go with it."""
    with tempfile.TemporaryDirectory() as folder:  # sockets have short names
        monkeypatch.setenv("TMPDIR", folder)
        ranks = make(num_ranks=1)
        ranks.start(ranks_module.whole)
        ranks.call("save", [("share",)])
        assert len(os.listdir(folder)) == 1
        ranks.close()
        assert os.listdir(folder) == []


def test_what_a_rank_raised_by_itself_is_told_rather_than_that_others_waited() -> None:
    """The others' exchanges end in errors of their own, which only say that one was missing; ranks are then not in step."""
    gone = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:2")
    error = error_of({0: failure_of(gone), 1: failure_of(BatchError("of rank 1"))}, 2)
    assert isinstance(error, BatchError)
    assert "rank 1 of 2" in error.__notes__[0]
    assert not error.ranks_in_step  # pyright: ignore[reportAttributeAccessIssue]
    both = error_of({rank: failure_of(gone) for rank in (0, 1)}, 2)
    assert isinstance(both, RankExchangeError)
    assert "all ranks waited for each other" in str(both)
    assert not both.ranks_in_step  # pyright: ignore[reportAttributeAccessIssue]
    assert not isinstance(failure_of(RuntimeError("gloo/ is a folder")).error, RankExchangeError)


def test_a_factory_that_fails_leaves_no_process(ranks_module) -> None:
    """Its error comes out of `start`, and the ranks are gone."""
    ranks = make(num_ranks=1)
    with pytest.raises(BackendError, match="no model on rank 0"):
        ranks.start(ranks_module.broken)
    assert ranks.process_ids == []
    ranks.close()


def test_a_factory_that_cannot_travel_is_refused_at_once() -> None:
    """One that is made inside a function is refused with the cure."""
    ranks = make(num_ranks=1)
    with pytest.raises(BackendError, match="must be picklable"):
        ranks.start(lambda address, device: None)  # pyright: ignore[reportArgumentType]  the point of the test
    assert ranks.process_ids == []


@pytest.mark.slow
def test_a_rank_that_does_not_answer_ends_the_call(ranks_module) -> None:
    """At the deadline the error names the rank that is late, and nothing is left."""
    ranks = make(call_timeout_s=120.0)
    ranks.start(ranks_module.whole)
    ranks.options = RankProcessOptions(num_ranks=2, call_timeout_s=0.5)
    pids = ranks.process_ids
    with pytest.raises(RankTimeoutError, match=r"within 0\.5 s, but (rank 1|ranks 0, 1) had not"):
        ranks.call("save", [("one waits",)] * 2)
    assert not [pid for pid in pids if is_there(pid)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_rank_outlives_a_controller_that_is_killed(ranks_module, tmp_path: Path) -> None:
    """After SIGKILL to the controller its ranks end by themselves, one of them in the middle of a call."""
    script = tmp_path / "controller.py"
    script.write_text(
        "import sys, ranks_of_this_test\n"
        "from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions\n"
        "ranks = RankProcesses(RankProcessOptions(num_ranks=2))\n"
        "ranks.start(ranks_of_this_test.whole)\n"
        "print(*ranks.process_ids, flush=True)\n"
        "ranks.call('save', [('one waits',)] * 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        controller.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 120
    while any(is_there(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is still there two minutes after its controller was killed"
        time.sleep(0.05)
