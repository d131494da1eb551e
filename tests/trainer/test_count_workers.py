"""Processes that count prompts: they count as this process does, and whatever happens to one is an error."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.data.count_workers import CountWorkers
from ostinato_trainer.data.prompt_length import PromptLength
from ostinato_trainer.errors import DatasetError

PROMPT = [{"role": "user", "content": "q"}]


class Unpacks(PromptLength):
    """Stands for a length whose arrival in the process does something else."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (Unpacks(os._exit, 7), "exit status 7 and no word; write data.filter_overlong_prompts_workers=1"),
        (Unpacks(int, "x"), "exit status 1 and: Traceback.*ValueError: invalid literal.*workers=1"),
    ],
)
def test_a_process_that_dies_is_an_error_with_its_last_words(length: PromptLength, expected: str) -> None:
    """The exit status, what the process wrote last and the cure are in the message."""
    workers = CountWorkers(length, 1)
    try:
        with pytest.raises(DatasetError, match=f"(?s)must answer, got {expected}"):
            workers.result(workers.submit([(PROMPT, None)]))
    finally:
        workers.close()


def test_a_process_that_does_not_answer_is_an_error_and_is_ended() -> None:
    """After the deadline the wait ends with an error, and closing does not wait for the process."""
    workers = CountWorkers(Unpacks(time.sleep, 3600), 1, deadline_s=0.2)
    with pytest.raises(DatasetError, match=r"must answer within 0\.2 s, got nothing"):
        workers.result(workers.submit([(PROMPT, None)]))
    workers.close()


def test_closing_ends_what_is_under_way() -> None:
    """Requests that nobody waits for any longer do not keep the processes."""
    workers = CountWorkers(PromptLength(tiny_chat_tokenizer(), {}, 100), 2)
    futures = [workers.submit([(PROMPT, None)] * 100) for _ in range(20)]
    workers.close()
    assert all(future.done() for future in futures)


def test_modules_of_the_present_folder_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the user's that has the name of a module which counting needs is not imported in its place."""
    for name in ("heapq", "jinja2", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    length = PromptLength(tiny_chat_tokenizer(), {}, 100)
    workers = CountWorkers(length, 1)
    try:
        assert workers.result(workers.submit([(PROMPT, None)])) == [length.count(PROMPT, None)]
    finally:
        workers.close()


def test_a_script_without_a_main_guard_may_use_them(tmp_path: Path) -> None:
    """The user's main module is run once, counts agree with those of one process, and no process is left over."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import os\n"
        "from ostinato_tokenization.testing import tiny_chat_tokenizer\n"
        "from ostinato_trainer.data.prompt_counter import PromptCounter\n"
        "from ostinato_trainer.data.prompt_length import PromptLength\n"
        "print('once')\n"
        'template = \'{{ messages[0].content }}{{ raise_exception("no") if messages[0].content == "x7" }}\'\n'
        "length = PromptLength(tiny_chat_tokenizer(chat_template=template), {}, 100)\n"
        "prompts = [(n, ([{'role': 'user', 'content': 'x' * (n % 7) + str(n % 10)}], None)) for n in range(1000)]\n"
        "found = {}\n"
        "for workers in (1, 2):\n"
        "    with PromptCounter(length, num_workers=workers, cache=None, num_alone=200) as counter:\n"
        "        found[workers] = list(counter.measured(prompts))\n"
        "assert found[1] == found[2]\n"
        "assert [key for key, _ in found[2]] == list(range(1000))\n"
        "assert sum(isinstance(number, str) for _, number in found[2]) == 14\n"
        "try:\n"
        "    with PromptCounter(length, num_workers=2, cache=None, num_alone=0) as counter:\n"
        "        next(counter.measured(prompts))\n"
        "        raise KeyboardInterrupt\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "try:\n"
        "    os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError:\n"
        "    print('none left')\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (result.stdout.split("\n"), result.returncode) == (["once", "none left", ""], 0), result.stderr
