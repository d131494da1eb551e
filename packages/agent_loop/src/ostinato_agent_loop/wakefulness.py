"""A pool that is awake while somebody samples, and asleep otherwise, where engines share devices with training."""

from __future__ import annotations

import asyncio

from ostinato_rollout import ServerPool


class Wakefulness:
    """Counts who needs the pool: the first wakes it, all others wait until it is awake, the last puts it to sleep.

    Args:
        pool: The pool; None: there is nothing to wake.
    """

    def __init__(self, pool: ServerPool | None) -> None:
        self._pool = pool
        self._num_users = 0
        self._is_awake = False
        self._changing = asyncio.Lock()

    async def enter(self) -> None:
        """Return when the pool is awake; call `leave` once for each call that returned.

        Raises:
            NoReplicaError: No replica could be woken.
        """
        if self._pool is None:
            return
        self._num_users += 1
        try:
            async with self._changing:
                if not self._is_awake:
                    await self._pool.wake_up()
                    self._is_awake = True
        except BaseException:
            self._num_users -= 1
            raise

    async def leave(self) -> None:
        """Need it no longer."""
        if self._pool is None:
            return
        self._num_users -= 1
        async with self._changing:
            if self._is_awake and not self._num_users:
                self._is_awake = False
                await self._pool.sleep()
