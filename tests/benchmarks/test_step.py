"""A whole step at a tiny size with our own engine: what `benchmarks.step` measures, and the bounds that it compares with."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.step import bounds, completed, parameters_of, ratios
from benchmarks.step_task import SHAPES, WORK, save_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_tiny_run_is_measured_to_its_end(tmp_path):
    """Without vLLM a run of our own engine still gives every phase, sleep and wake, and says that TRL is left out."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.step",
        "--shape",
        "tiny",
        "--engine",
        "transformers",
        "--parts",
        "ours",
    ]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    ours, work = figures["shapes"]["tiny"]["ours"], WORK["tiny"]
    assert len(ours["steps_s"]) == work.num_steps
    assert (ours["failed"], ours["log_prob_difference"] < 1e-4) == (0, True)
    for phases in (ours["phases_s"], ours["phases_s_without_latency"]):
        assert all(
            phases[name] > 0 for name in ("gen", "old_log_prob", "update_actor", "update_weights", "sleep", "wake")
        )
    assert ours["calls"] > 0
    assert ours["tokens"] > ours["sampled_tokens"] >= work.num_trajectories


def test_every_id_can_be_read_and_reads_as_it_was_sampled(tmp_path):
    """A word of the tokenizer, and the one that is a call, are one token each, whatever stands around them."""
    from ostinato_tokenization import ChatTokenizer
    from ostinato_tools import get_parser

    ids = save_tokenizer(tmp_path, 512)
    (tokenizer, places) = (ChatTokenizer.from_pretrained(tmp_path), list(range(3, 512)))
    assert tokenizer.encode_text(tokenizer.decode(places)) == places
    assert (len(ids), tokenizer.stop_token_ids) == (512, (2,))
    [call] = get_parser("hermes").parse(tokenizer.decode([200, 3, 300])).tool_calls
    assert (call.name, call.arguments) == ("lookup", {"key": "k"})


def test_the_tool_takes_its_time_in_the_steps_that_say_so():
    """The first steps warm the run, the next wait for the tool, the last do not."""
    work = WORK["135M"]
    latencies = [work.latency_of(step) for step in range(1, work.num_steps + 1)]
    assert latencies == [0.0] * 2 + [0.03] * 3 + [0.0] * 2


@pytest.mark.parametrize(("shape", "billions"), [("135M", 0.1345), ("1.7B", 1.7206)])
def test_the_shapes_have_their_parameters(shape, billions):
    """The FLOPs of the bounds count the parameters that the models are known for."""
    assert parameters_of(SHAPES[shape]) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_bounds_are_what_the_formulas_give():
    """On a device with round numbers the bounds of two trajectories can be counted by hand, and no step is under their sum."""
    shape = dict.fromkeys(SHAPES["tiny"], 1)
    weights = 2.0 * parameters_of(shape)
    rows = [
        {"prompt": 2, "response": 4, "sampled": 3, "turns_with_calls": 1},
        {"prompt": 2, "response": 8, "sampled": 8, "turns_with_calls": 0},
    ]
    found = bounds({"parameters": shape, "trajectories": [rows]}, 0, 100.0, flops=weights, bandwidth=1.0)
    assert found["critical_path"] == pytest.approx(max(2 + 3 * weights + 100.0, 2 + 8 * weights))
    assert found["work"] == pytest.approx(2 + 3 * (weights / 2 + 16) + 2 + 8 * (weights / 2 + 24))
    update = (3 * weights * (6 + 10) + 6 * (6**2 + 10**2)) / weights
    assert found["update_actor"] == pytest.approx(update, rel=1e-4)
    assert found["update_weights"] == 2 * weights
    assert found["step"] == pytest.approx(found["rollout"] + update * 4 / 3 + 2 * weights, rel=1e-4)


def test_a_side_that_failed_has_no_ratio():
    """Figures of one side are kept where the other failed, and nothing is divided."""
    ours = {"step_s": 2.0, "step_s_without_latency": 1.0, "tokens": 10.0}
    assert ratios({"ours": ours, "trl": {"error": "no"}}) == {}
    assert ratios({"ours": ours, "trl": {"step_s": 5.0, "step_s_without_latency": 2.0}}) == {
        "ratio_vs_trl": 2.5,
        "ratio_without_latency": 2.0,
    }
    assert completed({"error": "no"}, "tiny", Namespace(), is_ours=True) == {"error": "no"}
    assert completed(dict(ours), "tiny", Namespace(), is_ours=True)["tokens_per_s"] == 5
