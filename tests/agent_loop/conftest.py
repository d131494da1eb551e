"""A whole world in one process: a tiny tokenizer, a scripted policy, fake tools, and managers over them."""

from __future__ import annotations

import re

import pytest

from ostinato_agent_loop import AgentConfig, AgentLoopManager, MultiTurnConfig, RewardResult, RolloutConfig, register
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_rollout.tracing import TraceConfig
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import ToolExecutor, ToolRegistry
from ostinato_tools.testing import CounterTool, MischievousTool, echo, failing, hanging, make_schema, stopping

_CONTROL = re.compile(r"(<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>|</?tool_call>|</?tool_response>)")


class World:
    """Policy, tools and manager of one test."""

    def __init__(self) -> None:
        self.tokenizer = tiny_chat_tokenizer()
        self.journal: list = []
        self.rewarded: list = []
        self.server: ScriptedServer | None = None
        self.pool: ServerPool | None = None
        self.manager: AgentLoopManager | None = None
        self.client = None

    def encode(self, text: str) -> list[int]:
        """Ids as a model would sample them: control tokens in the text are control tokens."""
        ids = []
        for piece in filter(None, _CONTROL.split(text)):
            token_id = self.tokenizer.token_id(piece) if _CONTROL.fullmatch(piece) else None
            ids += self.tokenizer.encode_text(piece) if token_id is None else [token_id]
        return ids

    def registry(self, **mischief) -> ToolRegistry:
        """echo, failing, hanging, stopping, counter, and a tool that misbehaves as told."""
        registry = ToolRegistry([echo, failing, hanging, stopping])
        registry.add_class(CounterTool, config={"journal": self.journal})
        config = {"journal": self.journal, **mischief}
        registry.add_class(MischievousTool, config=config, tool_schema=make_schema("mischief"))
        return registry

    async def reward(self, row, outputs):
        """Score 1.0, and remember what was seen."""
        self.rewarded.append((row, list(outputs)))
        return RewardResult(1.0, {"row": row.get("index")})

    def build(
        self,
        replies,
        *,
        prompt=600,
        response=400,
        model_len=None,
        turn=None,
        num_workers=2,
        agent="tool_agent",
        reward_fn=None,
        mischief=None,
        timeout_s=5.0,
        tool_text=256,
        agent_options=None,
        colocated=False,
        seed=0,
        server=None,
        tracer=None,
        trace=None,
        **multi_turn,
    ) -> AgentLoopManager:
        """Make a manager over one server that samples `replies`."""
        multi_turn = {"enable": True, **multi_turn}
        config = RolloutConfig(
            multi_turn=MultiTurnConfig(**multi_turn),
            agent=AgentConfig(num_workers=num_workers, default_agent_loop=agent, **(agent_options or {})),
            trace=TraceConfig() if trace is None else trace,
        )
        self.server = server or ScriptedServer(replies, encode=self.encode)
        self.pool = ServerPool([self.server])
        self.client = self.pool.client(seed=seed)
        self.manager = AgentLoopManager(
            config,
            tokens=ContinuousTokens(self.tokenizer),
            budget=SessionBudget(prompt, response, model_len, turn),
            pool=self.pool,
            client=self.client,
            tools=ToolExecutor(self.registry(**(mischief or {})), timeout_s=timeout_s, max_response_length=tool_text),
            reward_fn=self.reward if reward_fn is None else reward_fn,
            seed=seed,
            colocated=colocated,
            tracer=tracer,
        )
        return self.manager

    async def run_one(self, replies, row=None, **options):
        """Run one trajectory; return it after checking that nothing is left behind."""
        manager = self.build(replies, **options)
        row = {"raw_prompt": [{"role": "user", "content": "Please."}], **(row or {})}
        batch = await manager.generate_sequences([row], n=1, step=0)
        self.metrics = batch.metrics
        assert set(self.client.num_in_flight.values()) == {0}
        assert self.client.num_sticky == 0
        created = sorted(name for event, name in self.journal if event == "create")
        assert sorted(name for event, name in self.journal if event == "release") == created
        return batch.trajectories[0]

    async def run_ok(self, replies, row=None, **options):
        """Run one trajectory that must not fail; return its only segment."""
        trajectory = await self.run_one(replies, row, **options)
        assert trajectory.failure is None, trajectory.failure
        (segment,) = trajectory.segments
        return segment


@pytest.fixture
def world() -> World:
    """See World."""
    return World()


@pytest.fixture
def graph_agent():
    """Registers an agent of the graph that a function of model and tools builds; members of the class may be given, too."""
    langgraph_agent = pytest.importorskip("ostinato_agent_loop.langgraph_agent", reason="needs the extra langgraph")

    def make(build, *, name="graph_of_a_test", **members):
        members = {"build_graph": lambda self, model, tools: build(model, tools), **members}
        cls = type("GraphOfATest", (langgraph_agent.LangGraphAgentLoop,), members)
        register(name)(cls)
        return name

    return make


@pytest.fixture
def call():
    """Text of a turn that makes the given calls: pairs of name and arguments as JSON."""

    def make(*calls, content=""):
        blocks = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
        ]
        return "\n".join([*([content] if content else []), *blocks]) + "<|im_end|>"

    return make
