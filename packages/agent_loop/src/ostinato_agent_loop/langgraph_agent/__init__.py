"""LangGraph graphs as agents whose tokens are recorded as they were sampled.

What it is: `ChatModel` (the policy as a LangChain chat model), `LangGraphAgentLoop` (override `build_graph`), and
`ReactAgentLoop`, which is `react_agent`. What it is not: it renders no message and owns no token; it sits on ChatSession.
Behind the extra `langgraph`.
"""

from ostinato_engines import MissingDependencyError

try:
    from ostinato_agent_loop.langgraph_agent.agent_loop import LangGraphAgentLoop
    from ostinato_agent_loop.langgraph_agent.chat_model import ChatModel
    from ostinato_agent_loop.langgraph_agent.react import ReactAgentLoop
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("langchain_core", "langgraph", "pydantic"):
        raise
    raise MissingDependencyError(
        f"{error.name} must be installed for LangGraph agents; run `pip install 'ostinato-agent-loop[langgraph]'`"
    ) from error

from ostinato_agent_loop.langgraph_agent.bridge import LoopBridge
from ostinato_agent_loop.langgraph_agent.conversations import GraphConversations, GraphTurn
from ostinato_agent_loop.langgraph_agent.graph_tools import GraphTools, TrajectoryTool
from ostinato_agent_loop.langgraph_agent.messages import calls_of, plain_messages

__all__ = [
    "ChatModel",
    "GraphConversations",
    "GraphTools",
    "GraphTurn",
    "LangGraphAgentLoop",
    "LoopBridge",
    "ReactAgentLoop",
    "TrajectoryTool",
    "calls_of",
    "plain_messages",
]
