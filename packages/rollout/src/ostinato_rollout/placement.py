"""Where conversations are: replicas and their counters, the policy that chooses among them, and the places that it fills.

Invariants: a counter belongs to one incarnation of a replica and is the number of generations inside of it or about to
enter; entries end with their conversation. Calls no server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeGuard

from ostinato_engines import AsyncServerBase
from ostinato_rollout.activity import ClientActivity, ReplicaActivity
from ostinato_rollout.admission import Admission
from ostinato_rollout.config import AdmissionConfig
from ostinato_rollout.conversation import Conversation
from ostinato_rollout.decision_log import DecisionLog
from ostinato_rollout.errors import NoReplicaError, ReplicaError, SessionStateError
from ostinato_rollout.routing import ReplicaPolicy, TokenPolicy

logger = logging.getLogger(__name__)

_MAX_CONVERSATIONS = 1_000_000


class Placement:
    """Replicas and conversations of one client.

    Args:
        policy: How replicas are chosen.
        admission: How many conversations may be under way.
        decision_log: Is told every choice.
        num_clients: Clients that admit conversations to the same replicas.
    """

    def __init__(
        self,
        policy: ReplicaPolicy,
        admission: AdmissionConfig,
        decision_log: DecisionLog | None,
        *,
        num_clients: int = 1,
    ) -> None:
        self.policy = policy
        self.servers: dict[int, AsyncServerBase] = {}
        """In service, by id."""
        self.in_flight: dict[int, int] = {}
        """Generations, by id of those in service."""
        self.conversations: dict[str, Conversation] = {}
        """Under way, by request id, those that wait for a place included."""
        self.admission = Admission(admission, self.place, num_clients=num_clients)
        self._policy_sees_tokens = isinstance(policy, TokenPolicy)
        self._policy_stays = getattr(policy, "stays", False)
        self._log = decision_log
        self._next_id = 0
        self.why_none = ""
        """What became of all replicas, as far as somebody has said it."""
        self._last_lost = ""
        if decision_log is not None:
            decision_log.begin(policy)

    def add(self, server: AsyncServerBase) -> int:
        """Put a replica into service; return its id, which is never used again."""
        capabilities = server.capabilities()
        replica = self._next_id
        self._next_id += 1
        self.servers[replica] = server
        self.in_flight[replica] = 0
        self.admission.add(replica, capabilities)
        return replica

    def refresh(self) -> None:
        """Ask replicas again what they hold: many know it only once they have started."""
        for replica, server in self.servers.items():
            self.admission.add(replica, server.capabilities())

    def remove(self, server: AsyncServerBase, reason: str) -> None:
        """Take a replica out of service; with the last one, everybody's wait for a place ends with NoReplicaError."""
        for replica in [replica for replica, known in self.servers.items() if known is server]:
            del self.servers[replica]
            del self.in_flight[replica]
            self._last_lost = f"replica {replica} {reason}"
            self.admission.remove(replica)

    def no_replica(self, request_id: str) -> NoReplicaError:
        """Build the error for a turn that nobody can serve."""
        last = f"the last one, {self._last_lost}" if self._last_lost else ""
        why = self.why_none or last
        lost = f" ({why})" if why else ""
        return NoReplicaError(
            f"at least one replica must be in service for request {request_id!r}, got none{lost}; restart one"
        )

    def open(
        self, request_id: str, group: str | None, *, num_prompt_tokens: int, max_growth: int | None
    ) -> Conversation:
        """Make the entry of a new conversation, without a place yet.

        Raises:
            NoReplicaError: None is in service, nor expected to be.
            SessionStateError: More conversations than can be are open.
        """
        if not self.servers and not self.admission.is_held:
            raise self.no_replica(request_id)
        if len(self.conversations) >= _MAX_CONVERSATIONS:
            raise SessionStateError(
                f"conversations must be released at their end, got {len(self.conversations)} open ones; call release"
            )
        conversation = Conversation(request_id, group, prompt_tokens=num_prompt_tokens, max_growth=max_growth)
        self.conversations[request_id] = conversation
        return conversation

    def place(self, conversation: Conversation) -> None:
        """Choose a new conversation's replica, and count its first turn there already."""
        self._choose(conversation)
        conversation.is_counted = True

    def is_left(self, previous: int | None, conversation: Conversation) -> TypeGuard[int]:
        """Tell whether a conversation has moved from `previous`, which is in service and has to free it."""
        return self._policy_stays and previous != conversation.replica and previous in self.servers

    def enter(self, conversation: Conversation) -> int:
        """Choose the replica of a turn, and count it there until `exit`.

        Raises:
            NoReplicaError: None is in service.
            ReplicaError: The policy chose none of those that it was shown.
        """
        if conversation.is_counted:
            conversation.is_counted = False
            if conversation.replica in self.servers:
                return conversation.replica  # pyright: ignore[reportReturnType]
        return self._choose(conversation)

    def exit(self, replica: int) -> None:
        """Count a turn on a replica no more; one that is out of service, or back as another one, has no such counter."""
        if replica in self.in_flight:
            self.in_flight[replica] -= 1

    def close(self, conversation: Conversation) -> None:
        """Forget a conversation, whatever it holds; forgetting it again does nothing."""
        if self.conversations.get(conversation.request_id) is not conversation:
            return
        del self.conversations[conversation.request_id]
        if conversation.replica is None:
            return
        if conversation.is_counted:
            conversation.is_counted = False
            self.exit(conversation.replica)
        self.admission.leave(conversation)

    def activity(self) -> ClientActivity:
        """Return what every replica and conversation is doing now."""
        replicas = [
            ReplicaActivity(
                replica=replica,
                num_in_flight=self.in_flight.get(replica, 0),  # a signal may strike while one is being removed
                num_sessions=account.num_sessions,
                held_tokens=account.held_tokens,
                capacity_tokens=account.capacity_tokens,
                max_sessions=account.max_sessions,
            )
            for replica, account in list(self.admission.accounts.items())
        ]
        places = {request_id: place for place, request_id in enumerate(self.admission.queue(), 1)}
        conversations = [
            conversation.activity(places.get(conversation.request_id, 0))
            for conversation in list(self.conversations.values())
        ]
        conversations.sort(key=lambda conversation: -conversation.since_s)
        return ClientActivity(replicas=replicas, conversations=conversations)

    def _choose(self, conversation: Conversation) -> int:
        previous = conversation.replica if conversation.replica in self.servers else None
        candidates = self._candidates(conversation)
        if not candidates:
            raise self.no_replica(conversation.request_id)
        policy, request_id, num_tokens = self.policy, conversation.request_id, conversation.num_tokens
        held = {}
        if self._policy_sees_tokens or self._log is not None:
            held = self.admission.held_by_others(conversation, candidates)
        if self._policy_sees_tokens:
            replica = policy.choose_by_tokens(request_id, num_tokens, held, previous)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            replica = policy.choose(request_id, candidates, previous)
        if replica not in candidates:
            raise ReplicaError(f"the policy must choose one of {sorted(candidates)}, got {replica!r}; correct it")
        if self._log is not None:
            self._log.record(request_id, candidates, previous, replica, held_tokens=held, num_tokens=num_tokens)
        is_move = conversation.replica not in (None, replica)
        if replica != conversation.replica:
            self.admission.settle(conversation, replica)
            conversation.visited.add(replica)
        self.in_flight[replica] += 1
        if is_move:
            self.admission.admit_waiting()
        return replica

    def _candidates(self, conversation: Conversation) -> Mapping[int, int]:
        """Return the replicas that a turn may go to: with room, if any has; one that is under way never waits."""
        if not self.admission.is_limited:
            return self.in_flight
        with_room = {replica: self.in_flight[replica] for replica in self.admission.with_room(conversation)}
        return with_room or self.in_flight
