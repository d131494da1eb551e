"""`ostinato sft`: conversations of files and a model folder in, a model folder out.

Invariant: the model is in the output whole or not at all, and carries the chat template that it was trained with; a run that was stopped goes
on from its newest checkpoint as if it had not been. What a token or a loss is, `ostinato_tokenization` and `ostinato_trainer.sft.steps` know.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ostinato_tokenization import ChatTokenizer, TrainingConversation
from ostinato_trainer.backends.lora import lora_options
from ostinato_trainer.backends.memory import out_of_memory_named
from ostinato_trainer.chat_template import chat_template_text, write_chat_template
from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.checkpoints.resume import ResumePoint, resume_point, take_up
from ostinato_trainer.checkpoints.whole_folder import check_root, writing_below
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import ConfigError, TrainingInterrupted
from ostinato_trainer.home_paths import home_path
from ostinato_trainer.interrupts import terminated_as_interrupted
from ostinato_trainer.model_files import num_positions, smaller_vocabulary, warn_of_endless_turns
from ostinato_trainer.progress import step_progress
from ostinato_trainer.sft.checkpoints import LearnedConversations, SftCheckpoints, began_at, check_unused
from ostinato_trainer.sft.checks import check_sft
from ostinato_trainer.sft.data import read_conversations
from ostinato_trainer.sft.reporting import StepReports, step_metrics, step_note
from ostinato_trainer.sft.steps import SFT_CURES, SftSettings, sft_backend, sft_steps

__all__ = ["run_sft"]

_logger = logging.getLogger(__name__)

_LAST_FILE: Final = "config.json"
"""By which a folder is one of a model."""


def run_sft(config: SftConfig, *, console: Console) -> None:
    """Fine-tune the model of a folder on conversations and write a model folder.

    Args:
        config: The whole tree; checked by `check_sft`.
        console: Where progress goes.

    Raises:
        ConfigError: Something that must be given is not, or no model can be where one is named.
        DatasetError: A row is no conversation, or none is short enough.
        TokenizationError, BackendError: The folder holds no tokenizer or no model.
        CheckpointError: The output is occupied or cannot be written, or its checkpoints are of another run.
        TrainingInterrupted: No step could change the model.
        KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM came; checkpoints that are there are whole, and the same run goes on from the newest.
    """
    check_sft(config)
    folder = home_path(str(config.trainer.default_local_dir), "trainer.default_local_dir")
    check_root(folder)
    with (
        terminated_as_interrupted(),
        out_of_memory_named("the run", SFT_CURES.state),
        CheckpointManager(folder, max_to_keep=config.trainer.max_ckpt_to_keep) as manager,
        step_progress(console) as bars,
    ):
        check_unused(manager)
        run = _Run(config, manager, resume_point(config.trainer, manager), console, bars)
        if run.is_over:
            return
        run.train()
        run.write_model()
    console.print(f"the model is in {escape(str(folder))}", highlight=False, soft_wrap=True)


class _Run:
    """A fine-tuning, read and loaded and, where it goes on, brought to where it was. The folder is as it was."""

    def __init__(
        self, config: SftConfig, manager: CheckpointManager, point: ResumePoint | None, console: Console, bars: Progress
    ) -> None:
        self._config, self._manager, self._point, self._console, self._bars = config, manager, point, console, bars
        self._started_at = time.time() if point is None else began_at(point)
        self._template = chat_template_text(config.model, key="model")
        tokenizer = ChatTokenizer.from_pretrained(str(config.model.path), chat_template=self._template)
        warn_of_endless_turns(tokenizer, "model")
        wanted = config.trainer.total_training_steps
        number = None if wanted is None else wanted * config.data.train_batch_size
        self._train = self._read("conversations", tokenizer, config.data.train_paths, number)
        self._held_out = self._read("validation", tokenizer, config.data.val_paths, None)
        self._settings = _settings(config, num_conversations=len(self._train))
        learned = LearnedConversations(
            self._train, batch_size=self._settings.batch_size, seed=config.trainer.seed, began_at=self._started_at
        )
        self._backend = sft_backend(str(config.model.path), self._settings)
        self._checkpoints = SftCheckpoints(manager, config, self._backend, learned, template=self._template)
        if point is not None:
            self._checkpoints.restore(point, tokenizer)

    @property
    def is_over(self) -> bool:
        """Whether an earlier run has taken all steps and written the model; that is said."""
        point, steps = self._point, self._settings.steps
        if point is None or point.step < steps or not (self._manager.root / _LAST_FILE).is_file():
            return False
        _logger.warning(
            "Nothing is left to do: %s is step %d of %d; more trainer.total_epochs or total_training_steps would go on from there",
            point.directory,
            point.step,
            steps,
        )
        return True

    def train(self) -> None:
        """Take the steps that are left, with a checkpoint where one is due.

        Raises:
            TrainingInterrupted: None of all the run's steps could change the model.
        """
        manager, point, settings, trainer = self._manager, self._point, self._settings, self._config.trainer
        manager.hold()
        if point is not None:
            take_up(manager, point)
        steps_done = 0 if point is None else point.step
        steps = sft_steps(
            self._backend,
            self._train,
            steps=settings.steps,
            batch_size=settings.batch_size,
            seed=trainer.seed,
            max_tokens_per_micro_batch=settings.max_tokens_per_micro_batch,
            validation=self._held_out,
            test_freq=settings.test_freq,
            steps_done=steps_done,
        )
        bar = self._bars.add_task("supervised", total=settings.steps, completed=steps_done, note="")
        with writing_below(manager.root), closing(StepReports(trainer, manager.root, self._console, point)) as reports:
            begin = time.perf_counter()
            for step in steps:
                metrics = step_metrics(step, epoch=self._epochs(step.step), seconds=time.perf_counter() - begin)
                if self._is_save_due(step.step):
                    self._checkpoints.save(step.step, metrics)
                self._bars.update(bar, completed=step.step, note=step_note(step))
                reports.show(step, metrics, num_steps=settings.steps)
                begin = time.perf_counter()
        if not self._backend.policy_version:
            raise TrainingInterrupted(
                f"{self._config.model.path} must learn something, but none of {settings.steps} steps had a gradient that is finite; "
                "look at the first warning, and try model.dtype=float32 or a lower optim.lr"
            )

    def write_model(self) -> None:
        """Write the model as it is, with the template that it was trained with.

        Raises:
            CheckpointError: The folder cannot be written.
        """

        def write(directory: Path) -> None:
            self._backend.save_hf(directory)
            if self._template is not None:
                write_chat_template(directory, self._template)

        self._manager.write_files(write, last=_LAST_FILE)

    def _epochs(self, step: int) -> float:
        """Passes over the conversations when the step is done."""
        return step * self._settings.batch_size / len(self._train)

    def _is_save_due(self, step: int) -> bool:
        """Whether the step ends an interval between checkpoints, or the run."""
        freq = self._config.trainer.save_freq
        if freq == 0 or step == 0:
            return False
        if freq == "after_each_epoch":
            return step == self._settings.steps or int(self._epochs(step)) > int(self._epochs(step - 1))
        return step == self._settings.steps or (freq > 0 and step % freq == 0)

    def _read(
        self, what: str, tokenizer: ChatTokenizer, paths: Sequence[str], number: int | None
    ) -> list[TrainingConversation]:
        """The conversations of `paths`, none for no paths, with a bar while they are read and a line about what was left out."""
        if not paths:
            return []
        data, bar = self._config.data, self._bars.add_task(what, total=None, note="")
        found = read_conversations(
            paths,
            tokenizer,
            data,
            seed=self._config.trainer.seed,
            number=number,
            vocab_size=smaller_vocabulary(tokenizer, str(self._config.model.path), key="model"),
            started_at=self._started_at,
            on_progress=lambda count, wanted: self._bars.update(bar, completed=count, total=wanted),
        )
        count, note = len(found.encoded), f"{found.num_overlong} longer than {data.max_length} tokens were left out"
        self._bars.update(bar, total=count, completed=count, note=note)
        if found.num_overlong and not self._console.is_terminal:
            self._console.print(f"{what}: {count}; {note}", highlight=False)
        known, longest = (
            num_positions(str(self._config.model.path), key="model"),
            max((len(each.token_ids) for each in found.encoded), default=0),
        )
        if known is not None and longest > known:
            raise ConfigError(
                f"data.max_length must be at most max_position_embeddings of the model, got {data.max_length} and {what} of up to {longest} "
                f"tokens, > {known}; write data.max_length={known}, which leaves longer ones out, or name a model for longer texts in model.path"
            )
        return found.encoded


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
        lora=lora_options(config.model, seed=config.trainer.seed, section="model"),
        use_remove_padding=config.model.use_remove_padding,
        device=config.trainer.device or "auto",
        dtype=config.model.dtype,
    )
