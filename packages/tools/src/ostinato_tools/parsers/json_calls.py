"""Calls that are JSON: decoding them, and saying what is wrong with them. Nothing is repaired."""

import re
from typing import Any, NamedTuple

import msgspec

_decode_any = msgspec.json.Decoder().decode
_BYTE = re.compile(r" \(byte (\d+)\)")
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,200})"')
_KINDS = {"[": "an array", '"': "a string", "n": "null", "t": "a boolean", "f": "a boolean"}
_BLANK = " \t\r\n"


class ReadCall(NamedTuple):
    """What was read of a call, in the order in which `Turn.add_call` takes it."""

    name: str
    arguments: dict | None
    raw: str
    error: str | None = None
    call_id: str | None = None


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()  # empty where the key is missing
    parameters: msgspec.Raw = msgspec.Raw()
    id: Any = None


_decode_call = msgspec.json.Decoder(_Call).decode


class JsonCallReader:
    """Reads calls that are one JSON object with a name and arguments.

    Args:
        keys: The keys under which arguments may stand, the format's own first: "arguments", "parameters".
        has_id: The format has the model write an id, under "id".
    """

    def __init__(self, *keys: str, has_id: bool = False) -> None:
        self._keys = keys
        self._has_id = has_id
        self.shape = f'{{"name": <name>, "{keys[0]}": <object>}}'
        """How a call must be written, for messages."""

    def read(self, body: str) -> ReadCall:
        """Decode a call."""
        body = body.strip(_BLANK)
        try:
            call = _decode_call(body)
            raw = ""
            for key in self._keys:
                if found := getattr(call, key):
                    raw = bytes(found).decode()
                    break
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            named = _NAME.match(body)
            return ReadCall(named.group(1) if named else "", None, body, self._fault(error, body))
        call_id = call.id if self._has_id and isinstance(call.id, str) else None
        if not call.name:
            error = f"the name of a tool call must not be empty; write {self.shape}"
            return ReadCall("", None, raw, error, call_id)
        if not raw:
            error = f"the tool call must be {self.shape}: the key {self._keys[0]} is missing"
            return ReadCall(call.name, None, body, error, call_id)
        return read_arguments(call.name, raw, self.shape, call_id)

    def has_arguments(self, body: str) -> bool:
        """Tell whether a call that `read` refused at least names its arguments; JSON without them is no call at all."""
        return any(f'"{key}"' in body for key in self._keys)

    def _fault(self, error: Exception, body: str) -> str:
        if isinstance(error, msgspec.ValidationError):
            return f"the tool call must be {self.shape}: {error}"
        return json_fault("the tool call", error, body, self.shape)


def read_arguments(name: str, raw: str, shape: str = "<object>", call_id: str | None = None) -> ReadCall:
    """Decode the arguments of a call whose name is known.

    Args:
        name: The name.
        raw: The arguments as JSON.
        shape: How the call (or the arguments) must be written, for messages.
        call_id: The id that the model gave the call.
    """
    raw = raw.strip(_BLANK)
    kind = None if raw[:1] in ("{", "") else _KINDS.get(raw[0], "a number")
    error = None
    arguments = None
    try:
        arguments = _decode_any(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as reason:
        error = json_fault(f"the arguments of {name}", reason, raw, shape)
    else:
        if kind is not None:
            error = f"the arguments of {name} must be a JSON object, got {kind}; write {shape}"
    return ReadCall(name, arguments if error is None else None, raw, error, call_id)


def json_fault(what: str, error: Exception, body: str, shape: str) -> str:
    """Say why `body` is no JSON and where, for the model.

    Args:
        what: What it should have been: "the tool call", "the arguments of f".
        error: What the decoder raised.
        body: The text that was decoded.
        shape: How it must be written.
    """
    be = "are" if what.startswith("the arguments") else "is"
    if not body:
        return f"{what} {be} empty; write {shape}"
    if isinstance(error, RecursionError):
        return f"{what} {be} nested too deeply"
    where = _BYTE.search(str(error))
    if where is None:
        reason = "the text ends too early" if "truncated" in str(error) else str(error)
        return f"{what} {be} not valid JSON: {reason}; write {shape}"
    reason = str(error)[: where.start()].removeprefix("JSON is malformed: ")
    data = body.encode("utf-8", "replace")
    before = len(data[: int(where.group(1))].decode("utf-8", "ignore"))
    near = body[max(before - 20, 0) : before + 20]
    return f"{what} {be} not valid JSON: {reason} at character {before + 1}, near {near!r}; write {shape}"
