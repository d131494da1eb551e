"""Servers for these tests, written against the public contract of engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re

import pytest

from ostinato_engines import AsyncServerBase, PolicySpan, SamplingParams, StopReason, TokenOutput
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import LLMServerClient, ServerPool
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import get_parser


class StubServer(AsyncServerBase):
    """Answers from a list of outputs, errors or coroutines; then endlessly with a stop token. Keeps what it was asked."""

    def __init__(self, answers=(), *, stop_id: int = 99) -> None:
        self.answers = list(answers)
        self.stop_id = stop_id
        self.requests: list[tuple[list[int], SamplingParams, str]] = []
        self.released: list[str] = []
        self.gate: asyncio.Event | None = None
        self.log: list[str] = []
        self.failing: set[str] = set()
        self.version_to_report: int | None = None
        self.running = 0

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        params = SamplingParams.from_mapping(sampling_params)
        self.requests.append((list(prompt_ids), params, request_id))
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            answer = (
                self.answers.pop(0)
                if self.answers
                else TokenOutput([self.stop_id], [-0.5], StopReason.STOP, self.stop_id)
            )
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            self.running -= 1

    async def chat_completion(self, raw_request):
        raise NotImplementedError

    async def release(self, request_id):
        self.released.append(request_id)

    async def _do(self, what: str) -> None:
        self.log.append(what)
        if what in self.failing:
            raise RuntimeError(f"{what} is broken")

    async def start(self):
        await self._do("start")

    async def shutdown(self):
        await self._do("shutdown")

    async def wake_up(self, tags=None):
        await self._do("wake_up")

    async def sleep(self, level=1):
        await self._do("sleep")

    async def update_weights(self, manifest, weights):
        self.received = list(weights)
        await self._do("update_weights")
        self.policy_version = manifest.version if self.version_to_report is None else self.version_to_report


class RepeatableLoop(asyncio.SelectorEventLoop):
    """An event loop in which the same steps always lead to the same end.

    A set of tasks has an order, in which a group cancels its own, say: here it follows from `order`, elsewhere from memory
    addresses. And no time passes: what waits for a deadline waits for ever.
    """

    def __init__(self, order: int) -> None:
        super().__init__()
        numbers = random.Random(order)

        class NumberedTask(asyncio.Task):
            __slots__ = ("_number",)

            def __init__(self, *args, **options) -> None:
                self._number = numbers.getrandbits(60)
                super().__init__(*args, **options)

            def __hash__(self) -> int:
                return self._number

        self.set_task_factory(lambda loop, work, **options: NumberedTask(work, loop=loop, **options))

    def time(self) -> float:
        return 0.0


@pytest.fixture
def repeatable_loop():
    """The class of event loops that do the same again: for state machines, whose rules depend on what has become of the others."""
    return RepeatableLoop


@pytest.fixture
def stub_server():
    """The class of servers that answer from a list."""
    return StubServer


@pytest.fixture
def output():
    """Makes a TokenOutput of ids, one policy version and an end."""

    def make(token_ids, stop=StopReason.STOP, *, version=0, logprobs=True):
        token_ids = list(token_ids)
        return TokenOutput(
            token_ids,
            [-float(token_id) for token_id in token_ids] if logprobs else None,
            stop,
            policy_versions=(PolicySpan(0, version),),
        )

    return make


@pytest.fixture
def tokenizer():
    """A real, tiny chat tokenizer."""
    return tiny_chat_tokenizer()


@pytest.fixture
def sampled(tokenizer):
    """Turns text into ids as a model would sample them: control tokens in the text are control tokens."""
    pattern = re.compile(r"(<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>|</?tool_call>|</?tool_response>)")

    def encode(text):
        ids = []
        for piece in filter(None, pattern.split(text)):
            token_id = tokenizer.token_id(piece) if pattern.fullmatch(piece) else None
            ids += tokenizer.encode_text(piece) if token_id is None else [token_id]
        return ids

    return encode


@pytest.fixture
def scripted(sampled):
    """Makes a client over one server that samples the given texts (or ids, outputs, errors), one per request."""

    def make(replies, **options):
        server = ScriptedServer(replies, encode=sampled, **options)
        return LLMServerClient([server]), server

    return make


@pytest.fixture
def openai_app(tokenizer, sampled):
    """Serves an app over one server that samples the given texts (or ids, outputs, errors); gives URL, app and server."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from ostinato_rollout.openai_app import OpenAIApp, serving

    @contextlib.asynccontextmanager
    async def make(replies=(), *, server=None, chat_template=None, parser="hermes", pool_options=None, **options):
        chat_tokenizer = tokenizer if chat_template is None else tiny_chat_tokenizer(chat_template=chat_template)
        server = server or ScriptedServer(replies, encode=sampled, **(pool_options or {}))
        pool = ServerPool([server])
        await pool.start()
        app = OpenAIApp(
            pool,
            ContinuousTokens(chat_tokenizer),
            model="tiny",
            parser=None if parser is None else get_parser(parser),
            **options,
        )
        try:
            async with serving(app) as url:
                yield url, app, server
        finally:
            await pool.shutdown()

    return make


@pytest.fixture
def ask():
    """Sends one HTTP request as it is; returns status, headers and body."""

    async def send(url, path, body=None, *, method=None, headers=None, raw=None):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        lines = {"Content-Length": len(content), **({"Content-Type": "application/json"} if content else {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **(headers or {})}.items())
        method = method or ("POST" if content else "GET")
        try:
            writer.write(f"{method} {path} HTTP/1.0\r\n{head}\r\n".encode() + content)
            answer = await reader.read(-1)
        finally:
            writer.close()
        top, _, content = answer.partition(b"\r\n\r\n")
        first, *rest = top.decode().split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        return int(first.split()[1]), found, content

    return send
