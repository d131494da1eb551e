"""How ranks share the tokens of a packed row, and who must not."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from ostinato_trainer.backends.packing import FlatModel
from ostinato_trainer.backends.sequence_ranks import SequenceRanks
from ostinato_trainer.config.checks import consistency_problems
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.config.strategy_checks import strategy_problems
from ostinato_trainer.errors import BackendError, ConfigError

KEY = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
SHARDED = ("actor_rollout_ref.actor.strategy=fsdp2", "trainer.n_gpus_per_node=4", f"{KEY}=4")


def rank(index: int, size: int) -> SequenceRanks:
    """One rank, of whose group nothing is known but its size: what needs no exchange."""
    group: Any = SimpleNamespace(size=lambda: size, rank=lambda: index)
    return SequenceRanks(group)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_every_token_stands_on_one_rank_and_is_scored_by_one(lengths: list[int], size: int) -> None:
    """Stretches are equally long and in order make the row, filled up with zeros; each scored token's predecessor stands on exactly one rank, at the
    place that it says; and what fills the row up is a sequence of its own."""
    row = torch.arange(1, sum(lengths) + 1)
    group = [rank(index, size) for index in range(size)]
    stretches = [each.own(row) for each in group]
    assert {len(stretch) for stretch in stretches} == {group[0].width(len(row))}
    filled = torch.cat(stretches)
    assert torch.equal(filled[: len(row)], row)
    assert not filled[len(row) :].any()
    assert len(filled) - len(row) < size
    scored = torch.arange(1, len(row))
    found: list[int] = []
    for each, stretch in zip(group, stretches, strict=True):
        tokens, places = each.predicted_here(scored, len(row))
        assert torch.equal(stretch[places], row[tokens - 1])
        found += tokens.tolist()
    assert sorted(found) == scored.tolist()
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    sequences = group[0].sequences(starts, len(row))
    assert sequences[: len(starts)].tolist() == starts.tolist()
    assert sequences[-1] == len(filled)
    assert bool((sequences.diff() > 0).all())


class Copied(SequenceRanks):
    """A rank whose neighbours all have what it has: what comes from each of them is the part that it has for itself."""

    def exchanged(self, parts: Tensor) -> Tensor:
        return parts[self.index].expand_as(parts).contiguous()


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_rank_has_the_key_heads_that_its_heads_ask(
    key_heads: int, heads_each: int, width: int, size: int, depth: int
) -> None:
    """However few key heads there are, each of a rank's query heads meets the key head that it asks in the model, for all tokens."""
    num_heads = key_heads * heads_each * size
    for index in range(size):
        ranks = Copied(SimpleNamespace(size=lambda: size, rank=lambda index=index: index))  # pyright: ignore[reportArgumentType]
        numbers = torch.arange(key_heads).view(1, key_heads, 1, 1).expand(1, key_heads, width, depth)
        asked = torch.arange(num_heads).view(1, num_heads, 1, 1).expand(1, num_heads, width, depth)
        query, key = ranks.heads(asked), ranks.heads(numbers)
        assert query.shape == (1, num_heads // size, width * size, depth)
        assert query.shape[1] % key.shape[1] == 0
        met = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        assert torch.equal(met, query // (num_heads // key_heads))


def test_heads_that_cannot_be_shared_are_refused_with_what_can() -> None:
    """Six heads for four ranks: the message names the key and the sizes that divide."""
    with pytest.raises(BackendError, match=rf"{KEY} must divide the model's 6 .* got 4; write one of 1, 2, 3, 6"):
        rank(0, 4).check_heads(6)


@pytest.mark.parametrize(
    ("options", "rotary", "why"),
    [
        ({"remove_padding": False}, {}, "use_remove_padding is false"),
        ({}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "of kind dynamic"),
    ],
)
def test_models_that_cannot_share_rows_are_refused(options: dict, rotary: dict, why: str) -> None:
    """Rows with padding, and positions that depend on the longest sequence at hand, cannot be cut: an error before the first step, with the key."""
    shape = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaModel(LlamaConfig(**shape, num_attention_heads=2, **rotary))

    class Alone(SequenceRanks):
        """The only rank of its group."""

        def exchanged(self, parts: Tensor) -> Tensor:
            return parts

        def gathered(self, rows: Tensor, num_tokens: int) -> Tensor:
            return rows[:num_tokens]

    alone = Alone(SimpleNamespace(size=lambda: 1, rank=lambda: 0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(BackendError, match=rf"{KEY} must be 1 for LlamaModel.*{why}.*write {KEY}=1"):
        FlatModel(model.eval(), sequence_ranks=alone, **options)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.n_gpus_per_node=6",), rf"{KEY} must divide .* = 6 ranks, got 4; write {KEY}=1"),
        (("actor_rollout_ref.model.use_remove_padding=false",), "use_remove_padding must be true with"),
    ],
)
def test_a_configuration_that_cannot_share_tokens_is_refused(overrides: tuple[str, ...], message: str) -> None:
    """Ranks that do not divide, and padding, are told before anything starts, by the keys to change."""
    problems = strategy_problems(load_config([], [*SHARDED, *overrides]))
    assert len(problems) == 1
    assert re.search(message, problems[0])
    assert not strategy_problems(load_config([], SHARDED))


def test_adapters_and_a_critic_are_no_problem_of_sharded_ranks() -> None:
    """What ranks of another strategy refuse runs on sharded ones, which share tokens at that."""
    keys = ("actor_rollout_ref.model.lora_rank=8", "algorithm.adv_estimator=gae")
    assert not strategy_problems(load_config([], [*SHARDED, *keys]))


def test_ranks_that_share_tokens_have_each_a_budget() -> None:
    """Four ranks hold a sequence four times as long as the budget of one; a longer one is refused with what each would need."""
    budget = (
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "data.train_batch_size=256",
        "data.max_prompt_length=1000",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=500",
    )
    assert not consistency_problems(load_config([], [*SHARDED, *budget, "data.max_response_length=1000"]))
    with pytest.raises(ConfigError, match=rf"per_gpu x {KEY}=4 must hold one whole sequence.*per_gpu=501 or more"):
        load_config([], [*SHARDED, *budget, "data.max_response_length=1001"])


def test_the_key_of_other_systems_is_told_ours() -> None:
    """Where others have the key beside the actor's, the message names its place here."""
    with pytest.raises(ConfigError, match=KEY.replace(".", r"\.")):
        load_config([], ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"])
