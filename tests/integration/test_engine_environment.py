"""A run whose engine lives in a process and an environment of its own: the same results, and one message where it fails.

`OSTINATO_ENGINE_PYTHON` names an interpreter with ostinato-engines and other versions than here, `OSTINATO_VLLM_PYTHON` one with vLLM too.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ostinato_engines.versions import installed_versions
from ostinato_trainer.cli import app
from ostinato_trainer.error_reporting import run_reporting_errors

ROLLOUT = "actor_rollout_ref.rollout"
FREE = f"{ROLLOUT}.full_determinism=false"
TOLERANCE = 1e-4
"""Of a probability in float32; one step at this learning rate changes them by a hundred times as much."""

REWARD = """
import json

def compute_score(data_source, solution_str, ground_truth, extra_info):
    score = float(len(solution_str) % 7)
    with open({path!r}, "a") as file:
        file.write(json.dumps([solution_str, score]) + "\\n")
    return score
"""

HANGING = """
import asyncio, os, pathlib
from ostinato_engines import AsyncServerBase

class Hanging(AsyncServerBase):
    def __init__(self, model):
        pass
    async def update_weights(self, manifest, weights):
        for _ in weights:
            pass
        self.policy_version = manifest.version
    def capabilities(self):
        from ostinato_engines import Capabilities
        return Capabilities(engine="hanging", weight_update=True)
    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        marker = pathlib.Path(__file__).with_name("pid")
        marker.with_suffix(".new").write_text(str(os.getpid()))
        marker.with_suffix(".new").rename(marker)
        await asyncio.sleep(600)
    async def chat_completion(self, raw_request):
        return {}
"""

SGLANG = """
import sys
from ostinato_engines.sglang_server import SGLangServer

class Local(SGLangServer):
    def __init__(self, model, *, dtype, max_model_len, max_num_seqs, cast_weights, seed):
        super().__init__(
            model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs, cast_weights=cast_weights, seed=seed,
            launcher=(sys.executable, "-m", "ostinato_engines.testing.sglang_stub"),
        )
"""


class Run:
    """What a run of two steps left: its metrics, and each answer with its reward."""

    def __init__(self, metrics: list[dict], answers: list[list]) -> None:
        self.metrics, self.answers = metrics, answers

    def must_have_followed(self) -> None:
        """The weights changed, and the engine sampled each step with those that were trained."""
        assert [record["step"] for record in self.metrics] == [1, 2]
        for record in self.metrics:
            assert record["actor/grad_norm"] > 0
            assert record["training/rollout_probs_diff_max"] < TOLERANCE
            assert record["training/num_failed_trajectories"] == 0


@pytest.fixture
def arguments(base: Path, small: tuple[str, ...]) -> Callable[..., list[str]]:
    """The command line of two steps into a folder."""

    def make(folder: Path, *overrides: str) -> list[str]:
        folder.mkdir(exist_ok=True)
        (folder / "reward.py").write_text(REWARD.format(path=str(folder / "answers.jsonl")))
        own = (
            "trainer.total_training_steps=2",
            "trainer.save_freq=0",
            "actor_rollout_ref.actor.optim.lr=0.01",
            f"reward.custom_reward_function.path={folder / 'reward.py'}",
            f"trainer.default_local_dir={folder / 'run'}",
        )
        return ["train", str(base / "config.yaml"), *small, *own, FREE, *overrides]

    return make


@pytest.fixture
def train(arguments: Callable[..., list[str]]) -> Callable[..., Run]:
    """Train, in this process, and read what is left."""

    def run(folder: Path, *overrides: str) -> Run:
        status = run_reporting_errors(lambda: app(arguments(folder, *overrides), standalone_mode=False))
        assert status == 0
        lines = {
            name: [json.loads(line) for line in (folder / name).read_text().splitlines()]
            for name in ("run/metrics.jsonl", "answers.jsonl")
        }
        return Run(lines["run/metrics.jsonl"], sorted(lines["answers.jsonl"]))

    return run


def python_named_by(variable: str) -> str:
    """An interpreter that the caller gives."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no interpreter with an engine and ostinato-engines")
    return python


def test_a_process_of_its_own_changes_no_reward(train: Callable[..., Run], tmp_path: Path) -> None:
    """The same seed gives the same answers and rewards, step by step, whether the engine is in this process or in its own."""
    here = train(tmp_path / "here")
    there = train(tmp_path / "there", f"{ROLLOUT}.engine_python={sys.executable}")
    for run in (here, there):
        run.must_have_followed()
        assert run.metrics[0]["versions/engine"] == run.metrics[0]["versions/trainer"] == installed_versions()
    assert len(here.answers) == 8
    assert len({score for _, score in here.answers}) > 1
    assert there.answers == here.answers


@pytest.mark.slow
def test_another_version_of_transformers(train: Callable[..., Run], tmp_path: Path) -> None:
    """A trainer with one version of transformers drives an engine with another; weights arrive, and both versions are told."""
    python = python_named_by("OSTINATO_ENGINE_PYTHON")
    run = train(tmp_path / "there", f"{ROLLOUT}.engine_python={python}")
    run.must_have_followed()
    trainer, engine = run.metrics[0]["versions/trainer"], run.metrics[0]["versions/engine"]
    assert trainer == installed_versions()
    assert engine.split("transformers ")[1] != trainer.split("transformers ")[1], (trainer, engine)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_in_an_environment_of_its_own(
    train: Callable[..., Run], arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GRPO with vLLM elsewhere: its logprobs are the trainer's, new weights arrive, versions are told, a wrong argument is one message."""
    python = python_named_by("OSTINATO_VLLM_PYTHON")
    vllm = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_python={python}", f"{ROLLOUT}.enforce_eager=true")
    run = train(tmp_path / "there", *vllm, f"{ROLLOUT}.engine_kwargs.vllm.block_size=32")
    run.must_have_followed()
    assert "vllm" in run.metrics[0]["versions/engine"]
    assert run.metrics[0]["versions/trainer"] == installed_versions()
    wrong = arguments(tmp_path / "wrong", *vllm, f"{ROLLOUT}.engine_kwargs.vllm.blocksize=32")
    capsys.readouterr()
    assert run_reporting_errors(lambda: app(wrong, standalone_mode=False)) == 1
    assert "engine_args must be known to vllm" in (err := capsys.readouterr().err)
    assert "'blocksize'" in err


@pytest.mark.slow
def test_sglang_s_protocol(train: Callable[..., Run], tmp_path: Path) -> None:
    """GRPO through the adapter for SGLang, with a local server that speaks SGLang's protocol: weights arrive, the process is gone after."""
    server = tmp_path / "server.py"
    server.write_text(SGLANG)
    custom = f"{ROLLOUT}.agent.custom_async_server"
    run = train(tmp_path / "there", f"{custom}.path={server}", f"{custom}.name=Local", f"{ROLLOUT}.name=sglang")
    run.must_have_followed()
    assert "sglang" in run.metrics[0]["versions/engine"]


@pytest.mark.parametrize(
    ("script", "fragments"),
    [
        ("exit 3", ("must hold this package", "install it there")),
        ("echo 'RuntimeError: device is full: out of memory' >&2; exit 1", ("device is full", "lower gpu_memory")),
    ],
)
def test_an_engine_that_does_not_start(
    arguments: Callable[..., list[str]],
    must_hold_no_checkpoint: Callable[[Path], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    script: str,
    fragments: tuple[str, ...],
) -> None:
    """The command ends with one message: the lines of the engine's log that matter, the cure, and where the whole log is."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    command = arguments(tmp_path, f"{ROLLOUT}.engine_python={python}")
    capsys.readouterr()
    assert run_reporting_errors(lambda: app(command, standalone_mode=False)) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    _, message = re.split(r"^error: ", err, flags=re.MULTILINE)
    for fragment in (
        f"must start under {python}",
        f"the whole log is in {tmp_path / 'run' / 'engine.log'}",
        *fragments,
    ):
        assert fragment in message
    must_hold_no_checkpoint(tmp_path / "run")


@pytest.fixture
def hanging(arguments: Callable[..., list[str]], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command, waiting for an engine elsewhere that does not answer, and that engine's process."""
    server = tmp_path / "server.py"
    server.write_text(HANGING)
    custom = f"{ROLLOUT}.agent.custom_async_server"
    command = arguments(
        tmp_path,
        f"{custom}.path={server}",
        f"{custom}.name=Hanging",
        f"{ROLLOUT}.engine_python={sys.executable}",
        f"{ROLLOUT}.pool.restarts.max_restarts=0",
    )
    main = [sys.executable, "-c", "from ostinato_trainer.cli import main; main()", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(main, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as running:
        deadline = time.monotonic() + 100
        while not (tmp_path / "pid").exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (tmp_path / "pid").exists(), running.communicate(timeout=10)
        yield running, int((tmp_path / "pid").read_text())
        running.kill()


@pytest.mark.slow
def test_an_engine_that_is_killed_ends_the_run(hanging: tuple[subprocess.Popen[str], int]) -> None:
    """Where the engine dies in mid-run and is not to be restarted, the command ends with one message that says so and where its log is."""
    running, engine = hanging
    os.kill(engine, signal.SIGKILL)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 1, err
    assert "Traceback" not in err
    before, message = re.split(r"^error: ", err, flags=re.MULTILINE)
    assert "replica 0 is lost" in before
    for fragment in ("the process is gone", "the whole log is in"):
        assert fragment in message


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_the_engine_goes_with_its_run(hanging: tuple[subprocess.Popen[str], int], number: signal.Signals) -> None:
    """Ctrl-C and even a kill of the trainer leave no engine behind, whatever that was doing."""
    running, engine = hanging
    os.kill(engine, 0)
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert running.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), err
    deadline = time.monotonic() + 60
    while Path(f"/proc/{engine}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{engine}").exists()
