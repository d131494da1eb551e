"""The contract's defaults are honest."""

import subprocess
import sys

import pytest

from ostinato_engines import (
    AsyncServerBase,
    EngineInputError,
    EngineState,
    PauseMode,
    UnsupportedError,
    WeightManifest,
)


class Minimal(AsyncServerBase):
    """The two methods that a third party must write."""

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        self.refuse_media(media)
        return [7]

    async def chat_completion(self, raw_request):
        raise UnsupportedError("no chat")


async def test_two_methods_make_a_server():
    """A subclass with generate and chat_completion starts, serves, tells its health and shuts down."""
    async with Minimal() as server:
        assert await server.generate([1], {}, "a") == [7]
        assert (await server.health()).state is EngineState.READY
        await server.release("a")
        await server.resume()
        await server.wake_up()
        await server.reset_prefix_cache()
        assert server.capabilities().engine == "Minimal"
        assert not server.capabilities().logprobs


@pytest.mark.parametrize(
    ("ask", "verb"),
    [
        (lambda server: server.sleep(), "sleep"),
        (lambda server: server.pause(PauseMode.KEEP), "pause"),
        (lambda server: server.abort(), "abort"),
        (lambda server: server.update_weights(WeightManifest(1, ()), []), "update its weights"),
    ],
)
async def test_what_an_engine_cannot_do_it_says(ask, verb):
    """A default that would have to pretend raises UnsupportedError instead."""
    with pytest.raises(UnsupportedError, match=f"Minimal cannot {verb}"):
        await ask(Minimal())


async def test_media_is_refused():
    """Media is refused with its count as long as an engine serves text only."""
    with pytest.raises(EngineInputError, match=r"media must be empty, got 1 item"):
        await Minimal().generate([1], {}, "a", media=["image"])


def test_a_server_without_generate_cannot_be_made():
    """The two methods are required."""
    with pytest.raises(TypeError, match="generate"):
        AsyncServerBase()  # type: ignore[abstract]


def test_importing_the_contract_is_light():
    """Importing the package and its testing module loads neither torch nor transformers."""
    code = (
        "import sys, ostinato_engines, ostinato_engines.testing, ostinato_engines.device;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
