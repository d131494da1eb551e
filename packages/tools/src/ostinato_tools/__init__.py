"""Tools for language-model agents: typed tools, an executor under policies, and parsers from sampled text to tool calls.

What it is: what an agent may do (`BaseTool`, `function_tool`, `load_tools`), the only way it is done (`ToolExecutor`: state
per trajectory, deadline, length limit, failure as a value), and how a model's text becomes a call (`get_parser`).

What it is not: it knows no tokens, no model, no engine and no agent loop; messages and schemas are OpenAI-style dicts.
Ready tools live in `ostinato_tools.calculator` and `ostinato_tools.gsm8k`, fakes for tests in `ostinato_tools.testing`.
"""

from ostinato_tools.base import BaseTool
from ostinato_tools.calls import OutcomeKind, ToolCall, ToolOutcome
from ostinato_tools.errors import (
    DuplicateToolError,
    ParserInputError,
    ToolArgumentError,
    ToolClosedError,
    ToolConfigError,
    ToolDefinitionError,
    ToolError,
    ToolFailedError,
    ToolFileNotFoundError,
    ToolImportError,
    ToolInfrastructureError,
    ToolRateLimitedError,
    ToolResultError,
    ToolRewardError,
    ToolSchemaError,
    ToolTimeoutError,
    UnknownParserError,
    UnknownToolError,
)
from ostinato_tools.executor import ToolExecutor
from ostinato_tools.function import FunctionTool, function_tool
from ostinato_tools.loading import load_tools
from ostinato_tools.parsers import HermesParser, ParsedTurn, ToolParser, get_parser, parser_for
from ostinato_tools.policies import ToolPolicy
from ostinato_tools.registry import ToolRegistry
from ostinato_tools.responses import ToolResponse
from ostinato_tools.stats import ToolStats
from ostinato_tools.trajectory import TrajectoryTools
from ostinato_tools.truncation import TruncateSide, TruncateUnit

__all__ = [
    "BaseTool",
    "DuplicateToolError",
    "FunctionTool",
    "HermesParser",
    "OutcomeKind",
    "ParsedTurn",
    "ParserInputError",
    "ToolArgumentError",
    "ToolCall",
    "ToolClosedError",
    "ToolConfigError",
    "ToolDefinitionError",
    "ToolError",
    "ToolExecutor",
    "ToolFailedError",
    "ToolFileNotFoundError",
    "ToolImportError",
    "ToolInfrastructureError",
    "ToolOutcome",
    "ToolParser",
    "ToolPolicy",
    "ToolRateLimitedError",
    "ToolRegistry",
    "ToolResponse",
    "ToolResultError",
    "ToolRewardError",
    "ToolSchemaError",
    "ToolStats",
    "ToolTimeoutError",
    "TrajectoryTools",
    "TruncateSide",
    "TruncateUnit",
    "UnknownParserError",
    "UnknownToolError",
    "function_tool",
    "get_parser",
    "load_tools",
    "parser_for",
]
