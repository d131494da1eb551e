"""What of a model's folder, or of its hub id, travels as it is into the folders that are written of the trained model."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

GENERATION_FILE: Final = "generation_config.json"

_TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*chat_template*",
)


def copy_tokenizer(source: str | Path, directory: Path) -> None:
    """Puts the tokenizer's files of a folder, unchanged, or of a hub id into a directory that exists."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(source)).save_pretrained(directory)
        return
    for pattern in _TOKENIZER_FILES:
        for path in sorted(folder.glob(pattern)):
            target = directory / path.name
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target)


def copy_generation_config(source: str | Path, directory: Path) -> bool:
    """Puts what a folder or a hub id says of sampling, unchanged, into a directory that exists; whether it says anything.

    What `transformers` reads it may refuse to write, such as a temperature without `do_sample`.
    """
    path = Path(source).expanduser() / GENERATION_FILE
    if not path.parent.is_dir():
        from huggingface_hub import hf_hub_download

        with suppress(OSError):  # also those of the hub
            path = Path(hf_hub_download(str(source), GENERATION_FILE))
    if not path.is_file():
        return False
    shutil.copyfile(path, directory / GENERATION_FILE)
    return True
