"""Weight updates between processes: one stream of named tensors, bounded in memory, through memory or through a file.

Within a process no transport is needed: hand `update_weights` an iterable. Between processes of one host, `WeightSender`
and `WeightReceiver` share two slots of memory; through a disk, `write_weights` and `StoredWeights`. It is not a way
between hosts, and not the way in which vLLM or SGLang move weights between their own workers.
"""

from ostinato_engines.errors import MissingDependencyError

try:
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
    "IncomingUpdate",
    "MemoryKind",
    "StoredWeights",
    "WeightListener",
    "WeightReceiver",
    "WeightSender",
    "connect",
    "send_weights",
    "serve_weight_updates",
    "write_weights",
]
