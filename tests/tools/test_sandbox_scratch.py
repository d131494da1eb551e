"""Removal of a folder that untrusted code has filled."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato_tools.sandbox.inside.scratch import remove


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
