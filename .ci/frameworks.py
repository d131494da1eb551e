"""Make an environment for each framework whose programs are trained as agents, and run the tests that train them.

``frameworks.py [--scratch DIR] [--required]``: the environments lie outside the workspace, because the frameworks' pins differ from the
lock's. What is tested is pinned, what it depends on is not, and changes without us: where an environment cannot be made (no index, no such
Python, a dependency that is gone), that is said and its tests are skipped, as everywhere else; with --required it is an error. A test that
fails is one always.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
NAMES = ("mini-swe-agent", "verifiers", "nemo-gym")
TESTS = "tests/integration/test_frameworks_*.py"


def main() -> int:
    """Exit status 0 if the tests passed in the environments that could be made."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scratch", type=Path, help="a folder for the environments; a temporary one by default")
    parser.add_argument("--required", action="store_true", help="an environment that cannot be made is an error")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ostinato-frameworks-", ignore_cleanup_errors=True) as temporary:
        home = (options.scratch or Path(temporary)).resolve()
        make = [sys.executable, "-m", "benchmarks.peers", *NAMES, "--home", str(home)]
        subprocess.run(make, cwd=REPO, check=True)
        pythons = {name: home / name / "bin/python" for name in NAMES}
        missing = [name for name, python in pythons.items() if not python.exists()]
        if missing and options.required:
            print(f"no environment could be made for {', '.join(missing)}", file=sys.stderr)
            return 1
        variables = {
            f"OSTINATO_{name.upper().replace('-', '_')}_PYTHON": str(python)
            for name, python in pythons.items()
            if name not in missing
        }
        tests = sorted(str(path.relative_to(REPO)) for path in REPO.glob(TESTS))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow", "--durations=5", *tests]
        return subprocess.run(command, cwd=REPO, env={**os.environ, **variables}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
