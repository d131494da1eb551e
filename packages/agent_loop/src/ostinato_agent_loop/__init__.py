"""The programs that agents run, and the workers that run thousands of them.

What it is: `AgentLoopBase` (the one thing that a user writes), `single_turn_agent` and `tool_agent`, and `AgentLoopManager`,
which turns rows into trajectories with rewards. What it is not: it knows no optimizer, and never touches token ids itself.
"""

from ostinato_agent_loop.base import AgentLoopBase, AgentLoopContext
from ostinato_agent_loop.batch_metrics import batch_metrics
from ostinato_agent_loop.config import (
    AgentConfig,
    CustomServerConfig,
    GatewayConfig,
    MultiTurnConfig,
    RolloutConfig,
    ValidationSamplingConfig,
)
from ostinato_agent_loop.errors import (
    AgentConfigError,
    AgentLoopError,
    AgentLoopOutputError,
    AgentProgramError,
    AgentRowError,
    RewardResultError,
    UnknownAgentError,
)
from ostinato_agent_loop.manager import AgentLoopManager, make_parser, make_tool_executor
from ostinato_agent_loop.manager_class import RolloutManager, RolloutManagerClass, check_rollout, load_manager_class
from ostinato_agent_loop.output import AgentLoopMetrics, AgentLoopOutput, TrajectoryEnd, outputs_from_session
from ostinato_agent_loop.registry import agent_loop_class, load_agent_loops, register
from ostinato_agent_loop.reward import RewardFn, RewardResult
from ostinato_agent_loop.rows import row_agent_name, row_messages, row_tool_selection, row_tools_kwargs
from ostinato_agent_loop.single_turn import SingleTurnAgentLoop
from ostinato_agent_loop.tool_agent import AgentState, ToolAgentLoop
from ostinato_agent_loop.trajectory import RolloutBatch, Trajectory
from ostinato_agent_loop.trajectory_stream import TrajectoryGroup, TrajectoryStream
from ostinato_agent_loop.worker import AgentLoopWorker, TrajectoryTask, TrajectoryWorker

__all__ = [
    "AgentConfig",
    "AgentConfigError",
    "AgentLoopBase",
    "AgentLoopContext",
    "AgentLoopError",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopOutputError",
    "AgentLoopWorker",
    "AgentProgramError",
    "AgentRowError",
    "AgentState",
    "CustomServerConfig",
    "GatewayConfig",
    "MultiTurnConfig",
    "RewardFn",
    "RewardResult",
    "RewardResultError",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutManager",
    "RolloutManagerClass",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "Trajectory",
    "TrajectoryEnd",
    "TrajectoryGroup",
    "TrajectoryStream",
    "TrajectoryTask",
    "TrajectoryWorker",
    "UnknownAgentError",
    "ValidationSamplingConfig",
    "agent_loop_class",
    "batch_metrics",
    "check_rollout",
    "load_agent_loops",
    "load_manager_class",
    "make_parser",
    "make_tool_executor",
    "outputs_from_session",
    "register",
    "row_agent_name",
    "row_messages",
    "row_tool_selection",
    "row_tools_kwargs",
]
