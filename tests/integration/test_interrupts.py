"""Ctrl-C, a reader that leaves, and terminals of all kinds: what only a process of its own can show."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

MAIN = "from ostinato_trainer.cli import main; main()"

SLOW_PHASE = """
import asyncio, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that a shell runs in its background are started without
phase, marker = sys.argv[1], Path(sys.argv[2])
sys.argv = ["ostinato", *sys.argv[3:]]

import ostinato_trainer.sft.steps
from ostinato_engines.transformers_server import TransformersServer
from ostinato_trainer.cli import main
from ostinato_trainer.backends.local import LocalBackend, LocalSnapshot


def compute():
    marker.touch()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        sum(range(1000))


def slow(kind, name):
    function = getattr(kind, name)

    def both(*args, **kwargs):
        result = function(*args, **kwargs)
        compute()
        return result

    setattr(kind, name, both)


async def slow_generate(*args, **kwargs):
    marker.touch()
    await asyncio.sleep(120)


if phase == "generation":
    TransformersServer.generate = slow_generate
elif phase == "checkpoint":
    slow(LocalSnapshot, "save_hf")
else:
    slow(LocalBackend, "optimizer_step")
main()
"""
"""The real command with one phase that does not end by itself."""


def process(*arguments: object, code: str = MAIN, **options: object) -> subprocess.Popen[str]:
    """The command in a process of its own, its output readable as text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *(str(each) for each in arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, env=environment, **streams)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("warm start", signal.SIGINT),
        ("generation", signal.SIGINT),
        ("update", signal.SIGINT),
        ("checkpoint", signal.SIGINT),
        ("generation", signal.SIGTERM),
        ("update", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_run(
    base: Path,
    small: tuple[str, ...],
    must_hold_no_checkpoint: Callable[[Path], None],
    tmp_path: Path,
    phase: str,
    number: int,
) -> None:
    """Ctrl-C or SIGTERM ends a run in any phase, computing or waiting, with status 130 or 143, one line, no checkpoint and no leftover."""
    marker, out = tmp_path / "marker", tmp_path / "out"
    if phase == "warm start":
        arguments: tuple[object, ...] = ("quickstart", "--output", out)
    else:
        arguments = ("train", base / "config.yaml", *small, f"trainer.default_local_dir={out}")
    with process(phase, marker, *arguments, code=SLOW_PHASE) as running:
        deadline = time.monotonic() + 100
        while not marker.exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marker.exists(), running.communicate(timeout=10)
        running.send_signal(number)
        try:
            _, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 128 + number, err
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("interrupted: ")
    if phase == "warm start":
        assert not (out / "warm_start").exists()
        assert not [path for path in out.iterdir() if path.name.startswith(".")]
    else:
        must_hold_no_checkpoint(out)


def test_a_closed_pipe() -> None:
    """A reader that leaves early, as `head` does, causes no message."""
    with process("config") as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert writer.stdout.readline()
        writer.stdout.close()
        assert writer.stderr.read() == ""


@pytest.mark.parametrize("colour", [True, False])
def test_a_narrow_terminal(colour: bool) -> None:
    """In a terminal of 40 columns every key is shown, in colours unless NO_COLOR is set."""
    main_end, child_end = pty.openpty()
    code = (
        "import os; os.environ.update(COLUMNS='40', TERM='xterm'" + ("" if colour else ", NO_COLOR='1'") + f"); {MAIN}"
    )
    with process("config", "trainer.seed", code=code, stdout=child_end) as running:
        os.close(child_end)
        chunks = []
        while True:
            try:
                chunk = os.read(main_end, 4096)
            except OSError:  # how the end of a closed terminal is told
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(main_end)
    text = b"".join(chunks).decode()
    assert running.returncode == 0
    assert "trainer.seed" in text
    assert ("\x1b[36m" in text) == colour
