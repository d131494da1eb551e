"""Requests on their way through a vLLM that the test plays: each is answered once, whoever ends it."""

import asyncio
from types import SimpleNamespace

import pytest

from ostinato_engines import (
    EngineClosedError,
    EngineCrashedError,
    EngineInputError,
    PauseMode,
    SamplingParams,
    StopReason,
)
from ostinato_engines.engine_status import EngineStatus
from ostinato_engines.vllm_engine.engine_log import EngineLog

pytest.importorskip("torch")

from ostinato_engines.vllm_engine.traffic import Traffic

PARAMS = SamplingParams(logprobs=False)


class DeadError(Exception):
    """What the engine raises once it is dead."""


class Played:
    """A running engine that answers when it is told to."""

    why_no_hold = "it holds nothing"
    exact_spans = False
    is_dead = False
    parts = SimpleNamespace(sampling_params=dict, final_only="final", dead_error=DeadError, refusals=(ValueError,))

    def __init__(self):
        self.asked: dict[str, asyncio.Future] = {}

    async def generate(self, prompt, asked, engine_id):
        """The answer that the test gives."""
        self.asked[engine_id] = asyncio.get_running_loop().create_future()
        return await self.asked[engine_id]

    def answer(self, engine_id, reason, token_ids=(7,)):
        """One request ends."""
        completion = SimpleNamespace(token_ids=token_ids, finish_reason=reason, logprobs=None, weight_versions=None)
        self.asked[engine_id].set_result((SimpleNamespace(outputs=[completion], num_cached_tokens=0), None))

    async def abort(self, engine_ids):
        """These end with what they have."""
        for name in engine_ids:
            if name in self.asked and not self.asked[name].done():
                self.answer(name, "abort")


@pytest.fixture
def engine():
    return Played()


@pytest.fixture
def status():
    return EngineStatus(loaded=True)


@pytest.fixture
def traffic(engine, status):
    return Traffic(engine, status, EngineLog(), version=3)


async def begun(traffic, name):
    """A request that waits at the gate, or in the engine."""
    task = asyncio.ensure_future(traffic.serve(name, [1, 2], PARAMS, 4))
    await asyncio.sleep(0)
    assert name in traffic.requests
    return task


async def test_a_request_that_waited_comes_from_the_weights_that_serve_then(traffic, engine, status):
    """A pause keeps it from the engine; new weights that come meanwhile are those that it is computed under."""
    status.paused = PauseMode.KEEP
    task = await begun(traffic, "a")
    assert (traffic.under_way(), engine.asked) == ([], {})
    traffic.note_update(5)
    status.paused = None
    traffic.requests["a"].leave_gate(True)
    while not engine.asked:  # noqa: ASYNC110  the loop tells no event for it
        await asyncio.sleep(0)
    assert [request.engine_id for request in traffic.under_way()] == ["a#0"]
    engine.answer("a#0", "length")
    output = await task
    assert [(span.version, span.exact) for span in output.policy_versions] == [(5, True)]
    assert not traffic.requests


async def test_weights_that_come_while_it_is_computed_are_told(traffic, engine):
    """Which tokens are from which is not known then, and that it was computed anew is counted."""
    task = await begun(traffic, "a")
    traffic.note_update(4)
    engine.answer("a#0", "length")
    output = await task
    assert [(span.version, span.exact) for span in output.policy_versions] == [(3, False)]
    assert output.num_preempted == 1


async def test_an_abort_returns_once_everybody_has_the_answer(traffic, engine, status):
    """It ends who waits and who is computed, counts each once, and passes over names that are not under way."""
    computed = await begun(traffic, "computed")
    status.paused = PauseMode.KEEP
    waiting = await begun(traffic, "waiting")
    assert await traffic.abort(["computed", "waiting", "computed", "unknown"]) == 2
    outputs = [await computed, await waiting]
    assert [output.stop_reason for output in outputs] == [StopReason.ABORTED] * 2
    assert [output.token_ids for output in outputs] == [[7], []]


async def test_whoever_fails_all_gives_each_its_own_error(traffic, status):
    """It does not matter whether a request waits, or what the engine still returns for it."""
    computed = await begun(traffic, "computed")
    status.paused = PauseMode.KEEP
    waiting = await begun(traffic, "waiting")
    await traffic.fail_all(lambda name: EngineClosedError(f"{name} must end"))
    for name, task in (("computed", computed), ("waiting", waiting)):
        with pytest.raises(EngineClosedError, match=f"{name} must end"):
            await task


@pytest.mark.parametrize("closed", [False, True])
async def test_an_engine_that_dies_is_noted_unless_it_was_to_end(traffic, engine, status, closed):
    """The first to find it says so for all that come later."""
    task = await begun(traffic, "a")
    status.closed = closed
    engine.asked["a#0"].set_exception(DeadError("gone"))
    with pytest.raises(EngineCrashedError, match="gone"):
        await task
    assert (status.failure is None) is closed


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueError("too long"), EngineInputError), (KeyError("x"), EngineCrashedError)]
)
async def test_an_error_of_one_request_is_its_own(traffic, engine, status, error, raised):
    """What the engine refuses is the caller's matter, anything else the engine's; it serves on."""
    task = await begun(traffic, "a")
    engine.asked["a#0"].set_exception(error)
    with pytest.raises(raised, match="'a#0'"):
        await task
    assert status.failure is None
