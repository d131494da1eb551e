"""Make an environment of its own for each peer that a benchmark compares with: `.venv-peers/NAME`.

A peer's requirements seldom agree with ours or with another peer's, so none of them enters the lock. Benchmarks ask `python_of` for the
interpreter and leave a peer out, saying so, where its environment is missing.
"""

import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent / ".venv-peers"
PEERS = {
    "trl": ("trl==1.16.0",),
    "renderers": ("renderers==0.1.12", "httpx"),
    "verl": ("verl==0.9.1",),
}
CONSTRAINTS = ("torch==2.13.*",)


def python_of(peer: str) -> Path | None:
    """The interpreter of a peer's environment; None where it was not made."""
    python = HOME / peer / "bin/python"
    return python if python.exists() else None


def make(peer: str) -> bool:
    """Make the environment of one peer; false where its packages cannot be installed here."""
    HOME.mkdir(exist_ok=True)
    constraints = HOME / "constraints.txt"
    constraints.write_text("\n".join(CONSTRAINTS) + "\n")
    environment = HOME / peer
    subprocess.run(
        ["uv", "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(environment)], check=True
    )
    command = [
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        str(environment / "bin/python"),
        "--constraints",
        str(constraints),
    ]
    return subprocess.run([*command, *PEERS[peer]], check=False).returncode == 0


def main() -> None:
    """Make all environments, or those named."""
    for peer in sys.argv[1:] or PEERS:
        print(
            f"{peer}: {'ready' if make(peer) else 'cannot be installed here; benchmarks will leave it out'}", flush=True
        )


if __name__ == "__main__":
    main()
