"""Replicas as actors of a Ray cluster.

Ray decides where a process runs, starts it and notices its end; what is asked of it goes over the transport, so that no
call of a conversation waits for Ray. Who goes where is its caller's business. Needs the extra `ray`.
"""

from ostinato_rollout.errors import ActorLostError, ClusterError
from ostinato_rollout.ray_cluster.actors import (
    ActorBody,
    ActorPlacement,
    ActorProcess,
    pickled,
)
from ostinato_rollout.ray_cluster.cluster import ClusterNode, cluster_nodes, connected, free, reserve
from ostinato_rollout.ray_cluster.replica import RayReplica, ReplicaEndpoint, ReplicaReport

__all__ = [
    "ActorBody",
    "ActorLostError",
    "ActorPlacement",
    "ActorProcess",
    "ClusterError",
    "ClusterNode",
    "RayReplica",
    "ReplicaEndpoint",
    "ReplicaReport",
    "cluster_nodes",
    "connected",
    "free",
    "pickled",
    "reserve",
]
