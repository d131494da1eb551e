"""Counts the tokens of many prompts: known ones from the cache, few in this process, many in several.

Results come in the order of the prompts, whatever is ready first, and only a bounded number of prompts is held meanwhile.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from msgspec import Struct

from ostinato_trainer.data.count_workers import CountWorkers, Prompt
from ostinato_trainer.data.length_cache import LengthCache, prompt_digest
from ostinato_trainer.data.prompt_length import PromptLength, count_or_refusal

__all__ = ["PromptCounter", "default_num_workers"]

Key = TypeVar("Key")

_CHUNK_PROMPTS = 128
_CHUNKS_A_WORKER = 3
"""Chunks under way for each process, so that none waits for work."""


class _Chunk(Struct, Generic[Key]):
    keys: list[Key]
    digests: list[bytes | None]
    lengths: list[int | str | None]
    """None where they are to be counted."""
    counted: Callable[[], list[int | str]]
    """Gives those, in order."""


class PromptCounter:
    """Use it as a context manager: at its end the cache is written and the processes are gone.

    Args:
        length: what counts.
        num_workers: processes for many prompts; 1: only this one.
        cache: counts of earlier runs.
        num_alone: prompts that are counted in this process before others are started, which takes about a second.
    """

    def __init__(
        self, length: PromptLength, *, num_workers: int, cache: LengthCache | None, num_alone: int = 2000
    ) -> None:
        self._length = length
        self._num_workers = num_workers
        self._cache = cache
        self._num_alone = num_alone
        self._workers: CountWorkers | None = None
        self.num_counted = 0
        """Prompts that were not in the cache."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers is not None:
            self._workers.close()
        if self._cache is not None:
            self._cache.save()

    def measured(self, prompts: Iterable[tuple[Key, Prompt]]) -> Iterator[tuple[Key, int | str]]:
        """Each key with the tokens of its prompt, or with the sentence that says why the template or the model's vocabulary refuses it.

        Raises:
            DatasetError: A process died or did not answer in time.
        """
        under_way: deque[_Chunk[Key]] = deque()
        iterator = iter(prompts)
        while chunk := list(itertools.islice(iterator, _CHUNK_PROMPTS)):
            under_way.append(self._begun(chunk))
            if self._workers is None or len(under_way) >= self._num_workers * _CHUNKS_A_WORKER:
                yield from self._finished(under_way.popleft())
        while under_way:
            yield from self._finished(under_way.popleft())

    def _begun(self, prompts: Sequence[tuple[Key, Prompt]]) -> _Chunk[Key]:
        digests = [None if self._cache is None else prompt_digest(*prompt) for _, prompt in prompts]
        lengths = [None if digest is None else self._known(digest) for digest in digests]
        unknown = [prompt for (_, prompt), length in zip(prompts, lengths, strict=True) if length is None]
        return _Chunk([key for key, _ in prompts], digests, lengths, self._counting(unknown))

    def _known(self, digest: bytes) -> int | str | None:
        return None if self._cache is None else self._cache.get(digest)

    def _counting(self, prompts: list[Prompt]) -> Callable[[], list[int | str]]:
        if not prompts:
            return list
        self.num_counted += len(prompts)
        if self._workers is None and self._num_workers > 1 and self.num_counted > self._num_alone:
            self._workers = CountWorkers(self._length, self._num_workers)
        workers = self._workers
        if workers is None:
            return lambda: [count_or_refusal(self._length, messages, tools) for messages, tools in prompts]
        future = workers.submit(prompts)
        return lambda: workers.result(future)

    def _finished(self, chunk: _Chunk[Key]) -> Iterator[tuple[Key, int | str]]:
        counted = iter(chunk.counted())
        for key, digest, known in zip(chunk.keys, chunk.digests, chunk.lengths, strict=True):
            length = next(counted) if known is None else known
            if known is None and digest is not None and self._cache is not None and isinstance(length, int):
                self._cache.add(digest, length)
            yield key, length


def default_num_workers() -> int:
    """A quarter of the cores that this process may use, at least 1 and at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // 4))
