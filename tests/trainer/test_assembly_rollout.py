"""From keys to the conversations of a run: budgets, routing, admission and deadlines reach the client and the sessions."""

import pytest

from ostinato_agent_loop import make_tool_executor
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import LeastInFlight, ServerPool
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.assembly import build_manager
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.rewards.manager import RewardManager

ROLLOUT = "actor_rollout_ref.rollout"
BASE = ("actor_rollout_ref.model.path=m", "data.train_files=a.parquet", "trainer.device=cpu")


@pytest.fixture
def context_of():
    """What trajectories are given under some keys."""

    def make(*keys: str):
        config = load_config([], [*BASE, *keys])
        tokenizer = tiny_chat_tokenizer()
        tools = make_tool_executor(config.actor_rollout_ref.rollout.multi_turn, tokenizer)
        pool = ServerPool([ScriptedServer([])])
        manager, _ = build_manager(config, tokenizer, pool, tools, RewardManager(config.reward, tokenizer))
        return manager._workers[0]._context

    return make


def test_the_budget_of_a_turn_reaches_sessions(context_of):
    """`multi_turn.max_turn_tokens` bounds each turn of each session; by default the room does."""
    assert context_of(f"{ROLLOUT}.multi_turn.max_turn_tokens=7").budget.max_turn_tokens == 7
    assert context_of().budget.max_turn_tokens is None


def test_routing_admission_and_deadlines_reach_the_client(context_of):
    """The named policy, the limits and the deadline are the client's; admission is on unless it is switched off."""
    client = context_of(
        f"{ROLLOUT}.routing.policy=least_in_flight",
        f"{ROLLOUT}.seed=5",
        f"{ROLLOUT}.admission.kv_capacity_tokens=1000",
        f"{ROLLOUT}.generate_timeout_s=12",
    ).client
    assert client._placement.policy == LeastInFlight(5)
    assert client._placement.admission.is_limited
    assert client._timeout_s == 12
    assert not context_of(f"{ROLLOUT}.admission.enable=false").client._placement.admission.config.enable
    assert context_of().client._placement.admission.config.enable
