"""A process group for weights alone: apart from torch's default group, from a meeting at a store until the first failure.

Invariants: nobody waits beyond a deadline, neither for a member that never comes nor for one that stands still; a member that gives up tells the
others through the store, and they give up with its reason; what two versions of a library would make of each other is not tried out.
Knows no tensors by name.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import metadata
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_engines import device as devices
from ostinato_engines.errors import WeightPeerLostError, WeightUpdateError, WeightUpdateTimeoutError
from ostinato_engines.network import address_towards
from ostinato_engines.weight_routes import CollectiveRoute, WeightPlace

_POLL_S = 0.02
_SPIN_S = 0.0001
_LOOK_S = 0.2
"""Between two looks whether another member has given up."""
_ABORT = "abort"
_STORE_S = 10.0
_REACH_S = 60.0
"""Longest wait for the store to be reached the first time: torch looks up the name of this end's address as well, and where no name server answers
that alone takes 10 s and more."""
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch would end the whole process where a member is late; here the wait ends instead."""


class _Member(msgspec.Struct, frozen=True):
    """What each writes at the meeting."""

    versions: str
    place: WeightPlace


class WeightGroup:
    """One member's end.

    Args:
        route: Where, and who else.
        rank: Of this member.
        device: Of this member; its kind says which library carries the bytes.

    Raises:
        WeightUpdateTimeoutError: A member did not come in time.
        WeightUpdateError: The members do not go together, or one gave up.
    """

    def __init__(self, route: CollectiveRoute, rank: int, device: str) -> None:
        self.route, self._rank, self._device = route, rank, device
        self._given_up = ""
        self._group: Any = None
        self._store = _store_of(route, _REACH_S)
        try:
            self._meet()
            self._group = _within(route.join_timeout_s, self._connected, f"{self} must connect")
        except Exception as error:
            self.abort(f"rank {rank}: {error}")
            raise

    def __str__(self) -> str:
        return f"rank {self._rank} of {self.route.world_size} in group {self.route.name}"

    def broadcast(self, memory: Tensor) -> None:
        """Sends `memory` (uint8 [bytes], on this member's device) from rank 0 to all; returns once it is there.

        Raises:
            WeightUpdateTimeoutError: A member stood still.
            WeightUpdateError: A member has gone, or gave up.
        """
        try:
            work = self._begun(memory)
            self._wait(work)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, WeightUpdateError):
                raise
            self._raise_if_given_up(look=True)
            raise WeightPeerLostError(f"{self} must reach the others, got {error}; see their logs") from error

    def _begun(self, memory: Tensor) -> Any:
        """A broadcast that is under way. The group is in no frame that an error keeps: where the last hold on it goes, the library waits."""
        group = self._group
        try:
            self._raise_if_given_up()
            options = dist.BroadcastOptions()
            options.rootRank = 0
            return group.broadcast([memory], options)
        finally:
            del group

    def abort(self, why: str) -> None:
        """Ends the group for all, from any thread; the first reason counts."""
        if self._given_up:
            return
        self._given_up = why
        with contextlib.suppress(RuntimeError):
            if not self._store.check([_ABORT]):
                self._store.set(_ABORT, why)
        self.close()

    def close(self) -> None:
        """Lets go of the group; an operation that the library still waits for keeps nobody."""
        self._given_up = self._given_up or "it was closed"
        if self._group is not None:
            held, self._group = [self._group], None  # no name of its own: a frame could be the last to let go
            _let_go(held)

    def _meet(self) -> None:
        """Waits until all are there, and looks whether they go together."""
        route, own = self.route, f"member/{self._rank}"
        if self._store.check([own]):
            raise WeightUpdateError(
                f"group {route.name} must be joined once by each member, got rank {self._rank} twice; make a new group"
            )
        versions = (
            f"ostinato-engines {metadata.version('ostinato-engines')}, {devices.collective_versions(self._device)}"
        )
        member = _Member(versions, devices.place_of(self._device))
        self._store.set(own, msgspec.json.encode(member).decode())
        names = [f"member/{rank}" for rank in range(route.world_size)]
        deadline = time.monotonic() + route.join_timeout_s
        while not self._store.check(names):
            self._raise_if_given_up(look=True)
            if time.monotonic() > deadline:
                late = [name.partition("/")[2] for name in names if not self._store.check([name])]
                raise WeightUpdateTimeoutError(
                    f"all {route.world_size} members must join group {route.name} within {route.join_timeout_s:g} s, got none of rank "
                    f"{', '.join(late)}; see the logs of their engines"
                )
            time.sleep(_POLL_S)
        self._raise_if_given_up(look=True)
        _check_members([msgspec.json.decode(self._store.get(name), type=_Member) for name in names])

    def _connected(self) -> Any:
        """The library's group, once a byte has gone through it."""
        devices.set_device(self._device)
        # The library's own deadline only bounds what is left of an operation that was given up.
        route, timeout = self.route, timedelta(seconds=2 * self.route.timeout_s)
        store = PrefixStore("library", self._store)
        if devices.distributed_backend(self._device) == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with _environment(_NCCL_SETTINGS):
                group: Any = dist.ProcessGroupNCCL(store, self._rank, route.world_size, options)
        else:
            make: Any = dist.ProcessGroupGloo
            options = make._Options()
            options._timeout = timeout
            where = (
                {"interface": route.interface}
                if route.interface
                else {"hostname": address_towards(route.host, route.port)}
            )
            options._devices = [make.create_device(**where)]
            group = make(store, self._rank, route.world_size, options)
        held = [group]
        del group  # see `close`
        try:
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            held[0].broadcast([byte]).wait()
            devices.synchronize(self._device)
            return held[0]
        except BaseException:
            _let_go(held)
            raise

    def _wait(self, work: Any) -> None:
        """Until an operation is done, its deadline passes or somebody gives up."""
        start = looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_SPIN_S)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._raise_if_given_up(look=True)
            if now - start > self.route.timeout_s:
                raise WeightUpdateTimeoutError(
                    f"all members must take part in a broadcast within {self.route.timeout_s:g} s, got no end in {self}; see their logs"
                )

    def _raise_if_given_up(self, *, look: bool = False) -> None:
        why = self._given_up
        if not why and look:
            with contextlib.suppress(RuntimeError):  # a store that is gone says nothing
                if self._store.check([_ABORT]):
                    why = self._store.get(_ABORT).decode()
        if why:
            raise WeightUpdateError(
                f"all members of group {self.route.name} must go on, got that {why}; send the weights again"
            )


def give_up(route: CollectiveRoute, why: str) -> None:
    """Ends a group in the place of members that will not come, or have gone."""
    with contextlib.suppress(WeightUpdateError, RuntimeError):
        store = _store_of(route)
        if not store.check([_ABORT]):
            store.set(_ABORT, why)


def _store_of(route: CollectiveRoute, timeout_s: float = _STORE_S) -> PrefixStore:
    try:
        store = TCPStore(route.host, route.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise WeightPeerLostError(
            f"the store of group {route.name} must be reached at {route.host}:{route.port} within {timeout_s:g} s, got {error}; see the trainer"
        ) from error
    store.set_timeout(timedelta(seconds=_STORE_S))
    return PrefixStore(f"weights/{route.name}", store)


def _check_members(members: list[_Member]) -> None:
    versions = list(dict.fromkeys(member.versions for member in members))
    if len(versions) > 1:
        raise WeightUpdateError(
            f"all members must have the same versions to broadcast, got {' and '.join(versions)}; give trainer and engines one environment"
        )
    on_devices = [member.place for member in members if member.place.device]
    if len(on_devices) not in (0, len(members)) or len(set(on_devices)) != len(on_devices):
        raise WeightUpdateError(
            f"each member must have an accelerator of its own, got {[place.device for place in on_devices]} for {len(members)} members; "
            "send through memory"
        )


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _within(limit_s: float, work: Callable[[], Any], what: str) -> Any:
    """What `work` returns; libraries that wait without a deadline are left to themselves, in a thread that keeps no process."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="weight group", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise WeightPeerLostError(f"{what}, got {errors[0]}; see the logs of the others") from errors[0]
    if not result:
        raise WeightUpdateTimeoutError(f"{what} within {limit_s:g} s, got no end; see the logs of the others")
    return result[0]


def _let_go(groups: list[Any]) -> None:
    """Has a thread that keeps no process free what the list holds, which nothing else may hold: the last hold waits with the library."""
    threading.Thread(target=_release, args=(groups,), name="weight group", daemon=True).start()


def _release(groups: list[Any]) -> None:
    """Frees a group; the library may wait for what is under way."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        groups[0].abort()
    groups.clear()
