"""Weights that are broadcast to a group, between threads of this process over gloo."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_engines import (  # noqa: E402
    CollectiveRoute,
    TensorSpec,
    WeightManifest,
    WeightPlace,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)
from ostinato_engines import device as devices  # noqa: E402
from ostinato_engines.weight_transfer import BroadcastSender, KeptGroup, RouteFollower, decline  # noqa: E402
from ostinato_engines.weight_transfer import group as group_module  # noqa: E402
from ostinato_engines.weight_transfer.group import WeightGroup  # noqa: E402

WAIT_S = 300.0
"""Longer than any deadline here: whoever hangs is found out."""
TENSORS = [(f"t{place}", torch.randn(size, 3)) for place, size in enumerate((5, 0, 700, 1, 40, 40))]
MANIFEST = WeightManifest.from_tensors(1, TENSORS)


class Meeting:
    """A store, and routes of groups that meet there."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def route(self, name: str = "a", *, members: int = 3, **changes) -> CollectiveRoute:
        settings = {"bucket_bytes": 1024, "join_timeout_s": 60.0, "timeout_s": 60.0, "interface": "lo", **changes}
        return CollectiveRoute(
            host="127.0.0.1", port=self.store.port, name=name, world_size=members, first_rank=1, **settings
        )


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


@contextmanager
def threads() -> Iterator[Callable[..., Future]]:
    """Runs functions beside each other."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def taken(follower: RouteFollower, route: CollectiveRoute, worker: int, manifest=MANIFEST, fail_at=None) -> dict:
    """What a worker gets of one update; it fails, if told to, before it takes that tensor."""
    update = follower.open(route, manifest, worker=worker)
    found = {}
    try:
        for name, tensor in update:
            if name == fail_at:
                raise ValueError("no room")
            found[name] = tensor.clone()
        update.finish()
    except BaseException as error:
        update.fail(error)
        raise
    finally:
        update.close()
    return found


def send_on(route: CollectiveRoute, kept: KeptGroup) -> None:
    """Sends updates until it is noticed, at the latest by the next one, that nobody takes them."""
    for _ in range(50):
        BroadcastSender(route, kept).send(MANIFEST, iter(TENSORS))


def equal(found: dict, tensors=TENSORS) -> bool:
    return list(found) == [name for name, _ in tensors] and all(
        torch.equal(found[name], value) for name, value in tensors
    )


def test_all_workers_get_every_bit_update_after_update(meeting) -> None:
    """Three updates of one group to two workers, tensors larger and smaller than a bucket: the bits are those that were sent."""
    route, kept = meeting.route(), KeptGroup("cpu")
    followers = [RouteFollower("cpu"), RouteFollower("cpu")]
    with threads() as run:
        for version in (1, 2, 3):
            tensors = [(name, tensor + version) for name, tensor in TENSORS]
            manifest = WeightManifest.from_tensors(version, tensors)
            workers = [run(taken, each, route, place, manifest) for place, each in enumerate(followers)]
            BroadcastSender(route, kept).send(manifest, iter(tensors))
            assert all(equal(worker.result(WAIT_S), tensors) for worker in workers)
    for each in (kept, *followers):
        each.close()


def test_a_worker_that_fails_ends_the_update_for_all_with_its_reason(meeting) -> None:
    """Sender and other worker hear why; in another group all is well again, and the old one cannot be joined."""
    route, kept = meeting.route(), KeptGroup("cpu")
    followers = [RouteFollower("cpu"), RouteFollower("cpu")]
    with threads() as run:
        workers = [
            run(taken, followers[0], route, 0),
            run(taken, followers[1], route, 1, fail_at="t2"),
        ]
        with pytest.raises(WeightUpdateError, match="rank 2: ValueError: no room"):
            send_on(route, kept)
        with pytest.raises(ValueError, match="no room"):
            workers[1].result(WAIT_S)
        with pytest.raises(WeightUpdateError, match="no room"):
            workers[0].result(WAIT_S)
        with pytest.raises(WeightUpdateError, match="joined once by each member"):
            taken(RouteFollower("cpu"), route, 0)
        again = meeting.route("b")
        workers = [run(taken, each, again, place) for place, each in enumerate(followers)]
        BroadcastSender(again, kept).send(MANIFEST, iter(TENSORS))
        assert all(equal(worker.result(WAIT_S)) for worker in workers)
    for each in (kept, *followers):
        each.close()


def test_a_member_that_never_comes_is_named_at_the_deadline(meeting) -> None:
    """Those who have come are told which rank has not, whichever of them is at the deadline first."""
    route = meeting.route(join_timeout_s=2.0)
    told = r"within 2 s, got none of rank .*2"
    with threads() as run:
        worker = run(taken, RouteFollower("cpu"), route, 0)
        with pytest.raises(WeightUpdateError, match=told) as by_sender:
            BroadcastSender(route, KeptGroup("cpu")).send(MANIFEST, iter(TENSORS))
        with pytest.raises(WeightUpdateError, match=told) as by_worker:
            worker.result(WAIT_S)
    assert any(isinstance(error.value, WeightUpdateTimeoutError) for error in (by_sender, by_worker))


def test_a_member_that_will_not_come_is_not_waited_for(meeting) -> None:
    """Somebody says it in its place: those who wait give up with the reason, long before their deadline."""
    route = meeting.route(join_timeout_s=2 * WAIT_S)
    with threads() as run:
        worker = run(taken, RouteFollower("cpu"), route, 0)
        decline(route, "replica 1: ManifestError: send the whole model")
        with pytest.raises(WeightUpdateError, match="send the whole model"):
            BroadcastSender(route, KeptGroup("cpu")).send(MANIFEST, iter(TENSORS))
        with pytest.raises(WeightUpdateError, match="send the whole model"):
            worker.result(WAIT_S)


def test_members_that_do_not_go_together_are_refused_before_a_byte(meeting, monkeypatch) -> None:
    """Other versions of a library, and two members on one device, are errors on all sides that say so."""
    route = meeting.route(members=2)
    versions = iter(("torch 2.11 with nccl 2.27.5", "torch 2.13 with nccl 2.28.9"))
    monkeypatch.setattr(devices, "collective_versions", lambda device: next(versions))
    told = r"same versions to broadcast, got .*torch 2.1. with nccl .* and .*torch 2.1. with nccl"
    with threads() as run:
        worker = run(taken, RouteFollower("cpu"), route, 0)
        with pytest.raises(WeightUpdateError, match=told):
            BroadcastSender(route, KeptGroup("cpu")).send(MANIFEST, iter(TENSORS))
        with pytest.raises(WeightUpdateError, match=told):
            worker.result(WAIT_S)
    monkeypatch.undo()
    monkeypatch.setattr(devices, "place_of", lambda device: WeightPlace("here", "GPU-1"))
    route = meeting.route("b", members=2)
    with threads() as run:
        worker = run(taken, RouteFollower("cpu"), route, 0)
        with pytest.raises(WeightUpdateError, match="an accelerator of its own"):
            BroadcastSender(route, KeptGroup("cpu")).send(MANIFEST, iter(TENSORS))
        with pytest.raises(WeightUpdateError, match="an accelerator of its own"):
            worker.result(WAIT_S)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (TENSORS[:-1], "got none for t5"),
        ([*TENSORS, TENSORS[0]], "t0' twice"),
        ([TENSORS[1], TENSORS[0], *TENSORS[2:]], "in the order of the manifest"),
        ([("t0", torch.zeros(4, 3)), *TENSORS[1:]], "t0 must be float32"),
    ],
)
def test_a_stream_that_does_not_keep_to_its_manifest_is_told_to_all(meeting, tensors, told) -> None:
    """Too few, too many, in another order, of another shape: no worker takes what came for a complete update."""
    route = meeting.route(members=2)
    with threads() as run:
        worker = run(taken, RouteFollower("cpu"), route, 0)
        with pytest.raises(WeightUpdateError, match=told):
            BroadcastSender(route, KeptGroup("cpu")).send(MANIFEST, iter(tensors))
        if tensors[-1] is TENSORS[-1] or len(tensors) < len(TENSORS):  # else the last bucket was complete
            with pytest.raises(WeightUpdateError, match="rank 0"):
                worker.result(WAIT_S)
        else:
            worker.result(WAIT_S)


def test_a_worker_that_was_told_of_another_update_takes_none(meeting) -> None:
    """The manifest that is sent must be the one that was announced."""
    route = meeting.route(members=2)
    other = WeightManifest(2, (TensorSpec("t0", (5, 3), "float32"),))
    with threads() as run:
        worker = run(taken, RouteFollower("cpu"), route, 0, other)
        with pytest.raises(WeightUpdateError):
            send_on(route, KeptGroup("cpu"))
        with pytest.raises(WeightUpdateError, match="got another"):
            worker.result(WAIT_S)


def test_a_member_that_stands_still_is_waited_for_within_the_deadline(meeting) -> None:
    """A worker that joins and takes nothing more ends the sender's wait, by the clock."""
    route, held = meeting.route(members=2, timeout_s=2.0), threading.Event()

    def stand_still() -> None:
        update = RouteFollower("cpu").open(route, MANIFEST)
        next(iter(update))
        held.wait(WAIT_S)
        update.fail(ValueError("enough"))

    with threads() as run:
        worker = run(stand_still)
        try:
            with pytest.raises(WeightUpdateError, match=r"within 2 s, got no end|must reach the others"):
                send_on(route, KeptGroup("cpu"))
        finally:
            held.set()
        worker.result(WAIT_S)


def test_a_group_is_freed_by_a_thread_that_nobody_waits_for(meeting, monkeypatch) -> None:
    """A library waits where the last hold on its group goes for what is under way: never in whoever closes it, however fast the other thread is."""
    freed_by = []

    class Library:
        def abort(self) -> None:
            """Ends nothing."""

        def __del__(self) -> None:
            freed_by.append(threading.current_thread())

    group = WeightGroup(meeting.route(members=1), 0, "cpu")
    group.close()
    group._group, start = Library(), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (start(thread), thread.join(WAIT_S)))
    group.close()
    assert len(freed_by) == 1
    assert freed_by != [threading.current_thread()]


def test_a_member_says_the_address_that_leads_to_the_store(meeting, monkeypatch) -> None:
    """Not what this host's name stands for, which on another host is often that one's own loopback."""
    told, make = [], dist.ProcessGroupGloo

    class Recording(make):
        @staticmethod
        def create_device(**where):  # pyright: ignore[reportIncompatibleMethodOverride]
            told.append(where)
            return make.create_device(**where)

    monkeypatch.setattr(dist, "ProcessGroupGloo", Recording)
    WeightGroup(meeting.route(members=1, interface=None), 0, "cpu").close()
    assert told == [{"hostname": "127.0.0.1"}]


def test_a_name_server_that_does_not_answer_is_waited_for(meeting, monkeypatch) -> None:
    """torch looks up this end's name while it reaches the store, and counts the half minute that this may take."""

    def slow(host, port, *, timeout, **options):
        if timeout.total_seconds() < 30:
            raise RuntimeError("timed out")
        return TCPStore(host, port, timeout=timeout, **options)

    monkeypatch.setattr(group_module, "TCPStore", slow)
    WeightGroup(meeting.route(members=1), 0, "cpu").close()
