"""Replicas in other processes: `ReplicaService` serves a server of the contract, `RemoteServer` is that server elsewhere.

ZeroMQ carries MessagePack between them; a prompt travels without what the replica has of it; nothing is unpickled. It is
not a way to start processes, and weights travel between processes of one host only. Needs the extra `zmq`.
"""

from ostinato_rollout.transport.errors import AddressError, ReplicaLostError, TransportInputError
from ostinato_rollout.transport.remote import RemoteServer
from ostinato_rollout.transport.service import ReplicaService
from ostinato_rollout.transport.stats import ServiceStats, TransportStats

__all__ = [
    "AddressError",
    "RemoteServer",
    "ReplicaLostError",
    "ReplicaService",
    "ServiceStats",
    "TransportInputError",
    "TransportStats",
]
