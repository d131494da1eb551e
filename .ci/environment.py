"""An environment outside the workspace, for what the lock does not hold, and the tests that run in it.

It is made with pip, which heeds how this machine is told where builds of torch for the CPU are (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). Where it
cannot be made (another machine, no such wheel), that is said and the exit status is 0, unless ``--required``: its tests are then not run. A test that
fails is an error. With ``--scratch`` the environment is kept, and used again.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isolate import REPO

INSTALL_S = 600
Variables = dict[str, str]


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


def run_tests(python: str | Path, tests: Sequence[str], *selection: str, environment: Variables, limit_s: int) -> int:
    """The exit status of test modules under an interpreter."""
    addopts = "addopts=--import-mode=importlib -ra --hypothesis-profile=ci --durations=5"
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-o", addopts, *selection)
    return run(python, *options, *tests, environment=environment, limit_s=limit_s)


@dataclass(frozen=True)
class Environment:
    """A folder with an interpreter of its own."""

    home: Path
    variables: Variables

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.home / "bin/python"

    def must(self, *command: str | Path, what: str) -> None:
        """Runs a command.

        Raises:
            CannotMakeError: it failed; `what` says what it was for.
        """
        if status := run(*command, environment=self.variables, limit_s=INSTALL_S):
            raise CannotMakeError(f"{what} ended with status {status}")

    def pip(self, *arguments: str | Path, what: str) -> None:
        """Runs pip in it; raises as `must`."""
        self.must(self.python, "-m", "pip", "--disable-pip-version-check", *arguments, what=what)


@dataclass(frozen=True)
class Recipe:
    """What is tested in an environment of its own."""

    subject: str
    """Its name on the index."""
    version: str
    """By default."""
    ours: tuple[Path, ...]
    """Our packages in it."""
    install: Callable[[Environment, str], None]
    """Installs the subject of a version and our packages, and sees that it can be loaded."""
    test: Callable[[Environment], int]
    """The exit status of the tests."""
    variables: Callable[[Path], Variables]
    """Of the environment, by the scratch folder."""

    def make(self, home: Path, version: str, variables: Variables) -> Environment:
        """The environment in a folder: the one that an earlier run finished, with our packages anew, or a new one.

        Raises:
            CannotMakeError: It cannot be made here.
        """
        environment, finished = Environment(home, variables), home / f"finished-{version}"
        if finished.exists():
            environment.pip(
                "install", "-q", "--no-deps", "--force-reinstall", *self.ours, what="installing our packages"
            )
            environment.pip("install", "-q", *self.ours, what="installing what our packages need")
            return environment
        shutil.rmtree(home, ignore_errors=True)
        environment.must(sys.executable, "-m", "venv", home, what="making a virtual environment")
        self.install(environment, version)
        finished.touch()
        return environment

    def main(self, description: str) -> int:
        """Exit status 0 if the tests passed, or could not be run and need not be."""
        parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        parser.add_argument("--scratch", type=Path, help="where the environment lies; it is kept then, and used again")
        parser.add_argument("--version", default=self.version, help=f"of {self.subject}")
        parser.add_argument("--required", action="store_true", help="an environment that cannot be made is an error")
        options = parser.parse_args()
        # Whoever ends this ends what it has started, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            print(f"wheels of {self.subject} are for Linux on x86_64: its tests are skipped here")
            return int(options.required)
        leaking = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        inherited = {name: value for name, value in os.environ.items() if name not in leaking}
        with tempfile.TemporaryDirectory(prefix=f"{self.subject}-", ignore_cleanup_errors=True) as temporary:
            scratch = (options.scratch or Path(temporary)).resolve()
            variables = {**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.variables(scratch)}
            start = time.monotonic()
            try:
                environment = self.make(scratch / "environment", options.version, variables)
            except CannotMakeError as error:
                print(f"an environment with {self.subject} cannot be made here: {error}; its tests are skipped")
                return int(options.required)
            print(f"the environment took {time.monotonic() - start:.0f} s", flush=True)
            status = self.test(environment)
            print(f"environment and tests took {time.monotonic() - start:.0f} s")
            return status
