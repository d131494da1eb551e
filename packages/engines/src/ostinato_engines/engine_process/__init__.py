"""An engine in a process and an environment of its own: another interpreter, another torch, the same contract.

`EngineProcess` is the trainer's end; `python -m ostinato_engines.engine_process` is the other. Neither knows what the
engine is. The ends meet at a Unix socket on one host, speak MessagePack, and unpickle nothing.
"""

from ostinato_engines.engine_process.client import EngineProcess

__all__ = ["EngineProcess"]
