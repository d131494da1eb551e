"""A run that is killed at any moment and started again ends where one that was never stopped ends, bit for bit.

Runs are children of one process that has imported everything: a start costs a fork, and each is a process of its own that can be killed.
"""

import filecmp
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ostinato_trainer.checkpoints.manager import LATEST, CheckpointManager, check_complete

FORK_SERVER = """
import os, signal, sys
import torch
import transformers.models.qwen3.modeling_qwen3
import ostinato_trainer.assembly, ostinato_trainer.cli, ostinato_engines.transformers_server

torch.set_num_threads(1)
for line in sys.stdin:
    log, *arguments = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["ostinato", *arguments]
        try:
            ostinato_trainer.cli.main()
        except SystemExit as request:
            os._exit(request.code if isinstance(request.code, int) else 1)
        os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Starts `ostinato` with the arguments of each line that it reads, and tells the child's number, then its end."""

DEADLINE_S = 120.0
NUM_STEPS = 6

REWARD = """
import random

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(extra_info["sampled_text"]) % 7 + random.random()
"""
"""Differs between trajectories, and draws from a generator that only the process knows."""


@dataclass
class Child:
    """A run under way."""

    number: int
    server: subprocess.Popen[str]

    def is_over(self, within_s: float) -> bool:
        """Whether it ends so soon."""
        return bool(select.select([self.server.stdout], [], [], within_s)[0])

    def send(self, signal_number: int) -> None:
        """A signal; it has not been waited for, so the number is still its own."""
        os.kill(self.number, signal_number)

    def status(self) -> int:
        """How it ended, as `subprocess` has it; it must end."""
        if not self.is_over(DEADLINE_S):
            self.send(signal.SIGKILL)
            pytest.fail(f"a run did not end within {DEADLINE_S:g} s")
        assert self.server.stdout is not None
        return int(self.server.stdout.readline())


@dataclass
class Lab:
    """Starts runs."""

    server: subprocess.Popen[str]
    config: Path
    reward: Path

    def start(self, folder: Path, *overrides: str, num_steps: int = NUM_STEPS) -> Child:
        """`ostinato train` into a folder: an epoch and a half, with 4 steps an epoch."""
        settings = (
            f"trainer.default_local_dir={folder}",
            f"trainer.total_training_steps={num_steps}",
            "trainer.val_before_train=true",
            "trainer.test_freq=2",
            "trainer.save_freq=1",
            "trainer.logger=[jsonl]",
            "data.train_batch_size=4",
            "data.max_response_length=12",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
            "actor_rollout_ref.rollout.n=3",
            f"reward.custom_reward_function.path={self.reward}",
        )
        folder.mkdir(exist_ok=True)
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        line = [str(folder / "log"), "train", str(self.config), *settings, *overrides]
        self.server.stdin.write("\t".join(line) + "\n")
        self.server.stdin.flush()
        return Child(int(self.server.stdout.readline()), self.server)

    def finish(self, folder: Path, *overrides: str, num_steps: int = NUM_STEPS) -> str:
        """A run to its end, which must be a good one; what it printed."""
        status = self.start(folder, *overrides, num_steps=num_steps).status()
        text = (folder / "log").read_text()
        assert status == 0, text
        return text


@pytest.fixture(scope="module")
def lab(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A process that has imported everything, once for all runs."""
    reward = tmp_path_factory.mktemp("resume") / "reward.py"
    reward.write_text(REWARD)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-c", FORK_SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield Lab(server, base / "config.yaml", reward)
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="module")
def straight(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("straight")
    lab.finish(folder)
    return folder


def curve(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics by step, each of which must be there once, without what a clock measured."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["step"] not in found
        found[record["step"]] = {key: value for key, value in record.items() if not MEASURED.match(key)}
    return found


MEASURED = re.compile(
    r"timing|perf/|versions/|resumed_from|agent_loop/(slowest|generate_sequences|compute_score|tool_calls|admission)/"
)


def prompts(folder: Path, step: int) -> list[str]:
    """What a step was trained on, by `trainer.rollout_data_dir`."""
    return sorted(json.loads(line)["input"] for line in (folder / f"{step}.jsonl").read_text().splitlines())


def must_be_alike(folder: Path, straight: Path, step: int = NUM_STEPS) -> None:
    """Both runs have the same curve and the same last checkpoint, bit for bit."""
    assert curve(folder) == curve(straight)
    own, other = (path / f"global_step_{step}" for path in (folder, straight))
    for name in (
        "actor/weights.safetensors",
        "actor/optimizer.safetensors",
        "huggingface/model.safetensors",
        "run_state.json",
    ):
        assert filecmp.cmp(own / name, other / name, shallow=False), name


def must_be_sound(folder: Path) -> None:
    """Whatever happened: every checkpoint is whole, nothing hidden survives the next start, and the newest is named."""
    with CheckpointManager(folder) as manager:
        assert all(check_complete(manager.path_of(step)).step == step for step in manager.steps())
        assert (manager.latest() is None) == (not manager.steps())
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def is_writing(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any(path.name.startswith(".writing-global_step") for path in folder.iterdir())


def num_lines(folder: Path) -> int:
    """Lines of metrics, one a step and one before the first."""
    path = folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def kill_on_the_way(lab: Lab, folder: Path, number: int, choice: random.Random, *overrides: str) -> bool:
    """Starts a run and ends it by a signal: at a random moment of its next steps, or while it writes a checkpoint; whether it was under way."""
    before = num_lines(folder)
    child = lab.start(folder, *overrides)
    if choice.random() < 0.4:
        wait_for(child, lambda: is_writing(folder))
        over = child.is_over(choice.random() * 0.005)
    else:
        num_steps = choice.randrange(3)
        wait_for(child, lambda: num_lines(folder) >= before + num_steps)
        over = child.is_over(choice.random() * 0.4)
    if not over:
        child.send(number)
    status = child.status()
    assert status in (0, 128 + number, -number), (
        folder / "log"
    ).read_text()  # the last where it came before, or after, all else
    must_be_sound(folder)
    return status != 0


def wait_for(child: Child, condition: Callable[[], bool]) -> None:
    """Until it holds, or the run is over."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < deadline and not child.is_over(0.001):
        pass


def kills_until_the_end(lab: Lab, folder: Path, choice: random.Random, most: int, *overrides: str) -> int:
    """Kills a run again and again while it makes its way, then lets it end; how often it was killed."""
    num_kills = 0
    for _ in range(10):
        while num_kills < most and kill_on_the_way(lab, folder, signal.SIGKILL, choice, *overrides):
            num_kills += 1
        if num_kills:
            break
        shutil.rmtree(folder)  # it was over before it could be killed
    lab.finish(folder, *overrides)
    return num_kills


def test_a_killed_run_ends_like_one_that_was_not(lab: Lab, straight: Path, tmp_path: Path) -> None:
    """Killed three times at random moments, a run has the curve and the weights of one that was never stopped."""
    num_kills = kills_until_the_end(lab, tmp_path / "run", random.Random(1), 3)
    assert num_kills
    must_be_alike(tmp_path / "run", straight)


def test_an_interrupted_run_ends_like_one_that_was_not(lab: Lab, straight: Path, tmp_path: Path) -> None:
    """The same after Ctrl-C and SIGTERM."""
    choice = random.Random(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        kill_on_the_way(lab, tmp_path / "run", number, choice)
    lab.finish(tmp_path / "run")
    must_be_alike(tmp_path / "run", straight)


def test_every_step_can_be_gone_on_from(lab: Lab, straight: Path, tmp_path: Path) -> None:
    """From the middle of an epoch, its end and the step before the last the rest of the curve is the same; after the last step nothing is
    left, which is said."""
    for step in (2, 4, NUM_STEPS - 1):
        run = tmp_path / f"from-{step}"
        shutil.copytree(straight, run)
        lab.finish(run, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={run / f'global_step_{step}'}")
        must_be_alike(run, straight)
    before = (straight / "metrics.jsonl").read_bytes()
    assert (
        f"Nothing is left to do: {straight / f'global_step_{NUM_STEPS}'} is step {NUM_STEPS} of {NUM_STEPS}"
        in lab.finish(straight)
    )
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_a_look_at_an_old_checkpoint_undoes_nothing(lab: Lab, straight: Path, tmp_path: Path) -> None:
    """`val_only` of an earlier checkpoint measures that one, in a file of its own; the newest stays the newest, with all metrics."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", LATEST)}
    chosen = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run / 'global_step_2'}")
    assert "goes back" not in lab.finish(run, "trainer.val_only=true", *chosen)
    assert {name: (run / name).read_bytes() for name in before} == before
    (line,) = map(json.loads, (run / "val_only.jsonl").read_text().splitlines())
    assert line["step"] == 2
    assert any(name.startswith("val-core/") for name in line)
    assert not any(name.startswith("actor/") for name in line)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_many_moments(lab: Lab, straight: Path, tmp_path: Path) -> None:
    """At least 24 kills at random moments, a third of them while a checkpoint is written, over several runs: each has the same curve and
    weights in the end."""
    choice = random.Random(3)
    num_kills = num_runs = 0
    while num_kills < 24:
        run = tmp_path / f"run-{num_runs}"
        num_kills += kills_until_the_end(lab, run, choice, 8)
        must_be_alike(run, straight)
        num_runs += 1
        assert num_runs < 24


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=gae",),
        ("trainer.async_save=false", "trainer.max_ckpt_to_keep=1", "trainer.save_freq=2"),
        ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_epochs=2"),
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=20"),
        ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true"),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=20"),
        ("algorithm.adv_estimator=remax",),
    ],
    ids=["critic", "waiting", "reference", "controller", "adapters", "filtered", "baselines"],
)
def test_other_runs_too(lab: Lab, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """With a critic, with checkpoints that are waited for and removed, with a reference policy, with a controller of the divergence, with
    adapters, with groups that are filtered, and with greedy baselines: killed or not, the end is the same."""
    if any("lora" in override for override in overrides):
        pytest.importorskip("peft")
    lab.finish(tmp_path / "straight", *overrides)
    kills_until_the_end(lab, tmp_path / "run", random.Random(4), 3, *overrides)
    must_be_alike(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_sampled_ahead_is_taken_up(lab: Lab, tmp_path: Path) -> None:
    """A run that samples ahead of training goes on after kills with what was finished: each step is there once and trains the prompts that it
    would have, so no group is lost or trained on twice. Its curve is another one, for how far ahead it is depends on time."""
    run, overrides = tmp_path / "run", ("trainer.max_staleness=1", "trainer.save_freq=2")
    assert kills_until_the_end(
        lab, run, random.Random(5), 4, *overrides, f"trainer.rollout_data_dir={tmp_path / 'killed'}"
    )
    assert list(curve(run)) == list(range(NUM_STEPS + 1))
    lab.finish(tmp_path / "straight", *overrides, f"trainer.rollout_data_dir={tmp_path / 'not'}")
    for step in range(1, NUM_STEPS + 1):
        assert prompts(tmp_path / "killed", step) == prompts(tmp_path / "not", step)
    states = [
        json.loads((path / f"global_step_{NUM_STEPS}" / "run_state.json").read_bytes())
        for path in (run, tmp_path / "straight")
    ]
    assert states[0]["parts"]["sampling"]["rows"] == states[1]["parts"]["sampling"]["rows"]
