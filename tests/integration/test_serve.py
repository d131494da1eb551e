"""`ostinato serve` as a process of its own: up, answering, and down without a trace."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ostinato_trainer.cli import app
from ostinato_trainer.error_reporting import run_reporting_errors
from ostinato_trainer.serve import curl_line

MAIN = "from ostinato_trainer.cli import main; main()"


@contextmanager
def server(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, killed if it does not end."""
    command = [sys.executable, "-c", MAIN, "serve", *(str(each) for each in arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment}
    with subprocess.Popen(command, text=True, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        killer = threading.Timer(120, running.kill)
        killer.start()
        try:
            yield running
        finally:
            killer.cancel()
            running.kill()


def lines_until_curl(running: subprocess.Popen[str]) -> list[str]:
    """What it prints until it is up."""
    assert running.stdout is not None
    lines: list[str] = []
    for line in running.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith("curl "):
            return lines
    raise AssertionError(running.communicate(timeout=10))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(
    ("ending", "in_process"),
    [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow)],
)
def test_it_serves_until_it_is_told_to_end(
    base: Path, tmp_path: Path, ending: signal.Signals, in_process: bool
) -> None:
    """The command prints a URL and a curl line that works, keeps the key to itself, and ends by Ctrl-C and by SIGTERM with
    status 0, whether the engine is in its process or in another."""
    where = () if in_process else ("--engine-python", sys.executable)
    arguments = (base / "model", "--port", 0, "--max-model-len", 64, "--model-name", "it's", *where)
    with server(*arguments, OSTINATO_API_KEY="a-secret", TMPDIR=str(tmp_path)) as running:
        lines = lines_until_curl(running)
        url = re.findall(r"http://127\.0\.0\.1:\d+", lines[-1])[0]
        assert f"serving it's at {url}/v1" in lines[-2]
        curl = shlex.split(lines[-1].replace("$OSTINATO_API_KEY", "a-secret"))
        done = subprocess.run(
            [*curl, "--silent", "--max-time", "60"], capture_output=True, text=True, timeout=90, check=True
        )
        running.send_signal(ending)
        out, err = running.communicate(timeout=60)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["total_tokens"] <= 64
    assert "a-secret" not in "\n".join([*lines, out, err])
    assert (running.returncode, out.strip()) == (0, "stopped"), err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_while_it_loads_ends_it(base: Path) -> None:
    """Ctrl-C before the server is up ends the command as it ends any other, with status 130 and one line."""
    with server(base / "model", "--port", 0) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("loading")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, ""), err
    assert err.startswith("interrupted")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "host must be a loopback address where no key is asked for"),
        (("--engine", "abacus"), "engine must be one of"),
        (("--format", "smoke_signals"), "parser must be one of"),
        (("--engine-python", "/nowhere/python"), "/nowhere/python"),
        (("--api-key", " "), "api_key must be printable ASCII"),
        (("--port", "70000"), "--port"),
    ],
)
def test_what_cannot_be_served_is_told(
    base: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """What is wrong with an option is one message with its cure, before anything is served."""
    command = ["serve", str(base / "model"), "--port", "0", *arguments]
    status = run_reporting_errors(lambda: app(command, standalone_mode=False))
    err = capsys.readouterr().err
    assert status in (1, 2)
    assert message in err
    assert ";" in err
    assert "Traceback" not in err


def test_the_curl_line_asks_for_a_key_only_where_there_is_one() -> None:
    """The line can be pasted into a shell whatever the model's name holds."""
    with_key = shlex.split(curl_line("http://h:1", "m'$(x)", needs_key=True))
    assert json.loads(with_key[-1])["model"] == "m'$(x)"
    assert "Authorization: Bearer $OSTINATO_API_KEY" in with_key
    assert "Authorization" not in curl_line("http://h:1", "m", needs_key=False)
