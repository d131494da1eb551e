"""What lives as long as a run does is not looked through again and again by Python's garbage collector.

Modules, the model's parts and rows are hundreds of thousands of objects that stay. A pass over them halts every trajectory of the process for
some tenths of a second, and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["lasting_objects"]


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Within the block the collector passes over what lives at its beginning; what comes later is collected as ever.

    Does nothing where somebody has frozen objects before: which are whose cannot be told.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()  # what is garbage already shall not stay
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
