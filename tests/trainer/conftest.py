"""What several test modules of the trainer start from."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def quickstart_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's files; the model is as it was made, without a warm start."""
    from ostinato_trainer.quickstart.run import make_files

    folder = tmp_path_factory.mktemp("quickstart_home")
    make_files(folder, seed=0)
    (folder / "warm_start").symlink_to(folder / "model")
    return folder
