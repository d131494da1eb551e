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
