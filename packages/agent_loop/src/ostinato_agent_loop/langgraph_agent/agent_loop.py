"""Any LangGraph graph as an agent: what a user writes is the graph.

Invariant: what was sampled is trained on however the graph ends by its own rules or at a limit; what it raises is the
trajectory's failure; nothing of a trajectory runs, and no conversation or tool is held, after its end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.errors import GraphRecursionError

from ostinato_agent_loop.base import AgentLoopBase
from ostinato_agent_loop.errors import GraphStateError, TurnLimitError
from ostinato_agent_loop.langgraph_agent.bridge import LoopBridge
from ostinato_agent_loop.langgraph_agent.chat_model import ChatModel
from ostinato_agent_loop.langgraph_agent.conversations import GraphConversations
from ostinato_agent_loop.langgraph_agent.graph_tools import GraphTools, TrajectoryTool, langchain_tools
from ostinato_agent_loop.output import AgentLoopOutput, TrajectoryEnd, outputs_from_session
from ostinato_agent_loop.rows import row_messages
from ostinato_engines import SamplingParams
from ostinato_rollout import ChatSession


class LangGraphAgentLoop(AgentLoopBase):
    """An agent that is a graph: override `build_graph`, and the rest only where the graph wants something else.

    A trajectory has one segment for each conversation that its graph led, in the order in which they began. The graph ends
    at its own end, at `max_steps`, or where its model may not have another turn: the limits of
    `actor_rollout_ref.rollout.multi_turn` count the turns of all conversations together, and all conversations share the
    response's length.
    """

    max_steps: ClassVar[int] = 200
    """Steps that a graph may take: LangGraph's recursion limit."""
    own_end: ClassVar[TrajectoryEnd] = TrajectoryEnd.GRAPH_END
    """Why a trajectory ended whose graph came to its end."""

    tools: GraphTools
    """The run's tools and what they gave; there while the graph is built and runs."""

    @abstractmethod
    def build_graph(self, model: ChatModel, tools: list[TrajectoryTool]) -> Runnable:
        """Return a compiled graph for one trajectory.

        Args:
            model: The policy.
            tools: The run's tools that the row may use. Ones of your own may stand beside them: nothing bounds or counts those.
        """

    def graph_input(self, row: Mapping[str, Any]) -> Any:
        """Return what the graph begins with; the row's messages, unless overridden."""
        return {"messages": row_messages(row)}

    def graph_config(self) -> RunnableConfig:
        """Return what the graph runs with: the step limit, and the trajectory's id as `thread_id` for a checkpointer."""
        return {
            "recursion_limit": self.max_steps,
            "configurable": {"thread_id": self.context.trajectory_id or "trajectory"},
        }

    async def run_graph(self, graph: Runnable, graph_input: Any, config: RunnableConfig) -> Any:
        """Run the graph to its end and return its state; override it to resume a graph after an interrupt."""
        return await graph.ainvoke(graph_input, config)

    def extra_fields(self, state: Any) -> dict[str, Any]:
        """Return what the reward function is to read beside the rest in `extra_fields`: plain data, made of the graph's
        last state. Not asked where a limit ended the graph."""
        return {}

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See AgentLoopBase. `extra_fields` holds `tool_rewards`, `turn_scores`, `tool_state_rewards` as those of
        `tool_agent`, `messages` (the conversation that had the last turn), and what `extra_fields` adds."""
        context = self.context
        conversations = GraphConversations(
            lambda tools, number: self._open_session(row, tools, number),
            sampling_params,
            context.config,
            context.share_budget,
        )
        bridge = LoopBridge()
        async with context.open_tools(row) as opened:
            self.tools = tools = GraphTools(opened, context.config, conversations.finish)
            try:
                model = ChatModel.over(conversations, bridge, on_turn=tools.expect)
                state = await self._to_its_end(model, tools, bridge, row, conversations)
            finally:
                await _close(bridge, conversations)
            state_rewards = await opened.calc_rewards()
        tools.metrics.num_release_failures = len(opened.release_failures)
        tools.metrics.num_continuations = conversations.num_continuations
        tools.metrics.num_exact_continuations = conversations.num_exact_continuations
        extra = {
            "turn_scores": tools.turn_scores,
            "tool_rewards": tools.tool_rewards,
            "tool_state_rewards": state_rewards,
            "messages": [] if conversations.last is None else conversations.last.messages,
            **({} if state is None else self.extra_fields(state)),
        }
        return [
            output
            for chat in conversations.chats
            for output in outputs_from_session(
                chat,
                num_turns=1 + conversations.num_assistant_turns + conversations.num_user_turns,
                stop_reason=conversations.last_end or self.own_end,
                metrics=tools.metrics,
                extra_fields=extra,
            )
        ]

    async def _to_its_end(
        self,
        model: ChatModel,
        tools: GraphTools,
        bridge: LoopBridge,
        row: Mapping[str, Any],
        conversations: GraphConversations,
    ) -> Any:
        """Run the graph; return its last state, or None where a limit ended it."""
        graph = self.build_graph(model, langchain_tools(tools, bridge))
        if not isinstance(graph, Runnable):
            raise GraphStateError(
                f"build_graph must return a compiled graph, got {type(graph).__name__}; return graph.compile()"
            )
        try:
            state = await self.run_graph(graph, self.graph_input(row), self.graph_config())
        except TurnLimitError as error:
            conversations.finish(TrajectoryEnd(error.end))
            return None
        except GraphRecursionError:
            conversations.finish(TrajectoryEnd.RECURSION_LIMIT)
            state = None
        if isinstance(state, Mapping) and state.get("__interrupt__"):
            raise GraphStateError(
                f"a graph must run to its end, got an interrupt that nobody answered: {state['__interrupt__']!r:.200};"
                " override run_graph to resume it"
            )
        if not conversations.chats:
            raise GraphStateError(
                "a graph must call its model at least once, got no call; check its edges and its input"
            )
        return state

    def _open_session(self, row: Mapping[str, Any], tools: Any, number: int) -> ChatSession:
        """Open a conversation, which may use what those before it have left."""
        context = self.context
        if not number:
            return context.open_session(row, tools)
        return context.open_session(row, tools, budget=context.budget_left(), call_id_prefix=f"call_{number}_")


async def _close(bridge: LoopBridge, conversations: GraphConversations) -> None:
    """End what the graph left running, then its conversations."""
    try:
        await bridge.close()
    finally:
        await conversations.close()
