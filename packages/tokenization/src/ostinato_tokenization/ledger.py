"""The record of one trajectory segment: which token stands where, and who wrote it.

Invariant: there is one origin for each id and one log-probability for each sampled one, and the mask is derived from the
origins, so that it cannot disagree with what was sampled. This module knows nothing of text, templates or tokenizers.
"""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from ostinato_tokenization.errors import LedgerError
from ostinato_tokenization.ledger_input import as_id_array, as_logprob_array, check_versions


class Origin(IntEnum):
    """Who wrote a token. Only `SAMPLED` tokens have mask 1."""

    TEMPLATE = 0
    """The chat template: headers, separators, the generation prompt."""
    CONTEXT = 1
    """Messages that were given: system, user and tool text with the template's words around them."""
    SAMPLED = 2
    """The policy."""
    REPAIR = 3
    """The framework, closing a turn that was cut off."""


class MediaSpan(msgspec.Struct, frozen=True):
    """The place of an image, video or audio clip among the tokens. Reserved: media is refused for now."""

    start: int
    """Offset of its first token in `token_ids`."""
    length: int
    """Number of tokens that it takes."""
    kind: str
    """`image`, `video` or `audio`."""


class _LedgerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wire form of a ledger. Numbers are little-endian: int32 ids, float64 log-probabilities of the sampled ones."""

    format: int
    ids: bytes
    origins: bytes
    logprobs: bytes
    versions: list[tuple[int, int]]
    media: list[MediaSpan]
    started_at: float | None


_FORMAT = 2
_MASK_OF_ORIGIN = bytes(1 if value == Origin.SAMPLED else 0 for value in range(256))
_KNOWN_ORIGINS = bytes(Origin)
_BYTE_OF = tuple(bytes((origin,)) for origin in Origin)
FIRST_POLICY = ((0, 0),)
"""Versions of a chunk that the first policy sampled as a whole."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_LedgerRecord)


class TokenLedger:
    """One segment's tokens with their origin, log-probability and policy version, grown in place.

    The *prompt* is everything before the first sampled token, the *response* everything from there on. `fork` copies
    the arrays as blocks of memory (5 bytes a token, 13 a sampled one); nothing is shared between a ledger and its fork.

    Args:
        started_at: When the conversation began, in seconds since 1970, for templates that print the date.
    """

    __slots__ = (
        "_first_sampled",
        "_ids",
        "_logprobs",
        "_media",
        "_num_sampled",
        "_origins",
        "_sampled_run",
        "_versions",
        "started_at",
    )

    def __init__(self, *, started_at: float | None = None) -> None:
        self._ids: array[int] = array("i")
        self._origins = bytearray()
        self._logprobs: array[float] = array("d")
        self._versions: list[tuple[int, int]] = []
        self._media: list[MediaSpan] = []
        self._num_sampled = 0
        self._sampled_run = 0
        self._first_sampled = -1
        self.started_at = started_at

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"TokenLedger(tokens={len(self)}, sampled={self._num_sampled})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLedger):
            return NotImplemented
        return self.to_bytes() == other.to_bytes()

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # it changes in place

    def append(self, token_ids: Sequence[int], origin: Origin, *, template_tail: int = 0) -> None:
        """Record tokens that the policy did not sample.

        Args:
            template_tail: How many of the last ones are the template's own, such as a generation prompt.

        Raises:
            LedgerError: `origin` is SAMPLED or unknown, or an id is no integer from 0 on. Nothing is recorded then.
        """
        if origin is Origin.SAMPLED or type(origin) is not Origin:
            raise LedgerError(
                f"origin must be a member of Origin other than SAMPLED, got {origin!r}; record those by append_sampled"
            )
        ids = as_id_array(token_ids)
        if not 0 <= template_tail <= len(ids):
            raise LedgerError(f"template_tail must be from 0 to {len(ids)}, got {template_tail}; count ids given here")
        if not ids:
            return
        self._ids.extend(ids)
        self._origins += _BYTE_OF[origin] * (len(ids) - template_tail) + _BYTE_OF[Origin.TEMPLATE] * template_tail
        self._sampled_run = 0

    def append_sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        *,
        policy_versions: Sequence[tuple[int, int]] = FIRST_POLICY,
    ) -> None:
        """Record tokens exactly as the policy sampled them; no tokens is a valid chunk.

        Args:
            token_ids: The sampled ids, with the stop token where one was sampled.
            logprobs: One finite log-probability (nats) per id, or None where the engine gives none.
            policy_versions: `(start, version)` spans, offsets into this chunk, rising, the first at 0.

        Raises:
            LedgerError: The three do not fit together. Nothing is recorded then.
        """
        ids = as_id_array(token_ids)
        values = as_logprob_array(logprobs, len(ids))
        if not ids:
            return
        if policy_versions is not FIRST_POLICY:
            check_versions(policy_versions, len(ids))
        offset = len(self._ids)
        for start, version in policy_versions:
            if not self._versions or self._versions[-1][1] != version:
                self._versions.append((offset + start, version))
        if self._first_sampled < 0:
            self._first_sampled = offset
        self._num_sampled += len(ids)
        self._sampled_run += len(ids)
        self._ids.extend(ids)
        self._origins += _BYTE_OF[Origin.SAMPLED] * len(ids)
        self._logprobs.extend(values)

    def mark(self) -> int:
        """The present length, to come back to with `truncate`."""
        return len(self._ids)

    def truncate(self, mark: int) -> None:
        """Forget every token from `mark` on.

        Raises:
            LedgerError: `mark` is negative or beyond the end.
        """
        if not isinstance(mark, int) or not 0 <= mark <= len(self._ids):
            raise LedgerError(f"mark must be between 0 and {len(self._ids)}, got {mark}; use a value from mark()")
        self._num_sampled -= self._origins.count(Origin.SAMPLED, mark)
        if not self._num_sampled:
            self._first_sampled = -1
        del self._ids[mark:], self._origins[mark:], self._logprobs[self._num_sampled :]
        self._sampled_run = self._run_at_end()
        del self._versions[bisect_left(self._versions, (mark, -1)) :]
        self._media = [span for span in self._media if span.start + span.length <= mark]

    def fork(self) -> TokenLedger:
        """An independent ledger with the same record."""
        other = TokenLedger(started_at=self.started_at)
        other._ids, other._origins, other._logprobs = self._ids[:], self._origins[:], self._logprobs[:]
        other._versions, other._media = self._versions[:], self._media[:]
        other._num_sampled, other._first_sampled = self._num_sampled, self._first_sampled
        other._sampled_run = self._sampled_run
        return other

    @property
    def token_ids(self) -> list[int]:
        """All ids, as a new list."""
        return self._ids.tolist()

    def snapshot(self) -> array[int]:
        """All ids as a new array('i'): a block copy, far cheaper than a list for long histories."""
        return self._ids[:]

    @property
    def origins(self) -> bytes:
        """One `Origin` value per token."""
        return bytes(self._origins)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens; always the sum of `response_mask`."""
        return self._num_sampled

    @property
    def _response_start(self) -> int:
        return self._first_sampled if self._first_sampled >= 0 else len(self._ids)

    @property
    def prompt_ids(self) -> list[int]:
        """Ids before the first sampled token; all of them when nothing was sampled."""
        return self._ids[: self._response_start].tolist()

    @property
    def response_ids(self) -> list[int]:
        """Ids from the first sampled token on."""
        return self._ids[self._response_start :].tolist()

    @property
    def response_mask(self) -> list[int]:
        """1 for each sampled token of `response_ids`, else 0."""
        return list(self._origins[self._response_start :].translate(_MASK_OF_ORIGIN))

    @property
    def response_logprobs(self) -> list[float] | None:
        """One value per response token: 0.0 where not sampled, NaN where sampled without one; None when all lack it."""
        if not self._num_sampled or all(map(math.isnan, self._logprobs)):
            return None
        mask, sampled = self._origins[self._response_start :].translate(_MASK_OF_ORIGIN), self._logprobs.tolist()
        values: list[float] = []
        used = end = 0
        while (start := mask.find(1, end)) >= 0:
            values += [0.0] * (start - end)
            end = mask.find(0, start)
            end = len(mask) if end < 0 else end
            values += sampled[used : used + end - start]
            used += end - start
        return values + [0.0] * (len(mask) - end)

    @property
    def policy_versions(self) -> list[tuple[int, int]]:
        """`(start, version)` spans with offsets into `response_ids`, the first at 0; empty when nothing was sampled."""
        base = self._response_start
        return [(start - base, version) for start, version in self._versions]

    @property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        """Places of media, in order. Always empty for now."""
        return tuple(self._media)

    def tail_ids(self, count: int) -> list[int]:
        """The last `count` ids."""
        return self._ids[len(self._ids) - count :].tolist()

    def end_of_sampled(self) -> int:
        """Offset behind the last sampled token; 0 when nothing was sampled."""
        return self._origins.rfind(Origin.SAMPLED) + 1

    def replace_with(self, other: TokenLedger) -> None:
        """Take over the record of another ledger, which must not be used afterwards."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    @property
    def sampled_run(self) -> int:
        """How many ids at the end were sampled."""
        return self._sampled_run

    def _run_at_end(self) -> int:
        length, size = len(self._origins), 256
        while True:
            tail = self._origins[max(0, length - size) :]  # grows with the run, not with the history
            run = len(tail) - len(tail.rstrip(_BYTE_OF[Origin.SAMPLED]))
            if run < len(tail) or len(tail) == length:
                return run
            size *= 4

    def to_bytes(self) -> bytes:
        """The whole record as MessagePack; `from_bytes` is its inverse."""
        ids, logprobs = self._ids, self._logprobs
        if sys.byteorder == "big":
            ids, logprobs = ids[:], logprobs[:]
            ids.byteswap()
            logprobs.byteswap()
        record = _LedgerRecord(
            format=_FORMAT,
            ids=ids.tobytes(),
            origins=bytes(self._origins),
            logprobs=logprobs.tobytes(),
            versions=self._versions,
            media=self._media,
            started_at=self.started_at,
        )
        return _encoder.encode(record)

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenLedger:
        """Read what `to_bytes` wrote.

        Raises:
            LedgerError: The bytes are damaged, or contradict themselves.
        """
        try:
            record = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise LedgerError(f"data must be a ledger written by to_bytes, got {error}; write it again") from error
        if record.format != _FORMAT:
            raise LedgerError(f"ledger format must be {_FORMAT}, got {record.format}; use the version that wrote it")
        length = len(record.origins)
        num_sampled = record.origins.count(Origin.SAMPLED)
        if len(record.ids) != 4 * length or len(record.logprobs) != 8 * num_sampled:
            raise LedgerError(
                f"ids must be as many as origins ({length}) and logprobs as many as are sampled ({num_sampled}), got"
                f" {len(record.ids) / 4:g} and {len(record.logprobs) / 8:g}; the bytes are damaged"
            )
        if record.origins.translate(None, _KNOWN_ORIGINS):
            raise LedgerError("origins must be Origin values, got others; the bytes are damaged")
        ledger = cls(started_at=record.started_at)
        ledger._ids.frombytes(record.ids)
        ledger._logprobs.frombytes(record.logprobs)
        if sys.byteorder == "big":
            ledger._ids.byteswap()
            ledger._logprobs.byteswap()
        ledger._origins.extend(record.origins)
        ledger._versions, ledger._media = record.versions, record.media
        ledger._num_sampled = num_sampled
        ledger._sampled_run = ledger._run_at_end()
        ledger._first_sampled = record.origins.find(Origin.SAMPLED)
        ledger._check_restored()
        return ledger

    def _check_restored(self) -> None:
        if self._ids and min(self._ids) < 0:
            raise LedgerError(f"token_ids must be >= 0, got {min(self._ids)}; the bytes are damaged")
        starts = [start for start, _ in self._versions]
        first = [self._first_sampled] if self._num_sampled else []
        within = all(self._origins[start] == Origin.SAMPLED for start in starts if 0 <= start < len(self))
        if starts[:1] != first or sorted(set(starts)) != starts or (starts and starts[-1] >= len(self)) or not within:
            raise LedgerError(
                f"policy versions must begin at sampled tokens, got {self._versions}; the bytes are damaged"
            )
