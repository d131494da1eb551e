"""Conversations of data files, as the token ids and masks that supervised fine-tuning learns from.

Invariant: a token is learned exactly where a rollout would have sampled it; both are `ostinato_tokenization`'s record of the same template.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ostinato_tokenization import ChatTokenizer, TokenizationError, TrainingConversation, encode_training_conversation
from ostinato_trainer.config.sft import SftDataConfig
from ostinato_trainer.data.files import open_data_file, parsed_json_text
from ostinato_trainer.data.paths import data_file_names
from ostinato_trainer.data.vocabulary import token_beyond
from ostinato_trainer.errors import DatasetError

__all__ = ["Conversations", "read_conversations"]

_logger = logging.getLogger(__name__)


class Conversations(msgspec.Struct, frozen=True):
    """What was read."""

    encoded: list[TrainingConversation]
    num_overlong: int
    """Longer ones that were met on the way and left out."""


def read_conversations(
    paths: Sequence[str],
    tokenizer: ChatTokenizer,
    config: SftDataConfig,
    *,
    seed: int,
    number: int | None = None,
    vocab_size: int | None = None,
    started_at: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Conversations:
    """Different conversations of some files, in an order that the seed decides.

    Args:
        paths: Data files or patterns; messages, and tools where a row has them, may be JSON text.
        tokenizer: Of the model that is to learn them.
        config: Columns, the longest length, and what becomes of longer conversations.
        seed: Of the order, and so of the choice.
        number: How many are wanted, at least 1, and no more rows are read than that takes; None reads all.
        vocab_size: Of the model, where the tokenizer has ids beyond it: a conversation with one of these is an error.
        started_at: When the conversations began, in seconds since 1970, for templates that print the date; None for now.
        on_progress: Is told after each row how many conversations there are, and how many there can be.

    Raises:
        DatasetError: A row is no conversation, or has tokens that the model lacks; one is too long where that is an error, or none is
            short enough.
    """
    files = [open_data_file(path) for path in data_file_names(paths)]
    order = [(file, index) for file in files for index in range(len(file))]
    random.Random(f"conversations-{seed}").shuffle(order)
    encode = _Encoder(tokenizer, config, started_at)
    wanted = len(order) if number is None else min(number, len(order))
    found: list[TrainingConversation] = []
    lengths: list[int] = []
    for file, index in order:
        if len(found) == wanted:
            break
        conversation = encode(file.row(index), file.place(index))
        length = len(conversation.token_ids)
        if length <= config.max_length:
            _check_vocabulary(conversation, tokenizer, vocab_size, file.place(index))
            found.append(conversation)
            if on_progress is not None:
                on_progress(len(found), wanted)
            continue
        lengths.append(length)
        if config.truncation == "error":
            raise DatasetError(
                f"{file.place(index)}: a conversation must have at most data.max_length={config.max_length} tokens, got {length}; "
                "raise data.max_length, or write data.truncation=drop"
            )
    if not found:
        raise DatasetError(
            f"data.max_length must leave a conversation of {', '.join(paths)}, got {config.max_length}, and the shortest has "
            f"{min(lengths)} tokens; raise it (--max-length)"
        )
    return Conversations(found, len(lengths))


def _check_vocabulary(
    conversation: TrainingConversation, tokenizer: ChatTokenizer, vocab_size: int | None, place: str
) -> None:
    beyond = None if vocab_size is None else token_beyond(tokenizer, conversation.token_ids, vocab_size)
    if beyond is not None:
        raise DatasetError(
            f"{place}: a conversation must be of tokens of the model's vocabulary of {vocab_size}, got {beyond}; name a model whose embeddings "
            "were resized for its tokenizer, or the tokenizer that belongs to it, in model.path"
        )


class _Encoder:
    """Encodes rows, and says once of each kind of thing in them that the chat template leaves out."""

    def __init__(self, tokenizer: ChatTokenizer, config: SftDataConfig, started_at: float | None) -> None:
        self._tokenizer, self._config, self._started_at = tokenizer, config, started_at
        self._unseen = {"tools", "tool_calls", "reasoning_content"}

    def __call__(self, row: dict[str, Any], place: str) -> TrainingConversation:
        """The conversation of a row.

        Raises:
            DatasetError: It is none; the message names the place.
        """
        config = self._config
        if config.messages_key not in row:
            raise DatasetError(
                f"{place}: {config.messages_key} must be there, got the columns {', '.join(row) or 'none'}; add it or set data.messages_key"
            )
        messages, tools = (parsed_json_text(row.get(key), list) for key in (config.messages_key, config.tools_key))
        if not isinstance(messages, list):
            raise DatasetError(
                f"{place}: {config.messages_key} must be a list of messages, got {type(messages).__name__}; "
                "write [{role: user, content: TEXT}, {role: assistant, content: TEXT}], or name the column by data.messages_key"
            )
        if tools is not None and not isinstance(tools, list):
            raise DatasetError(
                f"{place}: {config.tools_key} must be a list of schemas, got {type(tools).__name__}; or leave it out"
            )
        try:
            conversation = self._encoded(messages, tools)
            for kind in self._unseen & _kinds(messages, tools):
                self._unseen.remove(kind)
                plain = [{name: value for name, value in message.items() if name != kind} for message in messages]
                if self._encoded(plain, None if kind == "tools" else tools) == conversation:
                    _logger.warning(
                        "%s: the chat template leaves out %s, so it is not learned; name another template by model.chat_template",
                        place,
                        kind,
                    )
        except TokenizationError as error:
            raise DatasetError(f"{place}: {error}") from error
        return conversation

    def _encoded(self, messages: list[Any], tools: list[Any] | None) -> TrainingConversation:
        return encode_training_conversation(
            self._tokenizer,
            messages,
            tools,
            template_kwargs=self._config.apply_chat_template_kwargs or None,
            started_at=self._started_at,
        )


def _kinds(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> set[str]:
    """What a conversation has beside roles and contents."""
    said = {name for message in messages for name in ("tool_calls", "reasoning_content") if message.get(name)}
    return said | {"tools"} if tools else said
