"""Token counts of prompts on disk, so that a dataset is counted once and not at the start of every run.

An entry is a hash of one prompt's messages and tools with its number of tokens; a file of entries belongs to one tokenizer,
chat template and set of template variables. So neither the limit nor the file that a row stands in matters, and a changed
row is another prompt. A file that is damaged is made anew; a folder that cannot be written costs the saving of time only.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import pickle
import struct
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.data.paths import expanded_path

__all__ = ["LengthCache", "cache_folder", "prompt_digest"]

logger = logging.getLogger(__name__)

_MAGIC: Final = b"ostinato prompt lengths 1\n"
_ENTRY: Final = struct.Struct("<16sI")
_DIGEST_BYTES: Final = 16
_MAX_ENTRIES: Final = 2_000_000
"""Beyond it (40 MB) a file keeps only what the last run used."""


class LengthCache:
    """The counts of one tokenizer, template and set of template variables.

    Args:
        folder: where files of counts are; made when there is something to keep.
        tokenizer: what counts.
        template_kwargs: extra variables for its template.
    """

    def __init__(self, folder: Path, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> None:
        self._path = folder / f"{_context(tokenizer, template_kwargs)}.lengths"
        self._known = self._read()
        self._used: dict[bytes, int] = {}
        self._has_new = False

    def get(self, digest: bytes) -> int | None:
        """Tokens of a prompt, where they are known."""
        length = self._known.get(digest)
        if length is not None:
            self._used[digest] = length
        return length

    def add(self, digest: bytes, length: int) -> None:
        """Keep the tokens of a prompt."""
        self._known[digest] = self._used[digest] = length
        self._has_new = True

    def save(self) -> None:
        """Write what is new, whole or not at all, beside what other runs wrote meanwhile."""
        if not self._has_new:
            return
        entries = {**self._read(), **self._known}
        if len(entries) > _MAX_ENTRIES:
            entries = self._used
        body = b"".join(_ENTRY.pack(digest, length) for digest, length in entries.items())
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as stream:
                try:
                    stream.write(_MAGIC + _checksum(body) + body)
                    stream.flush()
                    os.replace(stream.name, self._path)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(stream.name)
                    raise
        except OSError as error:
            logger.warning("%s: prompt lengths are not kept for the next run: %s", self._path.parent, error)
        self._has_new = False

    def _read(self) -> dict[bytes, int]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            logger.warning("%s: prompt lengths of earlier runs are not used: %s", self._path, error)
            return {}
        head = len(_MAGIC) + _DIGEST_BYTES
        body = data[head:]
        if data[:head] != _MAGIC + _checksum(body) or len(body) % _ENTRY.size:
            logger.warning("%s is damaged: prompts are counted anew", self._path)
            return {}
        return dict(_ENTRY.iter_unpack(body))


def cache_folder(configured: str | None) -> Path | None:
    """`data.cache_dir`, else the user's folder for caches; None where there is no such folder."""
    if configured is not None:
        return expanded_path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostinato"
    except RuntimeError:  # no home
        return None


def prompt_digest(messages: Sequence[dict], tools: Sequence[dict] | None) -> bytes | None:
    """The hash of a prompt; None where it holds values that are not plain data."""
    try:
        text = msgspec.json.encode((messages, tools or None))
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


def _context(tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> str:
    """What a count depends on beside the prompt; the day too, where the template writes the date."""
    day = datetime.date.today().isoformat() if tokenizer.is_dated else ""
    known = hashlib.blake2b(pickle.dumps(tokenizer), digest_size=_DIGEST_BYTES)
    known.update(pickle.dumps((version("ostinato-tokenization"), day, sorted(template_kwargs.items()))))
    return known.hexdigest()


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
