"""Code of the user's own is loaded, or its fault is named."""

import sys
from pathlib import Path

import pytest

from ostinato_tools.loading import execute_file
from ostinato_trainer.custom_code import load_object
from ostinato_trainer.errors import RewardError


def load(path: str, name: str = "x") -> object:
    return load_object(path, name, key="reward.custom_reward_function", error=RewardError)


def test_files_and_modules_are_loaded(tmp_path: Path) -> None:
    """A name is found in a file and in an importable module; a file is run once."""
    (tmp_path / "own.py").write_text("x = object()\n")
    assert load(str(tmp_path / "own.py")) is load(str(tmp_path / "own.py"))
    assert load("json", "dumps") is __import__("json").dumps


def test_a_file_that_holds_tools_too_is_run_once(tmp_path: Path) -> None:
    """A reward sees what the tools of the same file have done: they are one module."""
    path = tmp_path / "own.py"
    path.write_text("x = object()\n")
    assert vars(execute_file(path))["x"] is load(str(path))


def test_a_prefix_says_whether_it_is_a_file_or_a_module(tmp_path: Path) -> None:
    """`pkg://` is a module and `file://` a file, as configurations of this field write them."""
    (tmp_path / "own.py").write_text("x = 3\n")
    assert load("pkg://json.decoder", "JSONDecoder") is __import__("json").JSONDecoder
    assert load(f"file://{tmp_path}/own.py") == 3


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    """Files with the same name in different folders do not take each other's place."""
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(f"x = {value}\n")
    assert [load(str(tmp_path / folder / "own.py")) for folder in "ab"] == [1, 2]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("y = 1\n", r"reward.custom_reward_function.name must be defined in .*, got 'x'; it defines y"),
        ("\n1 / 0\n", r"own.py:2: ZeroDivisionError"),
        ("x = (\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", r"own.py:2: SystemExit: 3"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
    ],
)
def test_a_faulty_file_is_named_with_its_line(content: str, expected: str, tmp_path: Path) -> None:
    """What the file does wrong is one error with the key, the line and the text; it can be mended and loaded again."""
    (tmp_path / "own.py").write_text(content)
    with pytest.raises(RewardError, match=expected):
        load(str(tmp_path / "own.py"))


def test_missing_files_and_modules_are_named(tmp_path: Path) -> None:
    """A path that is not there is an error with the key."""
    before = set(sys.modules)
    with pytest.raises(RewardError, match=r"must begin with the home of a known user.*; write the whole path"):
        load("~nobody-of-this-name/own.py")
    with pytest.raises(RewardError, match=r"custom_reward_function.path must be an existing Python file"):
        load(str(tmp_path / "no.py"))
    with pytest.raises(RewardError, match="importable module"):
        load("no_such_module_anywhere")
    assert not [name for name in set(sys.modules) - before if "ostinato_file_" in name]
