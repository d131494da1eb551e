"""Programs at their limits and in odd orders: shared budgets, several samples, requests side by side, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the gateway needs the extra gateway")
pytest.importorskip("uvicorn", reason="the gateway needs the extra gateway")

from ostinato_agent_loop import GatewayConfig, MultiTurnConfig, TrajectoryEnd, register
from ostinato_agent_loop.base import AgentLoopContext
from ostinato_agent_loop.gateway import GatewayAgentLoop, Recording, open_address, run_program
from ostinato_engines import SamplingParams
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import FailureKind, SessionBudget
from ostinato_tokenization import ContinuousTokens

LONG = "Yes, it is so, and it was so before.<|im_end|>"


def user(text: str) -> dict:
    """A message of the user."""
    return {"role": "user", "content": text}


class Asker:
    """Asks at an address, each request over a connection of its own."""

    def __init__(self, address) -> None:
        self.address = address

    async def __call__(self, messages, **more) -> dict:
        """Return the first answer's message."""
        return (await self.choices(messages, **more))[0]

    async def choices(self, messages, **more) -> list[dict]:
        """Return the messages of all answers."""
        body = json.dumps({"messages": messages, **more}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.address.api_key}"}
        request = urllib.request.Request(f"{self.address.base_url}/chat/completions", body, headers)

        def send():
            with urllib.request.urlopen(request) as answer:
                return [choice["message"] for choice in json.load(answer)["choices"]]

        found = await asyncio.to_thread(send)
        return [
            {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
            for message in found
        ]


@pytest.fixture
def agent():
    """Registers an agent that runs a function of an Asker and the row."""

    def make(act, name="gateway_of_a_test"):
        @register(name)
        class Agent(GatewayAgentLoop):
            async def act(self, address, row):
                return await act(Asker(address), row)

        return name

    return make


def num_response_tokens(trajectory) -> int:
    """Length of all segments' responses."""
    return sum(len(segment.response_ids) for segment in trajectory.segments)


async def test_conversations_that_take_turns_share_the_budget(world, agent):
    """A conversation that goes on after another one has used tokens has only what is left of the trajectory's response."""

    async def act(ask, row):
        histories = [[user("One")], [user("Two")]]
        while True:
            for history in histories:
                history.append(await ask(history))
                history.append(user("And?"))

    trajectory = await world.run_one([LONG] * 100, agent=agent(act), response=150)
    assert trajectory.failure is None, trajectory.failure
    assert len(trajectory.segments) == 2
    assert num_response_tokens(trajectory) <= 150
    assert {segment.stop_reason for segment in trajectory.segments} == {TrajectoryEnd.RESPONSE_LENGTH}


async def test_more_conversations_than_there_may_be_end_the_trajectory(world, agent):
    """A program that fails when it may not begin another conversation has ended there; one that asks for too many at once has nothing."""

    async def act(ask, row):
        for number in range(5):
            await ask([user(f"Question {number}")], n=row.get("n", 1))

    name, options = agent(act), {"gateway": GatewayConfig(command=["true"], max_segments=3)}
    trajectory = await world.run_one(["Yes.<|im_end|>"] * 9, agent=name, agent_options=options)
    assert trajectory.failure is None, trajectory.failure
    assert [segment.stop_reason for segment in trajectory.segments] == [TrajectoryEnd.MAX_SEGMENTS] * 3
    trajectory = await world.run_one(["Yes.<|im_end|>"] * 9, {"n": 4}, agent=name, agent_options=options)
    assert "at most 3 conversations" in trajectory.failure.message


@pytest.mark.parametrize("n", [1, 3])
async def test_a_prompt_without_room_ends_the_trajectory_for_any_number_of_samples(world, agent, n):
    """A request that finds no room, be it for several samples, is the limit that ends a trajectory, and no failure."""

    async def act(ask, row):
        for number in range(100):
            await ask([user(f"Question {number}")], n=n)

    options = {"gateway": GatewayConfig(command=["true"], max_segments=100)}
    trajectory = await world.run_one([LONG] * 300, agent=agent(act), agent_options=options, response=100)
    assert trajectory.failure is None, trajectory.failure
    assert {segment.stop_reason for segment in trajectory.segments} == {TrajectoryEnd.RESPONSE_LENGTH}


async def test_several_samples_count_as_so_many_turns(world, agent):
    """max_assistant_turns bounds samples, whether asked for together or at once, and num_turns agrees with what was sampled."""

    async def act(ask, row):
        assert len(await ask.choices([user("One")], n=2)) == 2
        results = await asyncio.gather(*(ask([user("Two")]) for _ in range(4)), return_exceptions=True)
        assert sum(isinstance(result, urllib.error.HTTPError) for result in results) == 3
        return "done"

    trajectory = await world.run_one(["Yes.<|im_end|>"] * 10, agent=agent(act), max_assistant_turns=3)
    assert trajectory.failure is None, trajectory.failure
    assert len(trajectory.segments) == len(world.server.requests) == 3
    assert {segment.num_turns for segment in trajectory.segments} == {4}


async def test_more_samples_at_once_than_there_may_be_turns_are_told(world, agent):
    """A trajectory whose only request asked for too many samples fails with that, not with having asked nothing."""

    async def act(ask, row):
        await ask([user("One")], n=4)

    trajectory = await world.run_one(["Yes.<|im_end|>"] * 4, agent=agent(act), max_assistant_turns=3)
    assert "at most 3 turns" in trajectory.failure.message
    assert not world.server.requests


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("swallows", [False, True])
async def test_the_engines_failure_stays_the_engines(world, agent, n, swallows):
    """Whether a program dies of an engine's failure or ends as if nothing were, for one sample or several, the engine is to blame."""

    async def act(ask, row):
        try:
            await ask([user("Hello")], n=n)
        except urllib.error.HTTPError:
            if not swallows:
                raise

    trajectory = await world.run_one([RuntimeError("out of memory")] * 2, agent=agent(act))
    assert trajectory.failure.kind is FailureKind.ENGINE
    assert "out of memory" in trajectory.failure.message


async def test_a_bad_request_stays_the_programs_fault(world, agent):
    """A program that dies of a request that cannot be read fails with its own words."""

    async def act(ask, row):
        try:
            await ask([user("half \ud800")])
        except urllib.error.HTTPError as error:
            raise LookupError("I gave up") from error

    trajectory = await world.run_one(["x"], agent=agent(act))
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "I gave up" in trajectory.failure.message


async def test_a_first_prompt_that_is_too_long_is_told(world, agent):
    """A trajectory whose only request did not fit fails with what did not fit, not with having asked nothing."""

    async def act(ask, row):
        await ask([user("word " * 200)])

    trajectory = await world.run_one(["x"], agent=agent(act), prompt=50)
    assert "max_prompt_tokens (50)" in trajectory.failure.message


async def test_requests_side_by_side_are_told_apart(world, agent):
    """The slower of two requests is the one that was answered last, and what the faster continued is not counted for it."""
    slow = asyncio.Event()

    class OneIsSlow(ScriptedServer):
        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            if "slow" in world.tokenizer.decode(list(prompt_ids)):
                await slow.wait()
            return await super().generate(prompt_ids, sampling_params, request_id, media)

    async def act(ask, row):
        history = [user("quick")]
        history.append(await ask(history))
        edited = [user("slow"), {"role": "assistant", "content": "edited"}, user("And?")]
        waiting = asyncio.create_task(ask(edited))
        while len(world.client.num_in_flight) == 0 or not any(world.client.num_in_flight.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await ask([*history, user("And?")])
        slow.set()
        await waiting

    server = OneIsSlow(lambda request: f"{len(world.server.requests)}<|im_end|>", encode=world.encode)
    trajectory = await world.run_one([], agent=agent(act), server=server)
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.segments[-1].extra_fields["messages"][0]["content"] == "slow"
    metrics = trajectory.segments[0].metrics
    assert (metrics.num_continuations, metrics.num_exact_continuations) == (2, 1)


async def test_turns_of_the_rows_own_are_no_continuation(world, agent):
    """Examples of earlier turns in a row's prompt, which nobody sampled, are not counted as turns that did not go on."""

    async def act(ask, row):
        history = list(row["raw_prompt"])
        history.append(await ask(history))
        await ask([*history, user("And?")])

    shown = [user("1 + 1?"), {"role": "assistant", "content": "2"}, user("1 + 2?")]
    segment = await world.run_ok(["3<|im_end|>", "Yes.<|im_end|>"], {"raw_prompt": shown}, agent=agent(act))
    assert (segment.metrics.num_continuations, segment.metrics.num_exact_continuations) == (1, 1)


async def test_a_conversation_that_is_rendered_anew_is_no_exact_continuation(world, agent):
    """Where the run renders each history anew and the tokens differ, the share of exact continuations says it."""

    async def act(ask, row):
        history = [user("One")]
        history.append(await ask(history))
        await ask([*history, user("And?")])

    odd = [token for letter in "the answer" for token in world.encode(letter)]
    assert odd != world.encode("the answer")
    turns = [[*odd, *world.encode("<|im_end|>")], "No.<|im_end|>"]
    trajectory = await world.run_one(turns, agent=agent(act), use_inference_chat_template=True)
    assert trajectory.failure is None, trajectory.failure
    assert len(trajectory.segments) == 2
    metrics = trajectory.segments[0].metrics
    assert (metrics.num_continuations, metrics.num_exact_continuations) == (1, 0)


async def test_an_agent_may_change_the_row_that_it_is_given(world, agent):
    """A coroutine that writes into its row changes neither the other trajectories' nor the reward's."""

    async def act(ask, row):
        assert len(row["raw_prompt"]) == 1
        row["raw_prompt"].append(await ask(row["raw_prompt"]))

    manager = world.build(lambda request: "Yes.<|im_end|>", agent=agent(act))
    rows = [{"raw_prompt": [user("Hello")]}]
    batch = await manager.generate_sequences(rows, n=3, step=0)
    assert [trajectory.failure for trajectory in batch.trajectories] == [None] * 3
    assert rows == [{"raw_prompt": [user("Hello")]}]


@pytest.mark.parametrize("value", [float("nan"), b"bytes", {1, 2}, object()])
async def test_a_row_that_json_cannot_hold_is_refused(world, value):
    """A program never reads a row that says something else than the dataset does: what JSON has no word for is an error."""
    options = {"gateway": GatewayConfig(command=[sys.executable, "-c", "pass"])}
    trajectory = await world.run_one(["x"], {"value": value}, agent="gateway_agent", agent_options=options)
    assert "must be JSON" in trajectory.failure.message


async def test_a_process_that_left_the_group_is_not_waited_for():
    """Output that an escaped process holds open ends with the program, whose own words are all there."""
    code = """
import os, sys, time
ready, told = os.pipe()
pid = os.fork()
if not pid:
    os.setsid()
    os.write(told, b"x")
    time.sleep(600)
os.read(ready, 1)
print("x" * 50_000, pid)
"""
    result = await run_program([sys.executable, "-c", code], stdin=b"", env={})
    os.kill(int(result.stdout.split()[1]), signal.SIGKILL)  # it was there to the end
    assert result.status == 0
    assert len(result.stdout.split()[0]) == 50_000


def recording_of(world, replies, params=None) -> Recording:
    """What the worker would give an agent, without the worker."""
    manager = world.build(replies)
    assert manager is not None
    context = AgentLoopContext(
        client=world.client,
        tokens=ContinuousTokens(world.tokenizer),
        config=MultiTurnConfig(),
        budget=SessionBudget(600, 400),
        tools=None,  # pyright: ignore[reportArgumentType]
        parser=None,  # pyright: ignore[reportArgumentType]
        trajectory_id="t",
    )
    return Recording(context, {}, params or SamplingParams(), max_segments=4)


async def test_bounds_of_the_run_hold_beside_the_programs(world):
    """The lower of the run's and the request's max_tokens holds, and both stop."""
    recording = recording_of(
        world, [LONG] * 3, SamplingParams(max_tokens=5, stop_token_ids=(7,), seed=1, temperature=0.5)
    )
    async with open_address(recording.app, recording.api_key) as address:
        ask = Asker(address)
        await ask([user("One")])
        await ask([user("Two")], max_tokens=3, stop_token_ids=[8], temperature=0.0, seed=5)
        await ask([user("Three")], max_tokens=50)
    asked = [request.params for request in world.server.requests]
    assert [params.max_tokens for params in asked] == [5, 3, 5]
    assert {7, 8} <= set(asked[1].stop_token_ids)
    assert {params.temperature for params in asked} == {0.5}
    assert len({params.seed for params in asked}) == 3


@pytest.mark.parametrize("target", ["*", "/", "//", "/x", "x", "http://127.0.0.1/x"])
async def test_paths_that_lead_nowhere_are_refused_in_words(world, target):
    """Whatever a request line names, a path that is no trajectory's is answered with 404 or 400 in the form of all errors."""
    recording = recording_of(world, [])
    async with open_address(recording.app, recording.api_key) as address:
        host, port = address.base_url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
    assert answer.split(" ")[1] in ("404", "400"), answer
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"]


def test_addresses_in_one_event_loop_after_the_other(world):
    """Loops that end with addresses open, or closed, leave nothing that keeps the next one from serving."""

    async def once(leave_open: bool):
        recording = recording_of(world, ["Yes.<|im_end|>"])
        context = open_address(recording.app, recording.api_key)
        address = await context.__aenter__()
        answer = await Asker(address)([user("Hello")])
        if not leave_open:
            await context.__aexit__(None, None, None)
        return answer["content"]

    assert [asyncio.run(once(leave_open)) for leave_open in (True, False, True, False)] == ["Yes."] * 4


async def test_many_trajectories_leave_nothing(world, agent):
    """A hundred trajectories, some of them failing, leave no descriptor, no task and no conversation behind."""

    async def act(ask, row):
        await ask(row["raw_prompt"])
        if row["index"] % 3 == 0:
            raise LookupError("odd")

    name = agent(act)

    async def run(count):
        manager = world.build(lambda request: "Yes.<|im_end|>", agent=name)
        rows = [{"raw_prompt": [user("Hello")], "index": number} for number in range(count)]
        batch = await manager.generate_sequences(rows, n=1, step=0)
        assert sum(trajectory.failure is None for trajectory in batch.trajectories) == count - len(range(0, count, 3))
        assert world.client.num_sticky == 0

    await run(4)
    num_open, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    for _ in range(4):
        await run(25)
    assert len(asyncio.all_tasks()) <= tasks
    assert len(os.listdir("/proc/self/fd")) <= num_open


async def test_the_same_seed_gives_the_same_trajectory(world, agent):
    """A program that asks in the same order samples with the same seeds, each request with one of its own."""

    async def act(ask, row):
        history = list(row["raw_prompt"])
        for _ in range(3):
            history.append(await ask(history))
            history.append(user("And?"))
        await ask.choices([user("Other")], n=2)

    def reply(request):
        return f"{request.params.seed}<|im_end|>"

    seen = []
    for _ in range(2):
        trajectory = await world.run_one(reply, agent=agent(act), seed=3)
        assert trajectory.failure is None, trajectory.failure
        seen.append(sorted(segment.response_ids for segment in trajectory.segments))
        assert len({request.params.seed for request in world.server.requests}) == 5
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_cancelled_anywhere_nothing_is_left(world, agent, kind):
    """Whenever a batch is cancelled, no task, descriptor, process or conversation of its trajectories stays behind."""

    async def act(ask, row):
        await asyncio.gather(*(_ask_without_threads(ask.address, [user(text)]) for text in ("One", "Two")))

    name = agent(act) if kind == "function" else "gateway_agent"
    options = {"gateway": GatewayConfig(command=["sh", "-c", "sleep 600"])}
    num_open, children = 0, _children()
    for num_steps in range(0, 120, 7):
        manager = world.build(lambda request: "Yes.<|im_end|>", agent=name, agent_options=options)
        rows = [{"raw_prompt": [user("Hello")]}] * 2
        running = asyncio.create_task(manager.generate_sequences(rows, n=1, step=0))
        for step in range(num_steps):
            await asyncio.sleep(0.001 if kind == "command" and step % 10 == 0 else 0)
        running.cancel()
        await asyncio.wait({running})
        assert world.client.num_sticky == 0
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        assert _children() == children
        num_open = num_open or len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) <= num_open


def _children() -> str:
    """Ids of the processes that this one has started and that have not been waited for."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


async def _ask_without_threads(address, messages) -> None:
    """Ask in so many steps of the event loop as it takes."""
    host, port = address.base_url.split("/")[2].split(":")
    body = json.dumps({"messages": messages}).encode()
    head = [
        f"POST {address.base_url.partition(port)[2]}/chat/completions HTTP/1.1",
        "Host: x",
        "Connection: close",
        "Content-Type: application/json",
        f"Authorization: Bearer {address.api_key}",
        f"Content-Length: {len(body)}",
    ]
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        await reader.read()
    finally:
        writer.close()
