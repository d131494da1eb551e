"""A server of the Model Context Protocol for the tests, written with the official SDK, that can misbehave in many ways.

`python mcp_server.py` serves over stdio; `python mcp_server.py http` serves over streamable HTTP on a free port of 127.0.0.1 and
prints the port. What happens is appended to the file `$JOURNAL`, a word a line. `$STARTUP` chooses a bad start.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path


def note(word: str) -> None:
    """Append a word to the journal."""
    if "JOURNAL" in os.environ:
        with Path(os.environ["JOURNAL"]).open("a") as journal:
            journal.write(word + "\n")


def start() -> None:
    """Start badly where told so, before anything takes time."""
    note("start")
    note(f"pid {os.getpid()}")
    startup = os.environ.get("STARTUP")
    if startup == "exit":
        print(f"cannot start with {os.environ.get('TOKEN')}", file=sys.stderr)
        sys.exit(7)
    if startup == "silent":
        time.sleep(3600)
    if startup == "slow":
        time.sleep(1)
    if startup == "babble":
        print("Welcome!\nThis is no protocol.", flush=True)
        time.sleep(3600)
    if startup == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    start()

import mcp_types as types  # noqa: E402
from mcp.server import Server  # noqa: E402
from mcp.server.stdio import stdio_server  # noqa: E402
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged  # noqa: E402

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
COMPLEX = {
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
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SIZE = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
NOTHING = {"type": "object", "properties": {}}
SUM = {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]}

PIPE = os.dup(1)
"""The pipe to the client; the SDK puts something harmless in the place of stdout."""
counts: dict[str, int] = {}
retired: set[str] = set()


def said(topic: str) -> str:
    """What a test has written into the file `$JOURNAL.<topic>`."""
    path = Path(os.environ.get("JOURNAL", "/nowhere") + "." + topic)
    return path.read_text() if path.exists() else ""


def tool(name: str, schema: dict, **extra) -> types.Tool:
    """A tool of the listing."""
    return types.Tool(name=name, description=f"The tool {name}.", input_schema=schema, **extra)


SAFE = types.ToolAnnotations(read_only_hint=True)
TOOLS = [
    tool("add", NUMBERS, output_schema=SUM, annotations=SAFE),
    tool("echo", TEXT),
    tool("count", NOTHING),
    tool("also_count", NOTHING),
    tool("fail", TEXT),
    tool("break", NOTHING),
    tool("reject", NOTHING),
    tool("promise", NOTHING, output_schema=SUM),
    tool("die", NOTHING),
    tool("die_once", NOTHING),
    tool("die_once_safely", NOTHING, annotations=types.ToolAnnotations(idempotent_hint=True)),
    tool("hang", NOTHING),
    tool("block", NOTHING),
    tool("many", NOTHING),
    tool("structured", NOTHING),
    tool("big", SIZE),
    tool("endless", NOTHING),
    tool("chatter", NOTHING),
    tool("shout", SIZE),
    tool("flood", NOTHING),
    tool("environment", TEXT),
    tool("retire", TEXT),
    tool("leave_child", NOTHING),
    tool("complex", COMPLEX),
]


async def list_tools(ctx, params) -> types.ListToolsResult:
    """Two pages of tools, without those that were retired, or with one twice or one of any schema."""
    tools = [item for item in TOOLS if item.name not in retired and item.name != said("without")]
    if said("schema"):
        tools.append(tool("odd", json.loads(said("schema"))))
    if said("twice"):
        tools.append(tools[-1])
    if params is None or params.cursor is None:
        return types.ListToolsResult(tools=tools[:5], next_cursor="rest")
    return types.ListToolsResult(tools=tools[5:])


def text(value: str, **extra) -> types.CallToolResult:
    """A result of one text."""
    return types.CallToolResult(content=[types.TextContent(text=value)], **extra)


async def call_tool(ctx, params) -> types.CallToolResult:
    """Do what the tool's name says."""
    name, arguments = params.name, params.arguments or {}
    note(name)
    if name in retired:
        raise ValueError(f"Unknown tool: {name}")
    return await HANDLERS[name](ctx, arguments)


async def add(ctx, arguments):
    """Text and structured content."""
    total = arguments["a"] + arguments["b"]
    return text(str(total), structured_content={"sum": total})


async def echo(ctx, arguments):
    """The text."""
    return text(arguments["text"])


async def count(ctx, arguments):
    """Calls so far in this session: over stdio that of the process, over HTTP that of the session's id."""
    session = ctx.request.headers.get("mcp-session-id", "none") if ctx.request is not None else "process"
    counts[session] = counts.get(session, 0) + 1
    return text(str(counts[session]))


async def fail(ctx, arguments):
    """The tool's own error."""
    return text(arguments["text"], is_error=True)


async def break_(ctx, arguments):
    """An exception in the server."""
    raise RuntimeError("the handler broke")


async def reject(ctx, arguments):
    """An error of the protocol."""
    from mcp import MCPError

    raise MCPError(code=types.INVALID_PARAMS, message="no such city")


async def promise(ctx, arguments):
    """Structured content that does not fit the output schema."""
    return text("?", structured_content={"sum": "many"})


async def die(ctx, arguments):
    """The process ends in mid-call."""
    print("the last words", file=sys.stderr, flush=True)
    os._exit(3)


async def die_once(ctx, arguments):
    """The process ends in the first call only."""
    marker = Path(os.environ["JOURNAL"] + ".died")
    if marker.exists():
        return text("survived")
    marker.touch()
    os._exit(3)


async def hang(ctx, arguments):
    """No answer to this call."""
    await asyncio.Event().wait()


async def block(ctx, arguments):
    """No answer to anything any more."""
    time.sleep(3600)  # noqa: ASYNC251 - that is the point


async def many(ctx, arguments):
    """Content of every kind."""
    return types.CallToolResult(
        content=[
            types.TextContent(text="first"),
            types.ImageContent(data=PIXEL, mime_type="image/png"),
            types.AudioContent(data="AAAA", mime_type="audio/wav"),
            types.ResourceLink(uri="file:///a.txt", name="a"),
            types.EmbeddedResource(resource=types.TextResourceContents(uri="file:///b.txt", text="inside")),
            types.EmbeddedResource(
                resource=types.BlobResourceContents(uri="file:///c", blob=PIXEL, mime_type="image/png")
            ),
            types.EmbeddedResource(resource=types.BlobResourceContents(uri="file:///d", blob="AAAA")),
        ]
    )


async def structured(ctx, arguments):
    """Structured content without text."""
    return types.CallToolResult(content=[], structured_content={"ä": [1, None]})


async def big(ctx, arguments):
    """As much text as asked for."""
    return text("x" * arguments["size"])


async def endless(ctx, arguments):
    """A line that never ends."""
    while True:
        os.write(PIPE, b"x" * 65536)
        await asyncio.sleep(0)


async def chatter(ctx, arguments):
    """A line on stdout that is no message, before the answer."""
    os.write(PIPE, b"Loading the model...\n{not json}\n")
    return text("done")


async def shout(ctx, arguments):
    """A notice that is too large, and that holds what looks like the id of this call, before the answer."""
    data = {"id": ctx.request_id, "result": "x" * arguments["size"]}
    notice = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": data}}
    os.write(PIPE, json.dumps(notice).encode() + b"\n")
    return text("heard")


async def flood(ctx, arguments):
    """Lines that are no messages, for ever."""
    while True:
        os.write(PIPE, b"noise\n" * 1000)
        await asyncio.sleep(0)


async def environment(ctx, arguments):
    """An environment variable."""
    return text(os.environ.get(arguments["text"], "unset"))


async def retire(ctx, arguments):
    """A tool is no longer offered."""
    retired.add(arguments["text"])
    await ctx.session.send_tool_list_changed()
    await bus.publish(ToolsListChanged())
    return text("retired")


async def leave_child(ctx, arguments):
    """A child that holds the pipes and outlives the server if it can."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(3600)")
    return text(str(child.pid))


async def complex_(ctx, arguments):
    """The arguments as they arrived."""
    return text(json.dumps(arguments, sort_keys=True))


HANDLERS = {
    "add": add,
    "echo": echo,
    "count": count,
    "also_count": count,
    "fail": fail,
    "break": break_,
    "reject": reject,
    "promise": promise,
    "die": die,
    "die_once": die_once,
    "die_once_safely": die_once,
    "hang": hang,
    "block": block,
    "many": many,
    "structured": structured,
    "big": big,
    "endless": endless,
    "chatter": chatter,
    "shout": shout,
    "flood": flood,
    "environment": environment,
    "retire": retire,
    "leave_child": leave_child,
    "complex": complex_,
}
bus = InMemorySubscriptionBus()
server = Server(
    "misbehaving", on_list_tools=list_tools, on_call_tool=call_tool, on_subscriptions_listen=ListenHandler(bus)
)


async def serve_stdio() -> None:
    """Serve one client over the pipes."""
    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())


async def serve_http(port: int) -> None:
    """Serve over HTTP; some paths answer badly."""
    import uvicorn

    app = server.streamable_http_app(
        json_response="JSON_RESPONSE" in os.environ, stateless_http="STATELESS" in os.environ
    )

    async def answer(send, status: int, body: bytes = b"", **headers: str) -> None:
        pairs = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    async def front(scope, receive, send) -> None:
        path = said("path") or scope.get("path", "")
        if scope.get("method") == "DELETE":
            note("delete")
        headers = dict(scope.get("headers", ()))
        if path == "/elsewhere":
            await answer(send, 307, location="http://127.0.0.2:1/mcp?token=hidden")
        elif path == "/busy":
            await answer(send, 429)
        elif path == "/broken":
            await answer(send, 500, b"oops")
        elif path == "/page":
            await answer(send, 200, b"<html>", content_type="text/html")
        elif path == "/half":
            await answer(send, 200, b'{"jsonrpc": ', content_type="application/json")
        elif path == "/zipped":
            await answer(send, 200, b"??", content_type="application/json", content_encoding="gzip")
        elif path == "/silent":
            await asyncio.Event().wait()
        elif path == "/private" and headers.get(b"authorization") != b"Bearer open-sesame":
            await answer(send, 401)
        elif path in ("/private", "/mcp"):
            await app({**scope, "path": "/mcp", "raw_path": b"/mcp"}, receive, send)
        elif scope["type"] == "lifespan":
            await app(scope, receive, send)
        else:
            await answer(send, 404)

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(front, log_level="critical", timeout_graceful_shutdown=0)
    await uvicorn.Server(config).serve(sockets=[listener])


def main() -> None:
    """Serve until the input ends."""
    http = sys.argv[1:2] == ["http"]
    asyncio.run(serve_http(int(sys.argv[2]) if len(sys.argv) > 2 else 0) if http else serve_stdio())
    note("end")
    if os.environ.get("STARTUP") == "stubborn":
        time.sleep(3600)


if __name__ == "__main__":
    main()
