"""An agent in forty lines, written with LangGraph: one conversation solves with the run's tools, another one checks.

Train with `agent.agent_loop_config_path=examples/langgraph_agent.py` and `agent.default_agent_loop=solve_and_check`.
"""

from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from ostinato_agent_loop import register
from ostinato_agent_loop.langgraph_agent import LangGraphAgentLoop


@register("solve_and_check")
class SolveAndCheck(LangGraphAgentLoop):
    """Solves, lets a fresh conversation check the answer, and corrects it where the check says no."""

    needs_tools = True

    def build_graph(self, model, tools):
        solver = model.bind_tools(tools)

        async def solve(state: MessagesState):
            return {"messages": [await solver.ainvoke(state["messages"])]}

        async def check(state: MessagesState):
            question, answer = state["messages"][0].text, state["messages"][-1].text
            verdict = await model.ainvoke([HumanMessage(f"{question}\nIs it {answer}? Say yes or no.")])
            right = verdict.text.lower().startswith("yes")
            return {"messages": [] if right else [HumanMessage("That is wrong. Try again.")]}

        graph = StateGraph(MessagesState)
        graph.add_node("solve", solve)
        graph.add_node("tools", ToolNode(tools))
        graph.add_node("check", check)
        graph.add_edge(START, "solve")
        graph.add_conditional_edges("solve", lambda state: "tools" if state["messages"][-1].tool_calls else "check")
        graph.add_edge("tools", "solve")
        graph.add_conditional_edges("check", lambda state: END if state["messages"][-1].type == "ai" else "solve")
        return graph.compile()
