"""What a replica's service and a remote server say to each other: MessagePack, one message in one or two frames.

The first frame is one of the structs below. A `Generate` has a second one: the ids that the service does not have, as
int32. Every call gets one answer, in any order. Nothing is unpickled. Knows no socket.
"""

import builtins
import hashlib
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ostinato_engines import Capabilities, SamplingParams, TokenOutput
from ostinato_engines.forwarding import error_named

PROTOCOL = 1
MAX_FRAME_BYTES = 64 << 20
"""Of one frame, by default: a prompt of 16 million ids."""
SILENCE_S = 10.0
"""How long the other end may be silent, by default."""
TICKS = 4
"""Signs of life that fit into the longest silence."""

T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    """One message."""


# From the remote server


class Hello(_Message, frozen=True):
    """The first message of a connection, said until it is answered; all others are for those who said it."""

    protocol: int
    proof: bytes
    """Of the shared key; empty without one."""
    name: str
    """For logs."""
    remote: bytes = b""
    """Which remote server says it: a new connection of the same one takes the place of the last."""


class Generate(_Message, frozen=True):
    """`AsyncServerBase.generate`: the prompt is what is kept of the conversation, and the ids of the second frame."""

    number: int
    request_id: str
    known: int
    """Tokens of the kept prompt that this one begins with; 0: the second frame is the whole prompt."""
    with_output: bool
    """What was sampled after the kept prompt follows it."""
    length: int
    """Tokens of the whole prompt."""
    digest: bytes
    """Hash of the whole prompt."""
    sampling_params: SamplingParams
    again: bool = False
    """The answer to `Forgotten`, under the same number."""


class Call(_Message, frozen=True):
    """Another method."""

    number: int
    method: str
    argument: msgspec.Raw


class Cancel(_Message, frozen=True):
    """Nobody waits for this call any more."""

    number: int


class Ping(_Message, frozen=True):
    """A sign of life; wants one."""

    number: int
    """Of the same row as those of calls."""


class Goodbye(_Message, frozen=True):
    """The remote server is closed."""


# From the service


class Welcome(_Message, frozen=True):
    """The answer to `Hello`."""

    silence_s: float
    """The service's own bound; it gives signs of life four times within it."""
    service: bytes = b""
    """Tells the service from all others, also from those that listened at the same address before it."""


class Refused(_Message, frozen=True):
    """The last message was not one that is served here."""

    reason: str


class Stranger(_Message, frozen=True):
    """Say `Hello` first: the service has been restarted, or has not heard of this connection for too long."""

    number: int
    """Of the message that this answers: it, and whatever came after it, has not been begun."""


class Output(_Message, frozen=True):
    """The answer to `Generate`."""

    number: int
    policy_version: int
    output: TokenOutput


class Forgotten(_Message, frozen=True):
    """The answer to a `Generate` whose beginning is not kept, or is not what its hash says: send it whole."""

    number: int


class Answer(_Message, frozen=True):
    """The answer to `Call`."""

    number: int
    policy_version: int
    result: msgspec.Raw


class Failed(_Message, frozen=True):
    """The answer to a `Generate` or a `Call` that raised."""

    number: int
    policy_version: int
    error: str
    message: str


class Pong(_Message, frozen=True):
    """The answer to `Ping`; also sent unasked."""

    policy_version: int


class Closing(_Message, frozen=True):
    """The service ends; calls under way are lost."""


class Description(msgspec.Struct, frozen=True):
    """What a started server says of itself: the result of the call `start`."""

    capabilities: Capabilities
    max_model_len: int
    versions: str


Request = Hello | Generate | Call | Cancel | Ping | Goodbye
Reply = Welcome | Refused | Stranger | Output | Forgotten | Answer | Failed | Pong | Closing

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def encode_raw(value: Any) -> msgspec.Raw:
    """A part of a message.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: It is not a plain value.
    """
    return msgspec.Raw(encode(value))


def decode_raw(raw: msgspec.Raw, kind: type[T]) -> T:
    """A part of a message."""
    return msgspec.msgpack.decode(raw, type=kind)


def decode_names(raw: msgspec.Raw) -> list[str] | None:
    """A list of names, or None for all."""
    return msgspec.msgpack.decode(raw, type=list[str] | None)


def error_of(failed: Failed) -> Exception:
    """The error that crossed, as one of this process: Python's own as themselves, others as `error_named` says."""
    kind = getattr(builtins, failed.error, None)
    # A future cannot hold a StopIteration, and a few others cannot be made of a message alone.
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
        with suppress(TypeError):
            return kind(failed.message)
    return error_named(failed.error, failed.message)


def proof_of(key: bytes | None) -> bytes:
    """What shows that the other end has the shared key; says nothing of the key itself."""
    return b"" if key is None else hashlib.blake2b(key, digest_size=32, person=b"ostinato hello").digest()
