"""The recipes that people look for by name run: the same files at a tiny shape, with the engine and the device that are here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.data.prepare_gsm8k import prepare_gsm8k

FOLDER = Path(__file__).parents[2] / "recipes"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"needs the recipes in {FOLDER}")

TINY = (
    "actor_rollout_ref.rollout.name=transformers",
    "actor_rollout_ref.rollout.gpu_memory_utilization=null",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "data.train_batch_size=2",
    "data.max_prompt_length=960",
    "data.max_response_length=16",
    "data.val_files=[]",
    "trainer.device=cpu",
    "trainer.executor=local",
    "trainer.n_gpus_per_node=1",
    "trainer.test_freq=-1",
    "trainer.save_freq=0",
    "trainer.total_training_steps=1",
)
"""What the machine, the model and the time ask for; everything else is the recipe's."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few questions as GSM8K has them, prepared by the command that the recipes name."""
    folder = tmp_path_factory.mktemp("gsm8k")
    lines = [
        {"question": f"What is {n} plus 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"}
        for n in range(8)
    ]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for agent in ("tool_agent", "single_turn_agent"):
        prepare_gsm8k(str(folder), folder / agent, agent=agent, checks=False)
    return folder


def last_step(recipe: str, home: Path, rows: Path, folder: Path, *overrides: str, agent: str = "tool_agent") -> dict:
    """The metrics of the last step of a recipe on a tiny model."""
    settings = [
        *TINY,
        f"actor_rollout_ref.model.path={home / 'model'}",
        f"data.train_files={rows / agent / 'train.parquet'}",
        f"trainer.default_local_dir={folder}",
        *overrides,
    ]
    run_training(load_config(FOLDER / f"{recipe}.yaml", settings))
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_a_tool_agent_with_traces_in_mlflow(
    quickstart_home: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_store: str
) -> None:
    """Qwen2.5-3B GSM8K tool agent: metrics and traces are in MLflow's store."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    step = last_step("qwen2_5_3b_gsm8k_tool_agent_mlflow", quickstart_home, rows, tmp_path / "run")
    assert math.isfinite(step["actor/pg_loss"])
    client = mlflow.MlflowClient(tracking_uri=mlflow_store)
    experiment = client.get_experiment_by_name("gsm8k")
    assert len(client.search_runs([experiment.experiment_id])) == 1
    assert client.search_traces(experiment_ids=[experiment.experiment_id])


@pytest.mark.slow
def test_an_agent_that_is_a_graph(quickstart_home: Path, rows: Path, tmp_path: Path) -> None:
    """LangGraph: the graph's conversations are trained on."""
    pytest.importorskip("langgraph")
    step = last_step("langgraph_agent", quickstart_home, rows, tmp_path / "run")
    assert math.isfinite(step["actor/pg_loss"])
    assert step["training/num_trajectories"] == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_sharded_training_of_one_rank(quickstart_home: Path, rows: Path, tmp_path: Path, engine: str) -> None:
    """Qwen3-8B GRPO FSDP2: the recipe's strategy trains, here with one rank."""
    step = last_step(
        f"qwen3_8b_grpo_fsdp2_{engine}", quickstart_home, rows, tmp_path / "run", agent="single_turn_agent"
    )
    assert math.isfinite(step["actor/pg_loss"])
    assert math.isfinite(step["actor/kl_loss"])


@pytest.mark.slow
def test_mathematical_problems_with_megatron(quickstart_home: Path, rows: Path, tmp_path: Path) -> None:
    """Qwen2-7B math Megatron: all but the strategy, which needs devices."""
    local = "actor_rollout_ref.actor.strategy=local"
    step = last_step(
        "qwen2_7b_math_megatron", quickstart_home, rows, tmp_path / "run", local, agent="single_turn_agent"
    )
    assert math.isfinite(step["actor/pg_loss"])
