"""What tests of every package need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest


@pytest.fixture
async def let_go() -> AsyncIterator[asyncio.Event]:
    """An event that is set at the end of the test at the latest, also of one that fails: work that swallows cancellations until then
    would keep the event loop from closing for ever."""
    event = asyncio.Event()
    yield event
    event.set()
