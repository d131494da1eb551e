"""`react_agent`: a model that calls tools, as a LangGraph graph; the same agent as `tool_agent`, limits and all."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph

from ostinato_agent_loop.langgraph_agent.agent_loop import LangGraphAgentLoop
from ostinato_agent_loop.langgraph_agent.chat_model import ChatModel
from ostinato_agent_loop.langgraph_agent.graph_tools import TrajectoryTool
from ostinato_agent_loop.langgraph_agent.messages import calls_of
from ostinato_agent_loop.output import TrajectoryEnd
from ostinato_agent_loop.registry import register


@register("react_agent")
class ReactAgentLoop(LangGraphAgentLoop):
    """Generates, runs the calls that the model made, shows it their answers, and so on until there is a reason to end."""

    needs_tools = True
    own_end = TrajectoryEnd.NO_TOOL_CALL

    def graph_config(self) -> RunnableConfig:
        """Two steps a turn, of which each has a token at least: turns and the response's length are the limits."""
        context = self.context
        turns = context.config.max_assistant_turns or context.budget.max_response_tokens
        return {**super().graph_config(), "recursion_limit": 2 * turns + 3}

    def build_graph(self, model: ChatModel, tools: list[TrajectoryTool]) -> Runnable:
        """See LangGraphAgentLoop."""
        calling = model.bind_tools(tools) if tools else model

        async def agent(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await calling.ainvoke(state["messages"])]}

        async def run_tools(state: MessagesState) -> dict[str, Any]:
            return {"messages": await self.tools.answer(_last_turn(state))}

        def needs_an_answer(state: MessagesState) -> str:
            return "tools" if any(calls_of(_last_turn(state))) else END

        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent)
        graph.add_node("tools", run_tools)
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", needs_an_answer, ["tools", END])
        graph.add_edge("tools", "agent")
        return graph.compile()


def _last_turn(state: MessagesState) -> AIMessage:
    message = state["messages"][-1]
    assert isinstance(message, AIMessage)  # the node before has put it there
    return message
