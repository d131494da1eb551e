"""Token-exact conversations with a policy served by many replicas.

What it is: `ChatSession` (messages in, turns out, token ids recorded once), `LLMServerClient` (one `generate` over many
replicas), `ServerPool` (their life), `RolloutScheduler` (thousands of conversations under bounded concurrency), and
`Failure` (what went wrong, as data). What it is not: it knows no agent, no reward and no training.
"""

from ostinato_rollout.client import LLMServerClient
from ostinato_rollout.config import SessionConfig
from ostinato_rollout.errors import (
    BudgetExceededError,
    NoReplicaError,
    ReplicaError,
    RequestTimeoutError,
    RolloutError,
    SessionInputError,
    SessionStateError,
)
from ostinato_rollout.failure import Failure, FailureKind, classify
from ostinato_rollout.pool import ServerPool
from ostinato_rollout.routing import LeastInFlight, ReplicaPolicy
from ostinato_rollout.scheduler import RolloutScheduler
from ostinato_rollout.seeds import derive_seed
from ostinato_rollout.session import ChatSession
from ostinato_rollout.types import Reply, SessionBudget, SessionMetrics

__all__ = [
    "BudgetExceededError",
    "ChatSession",
    "Failure",
    "FailureKind",
    "LLMServerClient",
    "LeastInFlight",
    "NoReplicaError",
    "ReplicaError",
    "ReplicaPolicy",
    "Reply",
    "RequestTimeoutError",
    "RolloutError",
    "RolloutScheduler",
    "ServerPool",
    "SessionBudget",
    "SessionConfig",
    "SessionInputError",
    "SessionMetrics",
    "SessionStateError",
    "classify",
    "derive_seed",
]
