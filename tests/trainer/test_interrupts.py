"""A signal ends a program as a signal, whatever it has come in the middle of."""

import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from ostinato_trainer.interrupts import TERMINATED, run_interruptibly, terminated_as_interrupted

pytestmark = pytest.mark.usefixtures("usual_handlers")


async def interrupted_in_a_lock(number: int) -> None:
    """What `threading` makes of a signal that comes while a condition lets go of its lock."""
    condition = threading.Condition()
    with condition:
        try:
            signal.raise_signal(number)
        finally:
            condition.release()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_lock_makes_of_a_signal_is_the_signal(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """An error that was raised in the interrupt's place does not become a fault of the program's; it is logged."""
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(expected) as caught:
        run_interruptibly(interrupted_in_a_lock(number))
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == TERMINATED
    assert "has raised RuntimeError" in caplog.text


def test_an_error_without_a_signal_stays_what_it_is() -> None:
    """Nobody has interrupted: the error is raised, and so is a KeyboardInterrupt of the program's own."""

    async def fail(error: BaseException) -> None:
        raise error

    for error in (RuntimeError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            run_interruptibly(fail(error))


def test_sigterm_unwinds_what_computes_without_a_loop() -> None:
    """In the middle of computing SIGTERM unwinds as Ctrl-C and is the status 143; Ctrl-C and errors stay what they are; the answer to SIGTERM is the
    usual one again afterwards, and a program's own is left alone."""
    unwound: list[bool] = []
    held = ExitStack()
    held.callback(unwound.append, True)
    with pytest.raises(SystemExit) as caught, terminated_as_interrupted(), held:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == TERMINATED
    assert unwound == [True]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for error in (RuntimeError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)), terminated_as_interrupted():
            raise error
    own: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: own.append(number))
    with terminated_as_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert own == [signal.SIGTERM]


def test_what_does_not_unwind_is_said_and_ends_all_the_same(tmp_path: Path) -> None:
    """A cleanup that waits for ever does not keep the process: it ends with SIGTERM's status and says where its threads are."""
    script = tmp_path / "stuck.py"
    script.write_text(
        """
import asyncio, threading
from ostinato_trainer import interrupts

async def main():
    try:
        print("running", flush=True)
        await asyncio.sleep(3600)
    finally:
        never_released()

def never_released():
    threading.Event().wait()

interrupts._UNWINDING_S = 0.5
interrupts.run_interruptibly(main())
"""
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "what SIGTERM has interrupted must end within 0.5 s" in errors
    assert "never_released" in errors
