"""The scripted server keeps the contract's rules around its script."""

import asyncio

import pytest

from ostinato_engines import EngineClosedError, EngineError, EngineInputError, StopReason, TokenOutput, WeightManifest
from ostinato_engines.testing import ScriptedServer


async def test_replies_in_order():
    """Ids, text, whole outputs and errors come back in order, cut at stop ids and limits, and requests are recorded."""
    whole = TokenOutput([9], None, StopReason.ABORTED)
    server = ScriptedServer(
        [[1, 2, 3, 4], "ab", whole, ValueError("boom")],
        encode=lambda text: [ord(char) for char in text],
        end_token_id=0,
    )
    first = await server.generate([5], {"stop_token_ids": [3], "max_tokens": 9}, "a")
    assert (first.token_ids, first.logprobs, first.stop_reason, first.stop_token_id) == (
        [1, 2, 3],
        [-0.5] * 3,
        "stop",
        3,
    )
    second = await server.generate([5, 6], {"max_tokens": 2}, "b")
    assert (second.token_ids, second.stop_reason) == ([97, 98], StopReason.LENGTH)
    assert await server.generate([7], {}, "c") is whole
    with pytest.raises(ValueError, match="boom"):
        await server.generate([7], {}, "d")
    with pytest.raises(EngineError, match="request number 5"):
        await server.generate([7], {}, "e")
    assert [(request.request_id, request.prompt_ids) for request in server.requests][:2] == [("a", [5]), ("b", [5, 6])]


async def test_a_callable_sees_the_request():
    """A callable script makes each reply from the request."""
    server = ScriptedServer(lambda request: request.prompt_ids[::-1], logprob=None, max_model_len=5)
    out = await server.generate([1, 2, 3], {}, "a")
    assert (out.token_ids, out.logprobs, out.stop_reason) == ([3, 2], None, StopReason.LENGTH)
    assert (await server.generate([1] * 5, {}, "a")).token_ids == []
    with pytest.raises(EngineInputError):
        await server.generate([1] * 6, {}, "a")


async def test_the_gate_holds_requests():
    """Gated requests wait, can be aborted, cancelled and shut down, and are counted meanwhile."""
    server = ScriptedServer(lambda request: [1], gate=asyncio.Event())
    tasks = {name: asyncio.ensure_future(server.generate([1], {}, name)) for name in "abc"}
    await asyncio.sleep(0)
    assert (await server.health()).num_running == 3
    assert await server.abort(["a", "x"]) == 1
    assert (await tasks["a"]).stop_reason is StopReason.ABORTED
    tasks["b"].cancel()
    await asyncio.wait([tasks["b"]])
    await server.shutdown()
    with pytest.raises(EngineClosedError, match="'c'"):
        await tasks["c"]
    assert (await server.health()).num_running == 0


async def test_updates_change_the_version():
    """A weight update is read to its end and changes the version that outputs carry."""
    server = ScriptedServer([[1]])
    stream = iter([("a", None), ("b", None)])
    await server.update_weights(WeightManifest(7, ()), stream)
    assert next(stream, None) is None
    out = await server.generate([1], {}, "a")
    assert [span.version for span in out.policy_versions] == [7]
    await server.release("a")
    assert server.released == ["a"]
