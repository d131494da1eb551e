"""Tokens that replicas sample of their own weights, to be compared with the trainer's."""

import asyncio

import pytest

from ostinato_agent_loop import AgentLoopOutput, Trajectory
from ostinato_engines import PolicySpan, StopReason, TokenOutput
from ostinato_engines.testing import ScriptedServer
from ostinato_trainer.loop import weight_probe
from ostinato_trainer.loop.weight_probe import sample_probe


class Server(ScriptedServer):
    """Answers one thing, or raises it, and remembers what it was asked for."""

    def __init__(self, answer):
        super().__init__([])
        self.answer, self.asked, self.released = answer, [], []

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        self.asked.append((list(prompt_ids), sampling_params.max_tokens, sampling_params.temperature))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer

    async def release(self, request_id):
        self.released.append(request_id)


def output(*token_ids, version=3, logprobs=True):
    spans = (PolicySpan(0, version),)
    return TokenOutput(
        list(token_ids), [-0.5] * len(token_ids) if logprobs else None, StopReason.LENGTH, policy_versions=spans
    )


def prompts():
    """Two trajectories, of which the first has nothing: it failed before its first turn."""
    segment = AgentLoopOutput(prompt_ids=[4, 5], response_ids=[6], response_mask=[1], response_logprobs=[-1.0])
    return [
        Trajectory(group_id="g", trajectory_id=f"t{place}", row={}, segments=segments)
        for place, segments in enumerate(([], [segment]))
    ]


async def test_each_replica_continues_a_prompt_of_the_step():
    """What comes back has the prompts' tokens, the replicas' own log-probabilities, and nothing else to learn from."""
    servers = [Server(output(7, 8)), Server(output(9))]
    batch = await sample_probe(servers, prompts(), version=3, temperature=0.7)
    assert batch is not None
    assert batch.token_ids.tolist() == [4, 5, 7, 8, 4, 5, 9]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert batch.rollout_log_probs[batch.loss_mask].tolist() == [-0.5] * 3
    assert [server.asked for server in servers] == [[([4, 5], 16, 0.7)]] * 2
    assert all(len(server.released) == 1 for server in servers)


@pytest.mark.parametrize(
    "answer",
    [output(7, version=2), output(), output(7, logprobs=False), [7], RuntimeError("broken"), None],
    ids=["another version", "no token", "no log-probability", "bare ids", "an error", "no answer"],
)
async def test_a_replica_that_tells_nothing_is_left_out(monkeypatch, answer):
    """Others count all the same; where there are none, nothing is known."""
    monkeypatch.setattr(weight_probe, "_PATIENCE_S", 0.01)
    server = Server(answer)
    assert await sample_probe([server], prompts(), version=3, temperature=1.0) is None
    assert len(server.released) == 1
    batch = await sample_probe([server, Server(output(9))], prompts(), version=3, temperature=1.0)
    assert batch is not None
    assert batch.token_ids.tolist() == [4, 5, 9]


async def test_without_a_prompt_nobody_is_asked():
    """A step of which every trajectory failed at once."""
    server = Server(output(7))
    assert await sample_probe([server], prompts()[:1], version=3, temperature=1.0) is None
    assert server.asked == []
