"""From keys to the conversations of a run: budgets, routing, admission and deadlines reach the client and the sessions."""

import pytest

from ostinato_agent_loop import make_tool_executor
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import LeastInFlight, ServerPool
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.rewards.manager import RewardManager
from ostinato_trainer.rollouts import build_manager

ROLLOUT = "actor_rollout_ref.rollout"
BASE = ("actor_rollout_ref.model.path=m", "data.train_files=a.parquet", "trainer.device=cpu")


class Sleeper(ScriptedServer):
    """Says "a" and ends; keeps whether it was awake when it was asked, and how often it slept."""

    def __init__(self) -> None:
        super().__init__(lambda request: [5, 2])
        self.is_asleep, self.num_sleeps = False, 0

    async def generate(self, *arguments, **named):
        assert not self.is_asleep
        return await super().generate(*arguments, **named)

    async def sleep(self, level=1):
        self.is_asleep = True
        self.num_sleeps += 1

    async def wake_up(self, tags=None):
        self.is_asleep = False


@pytest.mark.parametrize(("keys", "num_sleeps"), [((), 0), ((f"{ROLLOUT}.free_cache_engine=true",), 2)])
async def test_engines_sleep_between_batches_where_they_are_to(keys, num_sleeps):
    """`free_cache_engine` lets the engine of a run in one process sleep after each batch and wake for the next; by default it stays awake."""
    config, tokenizer, server = load_config([], [*BASE, *keys]), tiny_chat_tokenizer(), Sleeper()
    tools = make_tool_executor(config.actor_rollout_ref.rollout.multi_turn, tokenizer)
    pool = ServerPool([server], health_interval_s=None)
    manager, _ = build_manager(config, tokenizer, pool, tools, RewardManager(config.reward, tokenizer))
    await pool.start()
    try:
        for step in (1, 2):
            rows = [
                {
                    "prompt": [{"role": "user", "content": "a"}],
                    "data_source": "d",
                    "reward_model": {"ground_truth": "1"},
                }
            ]
            await manager.generate_sequences(rows, step=step)
    finally:
        await manager.close()
        await pool.shutdown()
    assert len(server.requests) == 2
    assert (server.num_sleeps, server.is_asleep) == (num_sleeps, bool(num_sleeps))


@pytest.mark.parametrize(
    ("keys", "engines_sleep"),
    [
        ((), False),
        (("trainer.executor=ray",), True),
        (("trainer.executor=ray", f"{ROLLOUT}.free_cache_engine=false"), False),
        (("trainer.executor=ray", f"{ROLLOUT}.nnodes=1"), False),
        (("trainer.executor=ray", "trainer.max_staleness=1"), False),
        ((f"{ROLLOUT}.free_cache_engine=true",), True),
    ],
)
def test_engines_sleep_where_they_take_turns_with_training(keys, engines_sleep):
    """By default engines sleep where a cluster's places are shared and nothing is sampled ahead; the key changes that."""
    assert load_config([], [*BASE, *keys]).engines_sleep is engines_sleep


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
