"""What tests of tools share."""

import os
import secrets
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def own_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A name of Python that no other program uses, so that the module's sandbox workers can be told from others; its real name."""
    from ostinato_tools.sandbox import shut_down

    original = sys.executable
    link = tmp_path_factory.mktemp("bin") / f"python-{secrets.token_hex(8)}"
    link.symlink_to(os.path.realpath(original))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(link))
        yield original
        shut_down()
