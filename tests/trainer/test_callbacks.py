"""Callbacks: told in order, by what they define, and part of the run where they raise."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ostinato_trainer.errors import CallbackError, ConfigError
from ostinato_trainer.loop.callbacks import Callbacks, StepFunction, TrainerCallback, load_callbacks


class Journal(TrainerCallback):
    """Writes down two of the events; the others it has from the protocol."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def on_step_begin(self, step: int) -> None:
        """See TrainerCallback."""
        self.seen.append(("begin", step))

    def on_train_end(self, step: int, error: BaseException | None) -> None:
        """See TrainerCallback."""
        self.seen.append(("end", step, error))


class Raising:
    """Has one event, and raises in it."""

    def on_step_begin(self, step: int) -> None:
        """See TrainerCallback."""
        raise ValueError("no room")

    def on_train_end(self, step: int, error: BaseException | None) -> None:
        """See TrainerCallback."""
        raise ValueError("no room at the end")


def test_each_is_told_what_it_defines() -> None:
    """Callbacks are told in order; one that lacks an event is not asked for it, one that derives from the protocol has them all."""
    journal, seen = Journal(), []
    callbacks = Callbacks([StepFunction(lambda step, metrics: seen.append((step, metrics))), journal])
    callbacks.tell("on_train_begin", 0, 5)
    callbacks.tell("on_step_begin", 1)
    callbacks.tell("on_step_end", 1, {"a": 1.0})
    callbacks.tell_of_the_end(1, None)
    assert journal.seen == [("begin", 1), ("end", 1, None)]
    assert seen == [(1, {"a": 1.0})]


def test_one_that_raises_is_named() -> None:
    """What a callback raises comes out as an error that names it and its event."""
    with pytest.raises(CallbackError, match=r"Raising\.on_step_begin has ended the run with ValueError: no room"):
        Callbacks([Raising()]).tell("on_step_begin", 1)


def test_all_are_told_of_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Every callback learns of the end, even behind one that raises; that error is the run's only where the run has none."""
    journal, error = Journal(), RuntimeError("the run's own")
    with caplog.at_level(logging.ERROR):
        Callbacks([Raising(), journal]).tell_of_the_end(2, error)
    assert journal.seen == [("end", 2, error)]
    assert "no room at the end" in caplog.text
    with pytest.raises(CallbackError):
        Callbacks([journal, Raising()]).tell_of_the_end(3, None)
    assert journal.seen[-1] == ("end", 3, None)


def test_classes_come_from_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trainer.callbacks names classes by file or module; they are made without arguments."""
    file = tmp_path / "callback_of_a_test.py"
    file.write_text("class Mine:\n    def on_step_end(self, step, metrics):\n        pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = load_callbacks([f"{file}:Mine", "callback_of_a_test:Mine"])
    assert [type(one).__name__ for one in made] == ["Mine", "Mine"]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", "", r"trainer\.callbacks\[0\] must be module:Class or file\.py:Class"),
        ("class Mine: pass", ":Mine", "one of on_train_begin, on_step_begin"),
        ("def on_step_end(step, metrics): pass", ":on_step_end", "must be a class with one of"),
        ("class Mine:\n    async def on_step_end(self, step, metrics): pass", ":Mine", "without async"),
        (
            "class Mine:\n    def __init__(self, x): pass\n    def on_step_end(self, s, m): pass",
            ":Mine",
            "made without arguments",
        ),
        ("class Mine:\n    def on_step_end(self, s, m): pass", ":Yours", "must be defined in"),
        ("1 / 0", ":Mine", "must import without errors"),
    ],
)
def test_what_cannot_be_told_is_refused(source: str, name: str, message: str, tmp_path: Path) -> None:
    """A name without a class, a class without an event, coroutines, and what cannot be made are refused with the key."""
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_callbacks([f"{file}{name}"])
