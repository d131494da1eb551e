"""Programs that speak OpenAI's API as agents: what is recorded, what is kept apart, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

pytest.importorskip("starlette", reason="the gateway needs the extra gateway")
pytest.importorskip("uvicorn", reason="the gateway needs the extra gateway")

from ostinato_agent_loop import AgentConfigError, GatewayConfig, RolloutConfig, TrajectoryEnd, register
from ostinato_agent_loop.gateway import GatewayAgentLoop, run_program
from ostinato_rollout import FailureKind

ASK = """
import json, os, sys, urllib.request, urllib.error

def ask(messages, base_url=os.environ["OPENAI_BASE_URL"], key=os.environ["OPENAI_API_KEY"], **more):
    body = json.dumps({"messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        message = json.load(answer)["choices"][0]["message"]
    return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}

row = json.load(sys.stdin)
messages = row["raw_prompt"]
"""
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def program(text: str, **options) -> dict:
    """Settings of an agent that runs a program, which may `ask`."""
    return {"gateway": GatewayConfig(command=[sys.executable, "-c", ASK + text], **options)}


def sampled_ids(segments) -> list[list[int]]:
    """What was sampled, by segment."""
    return [
        [token for token, mask in zip(each.response_ids, each.response_mask, strict=True) if mask] for each in segments
    ]


async def test_a_program_with_a_tool_is_one_segment(world, call):
    """Turns of a program that sends its history back are one segment of the tokens that were sampled, tool answers masked."""
    turns = [call(("add", '{"a":  1, "b": 2}'), content="Let me see."), "It is 3.<|im_end|>"]
    segment = await world.run_ok(
        turns,
        agent="gateway_agent",
        agent_options=program(f"""
tools = [{ADD!r}]
messages.append(ask(messages, tools=tools))
for made in messages[-1]["tool_calls"]:
    messages.append({{"role": "tool", "tool_call_id": made["id"], "content": "3"}})
print(ask(messages, tools=tools, temperature=0)["content"])
"""),
    )
    assert sampled_ids([segment]) == [world.encode(turns[0]) + world.encode(turns[1])]
    assert segment.stop_reason is TrajectoryEnd.PROGRAM_ENDED
    assert segment.num_turns == 4
    assert segment.extra_fields["program_output"] == "It is 3.\n"
    assert [message["role"] for message in segment.extra_fields["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert world.metrics["agent_loop/exact_continuations"] == 1.0
    assert {request.params.temperature for request in world.server.requests} == {1.0}
    assert world.rewarded[0][1] == [segment]


async def test_a_rewritten_history_is_a_segment_of_its_own(world):
    """What a program edits is context in a new segment; each sampled token is trained on once, and the share of exact continuations says it."""
    turns = ["One.<|im_end|>", "Two.<|im_end|>", "Three.<|im_end|>"]
    trajectory = await world.run_one(
        turns,
        agent="gateway_agent",
        agent_options=program("""
messages.append(ask(messages))
messages.append({"role": "user", "content": "Go on."})
messages.append(ask(messages))
edited = [messages[0], {"role": "assistant", "content": "Something else."}, {"role": "user", "content": "And now?"}]
ask(edited)
"""),
    )
    assert trajectory.failure is None, trajectory.failure
    assert sampled_ids(trajectory.segments) == [world.encode("One.<|im_end|>Two.<|im_end|>"), world.encode(turns[2])]
    assert [segment.segment_index for segment in trajectory.segments] == [0, 1]
    assert len({id(segment.metrics) for segment in trajectory.segments}) == 1
    assert world.metrics["agent_loop/exact_continuations"] == 0.5


async def test_two_requests_at_once_are_two_segments(world):
    """A program that asks twice at the same time gets two answers, each in a segment of its own."""
    trajectory = await world.run_one(
        ["One.<|im_end|>", "Two.<|im_end|>"],
        agent="gateway_agent",
        agent_options=program("""
import threading
threads = [threading.Thread(target=ask, args=(messages,)) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""),
    )
    assert trajectory.failure is None, trajectory.failure
    assert sorted(sampled_ids(trajectory.segments)) == sorted(
        [world.encode("One.<|im_end|>"), world.encode("Two.<|im_end|>")]
    )


async def test_the_conversation_that_was_answered_last_comes_last(world):
    """A helper's conversation, begun later and ended earlier, stands before the one that gives the answer, which the reward reads."""
    trajectory = await world.run_one(
        ["Ask.<|im_end|>", "Helped.<|im_end|>", "Answer.<|im_end|>"],
        agent="gateway_agent",
        agent_options=program("""
messages.append(ask(messages))
helped = ask([{"role": "user", "content": "Help."}])
messages.append({"role": "user", "content": helped["content"]})
ask(messages)
"""),
    )
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.segments[-1].extra_fields["messages"][-1]["content"] == "Answer."
    assert sampled_ids(trajectory.segments)[0] == world.encode("Helped.<|im_end|>")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("ask(messages); sys.exit('it broke')", FailureKind.AGENT, "status 1.*it broke"),
        ("os.kill(os.getpid(), 9)", FailureKind.AGENT, "SIGKILL"),
        ("pass", FailureKind.AGENT, "at least once"),
        ("import time; time.sleep(600)", FailureKind.TIMEOUT, "must end within"),
        ("ask(messages, key='another')", FailureKind.AGENT, "401"),
        ("ask([{'role': 'user', 'content': 'x' * 10_000_000}])", FailureKind.AGENT, "413"),
        (
            "ask(messages, base_url=os.environ['OPENAI_BASE_URL'].replace('/v1', '/sessions/other/v1'))",
            FailureKind.AGENT,
            "404",
        ),
        (
            "ask(messages, base_url='/'.join(os.environ['OPENAI_BASE_URL'].split('/')[:3]) + '/v1')",
            FailureKind.AGENT,
            "404",
        ),
    ],
)
async def test_a_program_that_misbehaves_is_a_recorded_failure(world, text, kind, said):
    """A program that dies, hangs, asks nothing, or asks elsewhere or for too much fails its trajectory with what it said."""
    options = program(text) | {"trajectory_timeout_s": 20.0 if kind is FailureKind.AGENT else 2.0}
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=options)
    assert trajectory.failure is not None
    assert trajectory.failure.kind is kind
    assert trajectory.reward is None
    assert re.search(said, trajectory.failure.message, re.DOTALL), trajectory.failure.message


async def test_what_a_program_started_ends_with_it(world, tmp_path):
    """A child that a program leaves behind, holding its output open, neither delays the trajectory nor outlives it."""
    text = f"""
import subprocess
ask(messages)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
"""
    await world.run_ok(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=program(text))
    pid = int((tmp_path / "pid").read_text())
    for _ in range(500):
        if not _is_alive(pid):
            break
        await asyncio.sleep(0.01)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_program_sees_only_what_it_was_given(world, monkeypatch):
    """Neither other variables of this process nor what only the reward may know reach a program."""
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    monkeypatch.setenv("PASSED_ON", "yes")
    text = (
        'ask(messages); print("SECRET_TOKEN" in os.environ, os.environ["PASSED_ON"], os.environ["MORE"], sorted(row))'
    )
    segment = await world.run_ok(
        ["Yes.<|im_end|>"],
        {"reward_model": {"ground_truth": "42"}, "index": 7},
        agent="gateway_agent",
        agent_options=program(text, pass_env=["PASSED_ON"], env={"MORE": "more"}),
    )
    assert segment.extra_fields["program_output"] == "False yes more ['index', 'raw_prompt']\n"


async def test_turns_and_tokens_have_their_limits(world):
    """A request beyond max_assistant_turns, or one that has no room, is refused with words, and the trajectory's end says so."""
    text = """
try:
    while True:
        messages.append(ask(messages))
        messages.append({"role": "user", "content": "Go on, and on, and on."})
except urllib.error.HTTPError as error:
    print(error.code, json.load(error)["error"]["code"])
"""
    turns = ["Yes.<|im_end|>"] * 100
    segment = await world.run_ok(turns, agent="gateway_agent", agent_options=program(text), max_assistant_turns=2)
    assert segment.extra_fields["program_output"] == "400 max_assistant_turns\n"
    assert (segment.stop_reason, segment.num_turns) == (TrajectoryEnd.MAX_ASSISTANT_TURNS, 4)
    segment = await world.run_ok(turns, agent="gateway_agent", agent_options=program(text), response=60)
    assert segment.extra_fields["program_output"] == "400 context_length_exceeded\n"
    assert segment.stop_reason is TrajectoryEnd.RESPONSE_LENGTH
    assert len(segment.response_ids) <= 60


async def test_a_program_that_fails_at_a_limit_has_ended_there(world):
    """A program that does not expect to be refused for a limit ends its trajectory there, with what was sampled."""
    text = """
while True:
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "Go on, and on, and on."})
"""
    turns = ["Yes.<|im_end|>"] * 100
    segment = await world.run_ok(turns, agent="gateway_agent", agent_options=program(text), response=60)
    assert segment.stop_reason is TrajectoryEnd.RESPONSE_LENGTH
    assert segment.extra_fields["program_output"] is None
    assert segment.reward_score == 1.0


async def test_conversations_share_the_budget_of_the_trajectory(world):
    """However many conversations a program begins, together they respond within the budget of one trajectory."""
    text = """
try:
    for number in range(100):
        ask([{"role": "user", "content": f"Question {number}"}])
except urllib.error.HTTPError as error:
    print(json.load(error)["error"]["code"])
"""
    options = program(text, max_segments=100)
    turns = ["Yes, it is so.<|im_end|>"] * 100
    trajectory = await world.run_one(turns, agent="gateway_agent", agent_options=options, response=50)
    assert trajectory.failure is None, trajectory.failure
    assert len(trajectory.segments) > 1
    assert sum(len(segment.response_ids) for segment in trajectory.segments) <= 50
    assert trajectory.segments[0].stop_reason is TrajectoryEnd.RESPONSE_LENGTH


async def test_an_engine_that_fails_is_not_the_programs_fault(world):
    """A program that dies because the engine did not answer is a failure of the engine."""
    trajectory = await world.run_one(
        [RuntimeError("out of memory")], agent="gateway_agent", agent_options=program("ask(messages)")
    )
    assert trajectory.failure.kind is FailureKind.ENGINE
    assert "out of memory" in trajectory.failure.message


async def test_trajectories_do_not_reach_each_other(world):
    """Many programs at once, each asking several times, get what was sampled for them and nothing of the others."""

    def reply(request):
        return f"{world.tokenizer.decode(request.prompt_ids).count('question')}<|im_end|>"

    manager = world.build(
        reply,
        agent="gateway_agent",
        agent_options=program("""
for _ in range(3):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "question"})
print([m["content"] for m in messages[1::2]])
"""),
    )
    rows = [{"raw_prompt": [{"role": "user", "content": "question " * number}]} for number in range(1, 5)]
    batch = await manager.generate_sequences(rows, n=2, step=0)
    for trajectory in batch.trajectories:
        assert trajectory.failure is None, trajectory.failure
        number = trajectory.row["raw_prompt"][0]["content"].count("question")
        (segment,) = trajectory.segments
        assert segment.extra_fields["program_output"] == f"{[str(number + turn) for turn in range(3)]}\n"
    assert set(world.client.num_in_flight.values()) == {0}
    assert world.client.num_sticky == 0


async def test_a_cancelled_batch_leaves_no_program(world, tmp_path):
    """Cancelling kills the programs and frees their conversations."""
    text = f'open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid())); import time; time.sleep(600)'
    manager = world.build(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=program(text))
    running = asyncio.create_task(
        manager.generate_sequences([{"raw_prompt": [{"role": "user", "content": "x"}]}], n=1, step=0)
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not _is_alive(int((tmp_path / "pid").read_text()))
    assert world.client.num_sticky == 0


def test_settings_that_cannot_run_are_refused_before_anything_starts(world):
    """Neither program nor function, a function that is none, and a command beside a function are named at once."""
    for gateway, said in (
        (GatewayConfig(), "command or agent.gateway.function"),
        (GatewayConfig(function="nowhere:agent"), "importable"),
        (GatewayConfig(function="json:dumps"), "coroutine function"),
        (GatewayConfig(function="asyncio:sleep"), "base_url, api_key and row"),
    ):
        with pytest.raises(AgentConfigError, match=said):
            world.build(["x"], agent="gateway_agent", agent_options={"gateway": gateway})
    for options in (
        {"command": ["a"], "function": "b:c"},
        {"function": "b"},
        {"max_segments": 0},
        {"function": "b:c", "cwd": "/"},
    ):
        with pytest.raises(ValueError):
            GatewayConfig(**options)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": ["/nowhere/agent"]}, "begin with a program.*'/nowhere/agent'"),
        ({"command": ["no-such-program", "x"]}, "'no-such-program', which is no executable file in PATH"),
        ({"command": ["sh"], "env": {"PATH": "/nowhere"}}, "'sh', which is no executable file in PATH"),
        ({"command": ["agents/mine.py"], "cwd": "agents"}, "'agents/mine.py', which is no executable file"),
        ({"command": ["sh", "agents/mine.py"]}, r"whole paths while cwd is null.*/agents/mine.py'.*config_dir"),
        ({"command": ["sh"], "cwd": "nowhere"}, "cwd must be a folder, got 'nowhere'"),
    ],
)
def test_a_command_that_cannot_start_is_refused_before_anything_starts(world, tmp_path, monkeypatch, settings, said):
    """A program, a file or a folder that is not there, or would not be where the program runs, is named before the run."""
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AgentConfigError, match=said):
        world.build(["x"], agent="gateway_agent", agent_options={"gateway": GatewayConfig(**settings)})


async def test_paths_of_a_command_begin_in_its_folder(world, tmp_path, monkeypatch):
    """With `cwd` a program and its files may be named from there, wherever the run was started."""
    (tmp_path / "mine.sh").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "mine.sh").chmod(0o755)
    (tmp_path / "mine.py").write_text(ASK + "ask(messages)")
    gateway = GatewayConfig(command=["./mine.sh", sys.executable, "./mine.py"], cwd=str(tmp_path))
    await world.run_ok(["Yes.<|im_end|>"], agent="gateway_agent", agent_options={"gateway": gateway})


async def test_a_program_that_does_not_start_is_a_recorded_failure(world, tmp_path):
    """A file that may be executed and is no program fails its trajectory and says which one."""
    (tmp_path / "agent").write_bytes(b"\x00\x01")
    (tmp_path / "agent").chmod(0o755)
    options = {"gateway": GatewayConfig(command=[str(tmp_path / "agent")])}
    trajectory = await world.run_one(["x"], agent="gateway_agent", agent_options=options)
    assert f"{tmp_path}/agent" in trajectory.failure.message


async def test_an_agent_in_this_process_gets_address_and_row(world, tmp_path):
    """A coroutine function of a file asks at its own address; what it returns is what the reward reads."""
    (tmp_path / "agent.py").write_text('''
import asyncio, json, urllib.request

async def agent(base_url, api_key, row):
    """Ask once."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    body = json.dumps({"messages": row["raw_prompt"]}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with await asyncio.to_thread(urllib.request.urlopen, request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
''')
    options = {"gateway": GatewayConfig(function=f"{tmp_path / 'agent.py'}:agent")}
    segment = await world.run_ok(["Hello.<|im_end|>"], agent="gateway_agent", agent_options=options)
    assert segment.extra_fields["program_output"] == "Hello."
    assert sampled_ids([segment]) == [world.encode("Hello.<|im_end|>")]


async def test_a_function_that_exits_ends_its_trajectory_only(world, tmp_path):
    """`sys.exit` in a function is its trajectory's failure, and in its file a setting that cannot be used; neither ends the run."""
    (tmp_path / "exits.py").write_text("import sys\nasync def agent(base_url, api_key, row):\n    sys.exit('enough')\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    options = {"gateway": GatewayConfig(function=f"{tmp_path / 'exits.py'}:agent")}
    trajectory = await world.run_one(["x"], agent="gateway_agent", agent_options=options)
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "exit('enough')" in trajectory.failure.message
    options = {"gateway": GatewayConfig(function=f"{tmp_path / 'script.py'}:agent")}
    with pytest.raises(AgentConfigError, match="importable"):
        world.build(["x"], agent="gateway_agent", agent_options=options)


async def test_an_agent_of_ones_own_needs_no_settings(world):
    """A class that overrides `act` runs without a command, and may fail in its own words."""

    @register("test_own_gateway")
    class Own(GatewayAgentLoop):
        async def act(self, address, row):
            assert address.base_url.startswith("http://127.0.0.1:")
            raise LookupError("I gave up")

    Own.check_config(RolloutConfig(), "test_own_gateway")
    trajectory = await world.run_one(["x"], agent="test_own_gateway")
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "I gave up" in trajectory.failure.message


async def test_much_output_is_kept_within_bounds():
    """A program that writes more than anybody wants neither blocks nor fills the memory; its last words are kept."""
    code = "import sys; sys.stdout.write('x' * 3_000_000 + 'end'); sys.stderr.write('y' * 100_000 + 'last')"
    result = await run_program([sys.executable, "-c", code], stdin=b"z" * 1_000_000, env={})
    assert result.status == 0
    assert len(result.stdout) == 1 << 20
    assert result.stdout.endswith("end")
    assert len(result.stderr) == 1 << 14
    assert result.stderr.endswith("last")
