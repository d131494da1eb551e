"""The errors of this package: one tree under `ToolError`, each leaf also the standard error that fits it.

Every error is built from one message, so that it survives pickling. What a *model* does wrong is no exception at all: it
becomes a `ToolOutcome` with a text that the model can act on.
"""


class ToolError(Exception):
    """Root of everything that this package raises on purpose."""


class ToolFileNotFoundError(ToolError, FileNotFoundError):
    """A tool configuration or a Python file with tools does not exist."""


class ToolConfigError(ToolError, ValueError):
    """A tool configuration, or a row's `tools_kwargs`, says something that cannot be meant."""


class ToolImportError(ToolError, ImportError):
    """A class or file that holds tools cannot be imported, or an extra is missing."""


class ToolDefinitionError(ToolError, ValueError):
    """A function cannot become a tool as it is written."""


class ToolSchemaError(ToolError, ValueError):
    """A tool schema is not an OpenAI-style function schema, or none can be made from the function."""


class DuplicateToolError(ToolError, ValueError):
    """Two different tools claim one name."""


class UnknownToolError(ToolError, LookupError):
    """A tool was asked for by a name that is not registered."""


class UnknownParserError(ToolError, LookupError):
    """A parser was asked for by a name that is not known."""


class ParserInputError(ToolError, ValueError):
    """A parser or a stream was given something that it cannot work with; the sampled text itself is never refused."""


class ToolArgumentError(ToolError, ValueError):
    """Raised *by tools*: the model's arguments make no sense. The model reads the message; no traceback is logged."""


class ToolFailedError(ToolError, RuntimeError):
    """Raised *by tools*: the call failed, and the tool says why. The model reads the message; no traceback is logged."""


class ToolTimeoutError(ToolError, TimeoutError):
    """Raised *by tools*: what the tool waited for did not come in time. The model reads the message."""


class ToolRateLimitedError(ToolError, RuntimeError):
    """Raised *by tools*: whoever serves the tool refused the call because there were too many. The model reads the message."""


class ToolInfrastructureError(ToolError, RuntimeError):
    """Raised *by tools*: what the tool stands on is broken, which is nobody's mistake in the conversation."""


class ToolResultError(ToolError, TypeError):
    """A tool returned something that is no tool response."""


class ToolRewardError(ToolError, RuntimeError):
    """`calc_reward` failed; there is no number to go on with."""


class ToolClosedError(ToolError, RuntimeError):
    """The tools of a trajectory were used before they were opened or after they were released."""
