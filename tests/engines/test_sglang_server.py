"""SGLangServer against a server that speaks SGLang's protocol with the embedded engine behind it."""

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ostinato_engines import WeightManifest  # noqa: E402
from ostinato_engines.sglang_server import SGLangServer  # noqa: E402
from ostinato_engines.testing import WeightUpdate, check_server  # noqa: E402

STUB = (sys.executable, "-m", "ostinato_engines.testing.sglang_stub")


@pytest.fixture
def checkpoint(make_model, tmp_path):
    """A folder with a tiny model."""
    make_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def update_for(make_model, forward_of):
    """A weight update to another model of the same shape."""

    def make(version, seed=1):
        model = make_model(seed=seed)
        named = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
        return WeightUpdate(WeightManifest.from_tensors(version, named), lambda: iter(named), forward_of(model))

    return make


async def test_conformance(checkpoint, make_model, forward_of, update_for, vocab_size):
    """The whole suite passes through SGLang's protocol: nothing is skipped, and logprobs are true."""
    server = SGLangServer(checkpoint, launcher=STUB)
    await server.start()
    try:
        report = await check_server(
            server, vocab_size=vocab_size, forward=forward_of(make_model()), weight_update=update_for(3)
        )
    finally:
        await server.shutdown()
    assert [result.name for result in report.results if result.skipped] == []
