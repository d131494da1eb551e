"""What a well-formed configuration of `ostinato sft` may still get wrong, found before anything heavy is imported or read."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ostinato_trainer.backends.lora import lora_options
from ostinato_trainer.config.checks import problems_text, template_problems
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.model_files import check_model_folder

__all__ = ["check_sft"]

_logger = logging.getLogger(__name__)


def check_sft(config: SftConfig, written: Collection[str] = ()) -> None:
    """Refuse what cannot be trained, all of it in one message, and say which written keys have no effect.

    Args:
        config: The whole tree.
        written: Dotted paths that files, overrides or options gave.

    Raises:
        ConfigError: Naming every key that must be given or changed.
    """
    problems = []
    for path, value, option in (
        ("model.path", config.model.path, "--model"),
        ("data.train_files", config.data.train_paths, "--data"),
        ("trainer.default_local_dir", config.trainer.default_local_dir, "--output"),
    ):
        if not value:
            problems.append(f"{path} must be given, got none; write {option} PATH or {path}=PATH")
    if config.trainer.test_freq > 0 and not config.data.val_paths:
        problems.append(
            f"data.val_files must name a file while trainer.test_freq is {config.trainer.test_freq}, got none; "
            "write data.val_files=PATH or trainer.test_freq=-1"
        )
    problems += template_problems(config.data.apply_chat_template_kwargs)
    problems += config.trainer.resume_problems
    if problems:
        raise ConfigError(problems_text(problems))
    check_model_folder(str(config.model.path), key="model")
    lora_options(config.model, seed=config.trainer.seed, section="model")  # an extra that is missing is told at once
    for key in _unread_keys(config, written):
        _logger.warning("%s", key)


def _unread_keys(config: SftConfig, written: Collection[str]) -> list[str]:
    """Sentences about keys that were written and that other keys keep from having any effect."""
    model, trainer = config.model, config.trainer
    rules = (
        (
            not model.lora_rank or model.lora_adapter_path is not None,
            "model.lora_rank is 0" if model.lora_adapter_path is None else "model.lora_adapter_path decides it",
            ("model.lora_alpha", "model.target_modules", "model.exclude_modules"),
        ),
        (
            trainer.total_training_steps is not None,
            "trainer.total_training_steps is given",
            ("trainer.total_epochs",),
        ),
        (
            trainer.resume_mode != "resume_path",
            f"trainer.resume_mode is {trainer.resume_mode}",
            ("trainer.resume_from_path",),
        ),
        (trainer.save_freq == 0, "trainer.save_freq is 0", ("trainer.max_ckpt_to_keep",)),
        (
            model.enable_gradient_checkpointing,
            "one device trains, as it does here; a lower data.max_token_len_per_gpu, model.dtype=bfloat16 or model.lora_rank=16 save memory",
            ("model.enable_gradient_checkpointing",),
        ),
    )
    return [
        f"{key} has no effect while {why}" for applies, why, keys in rules if applies for key in keys if key in written
    ]
