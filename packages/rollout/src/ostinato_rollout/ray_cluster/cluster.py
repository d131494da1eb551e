"""The cluster of a run: this process's connection to it, what it has, and places in it.

Invariants: a cluster that was started here is gone when the context ends, with all its processes; one that was there before stays. Places
are reserved whole or not at all, within a deadline. Knows nothing of who goes where.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import ray
from ray._private import services
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ostinato_rollout.errors import ClusterError
from ostinato_rollout.ray_cluster.actors import amounts_text, free_resources, ray_in_short
from ostinato_rollout.ray_cluster.host_processes import descendants, wait_until_gone

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Where Ray's own tools, `ray job submit` among them, say which cluster to use."""
HEAD_TIMEOUT_S = 30.0
"""Longest wait until something answers at a cluster's address: its head may be starting. Ray itself goes on for minutes."""
NUM_STARTS = 3
_HEAD_SERVER = "gcs_server"
"""Name of the program."""
_TOO_SLOW = "timed out during startup"
"""Of what Ray says then."""
_POLL_S = 0.5
_LOOK_S = 2.0
"""Between two looks whether it is still worth waiting."""


class ClusterNode(msgspec.Struct, frozen=True):
    """A node that is there."""

    node_id: str
    host: str
    resources: Mapping[str, float]
    """All that it has, free or not, by Ray's names: CPU, GPU, and others that it was started with."""


@contextlib.contextmanager
def connected(
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """This process connected to a cluster: the one that it is connected to already, the one at an address, or one that is started here.

    Args:
        address: Of a cluster; None: what RAY_ADDRESS says, and without that a cluster of this host alone, for as long as the context.
        num_cpus: What a cluster that is started here says it has; None: this host's.
        runtime_env: What processes of this run need, as Ray takes it (`working_dir`, `env_vars`, `pip`).

    Raises:
        ClusterError: There is no cluster at the address, or Ray does not take the settings.
    """
    if ray.is_initialized():
        given = {"address": address, "num_cpus": num_cpus, "runtime_env": runtime_env}
        if unread := [name for name, value in given.items() if value]:
            logger.warning(
                "this process is connected to a cluster already: %s is not read; give it to that ray.init",
                ", ".join(unread),
            )
        yield
        return
    address = address or os.environ.get(ADDRESS_VARIABLE) or None
    options: dict[str, Any] = {"address": "local" if address is None else address}
    if address is None or address == "local":
        options |= {"num_cpus": num_cpus, "include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    elif num_cpus is not None:
        raise ClusterError(
            f"num_cpus must be left out for the cluster at {address}, which knows what it has, got {num_cpus}; remove it"
        )
    else:
        _wait_for_head(address)
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    before, own = descendants(os.getpid()), None
    try:
        init_ray(options)
        own = descendants(os.getpid()) - before
        yield
    finally:
        _leave(descendants(os.getpid()) - before if own is None else own)


def _head_of(address: str) -> tuple[str, int] | None:
    """Where the head listens; None where the address does not say ("auto").

    Raises:
        ClusterError: The address is one of jobs, or none.
    """
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    if parts.scheme in ("http", "https"):
        raise ClusterError(
            f"address must be that of a cluster, HOST:PORT, got {address}, to which jobs are submitted; write "
            f"`ray job submit --address {address} -- ...` before the command, or give the address that `ray start --head` printed"
        )
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ClusterError(
            f"address must be that of a cluster, HOST:PORT, got {address}: {error}; see what `ray start --head` printed"
        ) from error
    return None if host is None or port is None else (host, port)


def _wait_for_head(address: str) -> None:
    """Until something listens where the head should, as far as that is known.

    Raises:
        ClusterError: Nothing did, or see `_head_of`.
    """
    if (head := _head_of(address)) is None:
        return
    ends, told = time.monotonic() + HEAD_TIMEOUT_S, False
    while True:
        try:
            socket.create_connection(head, timeout=max(ends - time.monotonic(), _POLL_S)).close()
            return
        except OSError as error:
            if time.monotonic() >= ends:
                raise ClusterError(
                    f"a cluster must be reached at {address}, nothing answers there: {error}; start its head with "
                    f"`ray start --head`, or see that this host reaches it"
                ) from error
            if not told:
                logger.warning(
                    "nothing answers at %s (%s); waiting for a head for at most %.0f s", address, error, HEAD_TIMEOUT_S
                )
            told = True
        time.sleep(_POLL_S)


def init_ray(options: Mapping[str, Any]) -> None:
    """`ray.init` with these options, which keeps this process's signal handlers. The processes of a cluster that is started here are out of
    reach of signals to this process's group, and its server of SIGTERM altogether. The cluster is tried again where Ray's own limit for its start,
    30 s, ran out: on a busy host it takes longer.

    Raises:
        ClusterError: There is no cluster at the address, or Ray does not take the settings, or the cluster did not start in time so often.
    """
    for number in range(1, NUM_STARTS + 1):
        before = descendants(os.getpid())
        try:
            with _own_signals(), _out_of_reach():
                ray.init(**options, configure_logging=False)
            return
        except Exception as error:  # Ray raises anything, a bare Exception where its node was too slow
            if number == NUM_STARTS or _TOO_SLOW not in str(error):
                raise ClusterError(
                    f"a cluster must be reached at {options['address']}, got {ray_in_short(error)}; {_cure(error)}"
                ) from error
            logger.warning(
                "the local cluster did not start in Ray's time, at attempt %d of %d; trying again", number, NUM_STARTS
            )
        _kill(descendants(os.getpid()) - before)


def _cure(error: BaseException) -> str:
    """What to do about an error of the connection. Ray says in a cause alone that a token was wanted, and joins no cluster at an address with one
    unless it is told to."""
    cause: BaseException | None = error
    while cause is not None:
        if (
            "InvalidAuthToken" in str(cause) or type(cause).__name__ == "AuthenticationError"
        ):  # which older versions lack
            return (
                "the cluster wants a token: set RAY_AUTH_MODE=token for this command, and have the head's ~/.ray/auth_token here "
                "(or its path in RAY_AUTH_TOKEN_PATH)"
            )
        cause = cause.__cause__
    return "check the address and the settings for Ray"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps what this process does on SIGTERM: Ray would end it with a status of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _out_of_reach() -> Iterator[None]:
    """Keeps SIGTERM that is meant for this command from the processes that Ray starts from here.

    The command needs its cluster for its own end: Ray ends a process that misses the head for a minute. Each process leads a group of its own, for
    SIGTERM to the command's group, as `timeout` sends it; and the head's server does not take SIGTERM at all, for one to every process of a
    service or job, as systemd and Slurm send it. Ray itself protects its processes from SIGINT alone, and kills what SIGTERM does not end. They
    still end with this process, however that ends: the kernel sees to it.
    """
    plain = services.ConsolePopen
    services.ConsolePopen = functools.partial(_start_out_of_reach, plain)
    try:
        yield
    finally:
        services.ConsolePopen = plain


def _start_out_of_reach(
    plain: Callable[..., Any], command: Sequence[str], *, preexec_fn: Callable[[], None] | None = None, **options: Any
) -> Any:
    def prepare() -> None:
        if preexec_fn is not None:
            preexec_fn()
        # The raylet has to take it: what it starts would inherit the mask.
        if os.path.basename(command[0]) == _HEAD_SERVER:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    return plain(command, preexec_fn=prepare, process_group=0, **options)


def _leave(own: set[int]) -> None:
    """Disconnects, and sees to it that nothing is left of what that had started here."""
    started = own.union(*map(descendants, own))
    ray.shutdown()
    left = wait_until_gone(started)
    for pid in left:
        logger.warning("process %d of the local cluster had to be killed", pid)
    _kill(left)


def _kill(pids: set[int]) -> None:
    for pid in pids.union(*map(descendants, pids)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until_gone(pids)


def cluster_nodes() -> list[ClusterNode]:
    """The nodes that are there, the one of this process first.

    Raises:
        ClusterError: The cluster does not answer.
    """
    try:
        own = ray.get_runtime_context().get_node_id()
        found = [
            ClusterNode(node["NodeID"], node["NodeManagerAddress"], dict(node.get("Resources", {})))
            for node in ray.nodes()
            if node.get("Alive", node.get("alive"))
        ]
    except RayError as error:
        raise ClusterError(
            f"the cluster must say which nodes it has, got {ray_in_short(error)}; see `ray status`"
        ) from error
    return sorted(found, key=lambda node: node.node_id != own)


async def reserve(
    bundles: Sequence[Mapping[str, float]], *, timeout_s: float, check: Callable[[], None] | None = None
) -> PlacementGroup:
    """Bundles of one node, taken out of what is free; `free` gives them back. Also cancelled, it leaves none behind.

    Args:
        bundles: What each has, by Ray's names.
        timeout_s: Longest wait for them.
        check: Called now and then meanwhile; an error that it raises ends the wait.

    Raises:
        ClusterError: There was no room within the deadline; the message says what is free.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy="STRICT_PACK")
    start = looked = time.monotonic()
    total = _total(bundles)
    wanted = amounts_text(total)
    try:
        while not await asyncio.to_thread(group.wait, _POLL_S):
            now = time.monotonic()
            if now > start + timeout_s:
                raise ClusterError(
                    f"{wanted} must be free on one node within {timeout_s:g} s, got {free_resources(total)} free in the whole cluster; "
                    "wait for other runs to end, or ask for less"
                )
            if now < looked + _LOOK_S:
                continue
            if looked == start:
                logger.warning(
                    "waiting up to %g s for %s on one node, while %s are free in the whole cluster",
                    timeout_s,
                    wanted,
                    free_resources(total),
                )
            looked = now
            if check is not None:
                check()
    except RayError as error:
        free(group)
        raise ClusterError(f"{wanted} must be reserved, got {ray_in_short(error)}; see `ray status`") from error
    except BaseException:
        free(group)
        raise
    return group


def free(group: PlacementGroup) -> None:
    """Gives the bundles of a group back; actors that are still there are ended. A cluster that is gone has done so."""
    with contextlib.suppress(RayError, RuntimeError, ValueError):
        remove_placement_group(group)


def _total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total
