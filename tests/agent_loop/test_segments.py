"""Conversations that a template cannot extend: several segments, one trajectory."""

from __future__ import annotations

from ostinato_agent_loop import AgentConfig, AgentLoopManager, MultiTurnConfig, RewardResult, RolloutConfig
from ostinato_engines import PolicySpan, StopReason, TokenOutput
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import TINY_CHAT_TEMPLATE, tiny_chat_tokenizer
from ostinato_tools import ToolExecutor, ToolRegistry
from ostinato_tools.testing import echo

RESULTS_FIRST = (
    "{% for message in messages if message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>\n' }}"
    "{% endfor %}" + TINY_CHAT_TEMPLATE.replace("in messages %}", "in messages if message.role != 'tool' %}")
)
"""Writes what tools said at the top, so that no turn extends the one before."""
CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call><|im_end|>'


async def test_segments_of_a_trajectory_share_reward_budget_and_cost(world):
    """Each turn of a rewritten history is a segment with the full rendering as its prompt, its sampled ids, log-probs and
    policy version, once; the reward is one, the budget is one, and metrics count one trajectory."""
    tokenizer = tiny_chat_tokenizer(chat_template=RESULTS_FIRST)
    texts = [CALL, CALL, "done<|im_end|>"]
    said = [world.encode(text) for text in texts]
    outputs = [
        TokenOutput(ids, [-0.1 * (turn + 1)] * len(ids), StopReason.STOP, policy_versions=(PolicySpan(0, turn),))
        for turn, ids in enumerate(said)
    ]
    server = ScriptedServer(outputs)
    rewarded = []

    async def reward(row, segments):
        rewarded.append(len(segments))
        return RewardResult(0.5)

    manager = AgentLoopManager(
        RolloutConfig(multi_turn=MultiTurnConfig(enable=True), agent=AgentConfig(default_agent_loop="tool_agent")),
        tokens=ContinuousTokens(tokenizer),
        budget=SessionBudget(800, sum(map(len, said))),
        pool=ServerPool([server]),
        tools=ToolExecutor(ToolRegistry([echo])),
        reward_fn=reward,
    )
    batch = await manager.generate_sequences([{"raw_prompt": [{"role": "user", "content": "Please."}]}], n=1, step=0)
    (trajectory,) = batch.trajectories
    assert trajectory.failure is None
    messages = trajectory.segments[0].extra_fields["messages"]
    tools = ToolRegistry([echo]).schemas()
    for turn, segment in enumerate(trajectory.segments):
        assert segment.prompt_ids == server.requests[turn].prompt_ids
        assert segment.prompt_ids == tokenizer.encode_chat(messages[: 2 * turn + 1], tools)
        assert segment.response_ids == said[turn]
        assert segment.response_mask == [1] * len(said[turn])
        assert segment.response_logprobs == outputs[turn].logprobs
        assert segment.policy_versions == (PolicySpan(0, turn),)
        assert (segment.segment_index, segment.reward_score) == (turn, 0.5)
    assert rewarded == [len(trajectory.segments)] == [3]
    assert [request.params.max_tokens for request in server.requests] == [
        sum(map(len, said[turn:])) for turn in range(3)
    ]
    assert batch.metrics["agent_loop/num_segments"] == 3
    assert batch.metrics["num_turns/mean"] == 6
    assert batch.metrics["agent_loop/tokenization_mismatches"] == 0
