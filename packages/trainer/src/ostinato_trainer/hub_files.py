"""Files of dataset repositories on the Hugging Face hub, fetched into its local cache. Behind the extra `hub`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ostinato_trainer.errors import DatasetError

__all__ = ["HUB_SCHEME", "fetch_hub_file"]

HUB_SCHEME: Final = "hf://"
_PREFIX: Final = "hf://datasets/"


def fetch_hub_file(url: str) -> Path:
    """Download `hf://datasets/OWNER/NAME[@REVISION]/FILE`, or find it in the cache.

    Raises:
        DatasetError: another form of address, the extra is not installed, or the hub does not give the file.
    """
    owner, _, rest = url.removeprefix(_PREFIX).partition("/")
    name, _, file = rest.partition("/")
    if not (url.startswith(_PREFIX) and owner and name and file):
        raise DatasetError(f"a hub file must be named {_PREFIX}OWNER/NAME/FILE, got {url}; write it in that form")
    name, _, revision = name.partition("@")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise DatasetError(f"reading {url} must have the extra hub; run: pip install 'ostinato-trainer[hub]'") from None
    try:
        found = hf_hub_download(f"{owner}/{name}", file, repo_type="dataset", revision=revision or None)
    except Exception as error:
        raise DatasetError(
            f"{url} must be fetched from the hub, got {type(error).__name__}: {' '.join(str(error).split())}; "
            "check the address and the network, or download the file and name its local path"
        ) from error
    return Path(found)
