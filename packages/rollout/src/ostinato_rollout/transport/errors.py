"""What goes wrong between two processes, beside the errors that cross as themselves."""

from ostinato_engines import EngineCrashedError
from ostinato_rollout.errors import RolloutError


class TransportInputError(RolloutError, ValueError):
    """An address, a key or a limit that a service or a remote server cannot use; nothing was opened."""


class AddressError(RolloutError, OSError):
    """A service could not listen where it was told to."""


class ReplicaLostError(EngineCrashedError, ConnectionError):
    """The process of a replica fell silent, went away, or forgot this one.

    An engine's error, because a remote server is an engine to whoever calls it: what routes around an engine that crashed
    routes around this one.
    """


class NotBegunError(ReplicaLostError):
    """The replica has not begun this call, because it did not know the connection any more; it can be asked again."""

    prompt: bytes = b""
    """Of a generation, the ids that were meant."""
