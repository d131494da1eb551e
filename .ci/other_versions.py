"""Run the trainer in one environment and its engine in another, with different versions of transformers.

``other_versions.py [--scratch DIR]``: the trainer's environment has the newest transformers that is known to work, the engine's an older one, such as
inference engines pin; torch is the lock's in both. Both lie outside the workspace, and are made anew each time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from isolate import REPO, TEST_REQUIREMENTS, TORCH, UV, run

PACKAGES = ("tokenization", "tools", "engines", "rollout", "agent_loop", "trainer[quickstart]")
TRAINER = ("transformers==5.24.0", *(f"./packages/{name}" for name in PACKAGES))
ENGINE = ("transformers==5.12.1", "./packages/engines[transformers]")
TEST = "tests/integration/test_engine_environment.py"


def make_environment(home: Path, *requirements: str) -> Path:
    """The interpreter of a new environment."""
    python = home / "bin/python"
    run(UV, "venv", "--quiet", "--no-project", "--clear", "--python", sys.executable, home, cwd=REPO)
    run(UV, "pip", "install", "--quiet", "--python", python, TORCH, *requirements, cwd=REPO)
    return python


def main() -> int:
    """Exit status 0 if the environments could be made and the test passed in them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scratch", type=Path, help="a folder for the environments; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ostinato-versions-") as temporary:
        scratch = (options.scratch or Path(temporary)).resolve()
        try:
            engine = make_environment(scratch / "engine", *ENGINE)
            trainer = make_environment(scratch / "trainer", *TRAINER, *TEST_REQUIREMENTS)
            os.environ["OSTINATO_ENGINE_PYTHON"] = str(engine)
            run(trainer, "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow", "-k", "transformers", TEST, cwd=REPO)
        except subprocess.CalledProcessError as error:
            return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
