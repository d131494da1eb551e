"""A signal ends a program as a signal, whatever it has come in the middle of."""

import signal
import threading
from contextlib import ExitStack

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
