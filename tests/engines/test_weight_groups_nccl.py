"""Weights that are broadcast over NCCL between processes with a GPU each, and what becomes of the sender where the other is lost."""

import multiprocessing
import os
import signal
import time
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore  # noqa: E402  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_engines import CollectiveRoute, WeightManifest, WeightUpdateError  # noqa: E402
from ostinato_engines.weight_transfer import BroadcastSender, KeptGroup, RouteFollower  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WAIT_S = 120.0
"""Longer than any deadline here: whoever hangs is found out."""
SIZES = [5_000_000, 1, 700, 3_000_000, 40]


def tensors_of(version: int, device: str) -> list:
    """The same on every device."""
    generator = torch.Generator().manual_seed(version)
    return [(f"t{place}", torch.randn(size, generator=generator).to(device)) for place, size in enumerate(SIZES)]


def work(connection, route: CollectiveRoute, lost_at: str) -> None:
    """A worker on the second GPU: says after each update whether it has every bit; at version 2 it dies, or stands still, if told to."""
    follower = RouteFollower("cuda:1")
    for version in (1, 2, 3):
        expected = dict(tensors_of(version, "cuda:1"))
        update = follower.open(route, WeightManifest.from_tensors(version, list(expected.items())), worker=0)
        equal = []
        for name, tensor in update:
            if version == 2 and name == "t2" and lost_at == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if version == 2 and name == "t2" and lost_at == "stands still":
                time.sleep(10 * WAIT_S)
            equal.append(torch.equal(tensor, expected[name]))
        update.finish()
        update.close()
        connection.send((version, all(equal) and len(equal) == len(SIZES)))


@contextmanager
def worker_of(route: CollectiveRoute, *, lost_at: str = ""):
    """A process, and what it says."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=work, args=(there, route, lost_at), daemon=True)
    process.start()
    try:
        yield here
    finally:
        process.kill()
        process.join(WAIT_S)


def send(route: CollectiveRoute, kept: KeptGroup, version: int) -> None:
    tensors = tensors_of(version, "cuda:0")
    BroadcastSender(route, kept).send(WeightManifest.from_tensors(version, tensors), iter(tensors))


def send_on(route: CollectiveRoute, kept: KeptGroup) -> None:
    """Sends updates until it is noticed that nobody takes them: some of one goes without whoever takes it."""
    for _ in range(100):
        send(route, kept, 2)


def said_by(connection) -> tuple[int, bool]:
    assert connection.poll(WAIT_S)
    return connection.recv()


@pytest.mark.parametrize("lost_at", ["dies", "stands still"])
def test_a_sender_outlives_a_worker_that_is_lost_in_the_middle(lost_at) -> None:
    """It gives up at its deadline, its device goes on, and another worker gets every bit of the next updates in a group of their own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = {"bucket_bytes": 1 << 20, "join_timeout_s": 60.0, "timeout_s": 5.0, "interface": "lo"}
    first, second = (
        CollectiveRoute(host="127.0.0.1", port=store.port, name=name, world_size=2, first_rank=1, **settings)
        for name in ("first", "second")
    )
    kept = KeptGroup("cuda:0")
    with worker_of(first, lost_at=lost_at) as worker:
        send(first, kept, 1)
        assert said_by(worker) == (1, True)
        with pytest.raises(WeightUpdateError, match=r"within 5 s|must reach the others"):
            send_on(first, kept)
    with worker_of(second) as worker:
        for version in (1, 2, 3):
            send(second, kept, version)
            assert said_by(worker) == (version, True)
    kept.close()
    torch.cuda.synchronize("cuda:0")
