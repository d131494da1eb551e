"""Weight updates between processes: one stream of named tensors, bounded in memory, through memory or through a file.

Within a process no transport is needed: hand `update_weights` an iterable. Between processes of one host, `WeightSender`
and `WeightReceiver` share two slots of memory; through a disk, `write_weights` and `StoredWeights`. Along a route
(`ostinato_engines.weight_routes`) an engine's workers meet the sender themselves: behind sockets, or in a group that weights are broadcast in.
It is not the way in which vLLM or SGLang move weights between their own workers.
"""

from ostinato_engines.errors import MissingDependencyError
from ostinato_engines.weight_routes import LOADING_S, SENDING_S

try:
    from ostinato_engines.weight_transfer.along import RouteFollower, RouteUpdate, decline, follow_route
    from ostinato_engines.weight_transfer.broadcast import BroadcastSender, KeptGroup
    from ostinato_engines.weight_transfer.disk import StoredWeights, write_weights
    from ostinato_engines.weight_transfer.memory import MemoryKind
    from ostinato_engines.weight_transfer.receiver import IncomingUpdate, WeightReceiver
    from ostinato_engines.weight_transfer.rendezvous import WeightListener, connect
    from ostinato_engines.weight_transfer.sender import WeightSender
    from ostinato_engines.weight_transfer.serving import send_weights, serve_weight_updates
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "torch":
        raise
    raise MissingDependencyError(
        "torch must be installed for weight transfers; run `pip install 'ostinato-engines[transformers]'`"
    ) from error

__all__ = [
    "LOADING_S",
    "SENDING_S",
    "BroadcastSender",
    "IncomingUpdate",
    "KeptGroup",
    "MemoryKind",
    "RouteFollower",
    "RouteUpdate",
    "StoredWeights",
    "WeightListener",
    "WeightReceiver",
    "WeightSender",
    "connect",
    "decline",
    "follow_route",
    "send_weights",
    "serve_weight_updates",
    "write_weights",
]
