"""`MegatronRank` over one, two and four ranks, with gloo on the CPU, beside `LocalBackend` on the same weights and batches, in float32.

The ranks are processes of the interpreter that has megatron.core (megatron_ranks.py): the one that $OSTINATO_MEGATRON_PYTHON names, or this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent / "megatron_ranks.py"
RANKS_S = 500
LOG_PROBS, METRICS, GRAD_NORM, WEIGHTS = 5e-6, 5e-6, 2e-6, 2e-6
"""How far float32 may be apart: absolute, absolute, relative, absolute after five steps of 1e-3."""

Results = list[dict[str, Any]]
RunRanks = Callable[[int], Results]


def interpreter() -> str | None:
    """A Python that can import megatron.core."""
    given = os.environ.get("OSTINATO_MEGATRON_PYTHON")
    if given:
        return given
    try:
        return sys.executable if importlib.util.find_spec("megatron.core") else None
    except ModuleNotFoundError:
        return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(RANKS_S + 60),
    pytest.mark.skipif(
        interpreter() is None or torch.cuda.is_available(),
        reason="no megatron.core here, or a GPU; .ci/megatron.py makes an environment for CPUs",
    ),
]


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """What all ranks of a world of a size answered, run once a size; by rank and scenario."""
    found: dict[int, Results] = {}

    def run(world_size: int) -> Results:
        if world_size not in found:
            found[world_size] = _answers(world_size, tmp_path_factory.mktemp(f"ranks{world_size}"))
        return found[world_size]

    return run


def _answers(world_size: int, folder: Path) -> Results:
    """Starts the ranks and waits for them; all end with this call."""
    logs = [(folder / f"log-{rank}").open("w+") for rank in range(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(interpreter()), "-W", "ignore", str(SCRIPT)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(world_size)
    ]
    try:
        statuses = [process.wait(RANKS_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    said = "\n".join((folder / f"log-{rank}").read_text()[-2000:] for rank in range(world_size))
    assert statuses == [0] * world_size, said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def _scenario(results: Results, name: str) -> Results:
    """What each rank answered in a scenario."""
    answers = [each[name] for each in results if name in each]
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert len(answers) == len(results), f"{name} did not run on all ranks: {results}"
    assert not errors, errors[0]
    return answers


MODELS = ("qwen2_tied", "qwen2", "qwen3_tied", "qwen3", "llama", "llama3")


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_has_the_logits_of_transformers(run_ranks: RunRanks, model: str) -> None:
    """Logits are those of the Hugging Face model bit for bit; with one projection's rows in reverse they are far from them."""
    (answer,) = _scenario(run_ranks(1), f"logits {model}")
    assert answer["difference"] == 0.0
    assert answer["turned"] > 0.1 * answer["scale"]


@pytest.mark.parametrize("model", MODELS)
def test_two_tensor_ranks_have_the_logits_of_transformers(run_ranks: RunRanks, model: str) -> None:
    """Split over two ranks, logits are within 1e-5 of the Hugging Face model's; between the matrices each rank has half of the tokens, whose number
    is odd."""
    for answer in _scenario(run_ranks(2), f"logits {model}"):
        num_tokens, on_this_rank = answer["tokens"]
        assert num_tokens % 2 == 1
        assert on_this_rank == (num_tokens + 1) // 2
        assert answer["difference"] < 1e-5
        assert answer["turned"] > 0.1 * answer["scale"]


def test_positions_far_out_are_those_of_transformers(run_ranks: RunRanks) -> None:
    """Log-probabilities behind 20,000 tokens are one device's, with the frequencies of Llama 3, each scaled by itself."""
    (answer,) = _scenario(run_ranks(1), "far")
    assert answer["difference"] < LOG_PROBS
    assert answer["spread"] > 0.1


@pytest.mark.parametrize(
    ("world_size", "name", "data_size"),
    [
        (1, "training", 1),
        (1, "training again", 1),
        (2, "training tp2", 1),
        (2, "training tp2 whole", 1),
        (2, "training tp2 whole norms", 1),
        (2, "training pp2", 1),
        (2, "training dp2", 2),
        (4, "training tp2 pp2", 1),
        (4, "training tp2 dp2", 2),
        (4, "training pp2 dp2 tied", 2),
        (4, "training pp2 dp2", 2),
    ],
)
def test_any_layout_trains_like_one_device(run_ranks: RunRanks, world_size: int, name: str, data_size: int) -> None:
    """Log-probabilities, metrics, gradient norms, rates and the weights after five clipped steps are those of one device, also where a rank has
    nothing to train on; steps are equal on all ranks, and the weights come to the first in the manifest's order."""
    answers = _scenario(run_ranks(world_size), name)
    for answer in answers:
        assert answer["log_probs"] < LOG_PROBS
        assert [step["num_metrics"] for step in answer["steps"]] == [5] * 5
        assert max(step["metrics"] for step in answer["steps"]) < METRICS
        assert max(step["grad_norm"] for step in answer["steps"]) < GRAD_NORM
        assert all(step["same_rate"] for step in answer["steps"])
        assert all(step["clipped"] for step in answer["steps"])
        assert [step["stats"] for step in answer["steps"]] == [step["stats"] for step in answers[0]["steps"]]
        assert answer["weights"] < WEIGHTS < 1e-3 < answer["moved"]
        assert answer["in_order"]
        assert answer["everywhere"]
        assert answer["version"] == 5
    places = [answer["place"] for answer in answers]
    assert [place["rank"] for place in places] == list(range(world_size))
    assert sorted(place["data_index"] for place in places if place["reports"]) == list(range(data_size))


@pytest.mark.parametrize("name", ["tp2 to dp2", "dp2 to pp2", "pp2 to tp2"])
def test_a_checkpoint_goes_on_in_another_layout(run_ranks: RunRanks, name: str) -> None:
    """Weights and moments are loaded bit for bit by other layouts, which then take the same steps; also back from before the first step. A damaged or
    absent checkpoint, one of a run with another reference, and a folder that cannot be written are refused on all ranks and change nothing. The
    exported folder holds the same weights and says the same of sampling; an export in which the first rank meets any error is one on all."""
    for answer in _scenario(run_ranks(2), f"checkpoint {name}"):
        assert answer["loaded"] == answer["exported"] == answer["back_at_start"] == answer["same_reference"] == 0.0
        assert answer["got"] == answer["expected"]
        assert answer["final"] < WEIGHTS
        assert answer["unchanged"] == answer["final"]
        assert answer["version"] == 4
        assert answer["refused"].startswith("CheckpointError: checkpoint must hold a whole layer_00001.safetensors")
        assert answer["missing"].startswith("CheckpointError: checkpoint must hold a valid megatron.json")
        assert answer["unwritable"].startswith("OSError: embedding could not be written")
        assert answer["unexported"].startswith("OSError: the model could not be written")
        assert answer["generation"] is True
        assert "must name the weights that the run began with" in answer["other_reference"]
        assert answer["files"] == [
            "embedding.safetensors",
            "end.safetensors",
            "layer_00000.safetensors",
            "layer_00001.safetensors",
            "megatron.json",
        ]


@pytest.mark.parametrize("name", ["tp2", "pp2", "dp2"])
def test_a_step_that_cannot_be_taken_is_skipped_on_all_ranks(run_ranks: RunRanks, name: str) -> None:
    """A gradient of NaN on one rank, or none anywhere, changes nothing on any; the next step is one device's, and the reference stays."""
    answers = _scenario(run_ranks(2), f"skipping {name}")
    for answer in answers:
        assert answer["not_finite"] == answers[0]["not_finite"]
        assert answer["not_finite"][0] is True
        assert answer["not_finite"][1].startswith("gradient norm is nan, first in model.")
        assert answer["nothing"] == [True, "no token was trained on"]
        assert answer["unchanged"] == 0.0
        assert answer["empty"] == {}
        assert answer["sound"] < GRAD_NORM
        assert answer["same_rate"] is True
        assert answer["weights"] < WEIGHTS
        assert answer["reference"] < LOG_PROBS
        assert answer["moved"] > 1e-4
        assert answer["outside_mask"] == 0.0


@pytest.mark.parametrize("name", ["tp2", "pp2", "dp2"])
def test_bad_input_is_refused_on_all_ranks(run_ranks: RunRanks, name: str) -> None:
    """What cannot be computed is an error with its name before ranks wait for each other; no gradient is left behind."""
    for answer in _scenario(run_ranks(2), f"skipping {name}"):
        assert "keep_reference must be true" in answer["no_reference"]
        assert "temperature must be above 0" in answer["temperature"]
        assert answer["positions"].startswith("BatchError: position_ids must be absent")
        assert answer["vocabulary"].startswith("BatchError: token ids must be below the model's vocabulary of 96")
        assert answer["after_refusal"] == "no token was trained on"


def test_16_bits_keep_their_steps_in_32(run_ranks: RunRanks) -> None:
    """In bfloat16 the model computes and hands out 16 bits, while steps smaller than those move the float32 weights, which begin as the folder has
    them, not as 16 bits do, and which a checkpoint keeps."""
    (answer,) = _scenario(run_ranks(1), "one rank")
    assert 0.0 < answer["half"] < 0.1
    assert answer["half_dtypes"] == ["bfloat16", "torch.bfloat16"]
    assert answer["master_is_exact"] is True
    assert 0.0 < answer["master_moved"] < 2e-3
    assert answer["master_kept"] is True


@pytest.mark.parametrize("name", ["critic tp2 to pp2", "critic dp2 to tp2"])
def test_a_critic_learns_as_on_one_device(run_ranks: RunRanks, name: str) -> None:
    """Values, losses and gradient norms of a critic beside a policy are those of one device, also after its checkpoint is taken up in another layout;
    the policy stays as it is, and a critic's checkpoint is not taken for one of a policy."""
    for answer in _scenario(run_ranks(2), name):
        for part in (answer["begun"], answer["gone_on"]):
            assert part["values"] < 1e-6 < 1e-3 < part["largest"]
            assert part["metrics"] < METRICS
            assert part["grad_norm"] < GRAD_NORM
        assert answer["policy_moved"] == 0.0
        assert answer["is_policy"].startswith("CheckpointError: checkpoint must fit the model")
        assert "/score." in answer["is_policy"]
        assert "must be absent, got (1," in answer["is_policy"]


def test_a_critic_in_16_bits_is_near_one_device(run_ranks: RunRanks) -> None:
    """In bfloat16 a critic's values and gradient norms are within rounding of one device's."""
    (answer,) = _scenario(run_ranks(1), "critic in 16 bits")
    for part in (answer["begun"], answer["gone_on"]):
        assert part["values"] < 0.1 * part["largest"]
        assert part["grad_norm"] < 0.05


def test_what_cannot_run_is_refused(run_ranks: RunRanks) -> None:
    """A loss that is a constant, a layout that does not divide, a folder without a model and a negative rate are named; sequences are packed."""
    (answer,) = _scenario(run_ranks(1), "one rank")
    assert "loss must depend on the log-probabilities" in answer["constant"]
    assert answer["after_constant"] == "no token was trained on"
    assert "must divide the number of ranks, got 2 x 1 with 1" in answer["layout"]
    assert "actor_rollout_ref.model.path" in answer["no_model"]
    assert "lr must be finite" in answer["rate"]
    assert answer["pads"] is False


def test_memory_that_runs_out_is_reported_by_what_holds_it(run_ranks: RunRanks) -> None:
    """Of each parameter a rank counts what Megatron keeps of it after a step: weights, float32 gradients, moments, float32 weights beside 16 bits
    and the reference. The report has them, the largest micro-batch and the keys."""
    (answer,) = _scenario(run_ranks(1), "memory")
    expected = {
        "float32": {"parameters": 4, "gradients": 4, "optimizer": 8, "reference": 4},
        "bfloat16": {"parameters": 2, "gradients": 4, "optimizer": 12, "reference": 2},
    }
    for dtype, parts in expected.items():
        assert answer[dtype] == pytest.approx(parts, rel=0.05), dtype
    assert answer["beats"] == 2  # a heartbeat for each micro-batch
    said = answer["starved"]
    assert said.startswith("OutOfMemoryError: memory must suffice for an update")
    for part in ("ppo_micro_batch_size_per_gpu", "on cpu: parameters", "the largest of 2 micro-batches has"):
        assert part in said
