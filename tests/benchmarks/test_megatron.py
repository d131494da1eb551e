"""The benchmark of training with Megatron runs from end to end, on the CPU, where its figures say nothing of speed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None or torch.cuda.is_available(),
        reason="no megatron.core here, or a GPU; .ci/megatron.py makes an environment for CPUs",
    ),
]


def test_logits_curves_and_checkpoints_hold_their_bounds() -> None:
    """One rank's logits and the curve and checkpoint of two tensor ranks are within the stated bounds, and faults are told."""
    size = ("--shape", "tiny", "--sequences", "1", "--length", "32", "--rounds", "1")
    command = (sys.executable, "-W", "ignore", "-m", "benchmarks.megatron", "--cpu", *size)
    layout = ("--dtype", "float32", "--ranks", "2", "--tensor", "2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *layout], cwd=REPO, env=environment, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["ok"] is True
    tiny = figures["shapes"]["tiny"]
    assert tiny["logits"]["logits_float32"]["turned"] > 0.1
    assert tiny["float32"]["checkpoint"]["equal"] is True
    assert (
        max(tiny["float32"]["curve"]["apart"].values()) < 1e-3 < 0.1 < max(tiny["float32"]["curve"]["control"].values())
    )
