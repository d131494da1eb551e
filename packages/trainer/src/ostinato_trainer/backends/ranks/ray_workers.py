"""`RankActors`: ranks as actors of a Ray cluster, on whichever hosts their places are.

Invariants as `RankProcesses`: a rank's death ends the call that needs it and takes the others along, and no call waits beyond its deadline. Ray
notices an end within milliseconds on this host; of another host that is lost it says so once it counts the host as lost. The actors are those of
`ostinato_rollout.ray_cluster`, on an event loop of their own thread, so that whoever trains may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_engines.device import HOST, device_kind
from ostinato_rollout.ray_cluster import (
    ActorBody,
    ActorLostError,
    ActorPlacement,
    ActorProcess,
    ClusterError,
    cluster_nodes,
)
from ostinato_trainer.backends.ranks.base import RankAddress, RankFactory
from ostinato_trainer.backends.ranks.host import RankHost
from ostinato_trainer.backends.ranks.messages import Answer, Failure, error_of, failure_of, named_ranks, request_of
from ostinato_trainer.backends.ranks.processes import loopback
from ostinato_trainer.backends.ranks.store import listening_store
from ostinato_trainer.backends.ranks.workers import RankDiedError, RankTimeoutError
from ostinato_trainer.errors import BackendError
from ostinato_trainer.heartbeat import beat, num_beats

__all__ = ["RankActors"]

T = TypeVar("T")

_LOCAL_HOST: Final = "127.0.0.1"
_LOOK_S: Final = 1.0
"""Time between two looks at what a rank has computed."""
_LATE_ERRORS_S: Final = 10.0
"""How long the others may take to raise what one rank has raised, before they count as waiting for it in vain."""


class _RankBody(ActorBody):
    """The process of a rank; all that the backend does is done by one thread, while the event loop gives signs of life."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")
        self._host: RankHost | None = None

    async def serve(self, request: bytes) -> Answer | Failure:
        """Answers one call; the first must be `start`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._serve, request)

    async def num_beats(self) -> int:
        """How much has been computed so far; answered while a call is served."""
        return num_beats()

    def _serve(self, request: bytes) -> Answer | Failure:
        try:
            method, arguments = pickle.loads(request)  # from the process that made this actor
            if method == "start":
                self._host = RankHost(*arguments)
                return Answer(None)
            value = getattr(self._host, method)(*arguments)
            return Answer(_packed(value) if method == "next_weights" else value)
        except Exception as error:  # whatever a call raises is its answer
            return failure_of(error)


class RankActors:
    """See `RankWorkers`. Needs a process that is connected to a cluster.

    Args:
        placements: Where each rank goes, in order.
        device: `cpu`, or the kind of device that each place has one of.
        start_timeout_s: How long the actors may take to be there.
        collective_timeout_s: How long a rank may wait for the others inside a collective.
        call_timeout_s: How long one call may take, from its start to the last rank's answer.
    """

    def __init__(
        self,
        placements: Sequence[ActorPlacement],
        *,
        device: str = HOST,
        start_timeout_s: float = 600.0,
        collective_timeout_s: float = 600.0,
        call_timeout_s: float = 3600.0,
    ) -> None:
        self._device, self._start_timeout_s = device, start_timeout_s
        self._collective_timeout_s, self._call_timeout_s = collective_timeout_s, call_timeout_s
        self._placements = tuple(placements)
        self._ranks: list[ActorProcess] = []
        self._store: TCPStore | None = None
        self._closing = threading.Lock()
        self._is_started = self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rank actors", daemon=True)

    @property
    def num_ranks(self) -> int:
        """See `RankWorkers.num_ranks`."""
        return len(self._placements)

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks, in order, each on its own host; none before the start and after the end."""
        return [rank.place.pid for rank in self._ranks if rank.place is not None]

    def address_for(self, beyond_host: bool) -> tuple[str, str | None]:
        """See `RankWorkers.address_for`; of one host are only those that are on this one."""
        own = cluster_nodes()[0]
        is_here = all(rank.place is not None and rank.place.node_id == own.node_id for rank in self._ranks)
        return (own.host, None) if beyond_host or not is_here else (_LOCAL_HOST, loopback())

    def start(self, factory: RankFactory) -> None:
        """See `RankWorkers.start`.

        Raises:
            BackendError: they were started before, the factory cannot travel, or it raised.
            RankDiedError, RankTimeoutError: see there.
        """
        if self._is_started or self._is_closed:
            raise BackendError("ranks must be started once, got a second start; make new ones")
        self._is_started = True
        self._thread.start()
        try:
            self._wait(self._place())
            addresses = self._addresses()
            self._exchange("start", [(address, factory) for address in addresses])
        except BaseException:
            self.close()
            raise

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See `RankWorkers.call`."""
        if not self._ranks or self._is_closed:
            raise BackendError(f"ranks must be running to be asked for {method}, got closed ones; start a new group")
        try:
            values = self._exchange(method, arguments)
        except Exception as error:
            if not getattr(error, "ranks_in_step", False):
                self.close()
            raise
        except BaseException:  # an interrupt: where the ranks stand is unknown
            self.close()
            raise
        return [_unpacked(value) for value in values] if method == "next_weights" else values

    def close(self) -> None:
        """See `RankWorkers.close`."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        if self._thread.is_alive():
            self._wait(_end_all(self._ranks))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._ranks, self._store = [], None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Has the loop's thread do something; whoever is interrupted meanwhile leaves it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _place(self) -> None:
        """Starts the actors."""
        self._ranks = [ActorProcess(_RankBody, placement) for placement in self._placements]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.gather(*(rank.start() for rank in self._ranks))
        except TimeoutError as error:
            late = [number for number, rank in enumerate(self._ranks) if rank.place is None]
            raise RankTimeoutError(
                f"ranks must be placed within {self._start_timeout_s:g} s, but {named_ranks(late)} had no process; {self._ranks[late[0]].unplaced()}"
            ) from error
        except ClusterError as error:
            raise RankDiedError(f"ranks must start as actors, got {error}; see Ray's logs") from error

    def _addresses(self) -> list[RankAddress]:
        """Where the ranks meet: at a store of this process, on the loopback where all are on this host."""
        host, interface = self.address_for(False)
        self._store = listening_store(host, self._collective_timeout_s)
        return [
            RankAddress(
                rank=rank,
                world_size=self.num_ranks,
                store_host=host,
                store_port=self._store.port,
                device=HOST if device_kind(self._device) == HOST else f"{device_kind(self._device)}:0",
                timeout_s=self._collective_timeout_s,
                interface=interface,
            )
            for rank in range(self.num_ranks)
        ]

    def _exchange(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One call on every rank; raises where one fails, dies or is late, and says by `ranks_in_step` whether all failed alike."""
        return self._wait(self._answers(method, [request_of(method, each) for each in arguments]))

    async def _answers(self, method: str, requests: Sequence[bytes]) -> list[Any]:
        asked: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(rank.ask("serve", request))
            for rank, request in zip(self._ranks, requests, strict=True)
        ]
        for answer in asked:
            answer.add_done_callback(_noticed)
        waiting: set[asyncio.Future[Any]] = set(asked)
        loop = asyncio.get_running_loop()
        deadline, failures = loop.time() + self._call_timeout_s, {}
        following = [asyncio.ensure_future(_follow(rank)) for rank in self._ranks]
        try:
            while waiting and loop.time() < deadline:
                done, waiting = await asyncio.wait(
                    waiting, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
                for answer in done:
                    beat()
                    number = asked.index(answer)
                    result = self._result(method, number, answer)
                    if isinstance(result, Failure):
                        failures[number] = result
                        deadline = min(deadline, loop.time() + _LATE_ERRORS_S)
        finally:
            for each in (*waiting, *following):
                each.cancel()
        if failures:
            raise error_of(failures, len(asked), self._hosts())
        if waiting:
            late = [number for number, answer in enumerate(asked) if answer in waiting]
            who = named_ranks(late, self._hosts())
            raise RankTimeoutError(
                f"{method} must be answered by all ranks within {self._call_timeout_s:g} s, but {who} had not; see Ray's logs of them"
            )
        return [answer.result().value for answer in asked]

    def _hosts(self) -> list[str]:
        """Of the ranks, in order."""
        return [rank.place.host if rank.place is not None else "no host yet" for rank in self._ranks]

    def _result(self, method: str, number: int, answer: asyncio.Future[Any]) -> Answer | Failure:
        try:
            return answer.result()
        except ActorLostError as error:
            raise RankDiedError(
                f"rank {number} of {self.num_ranks} must live to answer {method}, but {error}; see Ray's log of it"
            ) from error
        except ClusterError as error:
            raise BackendError(f"the answer of rank {number} to {method} must arrive, got {error}") from error


def _noticed(answer: asyncio.Future[Any]) -> None:
    """Of several lost ranks one is told of: the loop is not to miss that the others were asked for."""
    if not answer.cancelled():
        answer.exception()


async def _follow(rank: ActorProcess) -> None:
    """Has this process's heart beat while that of a rank does, until cancelled or until the rank is lost, which its own call tells."""
    seen = 0
    with contextlib.suppress(ClusterError, ActorLostError):
        while True:
            await asyncio.sleep(_LOOK_S)
            now = await rank.ask("num_beats")
            if now != seen:
                beat()
            seen = now


async def _end_all(ranks: Sequence[ActorProcess]) -> None:
    await asyncio.gather(*(rank.end() for rank in ranks))


def _packed(tensors: list[tuple[str, Tensor]] | None) -> list[tuple[str, torch.dtype, tuple[int, ...], Any]] | None:
    """Tensors as Ray carries them without a copy of its own: bytes in numpy arrays."""
    if tensors is None:
        return None
    return [
        (
            name,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in tensors
    ]


def _unpacked(packed: list[tuple[str, torch.dtype, tuple[int, ...], Any]] | None) -> list[tuple[str, Tensor]] | None:
    """What `_packed` was given, in memory of this process: Ray's own is read-only."""
    if packed is None:
        return None
    return [(name, torch.from_numpy(bytes_.copy()).view(dtype).reshape(shape)) for name, dtype, shape, bytes_ in packed]
