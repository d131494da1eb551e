"""What fails while a first error is dealt with: the first one is the cause, and stays the one that is raised. Loads no torch."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def second_to(first: BaseException, what: str) -> Iterator[None]:
    """Logs what fails inside, and adds it to the first error as a note; a cancellation that comes meanwhile goes on.

    Args:
        first: The error that is raised afterwards.
        what: Was done inside; completes `... failed, too`.
    """
    try:
        yield
    # The boundary of what is done after an error: whoever raises the first one tells of this one with it.
    except Exception as second:
        text = f"{what} failed, too: {type(second).__name__}: {second}"
        first.add_note(text)
        logger.warning("after %s: %s: %s", type(first).__name__, first, text)
