"""The chat template that a configuration asks for, as text, and its place in a model folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from ostinato_trainer.config.actor import ModelConfig
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.home_paths import home_path

__all__ = ["chat_template_text", "write_chat_template"]


def chat_template_text(model: ModelConfig, *, key: str = "actor_rollout_ref.model") -> str | None:
    """`model.chat_template` as the template's text, read if it names a `.jinja` file; None for the model's own.

    Args:
        model: Names it.
        key: Of that node, for messages.

    Raises:
        ConfigError: the file cannot be read.
    """
    value = model.chat_template
    if value is None or not value.endswith(".jinja"):
        return value
    try:
        return home_path(value, "actor_rollout_ref.model.chat_template").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{key}.chat_template must be a readable file, got {value}: {reason}; check the path"
        ) from None


def write_chat_template(directory: Path, text: str) -> None:
    """Make `text` the chat template of a model folder, so that who loads it speaks to it as in training.

    Templates by other names, which would be preferred where tools are given, are removed.

    Raises:
        OSError: The folder cannot be written.
    """
    shutil.rmtree(directory / "additional_chat_templates", ignore_errors=True)
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
