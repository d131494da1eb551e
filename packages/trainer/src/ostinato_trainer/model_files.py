"""The folder that `actor_rollout_ref.model.path` names: whether a model can be in it, and its tokenizer.

Looks at names of files only; whether the weights can be loaded is found out by who loads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from ostinato_tokenization import ChatTokenizer, TokenizationError
from ostinato_trainer.chat_template import chat_template_text
from ostinato_trainer.config.actor import ModelConfig
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.home_paths import home_path

__all__ = ["check_model_folder", "check_same_tokenizer", "load_tokenizer"]

_KEY: Final = "actor_rollout_ref.model"


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerJson(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []


def check_model_folder(path: str, key: str = _KEY) -> None:
    """Find out cheaply, and before anything heavy is imported, that no model can be there.

    Args:
        path: What the configuration names.
        key: The node of the configuration that names it.

    Raises:
        ConfigError: No such folder, or one without config.json; the cure depends on what is there.
    """
    folder = home_path(path, f"{key}.path")
    if (folder / "config.json").is_file():
        return
    cure = "check the path"
    if folder.is_dir():
        found = "a folder without config.json"
        if (folder / "huggingface" / "config.json").is_file():
            cure = f"write {key}.path={folder / 'huggingface'}"
    elif folder.exists():
        found, cure = "a file", "name the folder that holds config.json, tokenizer.json and the weights"
    else:
        found = "nothing there"
        if path.count("/") == 1 and not path.startswith((".", "/", "~")) and not folder.parent.is_dir():
            found = "no folder of that name"
            cure = f"models of the hub are downloaded first: hf download {path} --local-dir DIR, then {key}.path=DIR"
    raise ConfigError(f"{key}.path must be a folder with a Hugging Face model, got {path} ({found}); {cure}")


def check_same_tokenizer(policy: str, critic: str) -> None:
    """Find out that a critic would read the policy's token ids as other tokens; a folder without a tokenizer is trusted.

    Raises:
        ConfigError: The two folders give an id to different tokens.
    """
    ours, theirs = (_token_ids(home_path(path, "model.path") / "tokenizer.json") for path in (policy, critic))
    if ours is None or theirs is None:
        return
    different = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if different is not None:
        raise ConfigError(
            f"critic.model.path must have the policy's tokenizer, got {critic}, where {different!r} is "
            f"{theirs.get(different, 'no token')} and not {ours[different]}; name a model of the same family"
        )


def _token_ids(file: Path) -> dict[str, int] | None:
    """Every token of a `tokenizer.json` with its id; None where there is no such file or it is of a kind that is not known."""
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_TokenizerJson)
    except (OSError, msgspec.DecodeError):
        return None
    return content.model.vocab | {token.content: token.id for token in content.added_tokens}


def load_tokenizer(model: ModelConfig) -> ChatTokenizer:
    """The policy's tokenizer with the chat template that the configuration chooses.

    Raises:
        ConfigError: The folder's tokenizer or the template cannot be used; the message says which key to change.
    """
    try:
        return ChatTokenizer.from_pretrained(str(model.path), chat_template=chat_template_text(model))
    except TokenizationError as error:
        raise ConfigError(
            f"{error} (in a run, {_KEY}.path names the folder and {_KEY}.chat_template a template file)"
        ) from error
