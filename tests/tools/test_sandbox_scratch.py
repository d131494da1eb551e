"""Removal of a folder that untrusted code has filled."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato_tools.sandbox.inside import scratch
from ostinato_tools.sandbox.inside.scratch import remove, remove_from_under


def test_nothing_to_remove_is_no_error(tmp_path: Path) -> None:
    """A folder that is not there is removed already."""
    remove(str(tmp_path / "absent"))


def test_depth_is_no_matter(tmp_path: Path) -> None:
    """A tree deeper than any path is long is removed with one open file at a time."""
    (root := tmp_path / "root").mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(40):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove(str(root))
    assert list(tmp_path.iterdir()) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Links to folders and files, also where the folder itself should be, lose only themselves."""
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").write_text("kept")
    (root := tmp_path / "root").mkdir()
    (root / "inner").mkdir()
    for place in (root / "folder", root / "inner" / "folder", root / "inner" / "up"):
        place.symlink_to(kept if place.name == "folder" else root)
    (root / "file").symlink_to(kept / "file")
    os.link(kept / "file", root / "second")
    (root / "dangling").symlink_to("nowhere")
    remove(str(root))
    (link := tmp_path / "link").symlink_to(kept)
    with pytest.raises(OSError):
        remove(str(link))
    assert (kept / "file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]


def test_modes_are_no_matter(tmp_path: Path) -> None:
    """Folders that even their owner may not enter are removed."""
    (root := tmp_path / "root").mkdir()
    for name in ("a", "b"):
        (root / name / "c" / "d").mkdir(parents=True)
        (root / name / "c" / "file").touch(0)
    for folder in ("a/c/d", "a/c", "a", "b/c", ""):
        os.chmod(root / folder, 0)
    remove(str(root))
    assert list(tmp_path.iterdir()) == []


class Writer:
    """Somebody who puts a file into a folder whenever that is about to go, until told to end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.is_alive, self.num_told = folder, True, 0
        self._rmdir = os.rmdir
        monkeypatch.setattr(scratch.os, "rmdir", self.rmdir)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        if self.is_alive and str(path) == str(self.folder):
            (self.folder / "late").touch()
        self._rmdir(path, dir_fd=dir_fd)

    def told(self, *, obeys_at: int) -> None:
        self.num_told += 1
        self.is_alive = self.num_told < obeys_at


def test_a_folder_is_removed_from_under_a_process_that_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again after the process has been told to end, and nothing is left once it has."""
    (root := tmp_path / "root").mkdir()
    writer = Writer(root, monkeypatch)
    assert remove_from_under(str(root), 60, lambda: writer.told(obeys_at=3)) is None
    assert (writer.num_told, list(tmp_path.iterdir())) == (3, [])


def test_a_folder_that_somebody_goes_on_filling_is_left_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is an end to trying; what time cannot change is not tried again."""
    (root := tmp_path / "root").mkdir()
    writer = Writer(root, monkeypatch)
    left = remove_from_under(str(root), 0.02, lambda: writer.told(obeys_at=10**9))
    assert left is not None
    assert left.errno == errno.ENOTEMPTY
    (link := tmp_path / "link").symlink_to(root)
    num_told = writer.num_told
    assert remove_from_under(str(link), 60, lambda: writer.told(obeys_at=0)) is not None
    assert writer.num_told == num_told


TREES = st.recursive(
    st.just({}) | st.just("file"),
    lambda inner: st.dictionaries(st.sampled_from([".1", ".2", "a", "b", "-r", "\n"]), inner, max_size=4),
)


def plant(place: Path, tree: dict | str) -> None:
    if isinstance(tree, str):
        place.write_text(tree)
        return
    place.mkdir()
    for name, inner in tree.items():
        plant(place / name, inner)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([".1", ".2", "a", "b"]), TREES, max_size=4))
def test_any_tree_is_removed(tmp_path: Path, tree: dict) -> None:
    """Trees of any form go, also those with the names that removal itself would give."""
    plant(tmp_path / "root", tree)
    remove(str(tmp_path / "root"))
    assert list(tmp_path.iterdir()) == []
