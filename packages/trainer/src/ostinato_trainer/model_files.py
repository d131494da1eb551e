"""The folder that `actor_rollout_ref.model.path` names: whether a model can be in it, and its tokenizer.

Looks at names of files and at what is in the small ones; whether the weights can be loaded is found out by who loads them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ostinato_tokenization import ChatTokenizer, TokenizationError
from ostinato_trainer.chat_template import chat_template_text
from ostinato_trainer.config import Config
from ostinato_trainer.config.actor import ModelConfig
from ostinato_trainer.data.vocabulary import token_beyond
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.home_paths import home_path

__all__ = [
    "check_model_folder",
    "check_positions",
    "check_same_tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "num_positions",
    "smaller_vocabulary",
    "warn_of_endless_turns",
]

_logger = logging.getLogger(__name__)

_KEY: Final = "actor_rollout_ref.model"
_SHORTEST: Final = ({"role": "user", "content": "1"},)
"""A conversation of which every prompt has the tokens."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int]


class _TextConfig(msgspec.Struct):
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    n_positions: int | None = None
    """The same of GPT-2 and its kin."""

    @property
    def num_positions(self) -> int | None:
        return self.max_position_embeddings or self.n_positions


class _ModelJson(_TextConfig):
    text_config: _TextConfig | None = None


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


def check_positions(config: Config) -> None:
    """Find out that the embedded engine has no positions for sequences as long as the run allows; other engines know themselves.

    Raises:
        ConfigError: Naming the lengths to change.
    """
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if rollout.name != "transformers" or rollout.agent.custom_async_server.path is not None:
        return
    known = num_positions(str(config.actor_rollout_ref.model.path))
    if rollout.max_model_len is not None:
        longest, what, got = rollout.max_model_len, "actor_rollout_ref.rollout.max_model_len", ""
    else:
        longest = data.max_prompt_length + data.max_response_length
        what = "data.max_prompt_length + data.max_response_length"
        got = f"{data.max_prompt_length} + {data.max_response_length} = "
    if known is not None and longest > known:
        raise ConfigError(
            f"{what} must be at most max_position_embeddings of the model, got {got}{longest} > {known}; write less, or name a model for "
            f"longer texts in {_KEY}.path"
        )


def num_positions(path: str, key: str = _KEY) -> int | None:
    """The longest sequence that a model is made for, in tokens; None where its configuration does not say it.

    Args:
        path: Of its folder.
        key: The node of the configuration that names it.
    """
    model = _model_json(home_path(path, f"{key}.path") / "config.json")
    return (None if model.text_config is None else model.text_config.num_positions) or model.num_positions


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
    """The policy's tokenizer with the chat template that the configuration chooses; what that lacks is said.

    Raises:
        ConfigError: The folder's tokenizer or the template cannot be used; the message says which key to change.
    """
    try:
        tokenizer = ChatTokenizer.from_pretrained(str(model.path), chat_template=chat_template_text(model))
    except TokenizationError as error:
        raise ConfigError(
            f"{error} (in a run, {_KEY}.path names the folder and {_KEY}.chat_template a template file)"
        ) from error
    warn_of_endless_turns(tokenizer)
    return tokenizer


def warn_of_endless_turns(tokenizer: ChatTokenizer, key: str = _KEY) -> None:
    """Say of a template that it closes what an assistant says with ordinary text: one that belongs to another tokenizer does so.

    Every turn is recorded as it was sampled all the same, and what the template writes between turns follows it.
    """
    if tokenizer.boundaries.stops:
        return
    end = (
        f"{tokenizer.eos_token!r} only, which the template does not show"
        if tokenizer.eos_token
        else "its longest length only"
    )
    _logger.warning(
        "The chat template ends no assistant turn with a control token that the tokenizer has: a turn ends with %s; "
        "name the template that belongs to the tokenizer, or one that ends turns with a token of it, in %s.chat_template",
        end,
        key,
    )


def smaller_vocabulary(tokenizer: ChatTokenizer, path: str, key: str = _KEY) -> int | None:
    """The size of a model's vocabulary where the tokenizer has tokens beyond it; None where it has not, or the model's configuration
    does not say it."""
    size = _vocabulary_size(home_path(path, f"{key}.path") / "config.json")
    return None if size is None or tokenizer.vocab_size <= size else size


def check_vocabulary(tokenizer: ChatTokenizer, model: ModelConfig, template_kwargs: Mapping[str, Any]) -> int | None:
    """Find out that the tokenizer makes prompts of tokens that the model has no embedding for; say of other such tokens that they are there.

    Args:
        tokenizer: Of `load_tokenizer`.
        model: Whose folder holds the model's configuration.
        template_kwargs: What prompts are rendered with.

    Returns:
        The model's vocabulary, below which the ids of prompts must be, where the tokenizer has tokens beyond it.

    Raises:
        ConfigError: No prompt could be trained on.
    """
    size = smaller_vocabulary(tokenizer, str(model.path))
    if size is None:
        return None
    cure = f"name a model whose embeddings were resized for its tokenizer, or the tokenizer that belongs to it, in {_KEY}.path"
    try:
        prompt = tokenizer.encode_chat(_SHORTEST, add_generation_prompt=True, template_kwargs=template_kwargs)
    except TokenizationError:  # a template that wants more of a conversation; the dataset says what
        prompt = []
    beyond = token_beyond(tokenizer, prompt, size)
    if beyond is not None:
        raise ConfigError(
            f"{_KEY}.path must hold a model with an embedding for every token of a prompt, got a vocabulary of {size} and {beyond}; {cure}"
        )
    _logger.warning(
        "The tokenizer of %s has tokens up to %d, and the model a vocabulary of %d: a trajectory in which a tool's answer has a token "
        "beyond that fails, or ends the run; %s",
        model.path,
        tokenizer.vocab_size - 1,
        size,
        cure,
    )
    return size


def _vocabulary_size(file: Path) -> int | None:
    """What a model's configuration says; None where it does not."""
    model = _model_json(file)
    return model.vocab_size or (model.text_config.vocab_size if model.text_config else None)


def _model_json(file: Path) -> _ModelJson:
    """A model's configuration; empty where it cannot be read, which others say."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_ModelJson)
    except (OSError, msgspec.DecodeError):
        return _ModelJson()
