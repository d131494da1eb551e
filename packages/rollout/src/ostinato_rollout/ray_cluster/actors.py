"""One actor: where it goes, its process, and the end of both.

Invariants: whoever waits for an actor hears of its end; when `end` has returned, its process and what that has started are
gone. Ray alone does not see to the last: an actor whose process has been stopped counts as dead, and goes on once it is
continued. Knows nothing of what an actor does.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from ostinato_engines import MissingDependencyError
from ostinato_rollout.errors import ActorLostError, ClusterError
from ostinato_rollout.loop_place import place_of, stack_of
from ostinato_rollout.ray_cluster.host_processes import is_running

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "ray must be installed for actors; run `pip install 'ostinato-rollout[ray]'`", name="ray"
    ) from error

logger = logging.getLogger(__name__)

_END_S = 10.0
_POLL_S = 0.02
_GRACE_S = 0.5
_STANDING_S = 2.0
_ASIDE = "aside"
"""Group of calls that have an event loop of their own."""
_MAX_CALLS = 100_000
"""Calls that one actor has under way at a time: what bounds them is the caller's."""


def pickled(value: Any) -> bytes:
    """Return a value, also a class or function of a script, in the form in which Ray sends it; `pickle.loads` reads it.

    Raises:
        Exception: It cannot be pickled; the class says little.
    """
    return cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]


class ActorPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where an actor goes and what it takes there."""

    num_cpus: float = 1.0
    """Of the node, or of the first bundle."""
    num_gpus: float = 0.0
    """Of the node, or of each bundle; actors that share a device take parts of it."""
    resources: Mapping[str, float] = {}
    """Others, as Ray names them; of the first bundle."""
    placement_group: PlacementGroup | None = None
    """Made and removed by whoever hands it over; None: wherever there is room."""
    bundles: tuple[int, ...] = ()
    """Of the group, by index; all of one node. The first holds the actor, from the others it has the devices."""
    environment: Mapping[str, str] = {}
    """Variables of the process."""

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}; 0 takes none")
        if (self.placement_group is None) != (not self.bundles):
            raise ValueError(
                f"bundles must be given with a placement_group, and only then, got {self.bundles}; name the bundles by index"
            )
        if len(set(self.bundles)) != len(self.bundles) or any(index < 0 for index in self.bundles):
            raise ValueError(f"bundles must be distinct indices from 0 on, got {self.bundles}; name each once")

    def holders(self) -> list["ActorPlacement"]:
        """What holds the bundles beyond the first."""
        return [
            ActorPlacement(num_cpus=0, num_gpus=self.num_gpus, placement_group=self.placement_group, bundles=(index,))
            for index in self.bundles[1:]
        ]

    def options(self) -> dict[str, Any]:
        """As Ray takes them."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
            "runtime_env": {"env_vars": dict(self.environment)} if self.environment else None,
        }
        if self.placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.placement_group,
                placement_group_bundle_index=self.bundles[0],
                placement_group_capture_child_tasks=True,
            )
        return options

    def wanted(self) -> dict[str, float]:
        """What it asks for, by Ray's names."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def text(self) -> str:
        """What it asks for, for people."""
        text = amounts_text(self.wanted()) or "nothing"
        return text if self.placement_group is None else f"{text} in bundles {', '.join(map(str, self.bundles))}"


class ActorPlace(msgspec.Struct, frozen=True):
    """Where an actor is."""

    node_id: str
    host: str
    """Address of the node, as its others reach it."""
    pid: int
    """Of the process, which leads a process group."""
    devices: tuple[str, ...]
    """That Ray has given it."""


class ActorBody:
    """What every actor can; its methods run on an event loop of the actor's own."""

    _own_loop: tuple[asyncio.AbstractEventLoop, int] | None = None
    """With its thread."""

    async def where(self) -> ActorPlace:
        """Where this is. From then on its process leads a group, so that what it starts can be ended with it."""
        self._own_loop = asyncio.get_running_loop(), threading.get_ident()
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        context = ray.get_runtime_context()
        devices = tuple(name for names in context.get_accelerator_ids().values() for name in names)
        return ActorPlace(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), devices)

    async def standing(self) -> str:
        """Which task the actor's event loop is in, and its stack. Called on another loop, it answers also while that one stands still."""
        return "" if self._own_loop is None else f"{place_of(*self._own_loop)}\n{stack_of(self._own_loop[1])}"

    async def until_end(self) -> None:
        """Never returns: whoever waits for it learns of the end of the process."""
        await asyncio.Event().wait()


class ActorProcess:
    """An actor, from its creation until its process is gone. Belongs to the event loop that starts it.

    Args:
        body: Its class, importable on every node, without arguments.
        placement: Where it goes.
        on_lost: Is told, once, that the process has ended without having been told to, and how.
    """

    def __init__(
        self, body: type[ActorBody], placement: ActorPlacement, *, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self._body, self._placement, self._on_lost = body, placement, on_lost
        self._actor: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self.place: ActorPlace | None = None
        """Once it is there."""

    async def start(self) -> ActorPlace:
        """Creates it and waits until it is there, within a deadline of the caller's: there may be no room.

        Whoever is cancelled meanwhile, or gets an error, calls `end`.

        Raises:
            ClusterError: There is no cluster, the process did not come up, or it was ended before.
        """
        if self._ending is not None:  # whoever has ended it would not come back for a process that is made now
            raise ActorLostError(
                f"actor {self._body.__name__} must be started before it is ended, got an end; make a new one"
            )
        if not ray.is_initialized():
            raise ClusterError("ray must be initialised in this process, is not; call ray.init first")
        # Shown by `ray list actors`; restarts are the caller's, who knows what else a new process needs.
        self._actor = (
            ray.remote(concurrency_groups={_ASIDE: 1})(self._body)  # pyright: ignore[reportCallIssue]  (for actors it is an option)
            .options(
                **self._placement.options(),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=_MAX_CALLS,
            )
            .remote()
        )
        place = self.place = await self.ask("where")
        self._watching = asyncio.ensure_future(self._watch())
        return place

    def unplaced(self) -> str:
        """What it waits for before it is there, for people."""
        if not (wanted := self._placement.wanted()):
            return "a process that still starts"
        free = free_resources(wanted)
        return f"no place for {self._placement.text()}, or a process that still starts, while {free} are free in the cluster"

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the body returns. Whoever goes meanwhile leaves it running there.

        Raises:
            ActorLostError: The process has gone.
            ClusterError: Ray could not deliver the call or its answer.
            Exception: What the method raised, as itself.
        """
        if self._actor is None or self._ending is not None:
            raise ActorLostError(f"actor {self._body.__name__} must be running, is not; start a new one")
        try:
            answer = asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future())
            answer.add_done_callback(_retrieve)
            return await asyncio.shield(answer)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception) and not isinstance(cause, RayError):
                raise cause from None
            raise ClusterError(f"{method} of {self._name()} must end well, got {error}") from error
        except RayError as error:
            kind = ActorLostError if isinstance(error, RayActorError) else ClusterError
            raise kind(f"{self._name()} must answer {method}, got that {ray_in_short(error)}") from error

    def _name(self) -> str:
        """What it is and on which host, once that is known, for people: Ray does not always say."""
        return f"actor {self._body.__name__}" + ("" if self.place is None else f" on {self.place.host}")

    async def standing(self, timeout_s: float = _STANDING_S) -> tuple[str, str]:
        """Where the actor's event loop is, in a few words and as a stack, also while it stands still; empty if nothing is heard."""
        if self._actor is None or self._ending is not None:
            return "", ""
        try:
            call = self._actor.standing.options(concurrency_group=_ASIDE).remote()
            async with asyncio.timeout(timeout_s):
                told = await asyncio.wrap_future(call.future())
        except (RayError, TimeoutError):
            return "", ""
        place, _, stack = told.partition("\n")
        return place, stack

    async def _watch(self) -> None:
        try:
            await self.ask("until_end")
            why = "it has ended"
        # Whatever Ray says of it, it is not there any more.
        except Exception as error:
            why = str(error)
        if self._ending is None and self._on_lost is not None:
            self._on_lost(why)

    async def end(self) -> None:
        """Kills the process and what it has started, and waits until they are gone; a second call waits for the same."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._actor is None:
            return
        with suppress(RayError, ValueError, RuntimeError):  # of a cluster that is gone as well
            await asyncio.to_thread(ray.kill, self._actor, no_restart=True)
        if self.place is not None:
            await _end_at(self.place)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])


async def _end_at(place: ActorPlace) -> None:
    """Ends a process group on its node."""
    is_gone = False
    try:
        async with asyncio.timeout(2 * _END_S):
            if place.node_id == own_node():
                is_gone = await asyncio.to_thread(end_group, place.pid)
            else:
                strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
                task = ray.remote(end_group).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
                is_gone = await asyncio.wrap_future(task.remote(place.pid).future())
    # A node or a cluster that is gone has taken the process with it, or cannot be asked.
    except (RayError, TimeoutError, RuntimeError) as error:
        logger.warning("process %d of node %s could not be ended: %s", place.pid, place.host, ray_in_short(error))
        return
    if not is_gone:
        logger.warning("process %d of node %s has been killed, but is still there", place.pid, place.host)


def end_group(pid: int, timeout_s: float = _END_S) -> bool:
    """Kills the process group that `pid` leads, stopped processes as well; whether it was gone before the deadline.

    The leader, which Ray has been told to end, gets a moment for that: Ray reports every other end as an accident.
    """
    deadline, grace_over = time.monotonic() + timeout_s, time.monotonic() + _GRACE_S
    while time.monotonic() < grace_over and is_running(pid):
        time.sleep(_POLL_S)
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:  # somebody else has the number now
            return True
        time.sleep(_POLL_S)
    return False


def show_devices(own: Sequence[str], devices: Sequence[str]) -> bool:
    """Lets this process see `devices` wherever a variable shows it exactly its own ones; whether there was any.

    Ray sets such a variable for whatever kind of device an actor gets.
    """
    names = [name for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES") and value == ",".join(own)]
    for name in names:
        os.environ[name] = ",".join(devices)
    return bool(names)


def num_nodes() -> int:
    """Nodes of the cluster that are there."""
    return sum(bool(node.get("Alive", node.get("alive"))) for node in ray.nodes())


def own_node() -> str:
    """The node that this process is on."""
    return ray.get_runtime_context().get_node_id()


def free_resources(names: Iterable[str]) -> str:
    """How much of these, by Ray's names, nobody has taken, for people; of the whole cluster."""
    try:
        free = ray.available_resources()
    except RayError as error:
        return f"not known ({error})"
    return amounts_text({name: free.get(name, 0.0) for name in names})


def amounts_text(amounts: Mapping[str, float]) -> str:
    """Amounts of resources, for people."""
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def ray_in_short(error: BaseException) -> str:
    """Ray's words, which can be long: of a process that has ended, how that was."""
    text = " ".join(str(error).split())
    _, found, exit_type = text.partition("Worker exit type: ")
    if found:
        return f"the process has ended: {exit_type.partition(' Some common causes')[0]}"
    return f"{type(error).__name__}: {text:.4000}"


def _retrieve(answer: "asyncio.Future[Any]") -> None:
    """Looks at an answer that nobody may wait for any more."""
    if not answer.cancelled():
        answer.exception()
