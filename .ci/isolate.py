"""Build every package as a wheel, install it alone with only what it declares, import it and run its own tests there.

``isolate.py SCRATCH [PACKAGE ...]``: each package gets an environment of its own below SCRATCH, outside the workspace, so that nothing
but the wheel and its declared requirements can be imported.
"""

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("tokenization", "tools", "engines", "rollout", "agent_loop", "trainer")
TEST_REQUIREMENTS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
# One torch for every environment, as in the lock: what is tested, not what is installed, should differ.
CONSTRAINTS = "torch==2.13.*\n"


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command, showing it; its failure ends this program."""
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def isolate(package: str, repo: Path, scratch: Path, wheels: Path) -> None:
    """Install one wheel alone and run its tests from a folder that holds nothing else."""
    home = scratch / package
    environment, python = home / "venv", home / "venv/bin/python"
    run("uv", "venv", "--quiet", "--python", sys.executable, environment, cwd=scratch)
    distribution = "ostinato-" + package.replace("_", "-")
    options = ("--quiet", "--python", python, "--find-links", wheels, "--constraints", scratch / "constraints.txt")
    run("uv", "pip", "install", *options, distribution, cwd=scratch)
    run(python, "-c", f"import ostinato_{package}", cwd=home)
    run("uv", "pip", "install", *options, *TEST_REQUIREMENTS, cwd=scratch)
    shutil.copytree(repo / "tests" / package, home / "tests")
    shutil.copy(repo / "packages" / package / "README.md", home / "README.md")
    options = (
        "-q",
        "--import-mode=importlib",
        "-o",
        "asyncio_mode=auto",
        "-m",
        "not slow",
        "-o",
        "markers=slow: takes minutes",
    )
    run(python, "-m", "pytest", *options, "--timeout=300", "--rootdir", home, "tests", cwd=home)


def main() -> None:
    """Build all wheels, then isolate the named packages, or all."""
    scratch, names = Path(sys.argv[1]).resolve(), tuple(sys.argv[2:]) or PACKAGES
    repo = Path(__file__).resolve().parent.parent
    wheels = scratch / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    (scratch / "constraints.txt").write_text(CONSTRAINTS)
    run("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", wheels, cwd=repo)
    for package in names:
        isolate(package, repo, scratch, wheels)


if __name__ == "__main__":
    main()
