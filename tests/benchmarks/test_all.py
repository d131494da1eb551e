"""What runs when no benchmark is named."""

from pathlib import Path

import benchmarks
import pytest
from benchmarks.__main__ import NOT_BENCHMARKS, RUN_ALONE, RUN_BY_ENGINES
from benchmarks.__main__ import benchmarks as names_of_benchmarks

FOLDER = Path(benchmarks.__file__).parent


@pytest.mark.parametrize("name", names_of_benchmarks())
def test_a_benchmark_is_a_program(name):
    """A module that only others import would be run, and say nothing."""
    assert '\nif __name__ == "__main__":\n' in (FOLDER / f"{name}.py").read_text()


def test_names_that_are_left_out_are_there():
    """A name that is gone from the folder is gone from the lists."""
    modules = {path.stem for path in FOLDER.glob("*.py")}
    assert modules >= NOT_BENCHMARKS | RUN_ALONE | RUN_BY_ENGINES
