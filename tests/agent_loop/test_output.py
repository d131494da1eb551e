"""Outputs that are consistent by construction."""

from __future__ import annotations

import pytest

from ostinato_agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopOutputError
from ostinato_engines import PolicySpan
from ostinato_rollout import Failure, FailureKind

GOOD = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "response_mask": [1, 0, 1]}


def test_parts_that_agree_are_accepted():
    """Ids, mask, log-probabilities, positions and versions of one length make an output."""
    output = AgentLoopOutput(
        **GOOD,
        response_logprobs=[-1.0, 0.0, float("nan")],
        position_ids=[0, 1, 2, 3, 4],
        policy_versions=(PolicySpan(0, 1), PolicySpan(2, 2)),
    )
    assert output.extra_fields == {}
    assert output.metrics == AgentLoopMetrics()
    assert AgentLoopOutput(**GOOD).extra_fields is not output.extra_fields


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"response_mask": [1, 0]}, r"as long as response_ids \(3\), got 2"),
        ({"response_mask": [1, 0, 2]}, "0 and 1 only, got 2"),
        ({"response_ids": [], "response_mask": [1]}, "got 1"),
        ({"response_logprobs": [-1.0]}, "response_logprobs must be as long"),
        ({"position_ids": [0, 1]}, r"prompt and response \(5\), got 2"),
        ({"prompt_ids": []}, "prompt_ids must hold at least one token"),
        ({"prompt_ids": (1, 2)}, "prompt_ids must be a list of ints, got tuple"),
        ({"response_ids": None}, "response_ids must be a list of ints, got NoneType"),
        ({"policy_versions": (PolicySpan(1, 0),)}, "policy_versions must start at 0"),
        ({"policy_versions": (PolicySpan(0, 0), PolicySpan(0, 1))}, "policy_versions must start at 0, rise"),
        ({"policy_versions": (PolicySpan(0, 0), PolicySpan(3, 1))}, "within the 3 response tokens"),
        ({"num_turns": -1}, "num_turns must not be negative"),
        ({"prompt_ids": [1, -2]}, "prompt_ids must hold integers from 0 on"),
        ({"response_ids": [3, 4.0, 5]}, "response_ids must hold integers from 0 on"),
        ({"response_ids": [3, None, 5]}, "response_ids must hold integers from 0 on"),
        ({"response_mask": [1.0, 0, 1]}, "response_mask must hold 0 and 1 only, got 1.0"),
        ({"response_mask": [1, -1, 300]}, "response_mask must hold 0 and 1 only, got -1"),
        ({"position_ids": [0, 1, 2, 3, "4"]}, "position_ids must hold integers"),
        (
            {"response_logprobs": [-1.0, 0.0, float("-inf")]},
            "response_logprobs must be a list of finite numbers or NaN",
        ),
        ({"response_logprobs": [-1.0, None, -1.0]}, "response_logprobs must be a list of finite numbers"),
        ({"response_logprobs": (-1.0, 0.0, -1.0)}, "response_logprobs must be a list"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes, text):
    """Every contradiction is a ValueError that names the part and the cure."""
    with pytest.raises(AgentLoopOutputError, match=text) as caught:
        AgentLoopOutput(**{**GOOD, **changes})
    assert isinstance(caught.value, ValueError)


def test_an_output_without_a_response_keeps_its_prompt():
    """Nothing sampled is an empty response beside the whole prompt."""
    output = AgentLoopOutput(prompt_ids=[1, 2, 3], response_ids=[], response_mask=[])
    assert (output.prompt_ids, output.response_ids) == ([1, 2, 3], [])


def test_a_declared_failure_needs_no_tokens():
    """An agent may return an empty output that says what went wrong."""
    failure = Failure("here", FailureKind.AGENT, "no luck")
    assert AgentLoopOutput(prompt_ids=[], response_ids=[], response_mask=[], failure=failure).failure is failure
