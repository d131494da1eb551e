"""What the two ends of an engine process say to each other. Knows no engine, and loads no torch.

A message is a 4-byte length and MessagePack. Each `Call` gets one `Answer`, in any order; `Cancel` asks for it early.
"""

import asyncio
import struct
from typing import Any, TypeVar

import msgspec

from ostinato_engines.errors import EngineCrashedError
from ostinato_engines.types import Capabilities, SamplingParams

PROTOCOL = 2
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 1 << 30


class Hello(msgspec.Struct, frozen=True):
    """The engine's end, first of all."""

    protocol: int
    package_version: str


class Build(msgspec.Struct, frozen=True):
    """Make and start a server."""

    engine: str
    """A name of `ostinato_engines.loading.ENGINES`, or a place and a class: `module:Class`, `file.py:Class`."""
    model: str
    settings: dict[str, Any]
    required: tuple[str, ...] = ()
    """Settings that the class must name itself."""


class Built(msgspec.Struct, frozen=True):
    """It is started."""

    capabilities: Capabilities
    max_model_len: int
    policy_version: int
    versions: str
    """For people."""


class Generate(msgspec.Struct, frozen=True):
    """`AsyncServerBase.generate`; media do not cross processes."""

    prompt_ids: list[int]
    sampling_params: SamplingParams
    request_id: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """One method of the server; `argument` is what that method takes."""

    number: int
    method: str
    argument: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The caller went away."""

    number: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What became of a call: a result, or an error's class and message."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    message: str = ""


encode = msgspec.msgpack.encode
_decode_request = msgspec.msgpack.Decoder(Call | Cancel).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode

T = TypeVar("T")


def decode(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    """A part of a message."""
    return msgspec.msgpack.decode(raw, type=kind)


def encode_raw(value: Any) -> msgspec.Raw:
    """A part of a message.

    Raises:
        TypeError: It is not a plain value.
    """
    return msgspec.Raw(encode(value))


def write(writer: asyncio.StreamWriter, message: Hello | Call | Cancel | Answer) -> None:
    """Queues a whole message; what the other end does not read in time is kept in memory."""
    body = encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None where the other end is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise EngineCrashedError(f"a message must have at most {_MAX_MESSAGE_BYTES} bytes, got {length}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def read_request(reader: asyncio.StreamReader) -> Call | Cancel | None:
    """The next request; None where the other end is gone."""
    body = await read_body(reader)
    return None if body is None else _decode_request(body)


async def read_answer(reader: asyncio.StreamReader) -> Answer | None:
    """The next answer; None where the other end is gone."""
    body = await read_body(reader)
    return None if body is None else _decode_answer(body)
