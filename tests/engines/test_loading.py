"""Third-party servers are found by path and name."""

import textwrap

import pytest

from ostinato_engines import AsyncServerBase, EngineLoadError, load_server_class
from ostinato_engines.loading import ENGINES, construct_server, engine_class
from ostinato_engines.testing import ScriptedServer

SOURCE = """
from ostinato_engines import AsyncServerBase

class Mine(AsyncServerBase):
    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        return [1]
    async def chat_completion(self, raw_request):
        return {}

class Half(AsyncServerBase):
    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        return [1]

class Other: ...
"""


@pytest.fixture
def server_file(tmp_path):
    """A file with a good class, an abstract one and a foreign one."""
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(SOURCE))
    return file


def test_a_class_in_a_file(server_file):
    """A .py path gives the class, the same one each time."""
    found = load_server_class(server_file, "Mine")
    assert issubclass(found, AsyncServerBase)
    assert load_server_class(str(server_file), "Mine") is found


def test_a_class_in_a_module():
    """A dotted module gives the class."""
    assert load_server_class("ostinato_engines.testing", "ScriptedServer") is ScriptedServer


@pytest.mark.parametrize(
    ("name", "message"), [("Yours", "Mine"), ("Half", "chat_completion"), ("Other", "subclass of AsyncServerBase")]
)
def test_a_class_that_does_not_fit(server_file, name, message):
    """A missing, abstract or foreign class is refused with what is there or missing."""
    with pytest.raises(EngineLoadError, match=message):
        load_server_class(server_file, name)


def test_a_path_that_is_none(tmp_path):
    """A missing file and an unknown module are each named."""
    with pytest.raises(EngineLoadError, match="existing Python file"):
        load_server_class(tmp_path / "none.py", "Mine")
    with pytest.raises(EngineLoadError, match=r"must begin with the home of a known user .*; write the whole path"):
        load_server_class("~nobody-of-this-name/own.py", "Mine")
    with pytest.raises(EngineLoadError, match="no_such_module_here"):
        load_server_class("no_such_module_here", "Mine")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1/0", r"ZeroDivisionError: division by zero \(line 1\)"),
        ("x = 1\nraise SystemExit(3)", r"SystemExit: 3 \(line 2\)"),
        ("import sys\nsys.exit('no licence')", r"SystemExit: no licence \(line 2\)"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_file_that_does_not_import(tmp_path, monkeypatch, source, message):
    """Whatever a file raises while it is imported, an exit too, is one error with the line, by file and by module."""
    file = tmp_path / "broken_server_file.py"
    file.write_text(source)
    for _ in range(2):  # nothing half-imported is left behind
        with pytest.raises(EngineLoadError, match=message):
            load_server_class(file, "Mine")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineLoadError, match=message.partition(":")[0]):
        load_server_class("broken_server_file", "Mine")


def test_an_interrupt_goes_through(tmp_path):
    """Ctrl-C while a file is imported is no error of the file."""
    file = tmp_path / "interrupted.py"
    file.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_server_class(file, "Mine")


class Silent(AsyncServerBase):
    """A server that keeps what it was made with."""

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        return []

    async def chat_completion(self, raw_request):
        return {}


class Plain(Silent):
    def __init__(self, model_path):
        self.got = {"model_path": model_path}


class Some(Silent):
    def __init__(self, model, *, max_model_len, flavour="plain", seed=None):
        self.got = {"model": model, "max_model_len": max_model_len, "flavour": flavour, "seed": seed}


class All(Silent):
    def __init__(self, model, **settings):
        self.got = {"model": model, **settings}


class NoModel(Silent):
    def __init__(self):
        self.got = {}


class Demanding(Silent):
    def __init__(self, model, *, max_model_len, licence):
        self.got = {}


class Raising(Silent):
    def __init__(self, model):
        raise TypeError("my own trouble")


def test_a_server_gets_the_settings_that_it_names():
    """A class is made with the model's path and what its `__init__` names of the settings; `**kwargs` names all."""
    settings = {"max_model_len": 64, "max_num_seqs": 8, "seed": 3}
    made = [construct_server(kind, "m", settings).got for kind in (Plain, Some, All)]  # type: ignore[attr-defined]
    assert made == [
        {"model_path": "m"},
        {"model": "m", "max_model_len": 64, "flavour": "plain", "seed": 3},
        {"model": "m", **settings},
    ]


def test_a_required_setting_is_not_lost():
    """A setting that somebody chose and the class does not take is refused by name; the others stay a matter of taste."""
    settings = {"max_model_len": 64, "enforce_eager": True}
    for kind in (Plain, Some):
        with pytest.raises(EngineLoadError, match=f"{kind.__name__} must take enforce_eager, which is set"):
            construct_server(kind, "m", settings, required=["enforce_eager"])
    assert construct_server(All, "m", settings, required=["enforce_eager"]).got["enforce_eager"] is True  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "message"), [(NoModel, "too many positional"), (Demanding, "licence")])
def test_a_server_that_cannot_be_made(kind, message):
    """A class that takes no model, or demands what no setting provides, is refused with its signature."""
    with pytest.raises(EngineLoadError, match=message):
        construct_server(kind, "m", {"max_model_len": 64})


def test_trouble_of_a_constructor_is_its_own():
    """What a constructor raises itself comes out as it is, and is not taken for a wrong signature."""
    with pytest.raises(TypeError, match="my own trouble"):
        construct_server(Raising, "m", {})


def test_our_engines_are_found_by_name():
    """Each name gives a server class that takes a model and a run's settings; another name is refused with the known."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for name in ENGINES:
        server = construct_server(engine_class(name), "model", {"max_model_len": 64, "cast_weights": True, "seed": 1})
        assert server.max_model_len == 64
        assert name in type(server).__name__.lower()
    with pytest.raises(EngineLoadError, match=f"one of {', '.join(ENGINES)}, got 'trtllm'"):
        engine_class("trtllm")
