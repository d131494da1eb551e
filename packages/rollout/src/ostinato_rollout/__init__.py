"""Token-exact conversations with a policy served by many replicas.

What it is: `ChatSession` (messages in, turns out, token ids recorded once), `LLMServerClient` (one `generate` over many
replicas), `ServerPool` (their life), `RolloutScheduler` (thousands of conversations under bounded concurrency), and
`Failure` (what went wrong, as data). `dump` says what everybody is doing, a `DecisionLog` why a replica was chosen.
What it is not: it knows no agent, no reward and no training.
"""

from ostinato_rollout.activity import Dump
from ostinato_rollout.client import LLMServerClient
from ostinato_rollout.config import AdmissionConfig, PoolConfig, RoutingConfig, RoutingPolicy, SessionConfig
from ostinato_rollout.decision_log import DecisionLog, replay
from ostinato_rollout.diagnostics import dump, dumps_on_signal, log_dump
from ostinato_rollout.errors import (
    BudgetExceededError,
    NoReplicaError,
    ReplicaError,
    RequestTimeoutError,
    RolloutError,
    SessionInputError,
    SessionStateError,
    StreamStalledError,
)
from ostinato_rollout.failure import Failure, FailureKind, classify
from ostinato_rollout.group_stream import GroupStream
from ostinato_rollout.overtime import NUM_CANCELLATIONS, Overtime
from ostinato_rollout.pool import ServerPool
from ostinato_rollout.replica_state import ReplicaState, Transition
from ostinato_rollout.restarts import RestartPolicy
from ostinato_rollout.routing import (
    BalancedTokens,
    LeastInFlight,
    RandomReplica,
    ReplicaPolicy,
    RoundRobin,
    StickyLeastInFlight,
    TokenPolicy,
    make_policy,
)
from ostinato_rollout.scheduler import RolloutScheduler
from ostinato_rollout.seeds import derive_seed
from ostinato_rollout.session import ChatSession
from ostinato_rollout.stream_types import (
    DroppedGroup,
    Group,
    GroupFate,
    Leftover,
    OnFailure,
    Run,
    SavedGroup,
    StreamCounts,
    StreamOptions,
    StreamState,
)
from ostinato_rollout.types import Reply, SessionBudget, SessionMetrics

__all__ = [
    "NUM_CANCELLATIONS",
    "AdmissionConfig",
    "BalancedTokens",
    "BudgetExceededError",
    "ChatSession",
    "DecisionLog",
    "DroppedGroup",
    "Dump",
    "Failure",
    "FailureKind",
    "Group",
    "GroupFate",
    "GroupStream",
    "LLMServerClient",
    "LeastInFlight",
    "Leftover",
    "NoReplicaError",
    "OnFailure",
    "Overtime",
    "PoolConfig",
    "RandomReplica",
    "ReplicaError",
    "ReplicaPolicy",
    "ReplicaState",
    "Reply",
    "RequestTimeoutError",
    "RestartPolicy",
    "RolloutError",
    "RolloutScheduler",
    "RoundRobin",
    "RoutingConfig",
    "RoutingPolicy",
    "Run",
    "SavedGroup",
    "ServerPool",
    "SessionBudget",
    "SessionConfig",
    "SessionInputError",
    "SessionMetrics",
    "SessionStateError",
    "StickyLeastInFlight",
    "StreamCounts",
    "StreamOptions",
    "StreamStalledError",
    "StreamState",
    "TokenPolicy",
    "Transition",
    "classify",
    "derive_seed",
    "dump",
    "dumps_on_signal",
    "log_dump",
    "make_policy",
    "replay",
]
