"""A rank's outlets of weights, in this process: how long they wait for workers, and what the ranks do meanwhile."""

import inspect
import threading
from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

from ostinato_engines import CollectiveRoute, WeightManifest, WeightUpdateError  # noqa: E402
from ostinato_engines.sglang_engine import running as sglang  # noqa: E402
from ostinato_engines.weight_transfer import LOADING_S, SENDING_S, WeightReceiver, connect  # noqa: E402
from ostinato_rollout import ServerPool  # noqa: E402
from ostinato_trainer.backends.ranks import outlets as outlets_module  # noqa: E402
from ostinato_trainer.backends.ranks.outlets import SendOrder, WeightOutlets  # noqa: E402

WAIT_S = 60.0
NUM_EXCHANGES = 3
TENSORS = [(f"layer.{place}", torch.full((1 << 20,), float(place))) for place in range(5)]
"""Each of them fills a bucket: the third one is sent once the worker has read the first."""
MANIFEST = WeightManifest.from_tensors(1, TENSORS)


class Alone(WeightOutlets):
    """A rank that exchanges with nobody, and counts how often, from when it is told to."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.counts, self.enough, self._num = threading.Event(), threading.Event(), 0

    def _any_rank(self, is_so):
        self._num += self.counts.is_set()
        if self._num >= NUM_EXCHANGES:
            self.enough.set()
        return is_so

    def send_all(self):
        order = SendOrder(manifest=MANIFEST, sockets={"0/0": False}, route=None, everywhere=False)
        return self.send(order, lambda everywhere: ([pair] for pair in TENSORS))


@pytest.mark.parametrize("slow_at", ["layer.0", "nothing yet"])
def test_ranks_go_on_exchanging_while_a_worker_takes_its_time(slow_at, monkeypatch):
    """While one rank waits for its worker, before the first tensor or between two, the others are not kept waiting in one exchange."""
    monkeypatch.setattr(outlets_module, "_EXCHANGE_S", 0.01)
    rank, found = Alone(), []
    (path,) = rank.listen(["0/0"]).values()

    def loads(name):
        if name == slow_at:
            rank.counts.set()
            found.append(rank.enough.wait(WAIT_S / 4))

    def work():
        receiver = WeightReceiver(connect(path), timeout_s=WAIT_S)
        update = receiver.next_update(forever=False)
        loads("nothing yet")
        for name, tensor in update:
            loads(name)
            found.append((name, float(tensor[0])))
        update.finish()
        with suppress(WeightUpdateError):
            receiver.next_update(forever=False)
        receiver.close()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    assert rank.send_all() == {"0/0": ""}
    worker.join(WAIT_S)
    arrived = [(name, float(place)) for place, (name, _) in enumerate(TENSORS)]
    assert found == [True, *arrived]


def test_a_worker_has_as_long_to_load_as_on_every_way(monkeypatch):
    """One that says nothing is waited for as long as the slowest engine may load, and its outlet says so."""
    monkeypatch.setattr(outlets_module, "LOADING_S", 0.25)
    rank = Alone()
    (path,) = rank.listen(["0/0"]).values()
    connections = []

    def come():
        connections.append(connect(path))

    worker = threading.Thread(target=come, daemon=True)
    worker.start()
    told = rank.send_all()
    worker.join(WAIT_S)
    connections[0].close()
    assert "receiver of weights must answer within 0.25 s" in told["0/0"]


def test_whoever_waits_for_somebody_who_waits_does_so_for_longer():
    """So the error that comes out is that of who knows most, from an engine that loads to the pool that waits for all."""
    pool = inspect.signature(ServerPool).parameters["update_timeout_s"].default
    broadcast = CollectiveRoute(host="", port=0, name="", world_size=2, first_rank=1)
    meeting_s = 2 * broadcast.join_timeout_s
    waits = [sglang._LOAD_S, LOADING_S, broadcast.timeout_s, outlets_module._SOURCE_S, SENDING_S, pool]
    assert waits == sorted(set(waits))
    assert broadcast.timeout_s + meeting_s < outlets_module._SOURCE_S
