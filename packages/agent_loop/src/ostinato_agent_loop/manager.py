"""From rows to trajectories, all of a batch or in a stream of groups, over workers of whatever kind.

Knows rows and workers, no training. Everything that can be wrong with names and settings is found before a trajectory starts.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Any

from ostinato_agent_loop import single_turn, tool_agent  # noqa: F401  (they register the built-in agents)
from ostinato_agent_loop.base import AgentLoopContext
from ostinato_agent_loop.batch_metrics import batch_metrics
from ostinato_agent_loop.config import MultiTurnConfig, RolloutConfig
from ostinato_agent_loop.errors import AgentConfigError
from ostinato_agent_loop.registry import agent_loop_class, load_agent_loops
from ostinato_agent_loop.reward import RewardFn
from ostinato_agent_loop.tasks import TaskMaker
from ostinato_agent_loop.team import WorkerTeam
from ostinato_agent_loop.trajectory import RolloutBatch, Trajectory
from ostinato_agent_loop.trajectory_stream import KeepGroup, ServedVersion, TrajectoryStream
from ostinato_agent_loop.wakefulness import Wakefulness
from ostinato_agent_loop.worker import AgentLoopWorker, TrajectoryTask, TrajectoryWorker, longest_run_s
from ostinato_engines import SamplingParams
from ostinato_rollout import (
    DecisionLog,
    Failure,
    LLMServerClient,
    RolloutScheduler,
    ServerPool,
    SessionBudget,
    SessionConfig,
    StreamOptions,
    StreamState,
    make_policy,
)
from ostinato_rollout.tracing import Tracer, make_tracer
from ostinato_tokenization import ChatTokenizer, ContinuousTokens
from ostinato_tools import (
    ToolExecutor,
    ToolParser,
    TruncateUnit,
    UnknownParserError,
    get_parser,
    load_tools,
    parser_for,
)

logger = logging.getLogger(__name__)


class AgentLoopManager:
    """Runs batches and streams of rows.

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
        workers: Who runs trajectories, as in other processes; `config.agent.num_workers` in this one if None. Those given
            have client, tools, reward function and tracer of their own.

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
        workers: Sequence[TrajectoryWorker] | None = None,
    ) -> None:
        if pool is None and ((client is None and workers is None) or colocated):
            raise AgentConfigError(
                "pool must be given where there is no client or engines are colocated, got None; pass it"
            )
        self._config, self._seed, self._pool = config, seed, pool
        self._wakefulness = Wakefulness(pool if colocated else None)
        if config.agent.agent_loop_config_path is not None:
            load_agent_loops(config.agent.agent_loop_config_path)
        self.check_agents([config.agent.default_agent_loop])
        self._tracer: Tracer | None = None
        if workers is None:
            if client is None:
                assert pool is not None
                client = make_client(config, pool, seed=seed)
            admission_timeout_s = client.admission_timeout_s
            context = self._context(client, tokens, budget, tools, tracer)
            self._workers: Sequence[TrajectoryWorker] = [
                AgentLoopWorker(context, config.agent, reward_fn=reward_fn) for _ in range(config.agent.num_workers)
            ]
        else:
            own = {"client": client, "tools": tools, "reward_fn": reward_fn, "tracer": tracer}
            if not workers or any(value is not None for value in own.values()):
                raise AgentConfigError(
                    f"workers must be at least one, and have {', '.join(own)} of their own, got {len(workers)} workers and"
                    f" {[name for name, value in own.items() if value is not None]}; leave one or the other out"
                )
            admission_timeout_s = config.admission.timeout_s
            self._workers = list(workers)
        self._team = WorkerTeam(
            self._workers,
            max_concurrency=config.agent.max_concurrency,
            run_timeout_s=longest_run_s(config.agent, admission_timeout_s),
        )

    def _context(
        self,
        client: LLMServerClient,
        tokens: ContinuousTokens,
        budget: SessionBudget,
        tools: ToolExecutor | None,
        tracer: Tracer | None,
    ) -> AgentLoopContext:
        """Make what workers in this process share."""
        config = self._config
        tools = make_tool_executor(config.multi_turn, tokens.tokenizer) if tools is None else tools
        parser = make_parser(config.multi_turn, tokens.tokenizer)
        if tracer is None:  # last, since it has a thread
            tracer = make_tracer(config.trace, decoder=tokens.tokenizer, num_workers=config.agent.num_workers)
        self._tracer = tracer
        return AgentLoopContext(
            client=client,
            tokens=tokens,
            config=config.multi_turn,
            budget=budget,
            tools=tools,
            parser=parser,
            agent=config.agent,
            tracer=tracer,
        )

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
        params = self._sampling_params(sampling_params, validate=validate)
        n = self._n(n, validate=validate)
        maker = TaskMaker(self._config, seed=self._seed, step=step, validate=validate)
        for index, row in enumerate(rows):
            maker.check(index, row)
        tasks = [maker.make(row, index, number) for index, row in enumerate(rows) for number in range(n)]
        await self._wakefulness.enter()
        try:
            trajectories = await self._run(tasks, params)
        finally:
            await self._wakefulness.leave()
        return RolloutBatch(trajectories, batch_metrics(trajectories) | self._tracer_metrics())

    def stream(
        self,
        rows: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        n: int | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        step: int,
        options: StreamOptions | None = None,
        keep_group: KeepGroup | None = None,
        state: StreamState[Mapping[str, Any], Trajectory] | None = None,
        greedy_baseline: bool = False,
    ) -> TrajectoryStream:
        """Return an async iterator of groups of `n` trajectories, one for each row, as they finish.

        A trajectory is that which `generate_sequences` of the same step gives for the row at the same place: they share seeds
        and names, so no two of them may be of one step at the same time. How a stream draws, filters, ends early and bounds
        staleness is in `RolloutScheduler.stream`.

        Args:
            rows: Where rows come from, with or without end; each is checked when it is drawn.
            n: Trajectories per row; None: as configured.
            sampling_params: How to sample; None: as configured. A seed here is replaced.
            step: Names the stream and decides, with row and number, each trajectory's seed. Traces are of this step, or with
                `groups_per_version` of the steps that follow it.
            options: Which groups are made and given out. A trajectory with a failure is a failed run; staleness counts the
                pool's policy versions, from that which sampled the oldest token of a group.
            keep_group: Says whether a group is given out: True, False, or why not in a few words.
            state: Where to go on from, as `TrajectoryStream.state` gave it; the rows begin after those that it has drawn.
            greedy_baseline: Sample one trajectory more of each row, with the most likely token each time: its `baseline`.

        Raises:
            AgentConfigError: `n` is not positive, or staleness is bounded and the manager has no pool.
            SessionInputError: Options or state do not fit together.
            NoReplicaError: Staleness is bounded, and no replica has told a version yet.
        """
        options = StreamOptions() if options is None else options
        pool = self._pool
        if options.max_staleness is not None and pool is None:
            raise AgentConfigError(
                f"max_staleness must go with a pool, which knows the policy version, got {options.max_staleness} without;"
                " pass the pool to the manager"
            )
        return TrajectoryStream(
            rows,
            tasks=TaskMaker(self._config, seed=self._seed, step=step, rows_per_step=options.groups_per_version),
            team=self._team,
            wakefulness=self._wakefulness,
            sampling_params=self._sampling_params(sampling_params, validate=False),
            n=self._n(n, validate=False),
            options=options,
            keep_group=keep_group,
            current_version=None if pool is None else ServedVersion(pool),
            state=state,
            more_metrics=self._tracer_metrics,
            greedy_baseline=greedy_baseline,
        )

    async def close(self) -> None:
        """Write out what the tracer still has, within its deadline. Closing again does nothing."""
        if self._tracer is not None:
            await self._tracer.aclose()

    def _sampling_params(
        self, sampling_params: SamplingParams | Mapping[str, Any] | None, *, validate: bool
    ) -> SamplingParams:
        if sampling_params is None:
            return self._config.sampling_params(validate=validate)
        return SamplingParams.from_mapping(sampling_params)

    def _n(self, n: int | None, *, validate: bool) -> int:
        if n is None:
            n = self._config.val_kwargs.n if validate else self._config.n
        if n < 1:
            raise AgentConfigError(f"n must be at least 1, got {n}; each row needs a trajectory")
        return n

    async def _run(self, tasks: Sequence[TrajectoryTask], params: SamplingParams) -> list[Trajectory]:
        """Run tasks; return their trajectories in the order of the tasks."""

        async def run(task: TrajectoryTask) -> Trajectory:
            return await self._team.run(task, params)

        team = self._team
        results = await RolloutScheduler().run(
            tasks, run, concurrency=team.concurrency, item_timeout_s=team.run_timeout_s
        )
        return [
            task.failed(result) if isinstance(result, Failure) else result
            for task, result in zip(tasks, results, strict=True)
        ]

    def _tracer_metrics(self) -> dict[str, float]:
        return {} if self._tracer is None else self._tracer.metrics()


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
    if config.format == "auto":
        return parser_for(tokenizer.tool_template)
    try:
        return get_parser(config.format)
    except UnknownParserError as error:
        raise UnknownParserError(f"multi_turn.format: {error}") from error


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
