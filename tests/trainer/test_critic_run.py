"""Whole runs with a critic, and with adapters: what is trained when, what engines get, and that both are taken up again exactly."""

import io
import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import BackendError, ConfigError
from ostinato_trainer.quickstart.report import ACCURACY
from ostinato_trainer.quickstart.run import make_files, run_quickstart

SMALL = (
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=3",
    "data.max_response_length=48",
    "trainer.logger=[jsonl]",
)
GAE = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_epochs=2")
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.optim.lr=5e-2",
    "actor_rollout_ref.actor.use_kl_loss=true",
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's files; the model is as it was made, without a warm start, and the reward differs between trajectories."""
    folder = tmp_path_factory.mktemp("quickstart")
    make_files(folder, seed=0)
    (folder / "warm_start").symlink_to(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(home: Path, output: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of the run's steps, without what depends on the clock."""
    places = (
        f"trainer.default_local_dir={output}",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
    )
    run_training(load_config([home / "config.yaml"], [*SMALL, *places, *overrides]))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    clocked = ("timing_", "perf/", "versions/", "agent_loop/", "resumed_from")
    return [{name: value for name, value in each.items() if not name.startswith(clocked)} for each in records]


def state(output: Path, step: int, part: str) -> dict[str, torch.Tensor]:
    folder = output / f"global_step_{step}" / part
    return {
        f"{file.stem}.{name}": value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return bool(one) and set(one) == set(other) and all(torch.equal(one[name], value) for name, value in other.items())


def test_in_the_warm_up_only_the_critic_learns(home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """During `critic_warmup` steps the policy's weights stay bit for bit, while the critic's values leave 0; then both learn. A warm-up that lasts
    for the whole run is said."""
    records = run(home, tmp_path / "warm", 2, *GAE, "trainer.critic_warmup=2")
    assert "critic_warmup is 2 and the run has 2 steps: the policy is never trained" in caplog.text
    caplog.clear()
    assert not any(name.startswith("actor/") for record in records for name in record)
    assert records[0]["critic/values/max"] == 0.0 != records[1]["critic/values/mean"]
    assert all(record["critic/grad_norm"] > 0 and record["critic/lr"] == 1e-3 for record in records)
    stored = load_file(home / "model" / "model.safetensors")
    assert equal(load_file(tmp_path / "warm" / "global_step_2" / "huggingface" / "model.safetensors"), stored)
    last = run(home, tmp_path / "on", 2, *GAE, "trainer.critic_warmup=1")[-1]
    assert last["actor/grad_norm"] > 0 < last["critic/grad_norm"]
    assert "never trained" not in caplog.text
    assert not equal(load_file(tmp_path / "on" / "global_step_2" / "huggingface" / "model.safetensors"), stored)


@pytest.mark.parametrize(("overrides", "parts"), [(GAE, ("actor", "critic")), (LORA, ("actor",))])
def test_a_run_is_taken_up_again_exactly(
    home: Path, tmp_path: Path, overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    """Two steps, an end, and one more give the metrics and the state of three steps in one go, for a critic and for adapters."""
    if overrides is LORA:
        pytest.importorskip("peft")
    whole = run(home, tmp_path / "whole", 3, *overrides)
    run(home, tmp_path / "parts", 2, *overrides)
    assert run(home, tmp_path / "parts", 3, *overrides) == whole
    for part in parts:
        assert equal(state(tmp_path / "parts", 3, part), state(tmp_path / "whole", 3, part))


def test_engines_sample_with_the_adapters(home: Path, tmp_path: Path) -> None:
    """Under adapters the engine's log-probabilities are the trainer's in every step, the divergence from the reference grows from 0, the base
    model is untouched, and the checkpoint has merged weights with the adapters beside them."""
    pytest.importorskip("peft")
    records = run(home, tmp_path, 3, *LORA)
    assert all(record["training/rollout_probs_diff_max"] < 1e-4 for record in records)
    assert records[0]["actor/kl_loss"] == 0.0 < records[2]["actor/kl_loss"]
    stored, merged = (
        load_file(home / "model" / "model.safetensors"),
        load_file(tmp_path / "global_step_3" / "huggingface" / "model.safetensors"),
    )
    assert set(stored) == set(merged)
    changed = {name for name, value in stored.items() if not torch.equal(merged[name], value)}
    assert changed == {name for name in stored if name.endswith("_proj.weight")}
    assert (tmp_path / "global_step_3" / "huggingface" / "lora_adapter" / "adapter_model.safetensors").is_file()
    assert all(".lora_" in name for name in load_file(tmp_path / "global_step_3" / "actor" / "weights.safetensors"))


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            (*GAE, "critic.model.path=no/such/model"),
            ConfigError,
            "critic.model.path must be a folder with a Hugging Face model",
        ),
        ((*LORA, "actor_rollout_ref.model.target_modules=[w_pack]"), BackendError, "got 'w_pack'; choose among q_proj"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    home: Path, tmp_path: Path, overrides: tuple[str, ...], error: type[Exception], message: str
) -> None:
    """A critic that is not there and layers that no model has end the run before its first step, and nothing is written."""
    if error is BackendError:
        pytest.importorskip("peft")
    with pytest.raises(error, match=message):
        run(home, tmp_path / "out", 1, *overrides)
    assert not (tmp_path / "out" / "global_step_1").exists()


def test_a_critic_with_another_vocabulary_is_refused(home: Path, tmp_path: Path) -> None:
    """A critic whose tokenizer gives ids to other tokens would misread every token; the first one that differs is named."""
    other = tmp_path / "other"
    shutil.copytree(home / "model", other)
    tokenizer = other / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"critic\.model\.path must have the policy's tokenizer"):
        run(home, tmp_path / "out", 1, *GAE, f"critic.model.path={other}")


@pytest.mark.slow
def test_ppo_with_a_critic_learns(tmp_path: Path) -> None:
    """The quickstart with GAE and a critic, cut short: the reward of the last five steps is well above that of the first five, and so is the
    accuracy on problems that were never trained on."""
    pytest.importorskip("plotille")
    overrides = (
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "trainer.total_training_steps=20",
        "trainer.test_freq=20",
    )
    console = Console(file=io.StringIO(), width=120)
    run_quickstart(tmp_path / "run", seed=0, console=console, overrides=(*overrides, "trainer.save_freq=0"))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
    accuracies = [record[ACCURACY] for record in records if ACCURACY in record]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.15
    assert accuracies[-1] > accuracies[0]
