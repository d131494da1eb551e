"""Whole runs in which something hangs: each ends, with a dropped trajectory or with an error that names what hung."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ostinato_engines import StopReason, TokenOutput
from ostinato_engines.device import host_threads
from ostinato_engines.transformers_server import TransformersServer
from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.assembly import run_training
from ostinato_trainer.backends.local import LocalBackend
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import CallbackError, StalledError, TrainingInterrupted

LONG_S = 60
SMALL = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
    "trainer.logger=[jsonl]",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=3",
    "data.max_response_length=48",
)
SOON = "trainer.watchdog={warn_after_s: null, fail_after_s: 6}"


class CallingServer(TransformersServer):
    """Answers every first turn with a call of the calculator, and every other one with its end."""

    def __init__(self, model_path: str, *, max_model_len: int) -> None:
        super().__init__(model_path, max_model_len=max_model_len)
        tokenizer = ChatTokenizer.from_pretrained(model_path)
        start, end = (tokenizer.token_id(token) for token in ("<tool_call>", "</tool_call>"))
        assert start is not None
        assert end is not None
        call = json.dumps({"name": "calculator", "arguments": {"expression": "1 + 1"}})
        self._stop = tokenizer.stop_token_ids[0]
        self._call = [start, *tokenizer.encode_text(f"\n{call}\n"), end, self._stop]
        self._called: set[str] = set()

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Any, request_id: str, media: Sequence[Any] = ()
    ) -> TokenOutput:
        """See AsyncServerBase."""
        ids = [self._stop] if request_id in self._called else self._call
        self._called.add(request_id)
        return TokenOutput(ids, [-1.0] * len(ids), StopReason.STOP, self._stop)


class DeafServer(TransformersServer):
    """Never answers."""

    def __init__(self, model_path: str, *, max_model_len: int) -> None:
        super().__init__(model_path, max_model_len=max_model_len)

    async def generate(self, *arguments: Any, **options: Any) -> TokenOutput:
        """See AsyncServerBase."""
        import asyncio

        await asyncio.sleep(LONG_S)
        raise AssertionError("nobody waits so long")


def run(home: Path, output: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train; return the record of each step."""
    with host_threads(1):  # more of them stand in each other's way on a busy host, for seconds
        run_training(load_config([home / "config.yaml"], [*SMALL, f"trainer.default_local_dir={output}", *overrides]))
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def server(name: str, folder: Path) -> tuple[str, str]:
    """A server class of this file, by path and name."""
    path = folder / "stuck_server.py"
    path.write_text(Path(__file__).read_text())
    prefix = "actor_rollout_ref.rollout.agent.custom_async_server"
    return f"{prefix}.path={path}", f"{prefix}.name={name}"


def python_file(folder: Path, text: str) -> Path:
    """A file of the user's own."""
    path = folder / "of_the_user.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_reward_that_never_returns_drops_its_trajectory(quickstart_home: Path, tmp_path: Path, kind: str) -> None:
    """A reward that waits for ever, as a coroutine or in a thread, is given up after reward.timeout_s; its trajectory is recorded as
    failed, and the run goes on to its end."""
    wait = "await asyncio.sleep(60)" if kind == "async def" else "time.sleep(8)"
    path = python_file(
        tmp_path,
        f"import asyncio, time\nseen = []\n{kind} compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    seen.append(1)\n    if len(seen) == 2:\n        {wait}\n    return float(len(seen) % 2)\n",
    )
    records = run(quickstart_home, tmp_path, f"reward.custom_reward_function.path={path}", "reward.timeout_s=3")
    assert [record["training/num_failed_trajectories"] for record in records] == [1.0, 0.0]
    assert records[0]["training/num_trajectories"] == 5.0


def test_a_tool_that_hangs_times_out(quickstart_home: Path, tmp_path: Path) -> None:
    """A tool that never answers is given up after tool_timeout_s; the model is told, and the trajectory goes on."""
    tools = python_file(
        tmp_path,
        "import asyncio\nfrom ostinato_tools import function_tool\n\n@function_tool\nasync def calculator(expression: str) -> str:\n"
        '    """Computes.\n\n    Args:\n        expression: What.\n    """\n    await asyncio.sleep(60)\n    return "never"\n',
    )
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    records = run(
        quickstart_home,
        tmp_path,
        *server("CallingServer", tmp_path),
        f"{multi_turn}.function_tool_path={tools}",
        f"{multi_turn}.tool_timeout_s=0.1",
        "data.max_response_length=128",
    )
    assert [record["agent_loop/tool_outcomes/timeout"] for record in records] == [6, 6]


def test_an_engine_that_never_answers_ends_the_run(quickstart_home: Path, tmp_path: Path) -> None:
    """Turns that get no answer fail after generate_timeout_s; where all do, the run ends with an error that says so."""
    overrides = (*server("DeafServer", tmp_path), "actor_rollout_ref.rollout.generate_timeout_s=0.2")
    with pytest.raises(TrainingInterrupted, match=r"max_failed_batches=1 batches of groups fail.*(0\.2|time)"):
        run(quickstart_home, tmp_path, *overrides)


def test_an_engine_that_never_answers_is_named_by_the_watchdog(quickstart_home: Path, tmp_path: Path) -> None:
    """Where the deadline of a turn is longer than the watchdog's, the run ends all the same, and says what it waits for."""
    with pytest.raises(StalledError, match=r"in gen in step; it waits for: .*session "):
        run(quickstart_home, tmp_path, *server("DeafServer", tmp_path), SOON, "trainer.watchdog.fail_after_s=3")


def test_a_backend_that_blocks_ends_the_run(
    quickstart_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass that does not come back is interrupted, and the error names its phase."""

    def stuck(*arguments: Any, **options: Any) -> None:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(LocalBackend, "log_probs", stuck)
    with pytest.raises(StalledError, match="in old_log_prob in step"):
        run(quickstart_home, tmp_path, SOON)


@pytest.mark.parametrize(
    ("event", "body", "error", "message"),
    [
        (
            "on_step_end",
            "time.sleep(60)",
            StalledError,
            r"in callback Mine\.on_step_end; the event loop has stood still",
        ),
        pytest.param(
            "on_train_end",
            "time.sleep(60)",
            StalledError,
            r"in callback Mine\.on_train_end; the event loop has stood still",
            marks=pytest.mark.slow,
        ),
        (
            "on_step_end",
            "raise ValueError('no room')",
            CallbackError,
            r"Mine\.on_step_end has ended the run with ValueError: no room",
        ),
    ],
    ids=["blocks", "blocks at the end", "raises"],
)
def test_a_callback_that_blocks_or_raises_ends_the_run(
    quickstart_home: Path, tmp_path: Path, event: str, body: str, error: type[Exception], message: str
) -> None:
    """A callback that blocks the event loop, also the last one, or raises ends the run with an error that names it."""
    path = python_file(tmp_path, f"import time\nclass Mine:\n    def {event}(self, *arguments):\n        {body}\n")
    with pytest.raises(error, match=message):
        run(quickstart_home, tmp_path, f"trainer.callbacks=['{path}:Mine']", *([SOON] if error is StalledError else []))
