"""Addresses on the hub."""

import sys

import pytest

from ostinato_trainer.data.files import open_data_file
from ostinato_trainer.errors import DatasetError


@pytest.mark.parametrize("url", ["hf://x", "hf://datasets/owner/name", "hf://datasets/owner", "hf://models/a/b/c.json"])
def test_another_form_of_address_is_refused(url: str) -> None:
    """An address that names no file of a dataset is an error that shows the form; nothing is fetched."""
    with pytest.raises(DatasetError, match=r"hf://datasets/OWNER/NAME\[@REVISION\]/FILE"):
        open_data_file(url)


def test_a_missing_extra_prints_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, a hub address is an error with the line that installs it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DatasetError, match=r"pip install 'ostinato-trainer\[hub\]'"):
        open_data_file("hf://datasets/owner/name/train.parquet")


def test_what_the_hub_raises_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the hub does not give is an error with the address, the reason and the cure."""
    hub = pytest.importorskip("huggingface_hub")

    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    with pytest.raises(DatasetError, match=r"hf://datasets/o/n/f.parquet must be fetched.*no network.*local path"):
        open_data_file("hf://datasets/o/n/f.parquet")
