"""Where those who have weights and the workers of an engine meet, as plain data: it crosses like any message, and no tensor comes along.

Loads no torch. What is done with a route is in `ostinato_engines.weight_transfer`.
"""

import functools
import socket
from pathlib import Path

import msgspec

LOADING_S = 960.0
"""Longest wait for an end that makes a whole model ready, or has one made, on whichever way: more than the slowest engine has for it."""
SENDING_S = LOADING_S + 600.0
"""Longest wait of a worker for its sender along a route, who may have to wait for the loading of another worker, and for a group to meet."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class WeightPlace(msgspec.Struct, frozen=True):
    """Where a process has its weights."""

    host: str
    """As `host_name` calls it there."""
    device: str = ""
    """The accelerator, by a name that all processes of the host find it by; empty: the host's own memory."""


class SocketRoute(msgspec.Struct, frozen=True, tag="sockets"):
    """Each worker connects to a socket of its host, behind which somebody offers it the update."""

    paths: tuple[str, ...]
    """By the worker's rank in its engine."""


class CollectiveRoute(msgspec.Struct, frozen=True, tag="collective", kw_only=True):
    """All workers of all engines join a group, whose rank 0 has the weights and broadcasts them in buckets."""

    host: str
    """Of the store that they meet at."""
    port: int
    name: str
    """Of the group, never used again for another: whoever is in it already stays."""
    world_size: int
    """Workers of all engines, and one."""
    first_rank: int
    """Of this engine's first worker in the group; the others follow."""
    bucket_bytes: int = 64 << 20
    """Of one broadcast; a larger tensor is broadcast alone."""
    join_timeout_s: float = 120.0
    """Longest wait for all to be there."""
    timeout_s: float = LOADING_S + 60.0
    """Longest wait for one broadcast: the slowest worker loads the bucket before it meanwhile, or one that rank 0 sends to over a socket."""
    interface: str | None = None
    """Network interface for traffic on the CPU; chosen by the system where None."""


WeightRoute = SocketRoute | CollectiveRoute


@functools.cache
def host_name() -> str:
    """The same for processes that reach each other's sockets and share memory, another for those that do not: the name of this host and what
    its kernel calls its last start."""
    try:
        return f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}"
    except OSError:
        return socket.gethostname()
