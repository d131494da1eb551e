"""The stub of SGLang against replies that the real one gave, kept in `sglang_replies.jsonl`."""

import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ostinato_engines.sglang_engine.http import LocalClient
from ostinato_engines.sglang_server import SGLangServer
from ostinato_engines.testing.sglang_stub.recording import Exchange, Recorder
from ostinato_engines.testing.sglang_stub.tokenizer import save_tokenizer

RECORDED = Path(__file__).parent / "sglang_replies.jsonl"


def differences(mine, theirs, place=""):
    """Where an answer of the stub has another shape than SGLang's: a field more, another type, another kind of finish."""
    if isinstance(mine, bool) or mine is None or theirs is None:
        return [] if type(mine) is type(theirs) else [f"{place}: {mine!r} for {theirs!r}"]
    if isinstance(mine, dict) and isinstance(theirs, dict):
        found = [f"{place}.{name}: beyond SGLang's" for name in mine.keys() - theirs.keys()]
        for name in mine.keys() & theirs.keys():
            found += differences(mine[name], theirs[name], f"{place}.{name}")
        return found
    if isinstance(mine, list) and isinstance(theirs, list):
        return differences(mine[0], theirs[0], f"{place}[]") if mine and theirs else []
    if isinstance(mine, int | float) and isinstance(theirs, int | float):
        return []
    if place.endswith(("finish_reason.type", "status")):
        return [] if mine == theirs else [f"{place}: {mine!r} for {theirs!r}"]
    return [] if type(mine) is type(theirs) else [f"{place}: {mine!r} for {theirs!r}"]


@pytest.fixture(scope="module")
def recorded():
    """SGLang's exchanges by name."""
    if not RECORDED.is_file():
        pytest.skip("no replies of a real SGLang are recorded: python -m benchmarks.sglang_server --parts record")
    lines = RECORDED.read_bytes().splitlines()
    return {exchange.name: exchange for exchange in (msgspec.json.decode(line, type=Exchange) for line in lines)}


async def test_the_stub_answers_as_sglang_does(make_model, tmp_path, recorded):
    """Status, fields, types and forms of a finish are those that SGLang answered the same calls with."""
    folder = tmp_path / "model"
    model = make_model(max_len=8192)
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)
    launcher = (sys.executable, "-m", "ostinato_engines.testing.sglang_stub")
    found: dict[str, Exchange] = {}
    async with SGLangServer(folder, launcher=launcher) as server:
        engine = server._engine
        assert engine is not None
        client = engine.running.client
        stranger = LocalClient(client._port, "of somebody else")
        keep = lambda exchange: found.update({exchange.name: exchange})  # noqa: E731
        await Recorder(client, stranger, folder, can_sleep=True, keep=keep).record()
    assert found.keys() >= recorded.keys()
    wrong = []
    for name, theirs in recorded.items():
        mine = found[name]
        if mine.status != theirs.status:
            wrong.append(f"{name}: status {mine.status} for {theirs.status}")
        if name == "openapi":
            missing = mine.answer["paths"].keys() - theirs.answer["paths"].keys()
            wrong += [f"{name}: {path} beyond SGLang's" for path in missing]
            continue
        wrong += [f"{name}{difference}" for difference in differences(mine.answer, theirs.answer)]
    assert wrong == []
