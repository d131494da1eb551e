"""A reward model behind HTTP: what is sent, what is understood, and servers that misbehave. Every server here is a real one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ostinato_agent_loop import AgentLoopOutput
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config.reward import CombineConfig, RewardConfig, RewardModelConfig
from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.manager import RewardManager
from ostinato_trainer.rewards.model import RewardModel
from ostinato_trainer.rewards.pace import Pace

Reply = bytes | float | None
"""Bytes to send, seconds to wait, or None to close the connection."""

MESSAGES = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
VALUES = {"prompt": "user: 1+1?", "response": "2 {prompt}", "ground_truth": "2", "data_source": "sums"}


class Server:
    """Answers each request with the next of its replies, the last one for ever."""

    def __init__(self, replies: list[list[Reply]]) -> None:
        self.replies, self.url, self.num_open = replies, "", 0
        self.requests: list[tuple[str, dict[str, str], Any]] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(headers["content-length"]))
            self.requests.append((head.split()[1], headers, json.loads(body)))
            for reply in self.replies[min(len(self.requests), len(self.replies)) - 1]:
                if reply is None:
                    return
                if isinstance(reply, float):
                    await asyncio.wait_for(reader.read(), reply)  # until the client hangs up
                else:
                    writer.write(reply)
                    await writer.drain()
        except (OSError, TimeoutError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def serving(*replies: list[Reply]) -> AsyncIterator[Server]:
    server = Server(list(replies))
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/score"
    async with listening:
        yield server
        while server.num_open:  # noqa: ASYNC110  (handlers set no event)
            await asyncio.sleep(0.001)


def http(body: str | bytes, status: str = "200 OK", *headers: str) -> list[Reply]:
    raw = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(raw)}", "Connection: close", *headers]
    return ["\r\n".join([*lines, "", ""]).encode() + raw]


def classified(*probs: float) -> list[Reply]:
    return http(json.dumps({"data": [{"index": 0, "label": "x", "probs": list(probs), "num_classes": len(probs)}]}))


def pooled(data: Any) -> list[Reply]:
    return http(json.dumps({"data": [{"index": 0, "object": "pooling", "data": data}]}))


def judged(text: Any) -> list[Reply]:
    return http(json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))


CHAT = {"api": "chat", "model": "judge", "template": "{prompt} | {response} | {ground_truth}"}
QUICK = {"backoff_s": 0.001}


async def asked(server: Server, **keys: Any) -> float:
    config = RewardModelConfig(url=server.url, **{**QUICK, **keys})
    model = RewardModel(config, max_connections=4, pace=Pace(None), timeout_s=60.0)
    try:
        return await model(MESSAGES, VALUES)
    finally:
        await model.aclose()


@pytest.mark.parametrize(
    ("reply", "keys", "score"),
    [
        (classified(0.25), {}, 0.25),
        (classified(0.25, 0.75), {"class_index": 1}, 0.75),
        (pooled([1.5]), {"api": "pooling"}, 1.5),
        (pooled([[0.1], [-2]]), {"api": "pooling"}, -2.0),
        (pooled([[0.1, 0.9], [0.2, 0.8]]), {"api": "pooling", "class_index": 1}, 0.8),
        (judged("Score: 1 ... so\nScore: **-3.5**"), CHAT, -3.5),
        (judged("Scores: 7\n**Score**: 6/10"), CHAT, 6.0),
        (judged('{"score": 4}'), {**CHAT, "pattern": r'"score":\s*(\d+)'}, 4.0),
    ],
)
async def test_each_api_gives_its_score(reply: list[Reply], keys: dict[str, Any], score: float) -> None:
    """vLLM's classes and pooled numbers and a judge's last word are read as scores."""
    async with serving(reply) as server:
        assert await asked(server, **keys) == score


async def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation goes as messages, a template as text with its places filled once; model, key and further fields go along."""
    monkeypatch.setenv("OWN_KEY", "secret")
    async with serving(classified(1.0)) as server:
        await asked(server, model="rm", api_key_env="OWN_KEY", extra_body={"use_activation": False})
        await asked(server, template="{prompt} -> {response}")
    (path, headers, body), (_, other, text) = server.requests
    assert path == "/score"
    assert headers["authorization"] == "bearer secret"
    assert body == {"model": "rm", "messages": MESSAGES, "use_activation": False}
    assert "authorization" not in other
    assert text == {"input": "user: 1+1? -> 2 {prompt}"}
    async with serving(judged("score: 1")) as server:
        await asked(server, **CHAT, extra_body={"max_tokens": 5})
        await asked(server, **CHAT, extra_body={"max_tokens": None, "temperature": None})
    assert set(server.requests[1][2]) == {"model", "messages"}
    assert server.requests[0][2] == {
        "model": "judge",
        "messages": [{"role": "user", "content": "user: 1+1? | 2 {prompt} | 2"}],
        "temperature": 0.0,
        "max_tokens": 5,
    }


CLOSED: list[Reply] = [None]
CUT: list[Reply] = [b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"da', None]


@pytest.mark.parametrize(
    "bad",
    [
        http("busy", "429 Too Many Requests", "Retry-After: 0.001"),
        http("oh", "500 Oh"),
        http("", "503 No"),
        CLOSED,
        CUT,
    ],
)
async def test_what_may_go_better_is_tried_again(bad: list[Reply]) -> None:
    """Too many requests, faults of the server and lost connections are tried again, and the score of a later attempt counts."""
    async with serving(bad, bad, classified(0.5)) as server:
        assert await asked(server, max_retries=2) == 0.5
        assert len(server.requests) == 3


@pytest.mark.parametrize(("bad", "said"), [(http("oh", "500 Oh"), "status 500: oh"), (CLOSED, "RemoteProtocolError")])
async def test_attempts_are_bounded(bad: list[Reply], said: str) -> None:
    """After the allowed attempts the last failure is the error."""
    async with serving(bad) as server:
        with pytest.raises(RewardError, match=f"must answer within 3 attempts, got {said}"):
            await asked(server, max_retries=2)
        assert len(server.requests) == 3


@pytest.mark.parametrize("status", ["400 Bad", "401 No", "404 Not Found", "422 What", "302 Found", "204 No Content"])
async def test_a_refusal_is_final(status: str) -> None:
    """Other statuses are an error at once, with what the server said; redirections are not followed."""
    async with serving(http("no such model", status, "Location: http://127.0.0.1:1/")) as server:
        with pytest.raises(RewardError, match=rf"must answer with status 200, got {status[:3]}"):
            await asked(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "keys", "said"),
    [
        (http("<html>"), {}, "must answer in JSON, got '<html>'"),
        (http(""), {}, "must answer in JSON"),
        (http(b"\xff\xfe"), {}, "must answer in JSON"),
        (http("[" * 100_000), {}, "must answer in JSON"),
        (http("[]"), {}, "in the form of classify"),
        (http("null"), {}, "in the form of classify"),
        (http('{"data": []}'), {}, "in the form of classify"),
        (http('{"data": [{"probs": "1"}]}'), {}, "in the form of classify"),
        (http('{"data": [{"probs": [true]}]}'), {}, "in the form of classify"),
        (classified(), {}, "must give one number, got 0"),
        (classified(0.5, 0.5), {}, "must give one number, got 2; .*class_index"),
        (classified(0.5), {"class_index": 1}, "in the form of classify"),
        (classified(float("nan")), {}, "must give a finite score, got nan"),
        (pooled([float("inf")]), {"api": "pooling"}, "must give a finite score, got inf"),
        (http('{"data": [{"probs": [1' + "0" * 400 + "]}]}"), {}, "in the form of classify"),
        (pooled("base64"), {"api": "pooling"}, "in the form of pooling"),
        (judged(None), CHAT, "in the form of chat"),
        (judged("good"), CHAT, "must give a score in the form .* got 'good'"),
        (judged("score:" + " " * 200_000), CHAT, "must give a score in the form"),
        (judged("score" + " " * 200_000), {**CHAT, "pattern": r"score\s*\s*(\d)"}, "must give a score in the form"),
        (judged("score: 7"), {**CHAT, "pattern": "(?:score: 7)(x)?"}, "must give a score in the form"),
        (http(b"x", "200 OK", "Content-Encoding: gzip"), {}, "encoding gzip"),
    ],
)
async def test_an_answer_that_is_no_score_is_an_error(reply: list[Reply], keys: dict[str, Any], said: str) -> None:
    """Whatever is not a finite number in the form that was asked for is an error that shows it, and no second attempt; none of
    them takes a search without end."""
    async with serving(reply) as server:
        with pytest.raises(RewardError, match=said):
            await asked(server, **keys)
        assert len(server.requests) == 1


async def test_a_huge_answer_is_read_no_further_than_it_may_be_long() -> None:
    """An answer without end is refused when it is too long."""
    endless: list[Reply] = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", *[b"x" * 2**20] * 64, None]
    async with serving(endless) as server:
        with pytest.raises(RewardError, match="in at most 4194304 bytes"):
            await asked(server)


@pytest.mark.parametrize("slow", [[60.0], [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", 60.0]])
async def test_a_slow_server_meets_the_deadline_of_a_request(slow: list[Reply]) -> None:
    """A server that does not answer, or not to the end, fails the attempt; the connection is closed."""
    async with serving(slow) as server:
        with pytest.raises(RewardError, match=r"within 2 attempts, got no answer within .*request_timeout_s=0.1"):
            await asked(server, request_timeout_s=0.1, max_retries=1)
        assert len(server.requests) <= 2


async def test_requests_that_were_given_up_hold_no_connection() -> None:
    """With one connection allowed, any number of requests out of time leave it free for the next."""
    slow: list[Reply] = [60.0]
    async with serving(slow, slow, slow, classified(0.5)) as server:
        config = RewardModelConfig(url=server.url, request_timeout_s=0.1, max_retries=20, **QUICK)
        model = RewardModel(config, max_connections=1, pace=Pace(None), timeout_s=60.0)
        assert await model(MESSAGES, VALUES) == 0.5
        await model.aclose()


async def test_nobody_at_the_address_is_said_with_it() -> None:
    """A refused connection is an error with the address, without what may be secret in it."""
    async with serving(classified(1.0)) as server:
        address = server.url.replace("http://", "http://user:secret@") + "?key=secret"
    model = RewardModel(
        RewardModelConfig(url=address, max_retries=1, **QUICK), max_connections=1, pace=Pace(None), timeout_s=60.0
    )
    with pytest.raises(RewardError, match="ConnectError") as caught:
        await model(MESSAGES, VALUES)
    await model.aclose()
    assert server.url in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_cancelling_closes_the_request() -> None:
    """A score that is given up leaves no connection (the server below waits for it to close)."""
    async with serving([60.0]) as server:
        task = asyncio.create_task(asked(server))
        while not server.requests:  # noqa: ASYNC110  (handlers set no event)
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("key", ["secret\n", "se cret", "secr\u00e9t"])
def test_what_is_no_key_is_refused_at_the_start_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """A key that no header can carry is refused before a run, rather than at each request with the key in the message."""
    monkeypatch.setenv("OWN_KEY", key)
    config = RewardModelConfig(url="http://x", api_key_env="OWN_KEY")
    with pytest.raises(RewardError, match="must name a variable that holds a key, got OWN_KEY") as caught:
        RewardModel(config, max_connections=1, pace=Pace(None), timeout_s=60.0)
    assert "secr" not in str(caught.value)


def test_a_key_that_is_not_there_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of the key must be set before a run."""
    monkeypatch.delenv("OWN_KEY", raising=False)
    with pytest.raises(RewardError, match="must name a variable that is set, got OWN_KEY"):
        RewardModel(
            RewardModelConfig(url="http://x", api_key_env="OWN_KEY"), max_connections=1, pace=Pace(None), timeout_s=60.0
        )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"url": "localhost:8000"}, "url must begin with http"),
        ({"url": "http://x", "api": "chat"}, "template and model must be given"),
        ({"template": "{respnse}"}, r"got \{respnse\}"),
        ({"pattern": "("}, "must be a regular expression"),
        ({"pattern": "score"}, "must have one group, the score, got 0"),
    ],
)
def test_a_node_that_contradicts_itself_is_refused(keys: dict[str, Any], said: str) -> None:
    """Addresses, templates and patterns are checked when they are written, not when the first trajectory ends."""
    with pytest.raises(ValueError, match=said):
        RewardModelConfig(**keys)


TOKENIZER = tiny_chat_tokenizer()


def trajectory(text: str, **extra_fields: Any) -> list[AgentLoopOutput]:
    ids = TOKENIZER.encode_text(text)
    return [
        AgentLoopOutput(
            prompt_ids=[1], response_ids=ids, response_mask=[1] * len(ids), num_turns=2, extra_fields=extra_fields
        )
    ]


async def with_manager(
    server: Server, use: Callable[[RewardManager], Any], backoff_s: float = 0.001, **keys: Any
) -> Any:
    config = RewardConfig(
        reward_model=RewardModelConfig(url=server.url, backoff_s=backoff_s),
        combine=CombineConfig(score=0.0, reward_model=2.0),
        **keys,
    )
    rewards = RewardManager(config, TOKENIZER, data_sources=["of nobody"])
    try:
        return await use(rewards)
    finally:
        await rewards.aclose()


async def test_the_model_scores_alone_where_the_score_has_no_weight() -> None:
    """A reward model needs neither scorer nor ground truth, sees prompt and response, and its part is recorded."""
    async with serving(classified(0.25)) as server:
        row = {"raw_prompt": [{"role": "user", "content": "hi"}]}
        result = await with_manager(server, lambda rewards: rewards(row, trajectory("hello")))
        assert (result.score, result.extra) == (0.5, {"model_reward": 0.25})
        await with_manager(server, lambda rewards: rewards(row, trajectory("x", messages=MESSAGES)))
    first, second = (body["messages"] for _, _, body in server.requests)
    assert first == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert second == MESSAGES


async def test_all_attempts_together_meet_the_deadline_of_a_score() -> None:
    """However often a request may be repeated, `reward.timeout_s` ends it, as a failure that names the key."""
    async with serving([60.0]) as server:
        with pytest.raises(
            RewardError, match=r"the reward model at .* must answer within reward.timeout_s=0.1 s, got no answer"
        ):
            await with_manager(server, lambda rewards: rewards({}, trajectory("x")), timeout_s=0.1)


async def test_a_score_that_is_late_says_what_failed_last() -> None:
    """Where the deadline of a score comes before the attempts are used up, the error says what became of them."""

    async def use(rewards: RewardManager) -> None:
        await rewards({}, trajectory("x"))
        with pytest.raises(RewardError, match=r"timeout_s=2 s, got 1 failed attempts, the last: status 503: loading"):
            await rewards({}, trajectory("x"))

    async with serving(classified(1.0), http("loading", "503 No")) as server:
        await with_manager(server, use, timeout_s=2.0, backoff_s=60.0)


async def test_no_more_requests_at_once_than_workers() -> None:
    """Many trajectories that end together share `reward.num_workers` requests, and each gets its score."""
    async with serving(classified(1.0)) as server:
        seen: list[int] = []

        async def use(rewards: RewardManager) -> list[Any]:
            calls = [asyncio.create_task(rewards({}, trajectory("x"))) for _ in range(12)]
            while not all(call.done() for call in calls):
                seen.append(server.num_open)
                await asyncio.sleep(0)
            return [await call for call in calls]

        results = await with_manager(server, use, num_workers=3)
    assert [result.score for result in results] == [2.0] * 12
    assert len(server.requests) == 12
    assert max(seen) <= 3
