"""The configuration nodes."""

from __future__ import annotations

import ast
import inspect

import msgspec
import pytest

import ostinato_agent_loop.config
import ostinato_rollout.config
from ostinato_agent_loop import AgentConfig, MultiTurnConfig, RolloutConfig
from ostinato_tokenization import SanityCheckMode


def test_the_defaults_are_those_of_the_field():
    """An empty node has the defaults that users know."""
    config = msgspec.convert({}, RolloutConfig)
    turns, agent = config.multi_turn, config.agent
    assert (turns.enable, turns.format, turns.max_parallel_calls, turns.max_tool_response_length) == (
        False,
        "hermes",
        1,
        256,
    )
    assert (turns.max_assistant_turns, turns.max_user_turns, turns.tool_response_truncate_side) == (
        None,
        None,
        "middle",
    )
    assert (agent.num_workers, agent.default_agent_loop) == (8, "single_turn_agent")
    assert turns.tokenization_sanity_check_mode is SanityCheckMode.STRICT


@pytest.mark.parametrize(
    ("node", "path"),
    [
        ({"multi_turn": {"max_turns": 3}}, "max_turns"),
        ({"multi_turn": {"max_parallel_calls": 0}}, "max_parallel_calls must be at least 1, got 0"),
        ({"multi_turn": {"max_user_turns": 0}}, "max_user_turns must be at least 1"),
        ({"multi_turn": {"tool_response_truncate_side": "top"}}, "top"),
        ({"multi_turn": {"tokenization_sanity_check_mode": "off"}}, "off"),
        ({"multi_turn": {"max_consecutive_malformed": -1}}, "max_consecutive_malformed"),
        ({"multi_turn": {"tool_timeout_s": 0}}, "tool_timeout_s must be positive"),
        ({"agent": {"num_workers": 0}}, "num_workers must be at least 1"),
        ({"agent": {"trajectory_timeout_s": -1}}, "trajectory_timeout_s must be positive"),
        ({"agent": {"default_agent_loop": ""}}, "default_agent_loop must name an agent"),
        ({"agent": {"custom_async_server": {"path": "x.py"}}}, "must be given together"),
        ({"n": 0}, "n must be at least 1"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"val_kwargs": {"do_sample": True, "top_p": 0.0}}, "top_p must be"),
    ],
)
def test_a_wrong_value_is_refused_where_it_enters(node, path):
    """Unknown keys and values out of range are validation errors that name the key."""
    with pytest.raises(msgspec.ValidationError, match=path):
        msgspec.convert(node, RolloutConfig)


def test_sampling_is_what_is_written_and_nothing_else():
    """Training samples with the keys given; validation is greedy unless do_sample is set."""
    config = RolloutConfig(temperature=0.7, top_k=5)
    assert (config.sampling_params().temperature, config.sampling_params().top_k) == (0.7, 5)
    assert config.sampling_params().repetition_penalty == 1.0
    assert config.sampling_params(validate=True).temperature == 0.0
    sampled = msgspec.convert({"val_kwargs": {"do_sample": True, "temperature": 0.5}}, RolloutConfig)
    assert sampled.sampling_params(validate=True).temperature == 0.5


@pytest.mark.parametrize("module", [ostinato_agent_loop.config, ostinato_rollout.config])
def test_every_key_is_explained(module):
    """Each field of each node has a docstring below it."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(below, ast.Expr), field.target
                    assert isinstance(below.value, ast.Constant), field.target


def test_nodes_are_frozen_and_forbid_unknown_fields():
    """A node cannot be changed, and takes no keys that it does not know."""
    for node in (RolloutConfig(), MultiTurnConfig(), AgentConfig()):
        assert node.__struct_config__.frozen
        assert node.__struct_config__.forbid_unknown_fields
