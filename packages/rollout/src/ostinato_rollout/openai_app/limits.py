"""How much of everything the app takes."""

from __future__ import annotations

import msgspec

from ostinato_rollout.errors import SessionInputError


class AppLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of requests, of what is kept between them, and of every wait.

    Raises:
        SessionInputError: One of them is not above 0.
    """

    max_body_bytes: int = 8 << 20
    """Longest body of a request."""
    max_messages: int = 4096
    """Most messages of a request."""
    max_tools: int = 128
    """Most tools of a request."""
    max_choices: int = 64
    """Largest `n`."""
    max_in_flight: int = 1024
    """Answers that are being sampled, `n` for each request; a request beyond that is answered with 503, unless it is alone."""
    max_sessions: int = 4096
    """Named sessions that are kept; a further one is answered with 503 until one ends."""
    max_segments: int = 256
    """Conversations of one named session, those that its rewritten histories have left behind among them."""
    max_open: int = 16
    """Conversations of one named session that can still be continued; the longest idle one cannot any more."""
    max_unnamed: int = 256
    """Conversations without a session that can be continued; the longest idle one is forgotten."""
    idle_timeout_s: float = 1800.0
    """Seconds after its last request that a session, or a conversation without one, is kept."""
    body_timeout_s: float = 30.0
    """Longest time that a client may take to send a body."""
    send_timeout_s: float = 60.0
    """Longest time that a client may leave a part of a stream unread."""
    idle_connection_s: float = 60.0
    """A connection on which nothing moves for this time is closed: a request that is not completed, a response that is not
    read. One whose request is being answered is not idle."""
    keepalive_s: float = 15.0
    """A stream that has nothing to tell yet is opened after this time, and a comment is sent as often."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise SessionInputError(f"{name} must be above 0, got {value!r}; leave it out for its default")
