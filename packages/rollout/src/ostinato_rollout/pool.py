"""The life of replicas, for those who own them: start, health, wake, sleep, new weights, and the draining of single ones.

Invariants: clients know exactly the replicas in service, and every one of these serves the same policy version; operations on all
come one after the other. Knows servers and clients, no conversation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ostinato_engines import AsyncServerBase, Health, PauseMode, WeightManifest
from ostinato_engines.engine_status import check_level, checked_tags
from ostinato_rollout.activity import PoolActivity
from ostinato_rollout.client import LLMServerClient
from ostinato_rollout.config import AdmissionConfig
from ostinato_rollout.decision_log import DecisionLog
from ostinato_rollout.diagnostics import register
from ostinato_rollout.draining import drain
from ostinato_rollout.errors import NoReplicaError, SessionInputError, SessionStateError
from ostinato_rollout.exclusive import Exclusive
from ostinato_rollout.failure import Failure
from ostinato_rollout.fleet import Fleet, Follower
from ostinato_rollout.health_watch import watch
from ostinato_rollout.patience import end
from ostinato_rollout.pool_operations import PoolOperations
from ostinato_rollout.removal import Removal
from ostinato_rollout.replacing import fill_anew
from ostinato_rollout.replica_state import Replica, ReplicaState, Transition
from ostinato_rollout.restarts import RestartBudget, RestartPolicy
from ostinato_rollout.revival import MakeServer, Revival
from ostinato_rollout.routing import ReplicaPolicy
from ostinato_rollout.sleeping import put_to_sleep, wake
from ostinato_rollout.starting import start_new
from ostinato_rollout.weight_sync import MakeWeights, WeightSync

logger = logging.getLogger(__name__)

_S = ReplicaState


class ServerPool:
    """Replicas of one policy.

    An operation goes to all replicas in service at the same time; one comes after the other. A replica that fails or overruns
    the deadline is taken out of service and shut down, and so is one that a client finds to have failed, or that says so when
    it is asked for its health. With `make_server` a new one takes its place, after a wait and with the policy that the others
    have. Turns that find no replica wait while one may come, and otherwise end with a NoReplicaError that names every cause.

    Args:
        servers: The replicas, at least one, not started yet.
        make_server: Makes, for a place in the pool, a server that is not started; None: lost replicas stay lost.
        restarts: How often lost replicas are restarted, and after which waits.
        seed: Of the part of these waits that is drawn.
        timeout_s: Longest time that one operation on one replica may take.
        update_timeout_s: The same of new weights, whose ways bound each of their waits and then say more.
        start_timeout_s: The same of its start, which engines bound themselves and then say more.
        shutdown_timeout_s: The same of its shutdown.
        health_interval_s: How often a started pool asks replicas for their health; None: never.
        health_timeout_s: Longest time that the answer may take.
        no_replica_timeout_s: How long turns wait while none is in service and one may come back.
    """

    def __init__(
        self,
        servers: Sequence[AsyncServerBase],
        *,
        make_server: MakeServer | None = None,
        restarts: RestartPolicy | None = None,
        seed: int = 0,
        timeout_s: float = 600.0,
        update_timeout_s: float = 1800.0,
        start_timeout_s: float = 1800.0,
        shutdown_timeout_s: float = 180.0,
        health_interval_s: float | None = 10.0,
        health_timeout_s: float = 30.0,
        no_replica_timeout_s: float = 600.0,
    ) -> None:
        if not servers:
            raise NoReplicaError("servers must hold at least one replica, got none; build one first")
        if len({id(server) for server in servers}) != len(servers):
            raise SessionInputError("servers must be distinct objects, got one twice; build one for each replica")
        for name, value in (
            ("timeout_s", timeout_s),
            ("update_timeout_s", update_timeout_s),
            ("start_timeout_s", start_timeout_s),
            ("shutdown_timeout_s", shutdown_timeout_s),
            ("health_interval_s", 1 if health_interval_s is None else health_interval_s),
            ("health_timeout_s", health_timeout_s),
            ("no_replica_timeout_s", no_replica_timeout_s),
        ):
            if not value > 0:
                raise SessionInputError(f"{name} must be positive, got {value}; give seconds")
        policy = RestartPolicy() if restarts is None else restarts
        self._make_server = make_server if policy.max_restarts and policy.max_pool_restarts else None
        self._fleet = Fleet(servers, restarts=self._make_server is not None, no_replica_timeout_s=no_replica_timeout_s)
        self._operations = PoolOperations()
        self._exclusive = Exclusive()
        self._revival = Revival(
            self._fleet,
            self._operations,
            self._exclusive.lock,
            make_server=self._make_server,
            budget=RestartBudget(policy, seed),
            update_timeout_s=update_timeout_s,
            start_timeout_s=start_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
        )
        self._removal = Removal(self._fleet, self._operations, self._revival, timeout_s=timeout_s)
        self._timeout_s, self._update_timeout_s, self._start_timeout_s = timeout_s, update_timeout_s, start_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._health_interval_s, self._health_timeout_s = health_interval_s, health_timeout_s
        self._watching: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        register(self)

    # What there is

    @property
    def servers(self) -> tuple[AsyncServerBase, ...]:
        """Replicas in service."""
        return tuple(replica.server for replica in self._fleet.in_service())

    @property
    def states(self) -> dict[int, ReplicaState]:
        """What each replica is doing, by its index."""
        return {replica.index: replica.state for replica in self._fleet.replicas}

    @property
    def history(self) -> tuple[Transition, ...]:
        """The last thousand changes of states, in order."""
        return self._fleet.transitions()

    @property
    def lost(self) -> dict[int, Failure]:
        """Replicas that a failure has taken out of service, by their index, and why."""
        return {replica.index: replica.failure for replica in self._fleet.replicas if replica.failure is not None}

    @property
    def policy_version(self) -> int:
        """Version that is served; while replicas differ (before a first update), the oldest.

        Raises:
            NoReplicaError: None is in service.
        """
        if not self.servers:
            raise self._fleet.no_replica("serve a policy")
        return min(server.policy_version for server in self.servers)

    def activity(self) -> PoolActivity:
        """Return what replicas are doing, and what they have not answered yet."""
        return PoolActivity(
            in_service=[replica.index for replica in self._fleet.in_service()],
            lost={replica: failure.message for replica, failure in self.lost.items()},
            replicas=[replica.activity() for replica in self._fleet.replicas],
            operations=self._operations.activity(),
            last_answer=self._operations.last_answer,
        )

    # Clients

    def client(
        self,
        *,
        seed: int = 0,
        timeout_s: float = 600.0,
        policy: ReplicaPolicy | None = None,
        admission: AdmissionConfig | None = None,
        num_clients: int = 1,
        decision_log: DecisionLog | None = None,
    ) -> LLMServerClient:
        """Return a client over the replicas in service, which follows them.

        Each client counts for itself what replicas hold; where several share them, `num_clients` says how many do.

        Raises:
            NoReplicaError: None is in service.
        """
        if not self.servers:
            raise self._fleet.no_replica("make a client")
        client = LLMServerClient(
            self.servers,
            seed=seed,
            timeout_s=timeout_s,
            policy=policy,
            admission=admission,
            num_clients=num_clients,
            decision_log=decision_log,
            on_lost=self._removal.found_lost,
        )
        self._fleet.follow(client, knows_them=True)
        return client

    def follow(self, follower: Follower) -> None:
        """Tell `follower`, while it lives, which replicas are in service and when turns have to wait."""
        self._fleet.follow(follower)

    # Life

    async def start(self) -> None:
        """Start every replica, and watch their health from then on; replicas that were started are left as they are.

        If one fails, the others are shut down again and its error is raised. Whoever is cancelled meanwhile has shut all of
        them down.
        """
        try:
            await self._exclusive.run("start", self._start)
        except SessionStateError:
            raise
        except BaseException:
            await self.shutdown()
            raise
        if self._health_interval_s is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.get_running_loop().create_task(
                watch(
                    self._fleet,
                    self._operations,
                    self._revival,
                    self._removal.take_out,
                    interval_s=self._health_interval_s,
                    timeout_s=self._health_timeout_s,
                ),
                name="ostinato-health",
            )

    async def _start(self) -> None:
        await start_new(self._fleet, self._operations, self._start_timeout_s)
        self._revival.note_start()

    async def shutdown(self) -> None:
        """Shut every replica down, those out of service too; failures are logged. What is under way ends with errors.

        It goes on to its end, whoever is cancelled; a second call waits for the same.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(), name="ostinato-pool-shutdown")
        if not self._stopping.done():
            await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        fleet = self._fleet
        tasks = [*([] if self._watching is None else [self._watching]), *self._exclusive.close(), *self._revival.tasks]
        for task in tasks:
            task.cancel()  # at once: none of them changes a state any more
        for replica in fleet.replicas:
            fleet.move(replica, _S.STOPPED, "the pool is shut down")
        fleet.close()
        await asyncio.gather(*map(end, tasks))

        async def shut_down(replica: Replica) -> None:
            await replica.server.shutdown()

        failures: dict[int, Exception] = {}
        for group in (fleet.replicas, self._revival.not_ended):
            failures |= await self._operations.on_each("shut down", group, shut_down, self._shutdown_timeout_s)
        for replica, error in failures.items():
            logger.warning("replica %d failed to shut down: %s: %s", replica, type(error).__name__, error)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Make replicas ready to generate, wholly or in part; one that cannot is taken out, and those lost are restarted.

        Raises:
            NoReplicaError: None is there, and none comes.
        """
        awake = checked_tags(tags)
        await self._exclusive.run("wake up", lambda: wake(self._fleet, self._removal.ask, awake, tags))
        await self._fleet.any_live("wake up")

    async def sleep(self, level: int = 1) -> None:
        """Let replicas give memory back until `wake_up`; those of a kind that never sleeps stay awake. Turns wait meanwhile.

        If it is cancelled, or some fail, the pool sleeps all the same: `wake_up` brings it back.

        Raises:
            NoReplicaError: None is there, and none comes.
        """
        check_level(level)
        await self._exclusive.run("go to sleep", lambda: put_to_sleep(self._fleet, self._removal.ask, level))
        if not self._fleet.live() and not self._fleet.is_one_coming():
            raise self._fleet.no_replica("go to sleep")

    async def health(self) -> dict[int, Health]:
        """Return the health of each replica in service; one that does not answer is taken out."""
        answers: dict[int, Health] = {}

        async def ask(replica: Replica) -> None:
            answers[replica.index] = await replica.server.health()

        await self._fleet.any_live("tell its health")
        await self._removal.ask("tell its health", self._fleet.in_service(), ask)
        if not self.servers:
            raise self._fleet.no_replica("tell its health")
        return dict(sorted(answers.items()))

    # Weights

    async def update_weights(
        self,
        manifest: WeightManifest,
        make_weights: MakeWeights,
        *,
        pause: PauseMode = PauseMode.ABORT,
        replayable: bool = False,
    ) -> None:
        """Bring every replica to `manifest.version`: pause all, update all, check that all have it, go on.

        Turns wait meanwhile. A replica that fails in one of these, or reports another version, is taken out; one that waits
        for weights joins. Where no replica is left, this waits for one that is being restarted.

        Args:
            manifest: What is sent.
            make_weights: Called once for each replica; its iterable yields (name, tensor) in the manifest's order. Where the manifest has a
                `base`, a replica that has it reads those of `changing` only; one that turns out not to have it calls again.
            pause: What becomes of generations that are under way. Where an engine cannot do it, they end with what they have
                (`WAIT`: they finish), and clients go on with them.
            replayable: `make_weights` may be called until `withdraw_weights` or the next update, so that a replica that is
                restarted meanwhile joins at once. Otherwise it waits for the next update.

        Raises:
            NoReplicaError: None has the new weights, and none comes that could take them.
            Exception: What `make_weights` raised. No replica is taken out for it. Those that read nothing go on with the old weights, unless
                others have the new ones or a `WeightSource` had opened routes to them; the rest wait for the next update.
        """
        mode, purpose = PauseMode(pause), f"take weights of version {manifest.version}"
        is_done = False

        async def work() -> None:
            nonlocal is_done
            sync = WeightSync(
                self._fleet,
                self._operations,
                self._removal.take_out,
                timeout_s=self._timeout_s,
                update_timeout_s=self._update_timeout_s,
            )
            source = None
            await self._revival.withdraw_weights()  # the last update's: whoever gives new ones has changed them
            try:
                await sync.run(manifest, make_weights, mode)
                source = make_weights if replayable else None
            finally:
                if sync.has_changed_any:
                    self._revival.note_update(manifest, source)
            is_done = bool(self.servers)

        await self._revival.withdraw_weights()  # at once: a replica that takes them now need not be waited for
        while not is_done:
            if replayable and self._fleet.sleeping and not self._fleet.live() and self._fleet.is_one_coming():
                self._revival.note_update(manifest, make_weights)  # all died in sleep: they take them when they wake
                return
            await self._fleet.any_live(purpose)
            await self._exclusive.run(purpose, work)

    async def withdraw_weights(self) -> None:
        """End what `replayable` allowed, as before the weights change: no call of `make_weights` is under way afterwards."""
        await self._revival.withdraw_weights()

    # Single replicas

    async def drain(self, replica: int, *, timeout_s: float = 600.0) -> None:
        """Let a replica end its generations, and give it no new ones; it then stands idle until `replace`.

        What still runs at the deadline is aborted, and goes on elsewhere. A cancelled call puts it back into service.

        Raises:
            SessionInputError: There is no such replica.
            SessionStateError: It is not in service.
            ReplicaError: It failed meanwhile, or does not let go of its generations.
        """
        if not timeout_s > 0:
            raise SessionInputError(f"timeout_s must be positive, got {timeout_s}; give seconds")
        drained = self._replica(replica)

        async def work() -> None:
            await drain(self._fleet, drained, self._removal.take_out, timeout_s=timeout_s)

        await self._exclusive.run("drain a replica", work, changes_all=False)

    async def replace(self, replica: int, *, drain_timeout_s: float = 600.0) -> None:
        """Drain a replica, shut it down, and put a new one with the current weights into its place.

        A call that is cancelled while it drains puts the old one back into service; later, the restart goes on by itself.

        Raises:
            SessionInputError: There is no such replica, or nothing makes a new one.
            SessionStateError: The pool sleeps, or the replica is being drained, restarted or replaced already.
            ReplicaError: It was given up, or the pool was shut down meanwhile.
        """
        replaced = self._replica(replica)
        if self._make_server is None:
            raise SessionInputError("make_server must be given to replace a replica, got None; pass it to the pool")
        await fill_anew(self._fleet, self._revival, replaced, lambda: self.drain(replica, timeout_s=drain_timeout_s))

    def take_out(self, server: AsyncServerBase, failure: Failure) -> None:
        """Take a replica out of service and out of every client; it is shut down, and its turns begin again elsewhere."""
        replica = self._fleet.find(server)
        if replica is None:
            raise SessionInputError(f"server must be one of this pool's replicas, got {server!r}; use pool.servers")
        self._removal.begin(replica, failure)

    # Inside

    def _replica(self, index: int) -> Replica:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self._fleet.replicas):
            raise SessionInputError(
                f"replica must be an index below {len(self._fleet.replicas)}, got {index!r}; see pool.states"
            )
        return self._fleet.replicas[index]
