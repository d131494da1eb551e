"""Make an environment of its own for each peer that a benchmark compares with, and each framework whose agents are tested.

``python -m benchmarks.peers [NAME ...] [--home DIR]``: they lie in `.venv-peers/NAME`, or below DIR. Their requirements seldom agree with
ours or with each other's, so none of them enters the lock. Benchmarks ask `python_of` for the interpreter and leave a peer out, saying so,
where its environment is missing; so do the tests, which ask for `.venv-peers/NAME` or OSTINATO_NAME_PYTHON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

UV = os.environ.get("UV", "uv")  # `uv run` tells its children which uv it is
HOME = Path(__file__).resolve().parent.parent / ".venv-peers"
PEERS = {
    "trl": ("trl==1.16.0",),
    "renderers": ("renderers[transformers]==0.1.12", "httpx"),
    "verl": ("verl==0.9.1", "cachetools", "fastapi", "uvicorn"),
}
FRAMEWORKS = {
    "verifiers": ("verifiers==0.4.0",),
    "mini-swe-agent": ("mini-swe-agent==2.4.6",),
    "nemo-gym": ("nemo-gym==0.4.0",),
}
MODULES = {"mini-swe-agent": "minisweagent", "nemo-gym": "nemo_gym"}
"""What is imported of those whose module has another name."""
PYTHONS = {"nemo-gym": ">=3.12,<3.14"}
"""What those need for which this Python may be the wrong one."""
CONSTRAINTS = ("torch==2.13.*",)


def python_of(peer: str) -> Path | None:
    """The interpreter of a peer's environment; None where it was not made."""
    python = HOME / peer / "bin/python"
    return python if python.exists() else None


class PeerProcess:
    """A peer that runs a script of this folder in its own environment and answers JSON lines with JSON lines."""

    def __init__(self, name: str, python: Path, script: str, *arguments: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, request: dict) -> dict:
        """The answer; with `error` in it where the peer failed or its process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": "its process ended"}

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def interpreter(peer: str) -> str | None:
    """A Python of this machine that the peer runs on, also where pyenv keeps it; None where there is none."""
    wanted = PYTHONS.get(peer)
    if wanted is None:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    path = os.pathsep.join([*map(str, pyenv.glob("versions/*/bin")), os.environ["PATH"]])
    command = [UV, "python", "find", "--no-project", "--system", wanted]
    found = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def make(peer: str, home: Path = HOME) -> bool:
    """Make the environment of one peer; false where there is no Python for it, or its packages cannot be installed or imported here."""
    base = interpreter(peer)
    if base is None:
        print(f"{peer} needs Python {PYTHONS[peer]}, and there is none", file=sys.stderr)
        return False
    environment, constraints = home / peer, home / "constraints.txt"
    python = str(environment / "bin/python")
    home.mkdir(exist_ok=True, parents=True)
    constraints.write_text("\n".join(CONSTRAINTS) + "\n")
    requirements = (PEERS | FRAMEWORKS)[peer]
    steps = (
        [UV, "venv", "--quiet", "--no-project", "--clear", "--python", base, str(environment)],
        [UV, "pip", "install", "--quiet", "--python", python, "--constraints", str(constraints), *requirements],
        [python, "-c", f"import {MODULES.get(peer, peer)}"],
    )
    made = all(subprocess.run(step, check=False).returncode == 0 for step in steps)
    if not made:
        shutil.rmtree(environment, ignore_errors=True)
    return made


def main() -> int:
    """Make all environments, or those named."""
    known = (*PEERS, *FRAMEWORKS)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all where none is named")
    parser.add_argument("--home", type=Path, default=HOME, help="where they lie")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"names must be of {', '.join(known)}, got {', '.join(unknown)}")
    for peer in options.names or known:
        ready = make(peer, options.home.resolve())
        print(f"{peer}: {'ready' if ready else 'cannot be installed here; who needs it will leave it out'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
