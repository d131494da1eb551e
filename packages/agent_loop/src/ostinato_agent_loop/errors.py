"""The error tree of this package; leaves are standard-library errors too and survive pickling."""


class AgentLoopError(Exception):
    """Root of everything that this package raises on purpose."""


class AgentConfigError(AgentLoopError, ValueError):
    """A setting, an agent file or a registration cannot be used; raised before any trajectory starts."""


class UnknownAgentError(AgentLoopError, ValueError):
    """A row or a setting names an agent that nobody registered; the message lists those known."""


class AgentRowError(AgentLoopError, ValueError):
    """A row lacks, or holds in a wrong form, what its agent reads."""


class AgentLoopOutputError(AgentLoopError, ValueError):
    """The parts of an agent's output contradict each other."""


class RewardResultError(AgentLoopError, ValueError):
    """A reward function answered something that is no finite score."""


class AgentProgramError(AgentLoopError, RuntimeError):
    """A program that runs as an agent did not start, ended badly, or never asked the model."""


class GraphInputError(AgentLoopError, ValueError):
    """A graph asked its model for something that it cannot do, or showed it what it cannot read."""


class GraphStateError(AgentLoopError, RuntimeError):
    """A graph used its model or tools where or when they cannot be used, or stopped before its end."""


class TurnLimitError(AgentLoopError, RuntimeError):
    """No turn may begin in a graph's conversation; the graph is to end, and its trajectory is a good one."""

    def __init__(self, message: str, *, end: str = "") -> None:
        super().__init__(message)
        self.end = end
        """The TrajectoryEnd that it brings."""
