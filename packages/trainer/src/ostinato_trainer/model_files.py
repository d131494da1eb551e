"""The folder that `actor_rollout_ref.model.path` names: whether a model can be in it, and its tokenizer.

Looks at names of files only; whether the weights can be loaded is found out by who loads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ostinato_tokenization import ChatTokenizer, TokenizationError
from ostinato_trainer.chat_template import chat_template_text
from ostinato_trainer.config_actor import ModelConfig
from ostinato_trainer.errors import ConfigError

__all__ = ["check_model_folder", "load_tokenizer"]

_KEY: Final = "actor_rollout_ref.model"


def check_model_folder(path: str) -> None:
    """Find out cheaply, and before anything heavy is imported, that no model can be there.

    Raises:
        ConfigError: No such folder, or one without config.json; the cure depends on what is there.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return
    cure = "check the path"
    if folder.is_dir():
        found = "a folder without config.json"
        if (folder / "huggingface" / "config.json").is_file():
            cure = f"write {_KEY}.path={folder / 'huggingface'}"
    elif folder.exists():
        found, cure = "a file", "name the folder that holds config.json, tokenizer.json and the weights"
    else:
        found = "nothing there"
        if path.count("/") == 1 and not path.startswith((".", "/", "~")) and not folder.parent.is_dir():
            found = "no folder of that name"
            cure = f"models of the hub are downloaded first: hf download {path} --local-dir DIR, then {_KEY}.path=DIR"
    raise ConfigError(f"{_KEY}.path must be a folder with a Hugging Face model, got {path} ({found}); {cure}")


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
