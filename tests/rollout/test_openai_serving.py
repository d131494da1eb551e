"""The app's connections: what is no HTTP, what comes before its time, and that nothing goes on for a client that left."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("starlette", reason="the app needs the extra serve")
pytest.importorskip("uvicorn", reason="the app needs the extra serve")

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi."}]}).encode()
STREAM = json.dumps({"messages": [{"role": "user", "content": "Hi."}], "stream": True}).encode()
HELLO = "Hello!<|im_end|>"


def request(body=BODY, *headers):
    lines = b"".join(header + b"\r\n" for header in headers)
    return CHAT + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def opened(url):
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer_to(url, *parts):
    """Send the parts one after the other, each where the server has had time for the one before; return all it says."""
    reader, writer = await opened(url)
    answer = b""
    try:
        async with asyncio.timeout(20):
            for index, part in enumerate(parts):
                if index:
                    answer += await reader.read(1)
                writer.write(part)
            return answer + await reader.read(-1)
    finally:
        writer.close()


async def until(condition):
    """Wait for what must come, and fail where it does not."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.005)


def error_of(answer):
    """The error that an answer ends with, which must be in OpenAI's form."""
    error = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        CHAT + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        CHAT + b"Content-Length: -2\r\n\r\n{}",
        CHAT + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n{}\r\n",
        CHAT + b"X-Session-ID: " + b"a" * (1 << 15),
    ],
)
async def test_what_is_no_http_is_told_in_the_form_of_errors(openai_app, sent):
    """Bytes that are no request, and headers without end, are answered with 400 like any other bad request."""
    async with openai_app() as (url, app, server):
        answer = await answer_to(url, sent)
        assert answer.startswith(b"HTTP/1.1 400 ")
        error = error_of(answer)
        assert (error["type"], server.requests) == ("invalid_request_error", [])
        assert error["message"].startswith("the request must be HTTP/1.1 with headers of at most 16384 bytes, got")
        assert app.num_in_flight == 0


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((request(STREAM, b"Connection: close"), b"more\r\n\r\n"), id="after the head of a stream"),
        pytest.param(
            (CHAT.replace(b"/json", b"/xml") + b"Transfer-Encoding: chunked\r\n\r\n", b"no number\r\n"),
            id="after a refusal",
        ),
    ],
)
async def test_garbage_after_an_answer_ends_the_connection(openai_app, caplog, parts):
    """Where an answer has begun, bytes that are no HTTP close the connection, with no fault in the log and no second answer."""
    gate = asyncio.Event()
    limits = pytest.importorskip("ostinato_rollout.openai_app").AppLimits(keepalive_s=0.01)
    async with openai_app([HELLO], pool_options={"gate": gate}, limits=limits) as (url, app, _server):
        answer = await answer_to(url, *parts)
        assert answer.count(b"HTTP/1.1 ") == 1
        await until(lambda: app.num_in_flight == 0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("ahead", [b"", request()[:40], request(), request() * 3, b"no HTTP\r\n\r\n"])
async def test_who_asks_ahead_and_leaves_cancels_its_generation(openai_app, ahead):
    """A client that sends its next requests while one is answered is still noticed when it leaves."""
    gate = asyncio.Event()
    async with openai_app(lambda _request: HELLO, pool_options={"gate": gate}) as (url, app, server):
        _reader, writer = await opened(url)
        writer.write(request())
        await until(lambda: server.requests)
        writer.write(ahead)
        await writer.drain()
        writer.close()
        await until(lambda: app.num_in_flight == 0)
        assert len(server.requests) == 1
        assert app.sessions.num_open == 0


async def test_requests_sent_ahead_are_answered_in_order(openai_app):
    """What a client sends ahead waits, however much it is, and each request gets its answer in its turn."""
    long = json.dumps({"messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
    async with openai_app(lambda _request: HELLO) as (url, _app, server):
        answer = await answer_to(url, request() + request(long) + request(BODY, b"Connection: close"))
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert [len(each.prompt_ids) > 200_000 for each in server.requests] == [False, True, False]


@pytest.mark.parametrize("name", ["X-Session-ID", "Authorization", "Content-Type", "Content-Encoding"])
async def test_a_header_that_comes_twice_is_refused(openai_app, name):
    """A header that may say one thing is not chosen from: where it comes twice, the request is refused by its name."""
    values = {"Authorization": "Bearer key", "Content-Type": "application/json", "Content-Encoding": "identity"}
    value = values.get(name, "a")
    headers = {"Authorization": "Bearer key", name: value}
    lines = [f"{key}: {each}".encode() for key, each in headers.items() if key != "Content-Type"]
    second = f"{name}: {value if name != 'X-Session-ID' else 'b'}".encode()
    async with openai_app([HELLO], api_key="key") as (url, app, server):
        answer = await answer_to(url, request(BODY, *lines, second, b"Connection: close"))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert error_of(answer)["param"] == name
        assert (server.requests, len(app.sessions)) == ([], 0)


async def test_a_method_that_a_path_has_not_is_told_which_it_has(openai_app, ask):
    """405 comes with the methods that the path has."""
    async with openai_app() as (url, _app, _server):
        status, headers, _ = await ask(url, "/v1/chat/completions", method="PUT")
        assert (status, headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_who_waits_when_the_server_ends_may_try_again(openai_app, body):
    """What is under way when the app is closed is answered with 503, which clients try again, and not with the end of a session."""
    async with openai_app([HELLO], pool_options={"gate": asyncio.Event()}) as (url, app, server):
        waiting = asyncio.create_task(answer_to(url, request(body, b"Connection: close")))
        await until(lambda: server.requests)
        await app.close()
        answer = await waiting
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: " in answer
        assert error_of(answer)["code"] == "shutting_down"
