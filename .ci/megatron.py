"""Make an environment with megatron-core for the CPU and run there the tests of training with Megatron.

``megatron.py [--scratch DIR] [--version VERSION]``: the environment lies outside the workspace, whose lock has megatron-core only for Python 3.12 and
later; its wheels for Python 3.11 work as well, whatever they declare. pip must know an index with torch's builds for the CPU
(PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS). Where the environment cannot be made, that is said and the exit status is 0, unless ``--required``: these
tests are then not run. A test that fails is an error.
"""

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from isolate import PACKAGES, REPO, TEST_REQUIREMENTS
from vllm_cpu import CannotMakeError, run

VERSION = "0.19.2"
TORCH = "torch==2.13.0+cpu"
# Imported by megatron-core, which does not declare it.
UNDECLARED = ("triton",)
TESTS = (
    "tests/trainer/test_megatron_rank.py",
    "tests/trainer/test_megatron_group.py",
    "tests/trainer/test_megatron_run.py",
    "tests/trainer/test_megatron_setup.py",
    "tests/trainer/test_megatron_shape.py",
    "tests/trainer/test_megatron_mapping.py",
    "tests/trainer/test_vocabulary_shard.py",
)
INSTALL_S = 600
TESTS_S = 900


def make_environment(home: Path, version: str, environment: Mapping[str, str]) -> Path:
    """The interpreter of the environment in a folder: the one that an earlier run finished, with our packages anew, or a new one.

    Raises:
        CannotMakeError: It cannot be made here.
    """
    python, finished = home / "bin/python", home / f"finished-{version}"
    pip = (python, "-m", "pip", "--disable-pip-version-check")

    def must(*command: str | Path, what: str) -> None:
        if status := run(*command, environment=environment, limit_s=INSTALL_S):
            raise CannotMakeError(f"{what} ended with status {status}")

    ours = [REPO / "packages" / package for package in PACKAGES]
    if not finished.exists():
        shutil.rmtree(home, ignore_errors=True)
        must(sys.executable, "-m", "venv", home, what="making a virtual environment")
        must(*pip, "install", "-q", TORCH, *TEST_REQUIREMENTS, *ours, what="installing our packages")
        without = ("--no-deps", "--ignore-requires-python")
        must(*pip, "install", "-q", *without, f"megatron-core=={version}", *UNDECLARED, what="installing megatron-core")
        must(python, "-W", "ignore", "-c", "import megatron.core", what="loading megatron-core")
        finished.touch()
    else:
        must(*pip, "install", "-q", "--no-deps", "--force-reinstall", *ours, what="installing our packages")
    return python


def main() -> int:
    """Exit status 0 if the tests passed, or could not be run and need not be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scratch", type=Path, help="where the environment lies; it is kept then, and used again")
    parser.add_argument("--version", default=VERSION, help="of megatron-core")
    parser.add_argument("--required", action="store_true", help="an environment that cannot be made is an error")
    options = parser.parse_args()
    # Whoever ends this ends what it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        print("megatron-core's wheels are for Linux on x86_64: its tests are skipped here")
        return int(options.required)
    leaking = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if name not in leaking}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="megatron-", ignore_cleanup_errors=True) as temporary:
        scratch = (options.scratch or Path(temporary)).resolve()
        start = time.monotonic()
        try:
            python = make_environment(scratch / "environment", options.version, environment)
        except CannotMakeError as error:
            print(f"an environment with megatron-core cannot be made here: {error}; its tests are skipped")
            return int(options.required)
        print(f"the environment took {time.monotonic() - start:.0f} s", flush=True)
        addopts = "addopts=--import-mode=importlib -ra --hypothesis-profile=ci --durations=5"
        command = (python, "-m", "pytest", "-p", "no:cacheprovider", "-o", addopts, *TESTS)
        status = run(*command, environment=environment, limit_s=TESTS_S)
        print(f"environment and tests took {time.monotonic() - start:.0f} s")
        return status


if __name__ == "__main__":
    sys.exit(main())
