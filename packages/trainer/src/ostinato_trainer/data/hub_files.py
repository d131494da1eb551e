"""Files of dataset repositories on the Hugging Face hub, fetched into its local cache. Behind the extra `hub`.

The client's own settings hold: `HF_TOKEN` for what is private or gated, `HF_HOME` for the place of the cache, and
`HF_HUB_OFFLINE=1`, with which only what is in the cache is found. Without a network a file that is in the cache is taken
from there.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from types import ModuleType
from typing import Final
from urllib.parse import unquote

from msgspec import Struct

from ostinato_trainer.errors import DatasetError

__all__ = ["HUB_SCHEME", "fetch_hub_file", "hub_file_names"]

HUB_SCHEME: Final = "hf://"
_FORM: Final = "hf://datasets/OWNER/NAME[@REVISION]/FILE"
_ADDRESS: Final = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?/(?P<path>.+)"
)
_REVISION_NAMES: Final = {"~parquet": "refs/convert/parquet"}


class _HubFile(Struct, frozen=True):
    repo: str
    """OWNER/NAME."""
    revision: str | None
    """Branch, tag or commit; None: the default branch."""
    path: str
    """File, or pattern of files, within the repository."""


def fetch_hub_file(url: str) -> Path:
    """Download `hf://datasets/OWNER/NAME[@REVISION]/FILE`, or find it in the cache.

    Raises:
        DatasetError: another form of address, the extra is not installed, or the hub does not give the file.
    """
    address = _parsed(url)
    hub = _client(url)
    try:
        return Path(hub.hf_hub_download(address.repo, address.path, repo_type="dataset", revision=address.revision))
    except Exception as error:  # the client's own, the network's and the disk's
        raise _refused(url, address, error) from error


def hub_file_names(url: str) -> list[str]:
    """Addresses of the files that a pattern matches, sorted; `*` stands for any text, folders included.

    Raises:
        DatasetError: as `fetch_hub_file`; or no file matches.
    """
    address = _parsed(url)
    hub = _client(url)
    try:
        listed = hub.HfApi().list_repo_files(address.repo, repo_type="dataset", revision=address.revision)
    except Exception as error:  # as above
        raise _refused(url, address, error) from error
    matching = sorted(fnmatch.filter(listed, address.path))
    if not matching:
        raise DatasetError(
            f"a pattern of data files must match at least one, got {url}; the repository has {', '.join(listed[:20])}"
        )
    return [url.removesuffix(address.path) + path for path in matching]


def _parsed(url: str) -> _HubFile:
    match = _ADDRESS.fullmatch(url)
    if match is None:
        raise DatasetError(f"a hub file must be named {_FORM}, got {url}; write it in that form")
    revision = match["revision"]
    if revision is not None:
        revision = _REVISION_NAMES.get(revision, unquote(revision))
    return _HubFile(match["repo"], revision, match["path"])


def _client(url: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise DatasetError(f"reading {url} must have the extra hub; run: pip install 'ostinato-trainer[hub]'") from None
    return huggingface_hub


def _refused(url: str, address: _HubFile, error: Exception) -> DatasetError:
    """What the hub said, in the order of the client's tree of errors: a leaf before its parent."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/datasets/{address.repo}"
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, errors.GatedRepoError):
        reason, cure = "a gated repository", f"ask for access at {page} and set HF_TOKEN, or run: hf auth login"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = f"no repository {address.repo} that may be read"
        cure = "check the name; if it is private, set HF_TOKEN or run: hf auth login"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason, cure = f"no revision {address.revision}", f"choose one of {page}/refs"
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        reason = "no network, or HF_HUB_OFFLINE=1, and no copy in the cache"
        cure = "connect once, or download the file and name its local path; a pattern always needs the network"
    elif isinstance(error, errors.EntryNotFoundError):
        reason, cure = (
            f"no file {address.path} in {address.repo}",
            f"choose one of {page}/tree/{address.revision or 'main'}",
        )
    else:
        cure = "check the address, HF_TOKEN and the network, or download the file and name its local path"
    return DatasetError(f"{url} must be fetched from the hub, got {reason}; {cure}")
