"""The error tree of this package.

Every leaf is also an error of the standard library, survives pickling, and carries its facts as attributes.
"""


class RolloutError(Exception):
    """Root of everything that this package raises on purpose."""


class SessionInputError(RolloutError, ValueError):
    """What the caller gave to a session, client, pool or scheduler cannot be used; nothing was changed."""


class SessionStateError(RolloutError, RuntimeError):
    """A session was asked for something that it cannot do at this point of the conversation."""


class BudgetExceededError(RolloutError, ValueError):
    """Tokens would not fit; the session is as it was before the call."""

    def __init__(self, message: str, *, limit: str = "", needed: int = 0, room: int = 0) -> None:
        super().__init__(message)
        self.limit = limit
        """Which bound was hit: `max_prompt_tokens`, `max_response_tokens`, `max_model_len`, or `max_tokens` (a turn
        that was cut off, where such turns end a conversation)."""
        self.needed = needed
        """Tokens that the addition needs."""
        self.room = room
        """Tokens that were free."""


class RequestTimeoutError(RolloutError, TimeoutError):
    """A wait passed its deadline; the message says what was waited for, since when, and the last progress."""


class NoReplicaError(RolloutError, RuntimeError):
    """No replica is left to serve the policy."""


class StreamStalledError(RolloutError, RuntimeError):
    """A stream drops one group after the other and gives none; the message counts why."""


class ReplicaError(RolloutError, RuntimeError):
    """A replica failed, or answered what its contract forbids."""

    def __init__(self, message: str, *, replica: int = -1) -> None:
        super().__init__(message)
        self.replica = replica
        """Id of the replica in the client's or pool's numbering."""


class TraceStoreError(RolloutError, ValueError):
    """The store that spans should go to can hold none."""


class TracingUnavailableError(RolloutError, ImportError):
    """The backend that spans should go to is not installed."""


class ClusterError(RolloutError, RuntimeError):
    """An actor could not be placed or started, or its process has gone."""


class ActorLostError(ClusterError, ConnectionError):
    """The process of an actor has gone, or cannot be reached: what it was doing has no result."""
