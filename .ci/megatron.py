"""Make an environment with megatron-core for the CPU and run there the tests of training with Megatron.

``megatron.py [--scratch DIR] [--version VERSION] [--required]``: see `environment`. It lies outside the workspace, whose lock has megatron-core only
for Python 3.12 and later; its wheels for Python 3.11 work as well, whatever they declare.
"""

import sys

from environment import Environment, Recipe, run_tests
from isolate import PACKAGES, REPO, TEST_REQUIREMENTS

VERSION = "0.19.2"
TORCH = "torch==2.13.0+cpu"
OURS = tuple(REPO / "packages" / package for package in PACKAGES)
OTHERS = ("ray>=2.48", "pyzmq")
# Imported by megatron-core, which does not declare it.
UNDECLARED = ("triton",)
TESTS = (
    "tests/trainer/test_megatron_rank.py",
    "tests/trainer/test_megatron_group.py",
    "tests/trainer/test_megatron_run.py",
    "tests/trainer/test_megatron_setup.py",
    "tests/trainer/test_megatron_shape.py",
    "tests/trainer/test_megatron_mapping.py",
    "tests/trainer/test_megatron_pretrained.py",
    "tests/trainer/test_ray_run.py::test_megatrons_ranks_are_actors_too",
    "tests/trainer/test_vocabulary_shard.py",
    "tests/trainer/test_weight_routes.py::test_shares_of_megatrons_ranks_arrive_whole",
    "tests/benchmarks/test_megatron.py",
)
TESTS_S = 1800


def install(environment: Environment, version: str) -> None:
    """Megatron and our packages, with torch for the CPU."""
    environment.pip("install", "-q", TORCH, *TEST_REQUIREMENTS, *OTHERS, *OURS, what="installing our packages")
    megatron = ("--no-deps", "--ignore-requires-python", f"megatron-core=={version}", *UNDECLARED)
    environment.pip("install", "-q", *megatron, what="installing megatron-core")
    environment.must(environment.python, "-W", "ignore", "-c", "import megatron.core", what="loading megatron-core")


def test(environment: Environment) -> int:
    """The exit status of the tests there."""
    return run_tests(environment.python, TESTS, environment=environment.variables, limit_s=TESTS_S)


if __name__ == "__main__":
    sys.exit(Recipe("megatron-core", VERSION, OURS, install, test, lambda _: {}).main(str(__doc__)))
