"""`ostinato sft`: conversations of a file, a model folder in, a model folder out.

Invariant: the output is there whole or not at all, and carries the chat template that it was trained with. What a token or
a loss is, `ostinato_tokenization` and `ostinato_trainer.sft` know.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ostinato_tokenization import (
    ChatTokenizer,
    TokenizationError,
    TrainingConversation,
    encode_training_conversation,
)
from ostinato_trainer.chat_template import chat_template_text, write_chat_template
from ostinato_trainer.config_actor import ModelConfig
from ostinato_trainer.data_files import open_data_file, parsed_json_text
from ostinato_trainer.errors import BatchError, DatasetError
from ostinato_trainer.progress import step_progress
from ostinato_trainer.sft import SftSettings, train_sft
from ostinato_trainer.whole_folder import folder_made_whole

__all__ = ["read_conversations", "run_sft"]


def run_sft(
    model_path: Path,
    data: str,
    output: Path,
    *,
    settings: SftSettings,
    max_length: int,
    chat_template: str | None,
    seed: int,
    console: Console,
) -> None:
    """Fine-tune the model of a folder on conversations and write a model folder.

    Args:
        model_path: A model folder in the Hugging Face format.
        data: A data file with `messages` and perhaps `tools` a row.
        output: A folder that does not exist yet, or is empty.
        settings: How to train.
        max_length: Tokens; longer conversations are left out.
        chat_template: A `.jinja` file, or the text of a template; None for the model's own.
        seed: Chooses and orders conversations.
        console: Where progress goes.

    Raises:
        DatasetError: A row is no conversation, or none is short enough.
        TokenizationError, BackendError: The folder holds no tokenizer or no model, or the learning rate is out of range.
        BatchError: `steps` or `batch_size` is below 1.
        CheckpointError: `output` is occupied or cannot be written.
    """
    for name, value in (("--steps", settings.steps), ("--batch-size", settings.batch_size)):
        if value < 1:
            raise BatchError(f"{name} must be at least 1, got {value}; raise it")
    template = chat_template_text(ModelConfig(path=str(model_path), chat_template=chat_template))
    tokenizer = ChatTokenizer.from_pretrained(model_path, chat_template=template)
    with folder_made_whole(output) as unfinished, step_progress(console) as progress:
        number = settings.steps * settings.batch_size
        reading = progress.add_task("conversations", total=None, note="")
        conversations, num_overlong = read_conversations(
            data, tokenizer, max_length=max_length, number=number, seed=seed
        )
        progress.update(
            reading,
            total=len(conversations),
            completed=len(conversations),
            note=f"{num_overlong} longer than {max_length} tokens were left out",
        )
        bar = progress.add_task("supervised", total=settings.steps, note="")
        for step in train_sft(model_path, unfinished, conversations, settings, seed=seed):
            progress.update(bar, completed=step.step, note=f"loss {step.loss:.3f}")
            if not console.is_terminal and (step.step * 10 // settings.steps > (step.step - 1) * 10 // settings.steps):
                console.print(f"step {step.step} of {settings.steps}  loss {step.loss:.3f}", highlight=False)
        if template is not None:
            write_chat_template(unfinished, template)
    console.print(f"the model is in {escape(str(output))}", highlight=False, soft_wrap=True)


def read_conversations(
    data: str, tokenizer: ChatTokenizer, *, max_length: int, number: int, seed: int
) -> tuple[list[TrainingConversation], int]:
    """`number` different conversations of a file, chosen at random, or all that there are.

    Args:
        data: A data file; `messages`, and `tools` where a row has them, may be JSON text.
        tokenizer: Of the model that is to learn them.
        max_length: Tokens; longer ones are not chosen.
        number: How many are wanted, at least 1; no more rows are read than that takes.
        seed: Of the choice.

    Returns:
        The conversations, and how many longer ones were met on the way.

    Raises:
        DatasetError: A row is no conversation, or none is short enough.
    """
    file = open_data_file(data)
    order = list(range(len(file)))
    random.Random(f"conversations-{seed}").shuffle(order)
    found: list[TrainingConversation] = []
    lengths: list[int] = []
    for index in order:
        if len(found) == number:
            break
        conversation = _encoded(file.row(index), tokenizer, file.place(index))
        if len(conversation.token_ids) <= max_length:
            found.append(conversation)
        else:
            lengths.append(len(conversation.token_ids))
    if not found:
        raise DatasetError(
            f"--max-length must leave a conversation of {data}, got {max_length}, and the shortest has {min(lengths)} "
            "tokens; raise it"
        )
    return found, len(lengths)


def _encoded(row: dict[str, Any], tokenizer: ChatTokenizer, place: str) -> TrainingConversation:
    messages, tools = (parsed_json_text(row.get(field), list) for field in ("messages", "tools"))
    if not isinstance(messages, list):
        raise DatasetError(
            f"{place}: messages must be a list of messages, got {type(messages).__name__}; "
            "write [{role: user, content: TEXT}, {role: assistant, content: TEXT}]"
        )
    if tools is not None and not isinstance(tools, list):
        raise DatasetError(f"{place}: tools must be a list of schemas, got {type(tools).__name__}; or leave it out")
    try:
        return encode_training_conversation(tokenizer, messages, tools)
    except TokenizationError as error:
        raise DatasetError(f"{place}: {error}") from error
