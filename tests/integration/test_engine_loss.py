"""A training run whose engine is killed, in mid-generation and in mid-update: it is started again, and the run goes on as if nothing
had been."""

import json
import os
import sys
from pathlib import Path

import pytest

from ostinato_trainer.cli import app
from ostinato_trainer.error_reporting import run_reporting_errors

ROLLOUT = "actor_rollout_ref.rollout"
TOLERANCE = 1e-4
"""Of a probability in float32; one step at this learning rate changes them by a hundred times as much."""

MORTAL = """
import asyncio, os, pathlib, signal
from ostinato_engines.transformers_server import TransformersServer

FOLDER = pathlib.Path(__file__).parent

def die_once(why):
    marker = FOLDER / why
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)

class Mortal(TransformersServer):
    def __init__(self, model, *, max_model_len, seed, cast_weights):
        super().__init__(model, max_model_len=max_model_len, seed=seed, cast_weights=cast_weights)
        (FOLDER / f"started-{os.getpid()}").touch()

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        generating = asyncio.ensure_future(super().generate(prompt_ids, sampling_params, request_id, media))
        if self.policy_version == 1:
            await asyncio.sleep(0.01)
            die_once("generating")
        return await generating

    async def update_weights(self, manifest, weights):
        if manifest.version == 1 and not (FOLDER / "updating").exists():
            next(iter(weights))
            die_once("updating")
        await super().update_weights(manifest, weights)
"""


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_outlives_its_engine(base: Path, small: tuple[str, ...], tmp_path: Path) -> None:
    """The engine's process is killed while it takes the first trained weights, and again while it samples under them. Each time
    another one takes its place, with these weights; no trajectory fails, all steps are made, and no process is left."""
    (tmp_path / "server.py").write_text(MORTAL)
    custom = f"{ROLLOUT}.agent.custom_async_server"
    command = [
        *("train", str(base / "config.yaml"), *small),
        "trainer.total_training_steps=2",
        "trainer.save_freq=0",
        "actor_rollout_ref.actor.optim.lr=0.01",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"{ROLLOUT}.full_determinism=false",
        f"{ROLLOUT}.engine_python={sys.executable}",
        f"{ROLLOUT}.pool.restarts.first_backoff_s=0.1",
        f"{custom}.path={tmp_path / 'server.py'}",
        f"{custom}.name=Mortal",
    ]
    assert run_reporting_errors(lambda: app(command, standalone_mode=False)) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["training/num_failed_trajectories"] == 0
        assert record["training/rollout_probs_diff_max"] < TOLERANCE
    died = [int((tmp_path / why).read_text()) for why in ("updating", "generating")]
    started = [int(path.name.removeprefix("started-")) for path in tmp_path.glob("started-*")]
    assert len(started) == 3
    assert set(died) < set(started)
    assert not any(is_alive(pid) for pid in (*started, *died) if pid != os.getpid())
    assert {path.name for path in (tmp_path / "run").glob("engine*.log")} == {
        "engine.log",
        "engine.1.log",
        "engine.2.log",
    }
