"""The life of replicas in one process: start, health, wake, sleep, new weights, and taking out those that fail.

Invariant: every replica in service serves the same policy version. Knows servers and clients, no conversation.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from ostinato_engines import AsyncServerBase, Health, UnsupportedError, WeightManifest
from ostinato_rollout.activity import OperationActivity, PoolActivity
from ostinato_rollout.client import LLMServerClient
from ostinato_rollout.config import AdmissionConfig
from ostinato_rollout.decision_log import DecisionLog
from ostinato_rollout.diagnostics import ago, log_dump, register
from ostinato_rollout.errors import NoReplicaError, ReplicaError, RequestTimeoutError, SessionInputError
from ostinato_rollout.failure import Failure, FailureKind
from ostinato_rollout.routing import ReplicaPolicy

logger = logging.getLogger(__name__)


class ServerPool:
    """Replicas of one policy.

    An operation goes to all replicas in service at the same time. One that fails or overruns the deadline is taken out
    of service, with the failure kept in `lost`, and so is one that a client finds to have failed for good; when none is
    left, NoReplicaError names them all.

    Args:
        servers: The replicas, at least one, not started yet.
        timeout_s: Longest time that one operation on one replica may take.
        start_timeout_s: The same of its start, which engines bound themselves and then say more.
    """

    def __init__(
        self, servers: Sequence[AsyncServerBase], *, timeout_s: float = 600.0, start_timeout_s: float = 1800.0
    ) -> None:
        if not servers:
            raise NoReplicaError("servers must hold at least one replica, got none; build one first")
        if len({id(server) for server in servers}) != len(servers):
            raise SessionInputError("servers must be distinct objects, got one twice; build one for each replica")
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not value > 0:
                raise SessionInputError(f"{name} must be positive, got {value}; give seconds")
        self._all: dict[int, AsyncServerBase] = dict(enumerate(servers))
        self._in_service: dict[int, AsyncServerBase] = dict(self._all)
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._clients: weakref.WeakSet[LLMServerClient] = weakref.WeakSet()
        self.lost: dict[int, Failure] = {}
        """Replicas taken out of service, by their index, and why."""
        self._under_way: dict[tuple[int, str], float] = {}  # what replicas have not answered yet, and since when
        self._last_answer = ""
        register(self)

    @property
    def servers(self) -> tuple[AsyncServerBase, ...]:
        """Replicas in service."""
        return tuple(self._in_service.values())

    @property
    def policy_version(self) -> int:
        """Version that is served; while replicas differ (before a first update), the oldest.

        Raises:
            NoReplicaError: None is in service.
        """
        self._check_left("serve a policy")
        return min(server.policy_version for server in self._in_service.values())

    def client(
        self,
        *,
        seed: int = 0,
        timeout_s: float = 600.0,
        policy: ReplicaPolicy | None = None,
        admission: AdmissionConfig | None = None,
        decision_log: DecisionLog | None = None,
        num_clients: int = 1,
    ) -> LLMServerClient:
        """Return a client over the replicas in service, which follows when one is taken out.

        Each client counts for itself what replicas hold: where several admit conversations, tell each how many they are.
        """
        self._check_left("make a client")
        client = LLMServerClient(
            self.servers,
            seed=seed,
            timeout_s=timeout_s,
            policy=policy,
            admission=admission,
            decision_log=decision_log,
            on_lost=self._found_lost,
            num_clients=num_clients,
        )
        self._clients.add(client)
        return client

    def activity(self) -> PoolActivity:
        """Return what replicas have not answered yet, and which are lost."""
        now = time.monotonic()
        return PoolActivity(
            in_service=list(self._in_service),
            lost={replica: failure.message for replica, failure in self.lost.items()},
            operations=[
                OperationActivity(replica=replica, what=what, since_s=now - since)
                for (replica, what), since in list(self._under_way.items())
            ],
            last_answer=self._last_answer,
        )

    async def start(self) -> None:
        """Start every replica. If one fails, the others are shut down again and its error is raised.

        Whoever is cancelled meanwhile has shut all of them down.
        """
        try:
            failures = await self._on_each("start", lambda server: server.start(), timeout_s=self._start_timeout_s)
        except asyncio.CancelledError:
            await self.shutdown()
            raise
        if failures:
            await self.shutdown()
            replica, error = next(iter(failures.items()))
            told = f"{type(error).__name__}: {error}"
            if len(self._all) == 1:
                message = f"the engine must start, got {told}"
            else:
                message = (
                    f"all {len(self._all)} replicas must start, got {len(failures)} failures; "
                    f"the first, replica {replica}: {told}"
                )
            raise ReplicaError(message, replica=replica) from error
        for client in self._clients:
            client.refresh_capacities()

    async def shutdown(self) -> None:
        """Shut every replica down, those out of service too; failures are logged."""
        for replica, error in (await self._on_each("shut down", lambda server: server.shutdown(), self._all)).items():
            logger.warning("replica %d failed to shut down: %s: %s", replica, type(error).__name__, error)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Make replicas ready to generate; one that cannot is taken out."""
        await self._or_take_out("wake up", lambda server: server.wake_up(tags))

    async def sleep(self, level: int = 1) -> None:
        """Let replicas give memory back until `wake_up`; those of a kind that never sleeps stay awake."""

        async def rest(server: AsyncServerBase) -> None:
            try:
                await server.sleep(level)
            except UnsupportedError as error:
                logger.debug("replica %d stays awake: %s", self._index(server), error)

        await self._or_take_out("go to sleep", rest)

    async def health(self) -> dict[int, Health]:
        """Return the health of each replica in service; one that does not answer is taken out."""
        answers: dict[int, Health] = {}

        async def ask(server: AsyncServerBase) -> None:
            answers[self._index(server)] = await server.health()

        await self._or_take_out("tell its health", ask)
        return dict(sorted(answers.items()))

    async def update_weights(
        self, manifest: WeightManifest, make_weights: Callable[[], Iterable[tuple[str, Any]]]
    ) -> None:
        """Bring every replica to `manifest.version`; one that fails or reports another version afterwards is taken out.

        Args:
            manifest: What is sent.
            make_weights: Called once for each replica; its iterable yields (name, tensor) in the manifest's order.
        """

        async def update(server: AsyncServerBase) -> None:
            await server.update_weights(manifest, make_weights())
            if server.policy_version != manifest.version:
                raise ReplicaError(
                    f"policy_version must be {manifest.version} after the update, got {server.policy_version};"
                    " that server ignored the weights"
                )

        await self._or_take_out(f"take weights of version {manifest.version}", update)

    def take_out(self, server: AsyncServerBase, failure: Failure) -> None:
        """Take a replica out of service and out of every client; its running requests may end on it."""
        replica = self._index(server)
        if self._in_service.pop(replica, None) is None:
            return
        self.lost[replica] = failure
        for client in self._clients:
            client.remove_server(server, reason=f"had a failure: {failure.message}")
        logger.error("replica %d is out of service: %s: %s", replica, failure.where, failure.message)

    def _found_lost(self, server: AsyncServerBase, error: BaseException) -> None:
        if not any(known is server for known in self._all.values()):
            return  # somebody added it to a client by hand
        where = f"replica {self._index(server)} had to generate"
        self.take_out(server, Failure.from_error(error, where, kind=FailureKind.ENGINE))

    def _index(self, server: AsyncServerBase) -> int:
        for replica, known in self._all.items():
            if known is server:
                return replica
        raise SessionInputError(f"server must be one of this pool's replicas, got {server!r}; use pool.servers")

    def _check_left(self, purpose: str) -> None:
        if not self._in_service:
            causes = "; ".join(f"replica {replica}: {failure.message}" for replica, failure in self.lost.items())
            raise NoReplicaError(
                f"at least one replica must be in service to {purpose}, got none ({causes}); restart them"
            )

    async def _or_take_out(self, purpose: str, operation: Callable[[AsyncServerBase], Awaitable[None]]) -> None:
        self._check_left(purpose)
        for replica, error in (await self._on_each(purpose, operation)).items():
            kind = FailureKind.TIMEOUT if isinstance(error, TimeoutError) else FailureKind.ENGINE
            self.take_out(
                self._all[replica], Failure.from_error(error, f"replica {replica} had to {purpose}", kind=kind)
            )
        self._check_left(purpose)

    async def _on_each(
        self,
        purpose: str,
        operation: Callable[[AsyncServerBase], Awaitable[None]],
        servers: dict[int, AsyncServerBase] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[int, Exception]:
        """Run `operation` on all at once, each under the deadline; return the errors by replica."""
        failures: dict[int, Exception] = {}
        limit_s = self._timeout_s if timeout_s is None else timeout_s

        async def one(replica: int, server: AsyncServerBase) -> None:
            key = (replica, purpose)
            self._under_way[key] = time.monotonic()
            deadline = asyncio.timeout(limit_s)
            try:
                async with deadline:
                    await operation(server)
                self._last_answer = f"replica {replica} had to {purpose}"
            except TimeoutError as error:
                failures[replica] = self._overdue(key, limit_s) if deadline.expired() else error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                failures[replica] = ReplicaError(
                    f"replica {replica} must {purpose}, got cancelled by itself; see its log"
                )
                failures[replica].__cause__ = error
            except Exception as error:
                failures[replica] = error
            finally:
                self._under_way.pop(key, None)

        async with asyncio.TaskGroup() as group:
            for replica, server in (self._in_service if servers is None else servers).items():
                group.create_task(one(replica, server))
        return dict(sorted(failures.items()))

    def _overdue(self, key: tuple[int, str], limit_s: float) -> RequestTimeoutError:
        """Build the error of an operation that has passed its deadline, and log what everybody is doing."""
        replica, purpose = key
        message = (
            f"replica {replica} must {purpose} within {limit_s:g} s, got no answer since {ago(self._under_way[key])},"
            f" last progress: {self._last_answer or 'no operation has ended yet'}; look at that replica's log"
        )
        log_dump(message)
        return RequestTimeoutError(message)
