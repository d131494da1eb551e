"""Prompts as bytes, and those that both ends of a connection keep, so that only what is new has to travel.

Both ends keep the same: the ids of a conversation's last prompt, a hash of all of them, and what was sampled after it.
Neither knows a message or a socket. Ids are int32 in this machine's byte order.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

from ostinato_engines import EngineInputError

ID_BYTES = 4
DIGEST_BYTES = 16

Key = TypeVar("Key", bound=Hashable)


def id_bytes(token_ids: Sequence[int]) -> memoryview:
    """The bytes of token ids; those of an `array('i')`, or of another buffer of int32, are not copied.

    Raises:
        EngineInputError: Not a flat sequence of integers below 2**31.
    """
    if isinstance(token_ids, bytes | bytearray | str):
        raise EngineInputError(f"prompt_ids must be token ids, got {type(token_ids).__name__}; encode the text first")
    try:
        if not isinstance(token_ids, array | np.ndarray):
            ids = memoryview(array("i", token_ids))
        elif isinstance(token_ids, array) and token_ids.typecode == "i":
            ids = memoryview(token_ids)
        else:
            ids = _narrowed(np.asarray(token_ids))
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineInputError(f"prompt_ids must be integers below 2**31, got {error}; pass token ids") from error
    return ids.cast("B") if len(ids) else memoryview(b"")


def _narrowed(ids: np.ndarray) -> memoryview:
    """An array of integers as int32."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"{ids.dtype} of shape {ids.shape}")
    if len(ids) and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise OverflowError(f"{ids.min()} to {ids.max()}")
    return np.ascontiguousarray(ids, dtype=np.int32).data


class KeptPrompt:
    """One conversation: the ids of its last prompt, and the ids that were sampled after it."""

    __slots__ = ("_hash", "ids", "output", "turn")

    def __init__(self) -> None:
        self.ids = bytearray()
        self.output = b""
        self.turn = -1
        """Number of the call that the prompt belongs to."""
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids) // ID_BYTES

    @property
    def num_bytes(self) -> int:
        """What it takes to keep this."""
        return len(self.ids) + len(self.output)

    def is_start_of(self, prompt: memoryview) -> bool:
        """Whether a new prompt goes on from the kept one."""
        known = len(self.ids)
        return 0 < known <= len(prompt) and self.ids.startswith(prompt[:known])

    def output_goes_on_in(self, prompt: memoryview) -> bool:
        """Whether a prompt that goes on from the kept one goes on with the output."""
        start, end = len(self.ids), self.num_bytes
        return start < end <= len(prompt) and self.output.startswith(prompt[start:end])

    @property
    def digest(self) -> bytes:
        """Hash of the whole prompt."""
        return self._hash.digest()

    def grow(self, new: bytes | memoryview, *, with_output: bool, turn: int) -> None:
        """Makes it the next turn's prompt: what was kept, the output if that is part of it, and what is new."""
        if with_output:
            self.ids += self.output
            self._hash.update(self.output)
        self.ids += new
        self._hash.update(new)
        self.output, self.turn = b"", turn

    def sampled(self, token_ids: Sequence[int], *, turn: int) -> None:
        """Keeps what a turn has sampled, unless the conversation has gone on since; ids that are none are not kept."""
        if turn == self.turn:
            try:
                self.output = bytes(id_bytes(token_ids))
            except EngineInputError:
                self.output = b""


class KeptPrompts(Generic[Key]):
    """Conversations up to a number of bytes; those that were idle for longest are forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, tuple[KeptPrompt, int]] = OrderedDict()
        self.num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> KeptPrompt | None:
        """What is kept of a conversation."""
        entry = self._kept.get(key)
        return None if entry is None else entry[0]

    def keep(self, key: Key, prompt: KeptPrompt) -> None:
        """Keeps a conversation as it is now, as the one used last; forgets others where that is too much."""
        self.forget(key)
        num_bytes = prompt.num_bytes
        self._kept[key] = (prompt, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.forget(next(iter(self._kept)))
            self.num_evicted += 1

    def forget(self, key: Key) -> None:
        """Frees what is kept of a conversation; unknown ones are fine."""
        entry = self._kept.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry[1]

    def clear(self) -> None:
        """Frees what is kept of all conversations."""
        self._kept.clear()
        self.num_bytes = 0
