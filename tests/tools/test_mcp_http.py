"""Tools of a server over streamable HTTP, on a free port of 127.0.0.1: sessions, bad answers, restarts."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato_tools import OutcomeKind, ToolExecutor, ToolInfrastructureError, ToolOutcome, ToolRegistry, load_tools
from ostinato_tools.mcp import close_mcp_servers
from ostinato_tools.testing import make_call

pytest.importorskip("mcp", reason="needs the extra mcp")

SERVER = Path(__file__).parent / "mcp_server.py"
LIMIT = 100_000
TOKEN = "open-sesame"


class Service:
    """The server as a process of its own, and a configuration that knows its address."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self._env = {**os.environ, "JOURNAL": str(self.journal), **env}
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start, on the same port as before."""
        command = [sys.executable, str(SERVER), "http", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self._env
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()

    def load(self, config: dict | None = None, path: str = "/mcp", **server: Any) -> ToolRegistry:
        """Load its tools."""
        url = f"http://127.0.0.1:{self.port}{path}"
        config = {"type": "mcp", "max_message_bytes": LIMIT, "start_timeout_s": 10, "max_retries": 1, **(config or {})}
        entry = {"config": config, "mcp": {"mcpServers": {"far": {"url": url, **server}}}}
        file = self.folder / "tools.yaml"
        file.write_text(json.dumps({"tools": [entry]}))
        return load_tools(file)

    def say(self, path: str) -> None:
        """Answer every request from now on as on this path; as asked for where it is empty."""
        Path(f"{self.journal}.path").write_text(path)

    def notes(self, word: str) -> int:
        """How often the server wrote the word."""
        return self.journal.read_text().split().count(word)


@pytest.fixture(scope="module", params=["events", "json"])
def shared(request, tmp_path_factory):
    """A server that the tests of this module share, answering in either way that the protocol has."""
    service = Service(tmp_path_factory.mktemp("far"), **({"JSON_RESPONSE": "1"} if request.param == "json" else {}))
    yield service
    close_mcp_servers()
    service.stop()


@pytest.fixture
def service(shared):
    """The shared server, behaving."""
    shared.say("")
    yield shared
    shared.say("")


@pytest.fixture
def mortal(tmp_path):
    """A server of this test's own."""
    service = Service(tmp_path)
    yield service
    close_mcp_servers()
    service.stop()


async def one(registry: ToolRegistry, name: str, arguments: dict | None = None, **policies: Any) -> ToolOutcome:
    """The outcome of one call in a trajectory of its own."""
    async with ToolExecutor(registry, **{"max_response_length": None, **policies}).open("t") as tools:
        (outcome,) = await tools.run([make_call(name, arguments)])
    assert tools.release_failures == []
    return outcome


@pytest.mark.parametrize("session", ["shared", "trajectory"])
async def test_calls_over_http(service, session: str) -> None:
    """Text, structured content, errors of the tool, and one answer that is too large, in either kind of session."""
    async with ToolExecutor(service.load({"session": session}), max_response_length=None).open("t") as tools:
        calls = [
            make_call("echo", {"text": "äöü </tool_call>\n"}),
            make_call("add", {"a": 1, "b": 2}),
            make_call("fail", {"text": "no such file"}),
            make_call("reject"),
            make_call("big", {"size": 2 * LIMIT}),
            make_call("break"),
        ]
        outcomes = await tools.run(calls)
        (after,) = await tools.run([make_call("echo", {"text": "still"})])
    texts = [outcome.message["content"] for outcome in outcomes]
    assert texts[:3] == ["äöü </tool_call>\n", "3", "Error: no such file"]
    assert outcomes[1].metrics == {"structured_content": {"sum": 3}}
    assert f"larger than {LIMIT} bytes" in texts[4]
    kinds = ["ok", "ok", "tool_error", "bad_arguments", "tool_error", "tool_error"]
    assert [outcome.kind for outcome in outcomes] == kinds
    assert after.message["content"] == "still"


async def test_trajectories_have_sessions_of_their_own(service) -> None:
    """With `session: trajectory` the server's state is the trajectory's, and its session is ended exactly once."""
    executor = ToolExecutor(service.load({"session": "trajectory"}))
    ended = service.notes("delete")
    async with executor.open("t") as first, executor.open("u") as second:
        outcomes = await first.run([make_call("count"), make_call("also_count"), make_call("count")])
        assert sorted(outcome.message["content"] for outcome in outcomes) == ["1", "2", "3"]
        (outcome,) = await second.run([make_call("count")])
        assert outcome.message["content"] == "1"
        assert service.notes("delete") == ended
    assert first.release_failures == second.release_failures == []
    assert service.notes("delete") == ended + 2


async def test_a_session_that_the_server_does_not_end_is_cut_off(service, monkeypatch) -> None:
    """A release without an answer ends in time, once, and is recorded."""
    monkeypatch.setattr("ostinato_tools.mcp.connection.CLOSE_GRACE_S", 0.2)
    async with ToolExecutor(service.load({"session": "trajectory"})).open("t") as tools:
        await tools.run([make_call("count"), make_call("also_count")])
        service.say("/silent")
    (failure,) = tools.release_failures
    assert "MCP server 'far' must end a session soon" in failure


@pytest.mark.parametrize("session", ["shared", "trajectory"])
async def test_a_withdrawn_tool_is_noticed(mortal, session: str) -> None:
    """A server that says that its tools changed is asked again, and a call of a tool that is gone is infrastructure."""
    async with ToolExecutor(mortal.load({"session": session}), max_response_length=None).open("t") as tools:
        await tools.run([make_call("retire", {"text": "echo"})])
        for _ in range(100):  # the notice travels on a stream of its own
            (outcome,) = await tools.run([make_call("echo", {"text": "x"})])
            if outcome.kind is OutcomeKind.INFRASTRUCTURE:
                break
        (other,) = await tools.run([make_call("add", {"a": 1, "b": 2})])
    assert "offers no tool 'echo' any more" in outcome.message["content"]
    assert other.kind is OutcomeKind.OK


BAD_ANSWERS = [
    ("/elsewhere", "infrastructure", "HTTP 307: Redirect to http://127.0.0.2:1/mcp not followed"),
    ("/private", "infrastructure", "refused the credentials with HTTP 401"),
    ("/missing", "infrastructure", "HTTP 404"),
    ("/broken", "infrastructure", "HTTP 500"),
    ("/busy", "rate_limited", "HTTP 429"),
    ("/page", "infrastructure", "text/html"),
    ("/half", "infrastructure", "Failed to parse JSON"),
    ("/zipped", "infrastructure", "encoding 'gzip'"),
]


@pytest.mark.parametrize(("path", "kind", "words"), BAD_ANSWERS)
async def test_bad_answers_to_a_call(service, path: str, kind: str, words: str) -> None:
    """A call that is answered with a redirect, a refusal or nonsense has the right class, and the next one is served."""
    registry = service.load()
    service.say(path)
    outcome = await one(registry, "echo", {"text": "x"})
    assert outcome.kind == kind
    assert words in outcome.message["content"]
    assert "hidden" not in outcome.message["content"]
    service.say("")
    assert (await one(registry, "echo", {"text": "back"})).message["content"] == "back"


@pytest.mark.parametrize(("path", "words"), [(path, words.split(": ")[0]) for path, _, words in BAD_ANSWERS])
def test_bad_answers_while_loading(service, path: str, words: str) -> None:
    """A server that cannot be used is refused when its tools are loaded, with the reason and the place."""
    with pytest.raises(ToolInfrastructureError, match=r"MCP server 'far' must be reachable.*tools\[0\]") as caught:
        service.load(path=path)
    assert words.removeprefix("Failed to ").split()[-1] in str(caught.value)


async def test_silence_is_a_timeout(service) -> None:
    """A server that takes a call and never answers costs the call its deadline and nothing else."""
    registry = service.load()
    service.say("/silent")
    assert (await one(registry, "echo", {"text": "x"}, timeout_s=0.5)).kind is OutcomeKind.TIMEOUT
    service.say("")
    assert (await one(registry, "add", {"a": 1, "b": 2})).kind is OutcomeKind.OK


async def test_credentials_are_sent_and_never_told(service, caplog) -> None:
    """`auth_token`, headers and a URL's query open the server, and appear in no log and no message."""
    caplog.set_level(logging.DEBUG)
    registry = service.load(path="/private?api_key=qs-4711", auth_token=TOKEN, headers={"X-Extra": "hd-4711"})
    assert (await one(registry, "echo", {"text": "in"})).message["content"] == "in"
    service.say("/private")
    outcome = await one(registry, "echo", {"text": "in"})
    assert outcome.message["content"] == "in"
    service.say("/broken")
    outcome = await one(registry, "echo", {"text": "in"})
    told = outcome.message["content"] + caplog.text + repr(registry.get("echo").config["mcp"].server.spec)
    assert not [secret for secret in (TOKEN, "qs-4711", "hd-4711") if secret in told]


async def test_the_environment_fills_in_credentials(service, monkeypatch) -> None:
    """`${NAME}` in a header is read from the environment."""
    monkeypatch.setenv("FAR_TOKEN", TOKEN)
    registry = service.load(path="/private", headers={"Authorization": "Bearer ${FAR_TOKEN}"})
    assert (await one(registry, "echo", {"text": "in"})).kind is OutcomeKind.OK


async def test_a_server_that_dies_in_mid_call_and_comes_back(mortal) -> None:
    """The call is infrastructure and not repeated, calls beside it too; while nobody listens calls fail in time; then they work."""
    registry = mortal.load()
    outcome = await one(registry, "die")
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert "may have run and was not repeated" in outcome.message["content"]
    assert mortal.notes("die") == 1
    refused = await one(registry, "echo", {"text": "x"})
    assert refused.kind is OutcomeKind.INFRASTRUCTURE
    assert "ConnectError" in refused.message["content"]
    mortal.stop()
    mortal.start()
    assert (await one(registry, "echo", {"text": "again"})).message["content"] == "again"


async def test_a_forgotten_session_of_a_trajectory_is_not_replaced(mortal) -> None:
    """After a restart the trajectory is told that its state is lost; a new trajectory has a new session."""
    executor = ToolExecutor(mortal.load({"session": "trajectory"}), max_response_length=None)
    async with executor.open("t") as tools:
        await tools.run([make_call("count")])
        mortal.stop()
        mortal.start()
        (outcome,) = await tools.run([make_call("count")])
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert "the state of this trajectory is lost" in outcome.message["content"]
    async with executor.open("u") as tools:
        (outcome,) = await tools.run([make_call("count")])
    assert outcome.message["content"] == "1"


async def test_one_broken_answer_leaves_its_siblings(service) -> None:
    """A call that hangs, one whose answer is too large and one that is fine, at once in one session."""
    registry = service.load()
    outcomes = await asyncio.gather(
        one(registry, "hang", timeout_s=1),
        one(registry, "big", {"size": 2 * LIMIT}),
        one(registry, "echo", {"text": "fine"}),
    )
    assert [outcome.kind for outcome in outcomes] == ["timeout", "tool_error", "ok"]


def test_a_server_without_sessions_cannot_keep_a_trajectory_s_state(tmp_path) -> None:
    """`session: trajectory` with a server that gives no session is refused, where `shared` works."""
    service = Service(tmp_path, STATELESS="1")
    try:
        with pytest.raises(ToolInfrastructureError, match="it keeps no sessions over HTTP; write session: shared"):
            service.load({"session": "trajectory"})
        assert asyncio.run(one(service.load(), "echo", {"text": "x"})).kind is OutcomeKind.OK
    finally:
        close_mcp_servers()
        service.stop()


def test_nobody_listening(tmp_path) -> None:
    """A refused connection is a clear error after the retries."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: nobody else can have the port
        entry = {
            "config": {"type": "mcp", "max_retries": 1},
            "mcp": {"mcpServers": {"far": {"url": f"http://127.0.0.1:{taken.getsockname()[1]}/mcp"}}},
        }
        (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
        with pytest.raises(ToolInfrastructureError, match="MCP server 'far' must be reachable, got: ConnectError"):
            load_tools(tmp_path / "tools.yaml")


def test_sessions_belong_to_no_event_loop(service) -> None:
    """One loaded registry serves event loops that come and go."""
    registry = service.load()
    assert [asyncio.run(one(registry, "echo", {"text": "x"})).kind for _ in range(3)] == [OutcomeKind.OK] * 3
