"""Real input: GSM8K's questions, a real small model, the commands of `recipes/gsm8k_tool_cpu.yaml`.

The run by command line is watched from outside; the one in this process shows that what is trained on is what was sampled.
"""

import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("OSTINATO_SHARED", Path(__file__).parents[3] / "shared"))
GSM8K = SHARED / "data" / "gsm8k"
MODEL = Path(os.environ.get("OSTINATO_SMOLLM2", "OSTINATO_SMOLLM2 is not set"))
RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k_tool_cpu.yaml"
TEMPLATE = RECIPE.parent / "templates" / "chatml_hermes.jinja"
COMMAND = Path(sys.executable).with_name("ostinato")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not MODEL.is_dir(), reason="needs SmolLM2-135M-Instruct; name its folder in OSTINATO_SMOLLM2"),
    pytest.mark.skipif(not GSM8K.is_dir(), reason=f"needs {GSM8K}"),
]

RECORDING_SERVER = '''
"""A server of a third party: the embedded engine, with a memory."""

from ostinato_engines.transformers_server import TransformersServer


class RecordingServer(TransformersServer):
    """Remembers every turn that it served."""

    turns = []

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        output = await super().generate(prompt_ids, sampling_params, request_id, media)
        self.turns.append((request_id, list(prompt_ids), output))
        return output
'''

LENGTH_REWARD = '''
"""A reward in which the answers to a question surely differ, so that every step moves the weights."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 1000
'''


def run(command: str, places: dict[str, Path], *more: str) -> None:
    """Run a command of the recipe's comment as a user does, from the repository's root.

    Args:
        command: How it begins, such as `ostinato sft`.
        places: What stands for the words and paths that the comment uses.
        more: Arguments that are added.
    """
    comment = [line.removeprefix("#") for line in RECIPE.read_text().splitlines() if line.startswith("#")]
    commands = [line.strip() for line in "\n".join(comment).replace("\\\n", " ").splitlines()]
    [text] = [line for line in commands if line.startswith(f"{command} ")]
    pattern = re.compile(r"(?<![\w/.])(" + "|".join(map(re.escape, places)) + r")(?![\w-])")
    arguments = [pattern.sub(lambda found: str(places[found[1]]), word) for word in shlex.split(text)[1:]]
    done = subprocess.run(
        [str(COMMAND), *arguments, *more],
        cwd=RECIPE.parents[1],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    run("ostinato prepare", {"DIR": GSM8K, "data/gsm8k": folder})
    return folder


@pytest.fixture(scope="module")
def warm_model(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "warm"
    run("ostinato sft", {"MODEL": MODEL, "data/gsm8k": rows, "models/warm": folder})
    return folder


def test_the_recipe_trains_a_real_model_with_tools(rows: Path, warm_model: Path, tmp_path: Path) -> None:
    """Two steps of GRPO: tools are called and answer, no loss is infinite, engine and trainer agree, the checkpoint loads."""
    places = {"data/gsm8k": rows, "models/warm": warm_model}
    run("ostinato train", places, f"trainer.default_local_dir={tmp_path}")
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["training/num_trajectories"] == 8
        assert step["agent_loop/failures"] == 0
        assert step["agent_loop/tokenization_mismatches"] == 0
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/ppo_kl"):
            assert math.isfinite(step[name]), name
        assert step["actor/num_skipped_steps"] == 0
        assert step["training/rollout_log_probs_diff_max"] < 1e-3
    assert sum(step["agent_loop/tool_outcomes/ok"] for step in steps) >= 1
    _check_loads(tmp_path / "global_step_2" / "huggingface")


def _check_loads(folder: Path) -> None:
    """What transformers makes of a checkpoint: finite weights, the tokenizer, the template with tools."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE.read_text()
    question = [{"role": "user", "content": "How much is 2 + 3?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert model(**ids).logits.isfinite().all()


def test_what_is_trained_on_is_what_was_sampled(
    rows: Path, warm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trained sequence is what the engine was asked and answered, id for id and log-probability for log-probability;
    the mask is 1 on what it answered and 0 on all else, tools' words included; and the second step samples from the weights
    that the first one made."""
    from ostinato_engines.loading import load_server_class
    from ostinato_tokenization import ChatTokenizer
    from ostinato_trainer.assembly import run_training
    from ostinato_trainer.backends.local import LocalBackend
    from ostinato_trainer.batch import Batch
    from ostinato_trainer.config.loading import load_config

    for name, text in (("server.py", RECORDING_SERVER), ("reward.py", LENGTH_REWARD)):
        (tmp_path / name).write_text(text)
    trained: list[Batch] = []
    train = LocalBackend.forward_backward

    def watched(self: LocalBackend, micro_batches: Any, loss_fn: Any, **options: Any) -> dict[str, float]:
        trained.extend(micro_batches)
        return train(self, micro_batches, loss_fn, **options)

    monkeypatch.setattr(LocalBackend, "forward_backward", watched)
    overrides = {
        "actor_rollout_ref.model.path": warm_model,
        "actor_rollout_ref.actor.optim.lr": 1e-5,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
        "actor_rollout_ref.rollout.agent.custom_async_server.path": tmp_path / "server.py",
        "actor_rollout_ref.rollout.agent.custom_async_server.name": "RecordingServer",
        "data.train_files": rows / "train.parquet",
        "data.train_batch_size": 1,
        "reward.custom_reward_function.path": tmp_path / "reward.py",
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.save_freq": 0,
        "trainer.logger": "[jsonl]",
    }
    metrics: list[dict[str, float]] = []
    run_training(
        load_config([RECIPE], [f"{key}={value}" for key, value in overrides.items()]),
        on_step=lambda _, values: metrics.append(dict(values)),
    )

    sampled: dict[str, list] = defaultdict(list)
    turns_served = load_server_class(tmp_path / "server.py", "RecordingServer").turns  # pyright: ignore[reportAttributeAccessIssue]
    for request_id, prompt_ids, output in turns_served:
        sampled[request_id].append((prompt_ids, output))
    sequences = [sequence for batch in trained for sequence in _sequences(batch)]
    assert len(sequences) == len(sampled) == 8
    tokenizer = ChatTokenizer.from_pretrained(warm_model)
    num_answered = 0
    for ids, mask, log_probs in sequences:
        turns = sampled.pop(next(name for name, turns in sampled.items() if _recorded(turns[-1], ids)))
        expected: list[float | None] = [None] * len(ids)
        for prompt_ids, output in turns:
            assert _recorded((prompt_ids, output), ids)
            begin, end = len(prompt_ids), len(prompt_ids) + len(output.token_ids)
            expected[begin:end] = output.logprobs
        assert mask == [value is not None for value in expected]
        assert [value for value, trains in zip(log_probs, mask, strict=True) if trains] == pytest.approx(
            [value for value in expected if value is not None], abs=1e-6
        )
        between = [ids[place] for place in range(len(turns[0][0]), len(ids)) if not mask[place]]
        num_answered += tokenizer.decode(between).count("<tool_response>")
    assert num_answered >= 1

    assert len(metrics) == 2
    assert all(step["actor/grad_norm"] > 0 for step in metrics)
    assert all(step["training/rollout_log_probs_diff_max"] < 1e-3 for step in metrics)
    assert {span.version for *_, output in turns_served for span in output.policy_versions} == {0, 1}


def _recorded(turn: tuple, ids: list[int]) -> bool:
    """Whether a sequence begins with what the engine was asked and answered in a turn."""
    known = [*turn[0], *turn[1].token_ids]
    return ids[: len(known)] == known


def _sequences(batch: Any) -> list[tuple[list[int], list[bool], list[float]]]:
    """Ids, mask and the engine's log-probabilities of each sequence of a batch."""
    bounds = batch.cu_seqlens.tolist()
    columns = [column.tolist() for column in (batch.token_ids, batch.loss_mask, batch.rollout_log_probs)]
    return [
        (columns[0][begin:end], columns[1][begin:end], columns[2][begin:end])
        for begin, end in itertools.pairwise(bounds)
    ]
