"""Names of data files, and patterns for many."""

import logging
from pathlib import Path

import pytest

from ostinato_trainer.data.files import open_data_file
from ostinato_trainer.data.paths import data_file_names
from ostinato_trainer.errors import DatasetError


def test_a_pattern_stands_for_its_files_in_order(tmp_path: Path) -> None:
    """Matching files are sorted by name, folders are no files, and other names stay where they are."""
    for name in ("train-1.parquet", "train-0.parquet", "test-0.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "train-2.parquet").mkdir()
    found = data_file_names(["first.json", f"{tmp_path}/train-*.parquet"])
    assert found == ["first.json", f"{tmp_path}/train-0.parquet", f"{tmp_path}/train-1.parquet"]


def test_two_stars_reach_into_folders(tmp_path: Path) -> None:
    """`**` matches files in folders below."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.jsonl").touch()
    assert data_file_names([f"{tmp_path}/**/*.jsonl"]) == [f"{tmp_path}/a/b/x.jsonl"]


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path: Path) -> None:
    """A name with brackets that is there is no pattern."""
    (tmp_path / "rows[1].jsonl").touch()
    assert data_file_names([f"{tmp_path}/rows[1].jsonl"]) == [f"{tmp_path}/rows[1].jsonl"]


def test_a_pattern_without_files_is_an_error(tmp_path: Path) -> None:
    """Nothing that matches is an error with the pattern."""
    with pytest.raises(DatasetError, match=r"must match at least one, got .*\*\.parquet"):
        data_file_names([f"{tmp_path}/*.parquet"])


def test_a_file_named_twice_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows may be wanted more than once; that a name stands there twice is said."""
    (tmp_path / "a.jsonl").touch()
    with caplog.at_level(logging.WARNING):
        found = data_file_names([f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl"])
    assert found == [f"{tmp_path}/a.jsonl"] * 2
    assert "named more than once" in caplog.text


def test_an_empty_name_is_an_error() -> None:
    """An empty name, which would be the present folder, is refused."""
    with pytest.raises(DatasetError, match="must have a name"):
        data_file_names(["a.jsonl", ""])


@pytest.mark.parametrize("name", ["~nobody-of-this-name/a.jsonl", "~nobody-of-this-name/*.jsonl"])
def test_a_home_that_is_not_there_is_an_error(name: str) -> None:
    """`~USER` of nobody is said to be that, in a name and in a pattern."""
    with pytest.raises(DatasetError, match=r"must begin with the home of a known user .*; write the whole path"):
        [open_data_file(file) for file in data_file_names([name])]
