"""What a ledger takes, checked: ids, log-probabilities and policy versions as engines and callers give them."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from operator import index

from ostinato_tokenization.errors import LedgerError

_SIGN_BYTE = array("i").itemsize - 1 if sys.byteorder == "little" else 0
_NAN = float("nan")


def as_id_array(token_ids: Sequence[int]) -> array[int]:
    """The ids as array('i'), which is `token_ids` itself where it is one.

    Raises:
        LedgerError: One is no integer from 0 to 2**31 - 1.
    """
    if isinstance(token_ids, (bytes, bytearray, str)):
        raise LedgerError(f"token_ids must be integers, got {type(token_ids).__name__}; pass a list or array('i')")
    try:
        if type(token_ids) is array and token_ids.typecode == "i":
            ids, packed = token_ids, token_ids.tobytes()
        else:
            packed = array("I", token_ids).tobytes()  # several times faster than from a list to array("i")
            ids = array("i", packed)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, OverflowError) and min(token_ids) < 0:
            raise _negative_id(token_ids) from error
        raise LedgerError(f"token_ids must be integers below 2**31, got {error}; pass the ids as sampled") from error
    if not packed[_SIGN_BYTE :: ids.itemsize].isascii():
        if min(token_ids) < 0:
            raise _negative_id(token_ids)
        raise LedgerError(f"token_ids must be integers below 2**31, got {max(token_ids)}; pass the ids as sampled")
    return ids


def _negative_id(token_ids: Sequence[int]) -> LedgerError:
    return LedgerError(f"token_ids must be >= 0, got {min(token_ids)}; remove padding before recording")


def as_logprob_array(logprobs: Sequence[float] | None, length: int) -> array[float]:
    """The log-probabilities (nats) as array('d'), NaN where there are none.

    Raises:
        LedgerError: There are not `length` of them, or one is not finite.
    """
    if logprobs is None:
        return array("d", (_NAN,)) * length
    try:
        values = array("d", logprobs)
    except TypeError as error:
        raise LedgerError(f"logprobs must be floats, got {error}; pass None where there are none") from error
    if len(values) != length:
        raise LedgerError(f"logprobs must have one entry per token ({length}), got {len(values)}; never pad them")
    if not math.isfinite(sum(values)):
        for place, value in enumerate(values):
            if not math.isfinite(value):
                raise LedgerError(f"logprobs must be finite, got {value} at {place}; pass None where there are none")
    return values


def check_versions(policy_versions: Sequence[tuple[int, int]], length: int) -> None:
    """Check the `(start, version)` spans of a chunk of `length` tokens.

    Raises:
        LedgerError: They are no pairs of integers, do not rise from 0, or reach beyond the chunk.
    """
    previous = -1
    try:
        for start, version in policy_versions:
            rising = previous < index(start) < length and (previous >= 0 or start == 0)
            if not rising or index(version) < 0:
                raise ValueError
            previous = start
        if previous == -1:
            raise ValueError
    except (TypeError, ValueError) as error:
        raise LedgerError(
            "policy_versions must be (start, version) pairs of integers whose starts rise from 0 within the"
            f" {length} sampled tokens, got {policy_versions!r}; pass ((0, version),), versions numbered from 0"
        ) from error
