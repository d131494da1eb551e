"""What needs no server: reading configurations, lines, secrets, results, and being light without the extra."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import ToolConfigError, ToolError, ToolFileNotFoundError, ToolImportError, load_tools
from ostinato_tools.mcp import McpResult, McpTool
from ostinato_tools.mcp.config import HttpServer, SessionScope, StdioServer, read_options, read_servers
from ostinato_tools.mcp.lines import LineSplitter, Oversized
from ostinato_tools.mcp.results import response_of
from ostinato_tools.mcp.secrets import Redactor, guard_logs, url_secrets

STDIO = {"command": "serve"}
SECRET = "sesame-4711"


def load(folder: Path, entry: dict, **files: str) -> None:
    """Load a configuration with one entry, beside these files."""
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    load_tools(folder / "tools.yaml")


def test_importing_needs_no_sdk() -> None:
    """Importing the package and even `ostinato_tools.mcp` loads neither the SDK nor what it stands on."""
    code = (
        "import sys, ostinato_tools, ostinato_tools.mcp\n"
        "print([name for name in ('mcp', 'mcp_types', 'anyio', 'httpx2', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_missing_extra_prints_its_install_line(tmp_path, monkeypatch) -> None:
    """Without the SDK an entry of type mcp says what to install."""
    monkeypatch.setitem(sys.modules, "mcp", None)
    entry = {"config": {"type": "mcp"}, "mcp": {"mcpServers": {"a": STDIO}}}
    with pytest.raises(ToolImportError, match=r"pip install 'ostinato-tools\[mcp\]'"):
        load(tmp_path, entry)


def test_servers_as_users_write_them(monkeypatch) -> None:
    """The keys of other clients' files are read, variables are filled in, and the kind follows from the keys."""
    monkeypatch.setenv("WHERE", "far.example")
    monkeypatch.delenv("MISSING", raising=False)
    servers = read_servers(
        {
            "a": {
                "command": "npx",
                "args": ["-y", "pkg", ""],
                "env": {"KEY": "${MISSING:-x}", "EMPTY": ""},
                "cwd": "/",
            },
            "b": {"type": "streamable-http", "url": "https://${WHERE}/mcp", "headers": {"X-Key": "1"}},
            "c": {"transport": "stdio", "command": "serve"},
            "d": {"url": "http://h/mcp", "auth_token": "t"},
        },
        "f.json",
    )
    assert servers == (
        StdioServer(name="a", command="npx", args=("-y", "pkg", ""), env={"KEY": "x", "EMPTY": ""}, cwd="/"),
        HttpServer(name="b", url="https://far.example/mcp", headers={"X-Key": "1"}),
        StdioServer(name="c", command="serve"),
        HttpServer(name="d", url="http://h/mcp", headers={"Authorization": "Bearer t"}),
    )


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (None, "must be a mapping, got NoneType"),
        ({}, "either command or url"),
        ({**STDIO, "url": "http://h"}, "either command or url"),
        ({**STDIO, "headers": {}}, r"got stdio with \['headers'\]"),
        ({"url": "http://h", "env": {}}, r"got http with \['env'\]"),
        ({**STDIO, "autoApprove": []}, r"no keys but command, args.*got \['autoApprove'\]"),
        ({"type": "sse", "url": "http://h"}, r"one of stdio, http, streamable-http, got \['sse'\]"),
        ({"type": "stdio", "transport": "http", **STDIO}, "one of stdio"),
        ({"type": "http", **STDIO}, r"got http with \['command'\]"),
        ({"type": "http"}, "url of .* must be a string, got NoneType"),
        ({"command": ""}, "command of .* must be a usable string, got an empty one"),
        ({"command": ["serve"]}, "command of .* must be a string, got list"),
        ({**STDIO, "args": "x"}, "args of .* must be a list, got str"),
        ({**STDIO, "args": [1]}, r"args\[0\] of .* must be a string, got int"),
        ({**STDIO, "args": ["a\0b"]}, "NUL"),
        ({**STDIO, "env": {"PORT": 80}}, "env.PORT of .* must be a string, got int; quote it"),
        ({**STDIO, "env": {"KEY": "${NOT_SET_ANYWHERE}"}}, r"\$\{NOT_SET_ANYWHERE\} in env.KEY .* must be set"),
        ({"url": "ftp://h"}, "must begin with http"),
        ({"url": "http://h", "headers": {"X": "a\nb"}}, "headers of .* must be printable ASCII"),
        ({"url": "http://h", "headers": {"X": "ä"}}, "headers of .* must be printable ASCII"),
        ({"url": "http://h", "auth_token": "t", "headers": {"authorization": "x"}}, "must have one authorization"),
    ],
)
def test_a_wrong_server_is_named_with_its_cure(server: Any, words: str) -> None:
    """A server that cannot be meant is refused naming itself and its place."""
    with pytest.raises(ToolConfigError, match=words) as caught:
        read_servers({"a": server}, "f.json")
    assert "MCP server 'a' of f.json" in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["command", "args", "env", "cwd", "url", "headers", "auth_token", "type", "transport", "x"])


@given(JSON | st.dictionaries(st.text(max_size=3), JSON | st.dictionaries(KEYS, JSON, max_size=4), max_size=2))
def test_any_servers_are_read_or_refused(servers: Any) -> None:
    """Whatever stands in the file is a server or a ToolConfigError, nothing else."""
    try:
        read = read_servers(servers, "f.json")
    except ToolConfigError:
        return
    assert [server.name for server in read] == list(servers)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"session": "mine"}, "session"),
        ({"start_timeout_s": 0}, "start_timeout_s must be a positive finite number"),
        ({"start_timeout_s": "1"}, "start_timeout_s"),
        ({"max_retries": -1}, "max_retries must be at least 0"),
        ({"max_message_bytes": 1}, "max_message_bytes must be at least 1024"),
        ({"sesion": "shared"}, r"no keys but type, timeout, session.*got \['sesion'\]; remove"),
        ({"rate_limit": 120}, r"got \['rate_limit'\]; write policy: \{max_calls_per_s"),
    ],
)
def test_a_wrong_option_is_refused(config: dict, words: str) -> None:
    """An unknown or unusable option is refused naming it."""
    with pytest.raises(ToolConfigError, match=f"(?s)p.yaml.*{words}"):
        read_options({"type": "mcp", **config}, "p.yaml")
    assert read_options({"type": "mcp", "session": "trajectory"}, "p").session is SessionScope.TRAJECTORY


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ({"mcp": None}, ToolConfigError, "mcp of .* must be a mapping"),
        ({"mcp": {}}, ToolConfigError, "either mcp_servers_config_path or mcpServers, got neither"),
        ({"mcp": {"mcpServers": {}, "mcp_servers_config_path": "x"}}, ToolConfigError, "got both"),
        ({"mcp": {"mcpServers": {}}}, ToolConfigError, "got an empty one"),
        ({"mcp": {"mcpServers": {"a": STDIO}, "tools": []}}, ToolConfigError, r"got \['tools'\]"),
        ({"mcp": {"mcpServers": {"a": STDIO}, "tool_selected_list": "x"}}, ToolConfigError, "list of tool names"),
        ({"mcp": {"mcpServers": {"a": STDIO}, "tool_selected_list": []}}, ToolConfigError, "list of tool names"),
        ({"mcp": {"mcpServers": {"a": STDIO}, "name_prefix": 1}}, ToolConfigError, "name_prefix"),
        ({"mcp": {"mcp_servers_config_path": "no.json"}}, ToolFileNotFoundError, "looked in .* and .*no.json"),
        (
            {"mcp": {"mcp_servers_config_path": "~nobody-of-this-name/x.json"}},
            ToolFileNotFoundError,
            "must begin with the home of a known user",
        ),
        ({"mcp": {"mcp_servers_config_path": "bad.json"}}, ToolConfigError, "bad.json must be JSON.*line 2"),
        ({"mcp": {"mcp_servers_config_path": "twice.json"}}, ToolConfigError, "'a' is written twice"),
        ({"mcp": {"mcp_servers_config_path": "list.yaml"}}, ToolConfigError, "key mcpServers, got list"),
        ({"mcp": {"mcpServers": {"a": STDIO}}, "tool_schema": {}}, ToolConfigError, r"got \['tool_schema'\]"),
        ({"mcp": {"mcpServers": {"a": STDIO}}, "policy": 1}, ToolConfigError, "policy of .* must be a mapping"),
        ({"mcp": {"mcpServers": {"a": STDIO}}, "class_name": 1}, ToolConfigError, "class_name of .* must be a string"),
        (
            {"mcp": {"mcpServers": {"a": STDIO}}, "class_name": "ostinato_tools.testing.CounterTool"},
            ToolConfigError,
            "must name McpTool or a class derived from it",
        ),
        (
            {"mcp": {"mcpServers": {"a": STDIO}}, "config": {"type": "mcp", "timeout": 1}, "policy": {"timeout_s": 1}},
            ToolConfigError,
            "must have one deadline",
        ),
    ],
)
def test_a_wrong_entry_is_refused_before_anything_starts(tmp_path, entry: dict, error: type, words: str) -> None:
    """An entry that cannot be meant names its file and the cure."""
    files = {
        "bad_json": f'{{"mcpServers": {{\n"a" "{SECRET}"}}}}',
        "twice_json": '{"mcpServers": {"a": {}, "a": {}}}',
        "list_yaml": "[1]",
    }
    with pytest.raises(error, match=f"(?s){words}") as caught:
        load(tmp_path, {"config": {"type": "mcp"}, **entry}, **files)
    assert isinstance(caught.value, ToolError)
    assert "yaml" in str(caught.value) or "json" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_broken_configuration_does_not_quote_its_secrets(tmp_path) -> None:
    """A syntax error in a tool configuration says where, not what the line holds."""
    (tmp_path / "tools.yaml").write_text(f"tools:\n  - env: {{KEY: {SECRET}\n  ]")
    with pytest.raises(ToolConfigError, match=r"tools\.yaml must be YAML, got: .* in line 3") as caught:
        load_tools(tmp_path / "tools.yaml")
    assert SECRET not in str(caught.value)


def test_the_tool_class_alone_is_refused() -> None:
    """`McpTool` without what the loader makes of an entry says how it is meant."""
    schema = {"type": "function", "function": {"name": "x", "parameters": {}}}
    with pytest.raises(ToolConfigError, match=r"must come from an entry of type mcp, got \['type'\]"):
        McpTool({"type": "native"}, schema)


@given(st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_lines_do_not_depend_on_how_bytes_are_cut(lines: list[bytes], data) -> None:
    """However a stream is cut into chunks, lines within the limit come whole and longer ones as their head, in order."""
    stream = b"".join(line + b"\n" for line in lines)
    splitter, found = LineSplitter(6), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found.extend(splitter.feed(stream[:size]))
        stream = stream[size:]
    expected = [line if len(line) <= 6 else None for line in lines]
    assert [None if isinstance(line, Oversized) else line for line in found] == expected
    heads = [line.head for line in found if isinstance(line, Oversized)]
    longer = [line for line in lines if len(line) > 6]
    assert all(line.startswith(head) and len(head) > 6 for line, head in zip(longer, heads, strict=True))
    assert splitter.num_discarded == 0


def test_a_line_without_end_takes_no_memory() -> None:
    """Of a line that never ends only the head is kept, and it is reported once."""
    splitter = LineSplitter(10_000)
    found = [item for _ in range(1000) for item in splitter.feed(b"x" * 1000)]
    assert found == [Oversized(b"x" * 4096)]
    assert splitter.num_discarded == 1_000_000
    assert splitter.feed(b"\nnext\n") == [b"next"]


@given(st.text(min_size=4, max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_no_secret_survives(secret: str, before: str, after: str) -> None:
    """A secret inside any text is masked."""
    assert secret not in Redactor([secret])(before + secret + after).replace("***", "")


def test_credentials_of_urls_and_tokens_of_headers_are_secrets() -> None:
    """User, password and query values count, in their plain and their encoded form, and so does the token after `Bearer`."""
    url = "https://us%40er:pass%2Fword@host/mcp?api_key=ke%20y1&empty=&b=val2"
    redact = Redactor([*url_secrets(url), "Bearer tok-en"])
    told = redact(f"{url} us@er pass/word 'ke y1' tok-en host/mcp")
    assert told == "https://***:***@host/mcp?api_key=***&empty=&b=*** *** *** '***' *** host/mcp"


def test_logs_of_the_libraries_are_masked(caplog) -> None:
    """A secret in a message, its arguments or a traceback of the libraries underneath does not reach a handler."""
    guard_logs(Redactor([SECRET]))
    caplog.set_level(logging.DEBUG)
    logger = logging.getLogger("httpx2")
    logger.info("HTTP Request: %s %s", "POST", f"http://h/mcp?key={SECRET}")
    try:
        raise ValueError(SECRET)
    except ValueError:
        logger.exception("it failed")
    assert SECRET not in caplog.text
    assert "http://h/mcp?key=***" in caplog.text
    assert "ValueError: ***" in caplog.text


def test_results_become_responses() -> None:
    """Texts are joined, images are data URLs, structured content stands in for missing text, unknown kinds are named."""
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "image", "data": "AA==", "mimeType": "image/png"},
        {"type": "text", "text": "b"},
        {"type": "hologram"},
    ]
    response = response_of(McpResult(content=blocks, structured={"x": 1}))
    assert response.text == "a\nb\n[hologram of unknown type cannot be shown]"
    assert response.image == ["data:image/png;base64,AA=="]
    assert response_of(McpResult(content=[], structured={"x": "ä"})).text == '{"x": "ä"}'
    assert response_of(McpResult(content=[])).text == ""
