"""The process of a worker: its own tools, tokenizer, parser and reward, and a client over all replicas.

Invariant: the client serves from the replicas that it was told last, as far as they can be reached; one that it has lost
is tried again for as long as it is told of it. Knows no other worker.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from ostinato_agent_loop.base import AgentLoopBase, AgentLoopContext
from ostinato_agent_loop.config import RolloutConfig
from ostinato_agent_loop.manager import make_parser, make_tool_executor
from ostinato_agent_loop.ray_workers.following import ReplicaView
from ostinato_agent_loop.registry import agent_loop_class, load_agent_loops, register, registered_agents
from ostinato_agent_loop.reward import RewardFn
from ostinato_agent_loop.trajectory import Trajectory
from ostinato_agent_loop.worker import AgentLoopWorker, TrajectoryTask
from ostinato_engines import AsyncServerBase, EngineError, SamplingParams
from ostinato_rollout import DecisionLog, LLMServerClient, NoReplicaError, SessionBudget, derive_seed, make_policy
from ostinato_rollout.ray_cluster import ActorBody, ReplicaEndpoint, pickled
from ostinato_rollout.tracing import Tracer, make_tracer
from ostinato_rollout.transport import RemoteServer
from ostinato_tokenization import ContinuousTokens
from ostinato_tools import ToolExecutor

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What every worker is made from; it is pickled to get there."""

    config: RolloutConfig
    """`actor_rollout_ref.rollout`."""
    tokens: ContinuousTokens
    """How messages become token ids."""
    budget: SessionBudget
    """How long a trajectory may get."""
    make_reward_fn: Callable[[], RewardFn] | None = None
    """Called once in each worker, for what scores its trajectories; its `aclose`, if it has one, is called at the end. None: only agents'
    own scores."""
    make_tools: Callable[[], ToolExecutor] | None = None
    """The same for its tools; None: made from `config.multi_turn`."""
    seed: int = 0
    """Root of what workers draw."""
    agents: Mapping[str, type[AgentLoopBase]] = field(default_factory=registered_agents)
    """By name, beside those of `config.agent.agent_loop_config_path`; those registered here unless others are given. One that
    cannot get to a worker is unknown there."""

    def pickled_agents(self) -> dict[str, bytes]:
        """Return the agents that can travel, each by itself: what one of them cannot do is no other's business."""
        found = {}
        for name, agent in self.agents.items():
            try:
                found[name] = pickled(agent)
            except Exception as error:
                logger.warning("agent %r stays unknown to workers: %s: %s", name, type(error).__name__, error)
        return found


class WorkerShare(msgspec.Struct, frozen=True):
    """Which of the workers one is."""

    number: int
    """From 0 on."""
    num_workers: int
    """Of all that share the replicas."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has under way; all zero when nothing is."""

    num_trajectories: int
    """Under way."""
    num_conversations: int
    """Not released."""
    num_in_flight: int
    """Generations, as the client counts them."""
    num_waiting: int
    """Calls that replicas have not answered."""
    num_open_tools: int
    """Trajectories that have tools."""
    num_replicas: int
    """In service; not counted as something under way."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not any(
            (
                self.num_trajectories,
                self.num_conversations,
                self.num_in_flight,
                self.num_waiting,
                self.num_open_tools,
            )
        )


@runtime_checkable
class _Closable(Protocol):
    """A reward function that holds processes or connections."""

    async def aclose(self) -> None: ...


class WorkerBody(ActorBody):
    """An `AgentLoopWorker` in an actor. All its methods belong to the actor's event loop."""

    def __init__(self) -> None:
        self._running: dict[int, asyncio.Task[Trajectory]] = {}
        self._servers: dict[ReplicaEndpoint, RemoteServer] = {}
        self._view = ReplicaView()
        self._is_closed = False
        self._connecting: dict[ReplicaEndpoint, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._tracer: Tracer | None = None
        self._reward_fn: RewardFn | None = None

    async def build(self, spec: WorkerSpec, agents: Mapping[str, bytes], share: WorkerShare, view: ReplicaView) -> None:
        """Makes the worker.

        Args:
            spec: From what, but for its agents.
            agents: These, as they travel.
            share: Which of the workers this is.
            view: Of the replicas; at least one is in service.

        Raises:
            NoReplicaError: None of the replicas can be reached.
            AgentConfigError, UnknownAgentError, ToolError: A setting, the default agent or a tool cannot be used.
        """
        config, self._share = spec.config, share
        if config.agent.agent_loop_config_path is not None:  # first: pickle finds the classes of a file that has run
            load_agent_loops(config.agent.agent_loop_config_path)
        for name, agent in agents.items():
            try:
                register(name)(pickle.loads(agent))
            except Exception as error:  # of a module that is not to be had here: only its own trajectories need it
                logger.warning("agent %r stays unknown here: %s: %s", name, type(error).__name__, error)
        agent_loop_class(config.agent.default_agent_loop)  # now, and not in every trajectory
        make_tools = spec.make_tools or (lambda: make_tool_executor(config.multi_turn, spec.tokens.tokenizer))
        self._tools = make_tools()
        self._client = await self._make_client(spec, view)
        self._tracer = make_tracer(config.trace, decoder=spec.tokens.tokenizer, num_workers=share.num_workers)
        context = AgentLoopContext(
            client=self._client,
            tokens=spec.tokens,
            config=config.multi_turn,
            budget=spec.budget,
            tools=self._tools,
            parser=make_parser(config.multi_turn, spec.tokens.tokenizer),
            agent=config.agent,
            tracer=self._tracer,
        )
        self._reward_fn = None if spec.make_reward_fn is None else spec.make_reward_fn()
        self._worker = AgentLoopWorker(context, config.agent, reward_fn=self._reward_fn)

    async def _make_client(self, spec: WorkerSpec, view: ReplicaView) -> LLMServerClient:
        """A client that admits to its part of what the replicas hold."""
        number = self._share.number
        self._view = view
        await asyncio.gather(*(self._reach(endpoint) for endpoint in view.endpoints))
        if not self._servers:
            raise NoReplicaError(
                f"at least one replica must be reached by worker {number}, got none of {len(view.endpoints)}; see its log"
            )
        config, seed = spec.config, derive_seed(spec.seed, number)
        log, path = None, config.routing.decision_log_path
        if path is not None:
            log = DecisionLog(
                Path(path).with_suffix(f".worker{number}{Path(path).suffix}"),
                max_decisions=config.routing.max_logged_decisions,
            )
        return LLMServerClient(
            list(self._servers.values()),
            seed=seed,
            timeout_s=config.generate_timeout_s,
            policy=make_policy(config.routing, seed=seed),
            admission=config.admission,
            decision_log=log,
            on_lost=self._note_lost,
            num_clients=self._share.num_workers,
        )

    # Replicas

    async def follow(self, view: ReplicaView) -> None:
        """From now on these are the replicas. Returns at once: whom it has to reach, it reaches meanwhile."""
        if self._is_closed:
            return
        self._view = view
        for endpoint in list(self._servers):
            if endpoint in view.draining:
                self._client.remove_server(self._servers[endpoint], reason="is drained")
            elif endpoint not in view.endpoints:
                self._drop(endpoint, "is out of service")
        for endpoint in view.endpoints:
            server = self._servers.get(endpoint)
            if server is None and endpoint not in self._connecting:
                self._connecting[endpoint] = asyncio.ensure_future(self._join(endpoint))
            elif server is not None and server not in self._client.servers:  # it was drained, and is back
                self._client.add_server(server)
        self._hold_or_proceed()

    async def take_back(self, endpoint: ReplicaEndpoint) -> None:
        """What is inside of a replica begins again, there or elsewhere."""
        if endpoint in self._servers:
            self._client.take_back(self._servers[endpoint])

    async def left(self, endpoint: ReplicaEndpoint) -> None:
        """Waits until no generation is inside of a replica; the deadline is the caller's."""
        if endpoint in self._servers:
            await self._client.left(self._servers[endpoint])

    async def _join(self, endpoint: ReplicaEndpoint) -> None:
        try:
            server = await self._reach(endpoint)
            if server is not None and endpoint in self._view.endpoints:
                self._client.add_server(server)
                self._hold_or_proceed()
        finally:
            del self._connecting[endpoint]

    def _hold_or_proceed(self) -> None:
        """Lets turns wait where the pool says so, and until one of its replicas has been reached."""
        if self._view.held:
            self._client.hold(self._view.held)
        elif self._view.endpoints and not self._client.servers:
            self._client.hold(f"worker {self._share.number} has none of the replicas reached yet")
        else:
            self._client.proceed(self._view.why_none)

    async def _reach(self, endpoint: ReplicaEndpoint) -> RemoteServer | None:
        """The replica, started; None if it cannot be reached, or is not wanted any more."""
        server = endpoint.connect()
        try:
            await server.start()
        except EngineError as error:
            logger.warning("the replica at %s cannot be reached: %s", endpoint.address, error)
            return None
        if endpoint not in (*self._view.endpoints, *self._view.draining):
            await server.disconnect()
            return None
        self._servers[endpoint] = server
        return server

    def _drop(self, endpoint: ReplicaEndpoint, reason: str) -> None:
        server = self._servers.pop(endpoint)
        self._client.remove_server(server, reason=reason, take_back=True)
        leaving = asyncio.ensure_future(server.disconnect())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _note_lost(self, lost: AsyncServerBase, error: BaseException) -> None:
        """The client has taken a replica out; if it is still there, the next `follow` brings it back."""
        for endpoint, server in list(self._servers.items()):
            if server is lost:
                self._drop(endpoint, f"failed: {error}")
        self._hold_or_proceed()

    # Trajectories

    async def run(self, number: int, task: TrajectoryTask, sampling_params: SamplingParams) -> Trajectory:
        """Runs a trajectory; its row does not travel back.

        Args:
            number: Unique, for `cancel`.
            task: What to run.
            sampling_params: How to sample.
        """
        running = asyncio.ensure_future(self._worker.run_trajectory(task, sampling_params))
        self._running[number] = running
        try:
            trajectory = await running
        finally:
            del self._running[number]
        trajectory.row = {}
        return trajectory

    async def cancel(self, number: int) -> None:
        """Ends a trajectory that nobody waits for, and waits until it has freed what it had."""
        running = self._running.get(number)
        if running is not None:
            running.cancel()
            await asyncio.wait([running])

    async def report(self) -> WorkerReport:
        """What is under way."""
        return WorkerReport(
            num_trajectories=len(self._running),
            num_conversations=self._client.num_sticky,
            num_in_flight=sum(self._client.num_in_flight.values()),
            num_waiting=sum(server.num_waiting for server in self._servers.values()),
            num_open_tools=self._tools.num_open,
            num_replicas=len(self._client.num_in_flight),
        )

    async def close(self) -> None:
        """Ends all trajectories, and lets go of tools, reward and replicas."""
        self._is_closed = True
        for running in self._running.values():
            running.cancel()
        ending = {*self._running.values(), *self._connecting.values()}
        for connecting in self._connecting.values():
            connecting.cancel()
        if ending:
            await asyncio.wait(ending, timeout=_CLOSE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._tools.close()
        if isinstance(self._reward_fn, _Closable):
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._reward_fn.aclose()
        if self._tracer is not None:
            await self._tracer.aclose()
        for endpoint in list(self._servers):
            self._drop(endpoint, "is let go of")
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=_CLOSE_S)
