"""From rows to trajectories: seeds, groups and workers around one batch, and the pool's sleep between batches.

Knows rows and workers, no training. Everything that can be wrong with names and settings is found before a trajectory starts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ostinato_agent_loop import single_turn, tool_agent  # noqa: F401  (they register the built-in agents)
from ostinato_agent_loop.base import AgentLoopContext
from ostinato_agent_loop.batch_metrics import batch_metrics
from ostinato_agent_loop.config import AgentConfig, MultiTurnConfig, RolloutConfig
from ostinato_agent_loop.errors import AgentConfigError, AgentRowError, UnknownAgentError
from ostinato_agent_loop.registry import agent_loop_class, import_class, load_agent_loops
from ostinato_agent_loop.reward import RewardFn
from ostinato_agent_loop.rows import row_agent_name
from ostinato_agent_loop.trajectory import RolloutBatch, Trajectory
from ostinato_agent_loop.worker import AgentLoopWorker, TrajectoryTask
from ostinato_engines import SamplingParams
from ostinato_rollout import (
    DecisionLog,
    Failure,
    LLMServerClient,
    RolloutScheduler,
    ServerPool,
    SessionBudget,
    SessionConfig,
    derive_seed,
    make_policy,
)
from ostinato_rollout.tracing import Tracer, make_tracer
from ostinato_tokenization import ChatTokenizer, ContinuousTokens
from ostinato_tools import ToolExecutor, ToolParser, TruncateUnit, get_parser, load_tools, parser_for

logger = logging.getLogger(__name__)


class AgentLoopManager:
    """Runs batches of rows.

    Args:
        config: `actor_rollout_ref.rollout`.
        tokens: How messages become token ids.
        budget: How long a trajectory may get.
        pool: The replicas; needed if `client` is None, or if `colocated`.
        client: Where generations come from; made from the pool if None.
        tools: The executor of tools; made from `config.multi_turn` if None.
        reward_fn: Scores each trajectory as soon as it ends; None: only agents' own scores.
        seed: Root of all seeds of this manager.
        colocated: Wake the pool before a batch and put it to sleep after it.
        tracer: Records trajectories; made from `config.trace` if None. `close` closes it.

    Raises:
        AgentConfigError, UnknownAgentError, ToolError: A setting, an agent or a tool cannot be used.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        tokens: ContinuousTokens,
        budget: SessionBudget,
        pool: ServerPool | None = None,
        client: LLMServerClient | None = None,
        tools: ToolExecutor | None = None,
        reward_fn: RewardFn | None = None,
        seed: int = 0,
        colocated: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        if pool is None and (client is None or colocated):
            raise AgentConfigError(
                "pool must be given where there is no client or engines are colocated, got None; pass it"
            )
        if client is None:
            assert pool is not None
            client = make_client(config, pool, seed=seed)
        self._config, self._seed = config, seed
        self._pool = pool if colocated else None
        self._num_batches = 0
        if config.agent.agent_loop_config_path is not None:
            load_agent_loops(config.agent.agent_loop_config_path)
        self.check_agents([config.agent.default_agent_loop])
        tools = make_tool_executor(config.multi_turn, tokens.tokenizer) if tools is None else tools
        parser = make_parser(config.multi_turn, tokens.tokenizer)
        if tracer is None:  # last, since it has a thread
            tracer = make_tracer(config.trace, decoder=tokens.tokenizer, num_workers=config.agent.num_workers)
        self._tracer = tracer
        context = AgentLoopContext(
            client=client,
            tokens=tokens,
            config=config.multi_turn,
            budget=budget,
            tools=tools,
            parser=parser,
            agent=config.agent,
            tracer=tracer,
        )
        self._workers = [
            AgentLoopWorker(context, config.agent, reward_fn=reward_fn) for _ in range(config.agent.num_workers)
        ]

    def check_agents(self, names: Iterable[str]) -> None:
        """Raise unless every name is a registered agent that these settings allow; give it a dataset's `agent_name`s."""
        for name in dict.fromkeys(names):
            agent_loop_class(name).check_config(self._config, name)

    async def generate_sequences(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        n: int | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        step: int,
        validate: bool = False,
    ) -> RolloutBatch:
        """Run `n` trajectories for each row.

        Args:
            rows: Fields of dataset rows; `agent_name` chooses the agent.
            n: Trajectories per row; None: as configured, for training or validation.
            sampling_params: How to sample; None: as configured, for training or validation. A seed here is replaced.
            step: The training step; together with row and number it decides each trajectory's seed.
            validate: Use the validation settings, and seeds of their own.

        Returns:
            Trajectories in the order of the rows, a row's `n` side by side, failures in their places; and metrics.

        Raises:
            AgentRowError, AgentConfigError, UnknownAgentError: A row chooses an agent that cannot run; nothing was started.
            NoReplicaError: No replica could be woken.
        """
        params = sampling_params
        if params is None:
            params = self._config.sampling_params(validate=validate)
        elif not isinstance(params, SamplingParams):
            params = SamplingParams.from_mapping(params)
        if n is None:
            n = self._config.val_kwargs.n if validate else self._config.n
        if n < 1:
            raise AgentConfigError(f"n must be at least 1, got {n}; each row needs a trajectory")
        tasks = self._tasks(rows, n=n, step=step, validate=validate)
        await self._wake()
        try:
            trajectories = await self._run(tasks, n, params)
        finally:
            await self._rest()
        metrics = batch_metrics(trajectories)
        if self._tracer is not None:
            metrics |= self._tracer.metrics()
        return RolloutBatch(trajectories, metrics)

    async def close(self) -> None:
        """Write out what the tracer still has, within its deadline. Closing again does nothing."""
        if self._tracer is not None:
            await self._tracer.aclose()

    def _tasks(self, rows: Sequence[Mapping[str, Any]], *, n: int, step: int, validate: bool) -> list[TrajectoryTask]:
        agents = [self._agent(index, row) for index, row in enumerate(rows)]
        self.check_agents(agents)
        phase = "val" if validate else "train"
        tasks = []
        for index, (row, agent) in enumerate(zip(rows, agents, strict=True)):
            group_id = f"{phase}-{step}-{index}"
            for number in range(n):
                seed = derive_seed(self._seed, step, index, number, int(validate))
                tasks.append(
                    TrajectoryTask(
                        row,
                        agent,
                        group_id,
                        f"{group_id}/{number}",
                        seed,
                        step=step,
                        sample_index=index,
                        rollout_n=number,
                        validate=validate,
                    )
                )
        return tasks

    def _agent(self, index: int, row: Mapping[str, Any]) -> str:
        if not isinstance(row, Mapping):
            raise AgentRowError(f"rows[{index}] must be a mapping of fields, got {type(row).__name__}; pass dicts")
        try:
            name = row_agent_name(row, self._config.agent.default_agent_loop)
            agent_loop_class(name)
        except (AgentRowError, UnknownAgentError) as error:
            raise type(error)(f"rows[{index}]: {error}") from error
        return name

    async def _run(self, tasks: list[TrajectoryTask], n: int, params: SamplingParams) -> list[Trajectory]:
        """Split whole rows over the workers, as evenly as they go, and put the results together again."""
        num_rows, workers = len(tasks) // n, self._workers
        bounds = [index * num_rows // len(workers) * n for index in range(len(workers) + 1)]
        shares = [
            (worker, tasks[start:end])
            for worker, start, end in zip(workers, bounds, bounds[1:], strict=False)
            if start < end
        ]

        async def run(share: tuple[AgentLoopWorker, list[TrajectoryTask]]) -> list[Trajectory]:
            worker, mine = share
            return await worker.generate_sequences(mine, params)

        results: list[Trajectory] = []
        for part, (_, mine) in zip(
            await RolloutScheduler().run(shares, run, concurrency=max(1, len(shares))), shares, strict=True
        ):
            if isinstance(part, Failure):
                results += [
                    Trajectory(group_id=task.group_id, trajectory_id=task.trajectory_id, row=task.row, failure=part)
                    for task in mine
                ]
            else:
                results += part
        return results

    async def _wake(self) -> None:
        self._num_batches += 1
        if self._pool is None or self._num_batches > 1:
            return
        try:
            await self._pool.wake_up()
        except BaseException:
            self._num_batches -= 1
            raise

    async def _rest(self) -> None:
        self._num_batches -= 1
        if self._pool is not None and not self._num_batches:
            await self._pool.sleep()


def load_manager_class(config: AgentConfig) -> type[AgentLoopManager]:
    """Return the manager class that the configuration names, or AgentLoopManager.

    Raises:
        AgentConfigError: The class cannot be imported or is no AgentLoopManager.
    """
    if config.agent_loop_manager_class is None:
        return AgentLoopManager
    return import_class(config.agent_loop_manager_class, AgentLoopManager, "agent.agent_loop_manager_class")


def make_client(config: RolloutConfig, pool: ServerPool, *, seed: int) -> LLMServerClient:
    """Return a client of the pool that routes, admits and waits as the settings say."""
    routing = config.routing
    log = None
    if routing.decision_log_path is not None:
        log = DecisionLog(routing.decision_log_path, max_decisions=routing.max_logged_decisions)
    return pool.client(
        seed=seed,
        timeout_s=config.generate_timeout_s,
        policy=make_policy(routing, seed=seed),
        admission=config.admission,
        decision_log=log,
    )


def make_parser(config: SessionConfig, tokenizer: ChatTokenizer) -> ToolParser:
    """Return the parser that the settings name, or for `auto` the one that the chat template tells.

    Raises:
        ToolError: There is no such parser, or the template tells none.
    """
    return parser_for(tokenizer.tool_template) if config.format == "auto" else get_parser(config.format)


def make_tool_executor(config: MultiTurnConfig, tokenizer: ChatTokenizer) -> ToolExecutor:
    """Return the executor that the settings describe; without `enable` it has no tools.

    Args:
        config: Which tools, and their limits.
        tokenizer: Counts tokens where answers are cut by them.

    Raises:
        ToolError: The files that the settings name cannot be loaded.
    """
    if config.enable:
        registry = load_tools(config.tool_config_path, config.function_tool_path)
    else:
        registry = load_tools()
    if config.enable and not registry.names:
        logger.warning("multi_turn.enable is true, but there are no tools; set tool_config_path or function_tool_path")
    return ToolExecutor(
        registry,
        timeout_s=config.tool_timeout_s,
        max_response_length=config.max_tool_response_length,
        truncate_side=config.tool_response_truncate_side,
        truncate_unit=config.tool_response_truncate_unit,
        encode=tokenizer.encode_text if config.tool_response_truncate_unit is TruncateUnit.TOKENS else None,
    )
