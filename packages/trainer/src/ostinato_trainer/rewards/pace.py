"""A rate that is kept: turns evenly spread over a minute."""

from __future__ import annotations

import asyncio

__all__ = ["Pace"]


class Pace:
    """Lets callers through in the order in which they come, `per_minute` of them a minute.

    Args:
        per_minute: None lets everybody through at once.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._interval_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._due = 0.0

    async def turn(self) -> None:
        """Wait for a turn. One that is given up while it waits is lost."""
        if not self._interval_s:
            return
        now = asyncio.get_running_loop().time()
        due = max(self._due, now)
        self._due = due + self._interval_s
        if due > now:
            await asyncio.sleep(due - now)
