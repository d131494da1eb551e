"""Make an environment of its own for each peer that a benchmark compares with: `.venv-peers/NAME`.

A peer's requirements seldom agree with ours or with another peer's, so none of them enters the lock. Benchmarks ask `python_of` for the
interpreter and leave a peer out, saying so, where its environment is missing.
"""

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


def make(peer: str) -> bool:
    """Make the environment of one peer; false where its packages cannot be installed or imported here."""
    environment, constraints = HOME / peer, HOME / "constraints.txt"
    python = str(environment / "bin/python")
    HOME.mkdir(exist_ok=True)
    constraints.write_text("\n".join(CONSTRAINTS) + "\n")
    steps = (
        [UV, "venv", "--quiet", "--no-project", "--clear", "--python", sys.executable, str(environment)],
        [UV, "pip", "install", "--quiet", "--python", python, "--constraints", str(constraints), *PEERS[peer]],
        [python, "-c", f"import {peer}"],
    )
    made = all(subprocess.run(step, check=False).returncode == 0 for step in steps)
    if not made:
        shutil.rmtree(environment, ignore_errors=True)
    return made


def main() -> int:
    """Make all environments, or those named."""
    unknown = sorted(set(sys.argv[1:]) - set(PEERS))
    if unknown:
        print(f"peers must be of {', '.join(PEERS)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    for peer in sys.argv[1:] or PEERS:
        print(
            f"{peer}: {'ready' if make(peer) else 'cannot be installed here; benchmarks will leave it out'}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
