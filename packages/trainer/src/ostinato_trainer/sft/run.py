"""`ostinato sft`: conversations of files and a model folder in, a model folder out.

Invariant: the output is there whole or not at all, and carries the chat template that it was trained with. What a token or
a loss is, `ostinato_tokenization` and `ostinato_trainer.sft.steps` know.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.backends.lora import lora_options
from ostinato_trainer.chat_template import chat_template_text, write_chat_template
from ostinato_trainer.checkpoints.whole_folder import folder_made_whole
from ostinato_trainer.config.checks import problems_text
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.loggers.group import METRICS_FILE, JsonlLogger
from ostinato_trainer.model_files import check_model_folder
from ostinato_trainer.progress import step_progress
from ostinato_trainer.sft.data import Conversations, read_conversations
from ostinato_trainer.sft.steps import SftSettings, SftStep, train_sft

__all__ = ["check_sft", "run_sft"]

_logger = logging.getLogger(__name__)


def run_sft(config: SftConfig, *, console: Console) -> None:
    """Fine-tune the model of a folder on conversations and write a model folder.

    Args:
        config: The whole tree; checked by `check_sft`.
        console: Where progress goes.

    Raises:
        ConfigError: Something that must be given is not, or no model can be where one is named.
        DatasetError: A row is no conversation, or none is short enough.
        TokenizationError, BackendError: The folder holds no tokenizer or no model.
        CheckpointError: The output is occupied or cannot be written.
    """
    check_sft(config)
    output, data, seed = Path(str(config.trainer.default_local_dir)), config.data, config.trainer.seed
    template = chat_template_text(config.model)
    tokenizer = ChatTokenizer.from_pretrained(str(config.model.path), chat_template=template)
    wanted = config.trainer.total_training_steps
    number = None if wanted is None else wanted * data.train_batch_size
    with folder_made_whole(output) as unfinished, step_progress(console) as progress:
        train = _read(progress, console, "conversations", config, tokenizer, data.train_paths, number)
        held_out = _read(progress, console, "validation", config, tokenizer, data.val_paths, None)
        settings = _settings(config, num_conversations=len(train.encoded))
        log = JsonlLogger(unfinished / METRICS_FILE) if "jsonl" in config.trainer.logger else None
        bar = progress.add_task("supervised", total=settings.steps, note="")
        steps = train_sft(
            str(config.model.path), unfinished, train.encoded, settings, seed=seed, validation=held_out.encoded
        )
        begin = time.perf_counter()
        try:
            for step in steps:
                now = time.perf_counter()
                if log is not None:
                    metrics = _metrics(step, seconds=now - begin)
                    log.log(step.step, metrics | {"train/epoch": step.step * settings.batch_size / len(train.encoded)})
                progress.update(bar, completed=step.step, note=_note(step))
                tenth = step.step * 10 // settings.steps > (step.step - 1) * 10 // settings.steps
                if (
                    "console" in config.trainer.logger
                    and (step.val_loss is not None or tenth)
                    and not console.is_terminal
                ):
                    console.print(f"step {step.step} of {settings.steps}  {_note(step)}", highlight=False)
                begin = time.perf_counter()
        finally:
            if log is not None:
                log.close()
        if template is not None:
            write_chat_template(unfinished, template)
    console.print(f"the model is in {escape(str(output))}", highlight=False, soft_wrap=True)


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
    if problems:
        raise ConfigError(problems_text(problems))
    check_model_folder(str(config.model.path), key="model")
    lora_options(config.model, seed=config.trainer.seed)  # an extra that is missing is told at once
    no_adapters = not config.model.lora_rank and config.model.lora_adapter_path is None
    rules = (
        (no_adapters, "model.lora_rank is 0", ("lora_alpha", "target_modules", "exclude_modules"), "model"),
        (
            config.trainer.total_training_steps is not None,
            "trainer.total_training_steps is given",
            ("total_epochs",),
            "trainer",
        ),
    )
    for applies, why, names, section in rules:
        for name in names:
            if applies and f"{section}.{name}" in written:
                _logger.warning("%s.%s has no effect while %s", section, name, why)


def _read(
    progress: Progress,
    console: Console,
    what: str,
    config: SftConfig,
    tokenizer: ChatTokenizer,
    paths: Collection[str],
    number: int | None,
) -> Conversations:
    """The conversations of `paths`, none for no paths, with a bar while they are read and a line about what was left out."""
    if not paths:
        return Conversations([], 0)
    bar = progress.add_task(what, total=None, note="")
    found = read_conversations(list(paths), tokenizer, config.data, seed=config.trainer.seed, number=number)
    count, note = len(found.encoded), f"{found.num_overlong} longer than {config.data.max_length} tokens were left out"
    progress.update(bar, total=count, completed=count, note=note)
    if found.num_overlong and not console.is_terminal:
        console.print(f"{what}: {count}; {note}", highlight=False)
    return found


def _settings(config: SftConfig, *, num_conversations: int) -> SftSettings:
    batch_size = min(config.data.train_batch_size, num_conversations)
    if batch_size < config.data.train_batch_size:
        _logger.warning(
            "data.train_batch_size is %d, and there are %d conversations: every step takes them all",
            config.data.train_batch_size,
            num_conversations,
        )
    optim = config.optim
    return SftSettings(
        steps=config.trainer.total_training_steps
        or math.ceil(config.trainer.total_epochs * num_conversations / batch_size),
        batch_size=batch_size,
        lr=optim.lr,
        warmup_steps=optim.lr_warmup_steps,
        lr_scheduler_type=optim.lr_scheduler_type,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        grad_clip=optim.grad_clip,
        max_tokens_per_micro_batch=config.data.max_token_len_per_gpu,
        test_freq=config.trainer.test_freq,
        lora=lora_options(config.model, seed=config.trainer.seed),
        use_remove_padding=config.model.use_remove_padding,
        device=config.trainer.device or "auto",
        dtype=config.model.dtype,
    )


def _metrics(step: SftStep, *, seconds: float) -> dict[str, float]:
    measured = {} if step.val_loss is None else {"val/loss": step.val_loss}
    if step.step == 0:
        return measured
    return {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/lr": step.lr,
        "train/num_tokens": float(step.num_tokens),
        "train/num_skipped_steps": float(step.skipped),
        "timing_s/step": seconds,
        **measured,
    }


def _note(step: SftStep) -> str:
    losses = [] if step.step == 0 else [f"loss {step.loss:.3f}"]
    return "  ".join(losses + ([] if step.val_loss is None else [f"val loss {step.val_loss:.3f}"]))
