"""The benchmark of sharded training runs from end to end, on the CPU, where its figures say nothing of speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_curves_and_checkpoints_of_two_ranks_hold_their_bounds() -> None:
    """Two ranks are within the stated bounds of one device, where another learning rate is far beyond them."""
    size = ("--shape", "tiny", "--sequences", "2", "--length", "32", "--rounds", "1")
    command = (sys.executable, "-W", "ignore", "-m", "benchmarks.fsdp2", "--cpu", *size, "--dtype", "bfloat16")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["ok"] is True
    found = figures["shapes"]["tiny"]["bfloat16"]
    assert found["checkpoint"]["equal"] is True
    assert max(found["curve"]["control"].values()) > 2 * found["curve"]["bound"]
    assert found["speedup"] > 0
