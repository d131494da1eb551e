"""Token-exact conversations with a policy served by many replicas.

What it is: `ChatSession` (messages in, turns out, token ids recorded once), `LLMServerClient` (one `generate` over many
replicas), `ServerPool` (their life), `RolloutScheduler` (thousands of conversations under bounded concurrency), and
`Failure` (what went wrong, as data). What it is not: it knows no agent, no reward and no training.
"""

from .client import LLMServerClient
from .config import SessionConfig
from .errors import (
    BudgetExceededError,
    NoReplicaError,
    ReplicaError,
    RequestTimeoutError,
    RolloutError,
    SessionInputError,
    SessionStateError,
)
from .failure import Failure, FailureKind, classify
from .pool import ServerPool
from .routing import LeastInFlight, ReplicaPolicy
from .scheduler import RolloutScheduler
from .seeds import derive_seed
from .session import ChatSession
from .types import Reply, SessionBudget, SessionMetrics

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
