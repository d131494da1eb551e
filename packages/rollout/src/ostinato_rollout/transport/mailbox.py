"""One ZeroMQ socket on an event loop: whole messages in and out, nothing blocks; and who may reach it.

Knows no message of ours. Without a key a service listens on this host only. A shared key gives both ends a CURVE key
pair: what travels is encrypted, and a service without the key cannot be impersonated.
"""

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import Callable, Sequence

from ostinato_engines import MissingDependencyError
from ostinato_rollout.transport.errors import AddressError, TransportInputError

try:
    import zmq
    from zmq.utils import z85
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "pyzmq must be installed for replicas in other processes; run `pip install 'ostinato-rollout[zmq]'`",
        name="pyzmq",
    ) from error

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 256
"""Messages that are read before the event loop may do something else."""
_MAX_UNSENT = 100_000
"""Messages that wait for one peer to read; one that lets more pile up is gone."""
_MIN_KEY_BYTES = 16
_LINGER_MS = 500
_BEATS = 4


class Mailbox:
    """A socket that hands each message to `receive`, and is closed once.

    Args:
        socket: Owned by the mailbox from then on.
        receive: Gets the frames of a message; must not block, and an error of it is only logged.
    """

    def __init__(self, socket: zmq.Socket, receive: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._file = socket.FD
        self._is_draining = False
        self._loop.add_reader(self._file, self.drain)
        self._drain_soon()

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Sends a message; whether there was somebody to take it."""
        # The file of a socket tells of an arrival once, and sending, or trying to, may have taken note of it.
        self._drain_soon()
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def drain(self) -> None:
        """Hands over what has arrived."""
        for _ in range(_MAX_AT_ONCE):
            if self._socket.closed or not int(self._socket.EVENTS) & zmq.POLLIN:
                return
            try:
                self._receive(self._socket.recv_multipart(zmq.NOBLOCK))
            # What one message does must not keep the next ones from being read.
            except Exception:
                logger.exception("a message could not be handled")
        self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            self._loop.call_soon(self._drain_now)

    def _drain_now(self) -> None:
        self._is_draining = False
        if not self._socket.closed:
            self.drain()

    def close(self, *, flush: bool) -> None:
        """Closes the socket.

        Args:
            flush: What has not gone out gets half a second more; else it is dropped.
        """
        if not self._socket.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._file)
            self._socket.close(linger=_LINGER_MS if flush else 0)


def listen(address: str, key: bytes | None, *, max_frame_bytes: int, silence_s: float) -> tuple[zmq.Socket, str]:
    """A socket that many may connect to, and its address with the port that it got.

    A message to a process that has ended, has been stopped, or is cut off for `silence_s`, is not taken; one whose event
    loop stands still is there.

    Raises:
        TransportInputError: Not an address, or one that others than this host reach, without a key.
        AddressError: Somebody else listens there, or it is none of this host's.
    """
    _check_address(address)
    if key is None and not _is_of_this_host(address):
        raise TransportInputError(
            f"address must be on this host's loopback where there is no key, got {address}; "
            "give both ends key=..., or listen on tcp://127.0.0.1:*"
        )
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * silence_s / _BEATS)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1000 * silence_s)))
        socket.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if key is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            _, socket.curve_secretkey = _key_pair(key)
        socket.bind(address)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise AddressError(
            f"address must be free and of this host, got {address} ({error}); choose another, or port *"
        ) from error


def dial(address: str, key: bytes | None, *, max_frame_bytes: int) -> zmq.Socket:
    """A socket to one service, which need not be there yet.

    Raises:
        TransportInputError: Not an address.
    """
    _check_address(address)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    try:
        # Bounded by the calls of this process, which hold what waits here anyway.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if key is not None:
            socket.curve_serverkey, _ = _key_pair(key)
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise TransportInputError(
            f"address must be that of a service, got {address} ({error}); pass ReplicaService.address"
        ) from error
    return socket


def checked_key(key: str | bytes | None) -> bytes | None:
    """A shared key as bytes.

    Raises:
        TransportInputError: Too short to be secret.
    """
    if key is None:
        return None
    secret = key.encode() if isinstance(key, str) else bytes(key)
    if len(secret) < _MIN_KEY_BYTES:
        raise TransportInputError(
            f"key must have at least {_MIN_KEY_BYTES} bytes, got {len(secret)}; make one with secrets.token_urlsafe()"
        )
    if not zmq.has("curve"):
        raise TransportInputError("key must be None, got one, but this libzmq has no CURVE; install pyzmq's wheel")
    return secret


def _key_pair(key: bytes) -> tuple[bytes, bytes]:
    """The service's CURVE key pair, public and secret; whoever has the key can make it."""
    secret = z85.encode(hashlib.blake2b(key, digest_size=32, person=b"ostinato curve").digest())
    return zmq.curve_public(secret), secret


def _check_address(address: str) -> None:
    if not address.startswith(("tcp://", "ipc://")) or address.endswith("://"):
        raise TransportInputError(
            f"address must begin with tcp:// or ipc://, got {address!r}; for example tcp://127.0.0.1:5555"
        )


def _is_of_this_host(address: str) -> bool:
    """Whether only processes of this host can reach an address."""
    scheme, _, place = address.partition("://")
    if scheme == "ipc":
        return True
    host = place.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
