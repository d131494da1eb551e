"""Third-party servers are found by path and name."""

import textwrap

import pytest

from ostinato_engines import AsyncServerBase, EngineLoadError, load_server_class
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
    """A missing file, a broken file and an unknown module are each named."""
    with pytest.raises(EngineLoadError, match="existing Python file"):
        load_server_class(tmp_path / "none.py", "Mine")
    broken = tmp_path / "broken.py"
    broken.write_text("1/0")
    with pytest.raises(EngineLoadError, match="ZeroDivisionError"):
        load_server_class(broken, "Mine")
    with pytest.raises(EngineLoadError, match="no_such_module_here"):
        load_server_class("no_such_module_here", "Mine")
