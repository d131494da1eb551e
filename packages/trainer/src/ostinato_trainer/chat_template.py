"""The chat template that a configuration asks for, as text."""

from __future__ import annotations

from pathlib import Path

from ostinato_trainer.config_actor import ModelConfig
from ostinato_trainer.errors import ConfigError

__all__ = ["chat_template_text"]


def chat_template_text(model: ModelConfig) -> str | None:
    """`model.chat_template` as the template's text, read if it names a `.jinja` file; None for the model's own.

    Raises:
        ConfigError: the file cannot be read.
    """
    value = model.chat_template
    if value is None or not value.endswith(".jinja"):
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"actor_rollout_ref.model.chat_template must be a readable file, got {value}: {reason}; check the path"
        ) from None
