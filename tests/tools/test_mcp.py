"""Tools of a stdio server: a real one, written with the official SDK, that also dies, hangs, babbles and forgets."""

import asyncio
import gc
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ostinato_tools import (
    DuplicateToolError,
    OutcomeKind,
    ToolConfigError,
    ToolExecutor,
    ToolInfrastructureError,
    ToolOutcome,
    ToolRegistry,
    ToolResponse,
    ToolSchemaError,
    load_tools,
)
from ostinato_tools.mcp import McpResult, McpTool, close_mcp_servers
from ostinato_tools.testing import make_call

pytest.importorskip("mcp", reason="needs the extra mcp")

SERVER = Path(__file__).parent / "mcp_server.py"
README = Path(__file__).parents[2] / "packages" / "tools" / "README.md"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LIMIT = 100_000
TOKEN = "sesame-4711"


class TaggedTool(McpTool):
    """Gives a reward for every answer."""

    def parse_result(self, result: McpResult) -> tuple[ToolResponse, float, dict]:
        """Reward a half."""
        response, _, metrics = super().parse_result(result)
        return response, 0.5, metrics


class Place:
    """A folder with a tool configuration for one server, and the server's journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"

    def entry(self, config: dict | None = None, mcp: dict | None = None, env: dict | None = None, **entry: Any) -> dict:
        """An entry for the server of the tests, named `odd`."""
        server = {
            "command": sys.executable,
            "args": [str(SERVER)],
            "env": {"JOURNAL": str(self.journal), **(env or {})},
        }
        servers = self.folder / "servers.json"
        servers.write_text(json.dumps({"mcpServers": {"odd": server}}))
        config = {"type": "mcp", "max_message_bytes": LIMIT, **(config or {})}
        return {"config": config, "mcp": {"mcp_servers_config_path": "servers.json", **(mcp or {})}, **entry}

    def load(self, *entries: dict) -> ToolRegistry:
        """Load a configuration of these entries."""
        path = self.folder / "tools.yaml"
        path.write_text(json.dumps({"tools": list(entries)}))
        return load_tools(path)

    def notes(self, word: str) -> int:
        """How often the server wrote the word."""
        return self.journal.read_text().split().count(word) if self.journal.exists() else 0

    @property
    def pids(self) -> list[int]:
        """Processes of the server, also those that have ended."""
        lines = self.journal.read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("pid ")]

    def tell(self, topic: str, text: str) -> None:
        """Tell the server something."""
        Path(f"{self.journal}.{topic}").write_text(text)


@pytest.fixture
def place(tmp_path: Path):
    """A server of this test's own."""
    yield Place(tmp_path)
    close_mcp_servers()


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory):
    """A server that tests of this module share; none of them harms it. Loading its tools again starts nothing."""
    return Place(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def odd(shared_place):
    """The tools of the shared server."""
    return shared_place.load(shared_place.entry())


async def one(registry: ToolRegistry, name: str, arguments: dict | None = None, **policies: Any) -> ToolOutcome:
    """The outcome of one call in a trajectory of its own."""
    async with ToolExecutor(registry, **{"max_response_length": None, **policies}).open("t") as tools:
        (outcome,) = await tools.run([make_call(name, arguments)])
    assert tools.release_failures == []
    return outcome


def test_a_list_that_is_too_large_is_why_loading_fails(place: Place) -> None:
    """A server whose list of tools is over the limit is refused for that, not for the end that we put to it."""
    with pytest.raises(
        ToolInfrastructureError, match=r"'odd' must be reachable, got: .*larger than 1500 bytes"
    ) as caught:
        place.load(place.entry({"max_message_bytes": 1500, "max_retries": 0}))
    assert "exit code" not in str(caught.value)


def gone(pid: int) -> bool:
    """Whether a process has ended, or ends soon."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not running(pid):
            return True
        time.sleep(0.02)
    return False


def running(pid: int) -> bool:
    """Whether a process is there and not only waits to be forgotten by its parent."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.skipif(not README.is_file(), reason="the README is not beside the tests")
def test_the_readme_example_runs() -> None:
    """The README's example of a server runs as it stands."""
    (example,) = re.findall(r"```py\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    subprocess.run([sys.executable, "-c", example], check=True, timeout=120)


def test_schemas_arrive_whole(odd) -> None:
    """Every tool of every page is there, and its schema keeps $defs, anyOf, defaults and keywords that nobody knows."""
    assert len(odd.names) == 24
    (schema,) = odd.schemas(["complex"])
    assert schema["type"] == "function"
    assert schema["function"]["description"] == "The tool complex."
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "where": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}], "default": None},
            "depth": {"type": "integer", "minimum": 1, "x-unit": "metres"},
        },
        "required": ["depth"],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "additionalProperties": False,
        "x-extension": {"deep": [1, {"er": True}]},
    }


async def test_arguments_and_text_pass_unchanged(odd) -> None:
    """What the model writes arrives at the server as it is, and the server's text comes back as it is."""
    text = '"\\ \n\t</tool_call><|im_end|> äöü 𝒳 \u2028'
    assert (await one(odd, "echo", {"text": text})).message["content"] == text
    outcome = await one(odd, "complex", {"depth": 3, "where": {"x": 0.1}})
    assert json.loads(outcome.message["content"]) == {"depth": 3, "where": {"x": 0.1}}


async def test_structured_content_is_a_metric_and_text_where_there_is_none(odd) -> None:
    """Structured content reaches the metrics, and the model where the server gave no text."""
    outcome = await one(odd, "add", {"a": 1, "b": 2})
    assert outcome.message["content"] == "3"
    assert outcome.metrics == {"structured_content": {"sum": 3}}
    outcome = await one(odd, "structured")
    assert json.loads(outcome.message["content"]) == {"ä": [1, None]}


async def test_images_pass_untouched_and_nothing_is_dropped_silently(odd) -> None:
    """Images keep the server's base64, embedded text is text, and what cannot be shown is named."""
    outcome = await one(odd, "many")
    *images, text = outcome.message["content"]
    assert images == [{"type": "image", "image": f"data:image/png;base64,{PIXEL}"}] * 2
    assert text["text"].splitlines() == [
        "first",
        "[audio of audio/wav cannot be shown]",
        "[resource a: file:///a.txt]",
        "inside",
        "[resource file:///d of unknown type cannot be shown]",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "text"),
    [
        ("fail", {"text": "no such file"}, "tool_error", "Error: no such file"),
        ("break", {}, "tool_error", "Error: "),
        ("promise", {}, "tool_error", "Invalid structured content"),
        ("reject", {}, "bad_arguments", "no such city"),
        ("big", {"size": 2 * LIMIT}, "tool_error", f"larger than {LIMIT} bytes"),
        ("complex", {"depth": 0}, "bad_arguments", "depth"),
        ("echo", {"text": "\ud800"}, "bad_arguments", "Unicode"),
        ("add", {"a": float("nan"), "b": 1}, "bad_arguments", "JSON"),
    ],
)
async def test_errors_of_the_tool_are_text_for_the_model(odd, caplog, name, arguments, kind, text) -> None:
    """What the tool or its server says about a call is classed, readable and not logged, and the session goes on."""
    outcome = await one(odd, name, arguments)
    assert outcome.kind == kind
    assert text in outcome.message["content"]
    assert not [record for record in caplog.records if record.name.startswith("ostinato")]
    assert (await one(odd, "echo", {"text": "still"})).message["content"] == "still"


async def test_lines_that_are_no_messages_are_survived(odd, caplog) -> None:
    """A server that prints between its messages is understood all the same, and the log says so once."""
    assert [(await one(odd, "chatter")).message["content"] for _ in range(2)] == ["done", "done"]
    assert len([record for record in caplog.records if "no message" in record.getMessage()]) <= 1


async def test_a_notice_that_is_too_large_is_nobody_s_answer(odd) -> None:
    """What is too large and no answer fails no call, whatever stands in it."""
    assert (await one(odd, "shout", {"size": 2 * LIMIT})).message["content"] == "heard"


async def test_calls_of_many_trajectories_share_a_session(odd) -> None:
    """A hundred trajectories calling at once over one session each get their own answer."""
    outcomes = await asyncio.gather(*(one(odd, "echo", {"text": str(index)}) for index in range(100)))
    assert [outcome.message["content"] for outcome in outcomes] == [str(index) for index in range(100)]


async def test_a_call_without_an_answer_is_a_timeout_and_others_go_on(odd) -> None:
    """A hanging call ends at its deadline; calls beside it and after it have their answers."""
    hanging, other = await asyncio.gather(one(odd, "hang", timeout_s=1), one(odd, "add", {"a": 1, "b": 1}))
    assert (hanging.kind, other.kind) == (OutcomeKind.TIMEOUT, OutcomeKind.OK)
    assert (await one(odd, "echo", {"text": "on"})).kind is OutcomeKind.OK


def test_a_server_serves_one_event_loop_after_another(odd) -> None:
    """The session belongs to no event loop of its callers."""
    kinds = [asyncio.run(one(odd, "echo", {"text": "x"})).kind for _ in range(3)]
    assert kinds == [OutcomeKind.OK] * 3


async def test_a_server_that_dies_in_mid_call(place) -> None:
    """The call is infrastructure with the reason, is not repeated, and the next call finds a new server."""
    registry = place.load(place.entry())
    outcome = await one(registry, "die")
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    for words in ("'odd'", "exit code 3", "the last words", "may have run and was not repeated"):
        assert words in outcome.message["content"]
    assert place.notes("die") == 1
    assert (await one(registry, "echo", {"text": "again"})).message["content"] == "again"
    assert place.notes("start") == 2
    assert gone(place.pids[0])


@pytest.mark.parametrize(
    ("name", "num_calls", "kind"), [("die_once", 1, "infrastructure"), ("die_once_safely", 2, "ok")]
)
async def test_only_what_is_said_to_be_safe_is_repeated(place, name: str, num_calls: int, kind: str) -> None:
    """A call that may have run is repeated only if the server calls its tool idempotent or read-only."""
    outcome = await one(place.load(place.entry()), name)
    assert (outcome.kind, place.notes(name)) == (kind, num_calls)


@pytest.mark.slow
async def test_whoever_runs_the_tools_may_say_that_repeating_is_safe(place) -> None:
    """`policy: {idempotent: true}` repeats a call that the server does not vouch for."""
    registry = place.load(place.entry(policy={"idempotent": True}))
    assert (await one(registry, "die_once")).kind is OutcomeKind.OK
    assert registry.get("die_once").policy.idempotent


async def test_hints_and_timeout_become_policy(odd, shared_place) -> None:
    """A read-only tool is idempotent for the executor, and `config.timeout` is the deadline of each call."""
    registry = shared_place.load(shared_place.entry({"timeout": 0.5}))
    assert registry.get("add").policy.idempotent
    assert not registry.get("echo").policy.idempotent
    assert (await one(registry, "hang")).kind is OutcomeKind.TIMEOUT


async def test_a_blocked_server_is_noticed_and_replaced(place, monkeypatch) -> None:
    """After a call without an answer a server that gives no sign of life is killed, and the next safe call starts another."""
    monkeypatch.setattr("ostinato_tools.mcp.server.PROBE_TIMEOUT_S", 0.2)
    registry = place.load(place.entry())
    assert (await one(registry, "block", timeout_s=0.5)).kind is OutcomeKind.TIMEOUT
    assert (await one(registry, "add", {"a": 1, "b": 2})).kind is OutcomeKind.OK
    assert place.notes("start") == 2
    assert gone(place.pids[0])


@pytest.mark.parametrize(
    ("name", "words"), [("flood", "does not speak the protocol"), ("endless", "without the end of a message")]
)
async def test_endless_output_is_cut_off(place, name: str, words: str) -> None:
    """A server that prints without end is given up long before its output fills the memory."""
    outcome = await one(place.load(place.entry()), name)
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert words in outcome.message["content"]
    assert gone(place.pids[0])


@pytest.mark.parametrize(
    ("startup", "timeout_s", "words"),
    [
        ("exit", 30, "exit code 7; stderr ends with 'cannot start with ***'"),
        ("silent", 1, "no answer within 1.0 s"),
        ("babble", 3, "no messages, the first 'Welcome!'"),
    ],
)
def test_a_server_that_does_not_start(place, monkeypatch, caplog, startup: str, timeout_s: float, words: str) -> None:
    """A server that ends, says nothing or says something else is a clear error in time, and leaves no process; whoever waits for the next
    attempt is told what was wrong with the last one."""
    monkeypatch.setattr("ostinato_tools.mcp.stdio.EXIT_GRACE_S", 0.2)
    config = {"start_timeout_s": timeout_s, "max_retries": int(startup == "exit")}
    entry = place.entry(config, env={"STARTUP": startup, "TOKEN": TOKEN})
    with pytest.raises(ToolInfrastructureError, match=r"MCP server 'odd' must be reachable.*tools\.yaml") as caught:
        place.load(entry)
    assert words in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert place.notes("start") == 1 + config["max_retries"]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("trying again" in text and words in text for text in warned) == config["max_retries"]
    assert all(gone(pid) for pid in place.pids)


@pytest.mark.slow
def test_a_slow_start_is_waited_for(place) -> None:
    """A server that needs a while is there once it answers."""
    assert "echo" in place.load(place.entry({"max_retries": 0}, env={"STARTUP": "slow"})).names


def test_a_missing_program_is_not_tried_again(place) -> None:
    """A command that does not exist is named at once."""
    entry = place.entry(mcp={"mcpServers": {"none": {"command": "no-such-program"}}})
    del entry["mcp"]["mcp_servers_config_path"]
    with pytest.raises(ToolInfrastructureError, match="No such file or directory: no-such-program"):
        place.load(entry)


async def test_a_withdrawn_tool_is_noticed(place) -> None:
    """A server that says that its tools changed is asked again, and a call of a tool that is gone is infrastructure."""
    async with ToolExecutor(place.load(place.entry()), max_response_length=None).open("t") as tools:
        await tools.run([make_call("retire", {"text": "echo"})])
        for _ in range(100):  # the notice travels beside the answers
            (outcome,) = await tools.run([make_call("echo", {"text": "x"})])
            if outcome.kind is OutcomeKind.INFRASTRUCTURE:
                break
        (other,) = await tools.run([make_call("add", {"a": 1, "b": 2})])
    assert "offers no tool 'echo' any more" in outcome.message["content"]
    assert other.kind is OutcomeKind.OK


async def test_a_tool_that_is_no_longer_offered(place, caplog) -> None:
    """A tool that is gone when the server starts anew is infrastructure, other tools go on, and the log names it."""
    registry = place.load(place.entry())
    place.tell("without", "echo")
    close_mcp_servers()
    outcome = await one(registry, "echo", {"text": "x"})
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert "offers no tool 'echo' any more" in outcome.message["content"]
    assert place.notes("echo") == 0
    assert (await one(registry, "add", {"a": 1, "b": 2})).kind is OutcomeKind.OK
    assert "changed or gone: echo" in caplog.text


def test_a_tool_that_is_listed_twice(place) -> None:
    """Two tools of one name on one server are refused."""
    place.tell("twice", "yes")
    with pytest.raises(ToolInfrastructureError, match="lists two tools named 'complex'"):
        place.load(place.entry())


def test_a_schema_that_is_none_is_named_and_can_be_left_out(place) -> None:
    """A schema that cannot be used is refused naming server and tool, and the server's other tools can be had without it."""
    place.tell("schema", json.dumps({"type": "object", "properties": {"a": {"type": "whole"}}}))
    with pytest.raises(
        ToolSchemaError, match=r"tool 'odd' of MCP server 'odd' .*properties\.a.*with tool_selected_list"
    ):
        place.load(place.entry())
    assert place.load(place.entry(mcp={"tool_selected_list": ["echo"]})).names == ("echo",)


async def test_trajectories_have_sessions_of_their_own(place) -> None:
    """With `session: trajectory` the tools of a trajectory share one server, others have another, and each ends once."""
    executor = ToolExecutor(place.load(place.entry({"session": "trajectory"})))
    assert place.notes("start") == place.notes("end") == 1  # to learn the tools
    async with executor.open("t") as first, executor.open("t") as second:
        outcomes = await first.run([make_call("count"), make_call("also_count"), make_call("count")])
        assert sorted(outcome.message["content"] for outcome in outcomes) == ["1", "2", "3"]
        (outcome,) = await second.run([make_call("count")])
        assert outcome.message["content"] == "1"
        assert (place.notes("start"), place.notes("end")) == (3, 1)
    assert first.release_failures == second.release_failures == []
    assert (place.notes("start"), place.notes("end")) == (3, 3)
    assert all(gone(pid) for pid in place.pids)


async def test_a_lost_session_of_a_trajectory_is_not_replaced(place) -> None:
    """State that died with its server is not passed off as fresh: the trajectory's later calls say what happened."""
    executor = ToolExecutor(place.load(place.entry({"session": "trajectory"})), max_response_length=None)
    async with executor.open("t") as tools:
        for name in ("count", "die", "count", "add"):
            (outcome,) = await tools.run([make_call(name, {"a": 1, "b": 2} if name == "add" else {})])
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert "the state of this trajectory is lost" in outcome.message["content"]
    assert place.notes("start") == 2
    assert tools.release_failures == []


async def test_a_cancelled_trajectory_ends_its_session(place) -> None:
    """Cancellation in mid-call passes through and leaves no process."""
    executor = ToolExecutor(place.load(place.entry({"session": "trajectory"})))

    async def trajectory() -> None:
        async with executor.open("t") as tools:
            await tools.run([make_call("hang")])

    task = asyncio.ensure_future(trajectory())
    while not place.notes("hang"):  # noqa: ASYNC110 - the server is another process
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(gone(pid) for pid in place.pids)


async def test_a_stubborn_server_and_its_children_are_killed(place, monkeypatch) -> None:
    """A server that ignores the end of its input and SIGTERM is killed, and so are the children that it left."""
    monkeypatch.setattr("ostinato_tools.mcp.stdio.EXIT_GRACE_S", 0.1)
    registry = place.load(place.entry({"session": "trajectory"}, env={"STARTUP": "stubborn"}))
    outcome = await one(registry, "leave_child")
    assert outcome.kind is OutcomeKind.OK
    assert all(gone(pid) for pid in [*place.pids, int(outcome.message["content"])])


def test_loading_twice_is_one_server(place) -> None:
    """Two registries of one configuration share the server, which ends when both are gone."""
    first, second = place.load(place.entry()), place.load(place.entry())
    assert place.notes("start") == 1
    del first
    gc.collect()
    assert asyncio.run(one(second, "echo", {"text": "x"})).kind is OutcomeKind.OK
    del second
    gc.collect()
    assert gone(place.pids[0])


def test_the_end_of_the_process_ends_its_servers(place) -> None:
    """A program that just ends leaves no server behind, not even a stubborn one."""
    registry = place.load(place.entry(env={"STARTUP": "stubborn"}))
    code = f"import ostinato_tools; ostinato_tools.load_tools({str(place.folder / 'tools.yaml')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert gone(place.pids[1])
    assert asyncio.run(one(registry, "echo", {"text": "ours"})).kind is OutcomeKind.OK
    assert len(place.pids) == 2


FORK = """
import asyncio, os, sys
from ostinato_tools import ToolExecutor, load_tools
from ostinato_tools.testing import make_call

registry = load_tools(sys.argv[1])

async def count():
    async with ToolExecutor(registry).open("t") as tools:
        (outcome,) = await tools.run([make_call("count")])
    return outcome.message["content"]

before = asyncio.run(count())
child = os.fork()
if not child:
    sys.exit(int(asyncio.run(count()) != "1"))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (before, asyncio.run(count())) == ("1", "2")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_a_server_of_its_own(place) -> None:
    """A forked process starts its own server and ends it, and leaves its parent's alone."""
    gc.collect()
    registry = place.load(place.entry())
    place.journal.unlink()
    subprocess.run([sys.executable, "-c", FORK, str(place.folder / "tools.yaml")], check=True, timeout=100)
    assert place.notes("start") == 2
    assert all(gone(pid) for pid in place.pids)
    assert registry.names


def test_collisions_name_both_places(odd, shared_place) -> None:
    """A server's tool that has the name of another tool is refused naming both, and a prefix cures it."""
    entry = shared_place.entry(mcp={"tool_selected_list": ["echo"]})
    native = {"class_name": "ostinato_tools.testing.echo"}
    with pytest.raises(
        DuplicateToolError, match=r"in .*tools\[0\], tool 'echo' of MCP server 'odd' and in .*tools\[1\]"
    ):
        shared_place.load(entry, native)
    entry["mcp"]["name_prefix"] = "far_"
    registry = shared_place.load(entry, native)
    assert registry.names == ("far_echo", "echo")
    assert asyncio.run(one(registry, "far_echo", {"text": "x"})).message["content"] == "x"


def test_a_selection_names_tools_that_exist(odd, shared_place) -> None:
    """A selected tool that no server offers is refused with those that are offered."""
    with pytest.raises(ToolConfigError, match=r"offer \(add, echo.*got \['ecko'\]"):
        shared_place.load(shared_place.entry(mcp={"tool_selected_list": ["echo", "ecko"]}))


async def test_a_derived_class_reads_rewards_out_of_results(odd, shared_place, monkeypatch) -> None:
    """`class_name` may name a class derived from McpTool, which makes rewards of answers."""
    monkeypatch.setitem(sys.modules, "tagged_tools", sys.modules[TaggedTool.__module__])
    registry = shared_place.load(shared_place.entry(class_name="tagged_tools.TaggedTool"))
    assert (await one(registry, "echo", {"text": "x"})).reward == 0.5


async def test_kwargs_of_rows_are_refused(odd) -> None:
    """A row cannot pass keywords to a server."""
    async with ToolExecutor(odd).open("t", {"echo": {"execute_kwargs": {"user": 1}}}) as tools:
        (outcome,) = await tools.run([make_call("echo", {"text": "x"})])
    assert outcome.kind is OutcomeKind.TOOL_ERROR
    assert "execute_kwargs of echo must be empty, got ['user']" in outcome.message["content"]


async def test_secrets_stay_out_of_logs_and_messages(place, caplog) -> None:
    """The values of `env` appear neither in logs at any level nor in a failure's message."""
    caplog.set_level(logging.DEBUG)
    registry = place.load(place.entry(env={"TOKEN": TOKEN}))
    (await one(registry, "echo", {"text": "x"}))
    outcome = await one(registry, "die")
    assert TOKEN not in outcome.message["content"] + caplog.text
    assert TOKEN not in repr(registry.get("echo").config["mcp"].server.spec)
    assert (await one(registry, "environment", {"text": "TOKEN"})).message["content"] == TOKEN


async def test_servers_get_little_of_our_environment(odd, monkeypatch) -> None:
    """A variable of this process reaches a server only if its configuration says so."""
    monkeypatch.setitem(os.environ, "SECRET_OF_OURS", "x")
    assert (await one(odd, "environment", {"text": "SECRET_OF_OURS"})).message["content"] == "unset"
