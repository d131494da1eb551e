"""What the two ends of a weight transfer say to each other, over a connected stream socket of one host.

Invariants: a message is whole or the channel is lost; every wait has a deadline; nothing is unpickled. A message is a
4-byte length, the number of file descriptors that come with it, and MessagePack. Knows no tensors, and loads no torch.
"""

import os
import socket
import struct
import time

import msgspec

from ostinato_engines.errors import EngineInputError, WeightPeerLostError, WeightUpdateTimeoutError
from ostinato_engines.types import WeightManifest

PROTOCOL = 1
_HEAD = struct.Struct("!IB")
_MAX_MESSAGE_BYTES = 1 << 28
"""A manifest of a million tensors fits."""


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Sender: this is what I would send. Nothing else is sent before the answer."""

    update: int
    manifest: WeightManifest
    protocol: int = PROTOCOL


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Receiver: send it."""

    update: int
    process_id: int
    """Of the receiver: what it holds of a device is given back in its place if it dies."""


class MemoryOpened(msgspec.Struct, frozen=True, tag="memory"):
    """Sender: buckets come in this memory."""

    update: int
    kind: str
    num_slots: int
    slot_bytes: int
    handle: bytes = b""
    """What opens it in another process, where it is not the file descriptor that comes along."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a bucket: its bytes start at `offset` within the slot; the manifest says the rest."""

    name: str
    offset: int


class Bucket(msgspec.Struct, frozen=True, tag="bucket"):
    """Sender: the slot is filled with these tensors, and is yours until you give it back."""

    update: int
    index: int
    slot: int
    entries: tuple[Entry, ...]


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """Receiver: nobody reads the slot any more."""

    update: int
    slot: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Sender: that was all."""

    update: int
    num_buckets: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Receiver: the new weights serve."""

    update: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Either: this update is over, and this is why."""

    update: int
    error: str
    """The error's class name."""
    message: str


Message = Offer | Accepted | MemoryOpened | Bucket | Taken | Ended | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Channel:
    """Messages over one socket, from one thread at a time; only `abort` may come from another.

    Args:
        connection: A connected stream socket; the channel owns it from then on.
        timeout_s: Longest wait for one message, and for room to send one.
        peer: What to call the other end in messages.
    """

    def __init__(self, connection: socket.socket, *, timeout_s: float, peer: str) -> None:
        if not timeout_s > 0:
            raise EngineInputError(f"timeout_s must be positive, got {timeout_s!r}; give seconds")
        self._connection = connection
        self._timeout_s = timeout_s
        self._peer = peer
        self._aborted = False

    def send(self, message: Message, *, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a message, and copies of open file descriptors with it.

        Raises:
            WeightPeerLostError: The other end is gone.
            WeightUpdateTimeoutError: It does not read.
        """
        body = _encoder.encode(message)
        if len(body) > _MAX_MESSAGE_BYTES:
            raise ValueError(
                f"message must have at most {_MAX_MESSAGE_BYTES} bytes, got {len(body)}; send fewer tensors"
            )
        try:
            self._connection.settimeout(self._timeout_s)
            self._connection.sendall(_HEAD.pack(len(body), len(descriptors)))
            for descriptor in descriptors:
                socket.send_fds(self._connection, [b"\0"], [descriptor])
            self._connection.sendall(body)
        except OSError as error:
            # Part of the message may be out: what follows could not be told apart.
            self.abort()
            if isinstance(error, TimeoutError):
                raise self._timed_out("read") from error
            raise self._lost(str(error)) from error

    def receive(self, *, forever: bool = False) -> tuple[Message, list[int]] | None:
        """Waits for a message; None once the other end has closed the channel between two messages.

        Args:
            forever: Wait as long as it takes for the message to begin.

        Returns:
            The message, and file descriptors, which the caller owns.

        Raises:
            WeightPeerLostError: The other end is gone, or speaks something else.
            WeightUpdateTimeoutError: It is silent.
        """
        descriptors: list[int] = []
        try:
            deadline = None if forever else time.monotonic() + self._timeout_s
            first = self._read(1, deadline)
            if first is None:
                if self._aborted:
                    raise self._lost("an end of the conversation")
                return None
            deadline = deadline or time.monotonic() + self._timeout_s
            num_bytes, num_descriptors = _HEAD.unpack(first + self._read_all(_HEAD.size - 1, deadline))
            if num_bytes > _MAX_MESSAGE_BYTES or num_descriptors > 1:
                raise self._lost(f"a message of {num_bytes} bytes with {num_descriptors} descriptors")
            for _ in range(num_descriptors):
                self._connection.settimeout(self._left(deadline))
                _, received, _, _ = socket.recv_fds(self._connection, 1, 1)
                descriptors += received
            if len(descriptors) != num_descriptors:
                raise self._lost("a descriptor that did not come along")
            message = _decoder.decode(self._read_all(num_bytes, deadline))
        except BaseException as error:
            close_all(descriptors)
            self.abort()
            if isinstance(error, WeightPeerLostError):
                raise
            if isinstance(error, TimeoutError):
                raise self._timed_out("answer") from error
            if isinstance(error, OSError | msgspec.MsgspecError | ValueError):
                raise self._lost(str(error)) from error
            raise
        return message, descriptors

    def abort(self) -> None:
        """Ends the conversation: whoever waits at either end learns of it at once."""
        self._aborted = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # It has ended before.

    def close(self) -> None:
        """Ends the conversation and frees the socket."""
        self.abort()
        self._connection.close()

    def _read(self, num_bytes: int, deadline: float | None) -> bytes | None:
        self._connection.settimeout(None if deadline is None else self._left(deadline))
        return self._connection.recv(num_bytes) or None

    def _read_all(self, num_bytes: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while num_bytes:
            part = self._read(min(num_bytes, 1 << 20), deadline)
            if part is None:
                raise self._lost("the end in the middle of a message")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    @staticmethod
    def _left(deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _lost(self, what: str) -> WeightPeerLostError:
        return WeightPeerLostError(f"{self._peer} must stay until the update is done, got {what}; connect anew")

    def _timed_out(self, verb: str) -> WeightUpdateTimeoutError:
        return WeightUpdateTimeoutError(
            f"{self._peer} must {verb} within {self._timeout_s:g} s, got nothing; see its log, or raise timeout_s, and connect anew"
        )


def close_all(descriptors: list[int]) -> None:
    """Closes file descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)
