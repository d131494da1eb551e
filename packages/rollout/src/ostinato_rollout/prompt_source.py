"""Prompts, one by one, from whatever can be iterated over: a list, a generator without end, a queue behind `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Generic, TypeVar

from ostinato_rollout.errors import RolloutError, SessionInputError

Prompt = TypeVar("Prompt")

_END: Any = object()
_CANCELLED = "prompts must come, got a cancellation instead of the next one; see who cancelled, and start anew"


class PromptSource(Generic[Prompt]):
    """Gives one prompt at a time, at once or when there is one.

    Args:
        prompts: Where they come from. It is asked for one more only when that can be used; it is never closed.
        on_prompt: Is given each prompt.
        on_end: Is told that there are no more, or what was raised instead of one.
        on_answer: Is called after one of these, where it came later.

    Raises:
        SessionInputError: `prompts` cannot be iterated over.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        on_prompt: Callable[[Prompt], None],
        on_end: Callable[[BaseException | None], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._on_prompt, self._on_end, self._on_answer = on_prompt, on_end, on_answer
        self._asking: asyncio.Task[Any] | None = None
        self._is_cancelled = False
        self._async = self._sync = None
        if isinstance(prompts, AsyncIterable):
            self._async = aiter(prompts)
        elif isinstance(prompts, Iterable):
            self._sync = iter(prompts)
        else:
            raise SessionInputError(
                f"prompts must be an iterable or an async iterable, got {type(prompts).__name__}; give a list"
            )

    @property
    def is_asking(self) -> bool:
        """Whether the next prompt is waited for."""
        return self._asking is not None

    @property
    def ending(self) -> set[asyncio.Task[Any]]:
        """The wait that was cancelled and has not ended, if there is one."""
        return {self._asking} if self._asking is not None and self._is_cancelled else set()

    def ask(self) -> None:
        """Ask for one prompt. It is given before this returns, or later where prompts have to be awaited."""
        if self._sync is not None:
            try:
                prompt = next(self._sync, _END)
            except asyncio.CancelledError:
                self._on_end(RolloutError(_CANCELLED))
            except Exception as error:
                self._on_end(error)
            else:
                self._give(prompt)
        elif self._asking is None:
            self._is_cancelled = False
            self._asking = asyncio.create_task(self._next())
            self._asking.add_done_callback(self._answered)

    def cancel(self) -> None:
        """Ask no longer. A generator that is cancelled while it waits is at its end, as Python has it; a queue is not."""
        if self._asking is not None:
            self._is_cancelled = True
            self._asking.cancel()

    async def _next(self) -> Prompt:
        assert self._async is not None
        return await anext(self._async, _END)

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._asking = None
        if not task.cancelled():
            error = task.exception()
            if error is None:
                self._give(task.result())
            else:
                self._on_end(error)
        elif not self._is_cancelled:
            self._on_end(RolloutError(_CANCELLED))
        self._on_answer()

    def _give(self, prompt: Any) -> None:
        if prompt is _END:
            self._on_end(None)
        else:
            self._on_prompt(prompt)
