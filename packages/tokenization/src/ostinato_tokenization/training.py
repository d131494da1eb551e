"""Whole conversations for supervised training, laid out as a rollout would have recorded them.

Invariant: the ids are those of a rollout in which the policy said exactly these assistant messages, so that a model is
warmed up on the very sequences that reinforcement learning shows it later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.continuous import ContinuousTokens
from ostinato_tokenization.delta import as_chat_tokenizer, encode_assistant_delta
from ostinato_tokenization.errors import MessageError
from ostinato_tokenization.messages import Message, normalize_messages


class TrainingConversation(msgspec.Struct, frozen=True):
    """One conversation as ids and loss mask."""

    token_ids: list[int]
    mask: list[int]
    """1 for what the assistant says, up to and including the stop token, else 0; as long as `token_ids`."""


def encode_training_conversation(
    tokenizer: ChatTokenizer | Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    started_at: float | None = None,
) -> TrainingConversation:
    """Encode a conversation with a mask on what the assistant says.

    Each assistant message is rendered as the last of the conversation, reasoning included. What comes after the last
    stop token (a newline, often) is left off.

    Args:
        tokenizer: A ChatTokenizer, or a fast tokenizer of transformers, or a processor with one.
        started_at: When the conversation began, in seconds since 1970, for templates that print the date; None for now.

    Raises:
        MessageError: There is no assistant message, nothing before the first, or two follow each other.
        HistoryRewrittenError: The template does not render an assistant message behind its own generation prompt.
        ChatTemplateError: The template refuses the conversation.
    """
    tokenizer = as_chat_tokenizer(tokenizer)
    if messages:
        normalize_messages(messages)  # for its errors
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns or turns[0] == 0:
        raise MessageError(
            f"messages must hold an assistant message after another one, got roles"
            f" {[message.get('role') for message in messages]}; there is nothing to train on"
        )
    tokens = ContinuousTokens(tokenizer, template_kwargs=template_kwargs)
    first = messages[: turns[0]]
    ledger = tokens.build_initial_tokens(first, tools, started_at=started_at)
    for number, turn in enumerate(turns):
        delta = encode_assistant_delta(
            tokenizer, first, messages[turn], tools, template_kwargs=template_kwargs, started_at=ledger.started_at
        )
        said = delta.token_ids[: sum(delta.mask)]
        end = turns[number + 1] if number + 1 < len(turns) else len(messages)
        if end == turn + 1 and end < len(messages):
            raise MessageError(f"messages[{end}] must not be the assistant's again; join it with messages[{turn}]")
        following = messages[turn + 1 : end]
        opener = tokens.opener_after(messages[: turn + 1], following, tools) if following else None
        if opener is not None and (not said or said[-1] not in tokenizer.stop_token_ids):
            said.append(opener)
        tokens.merge_assistant_tokens(ledger, said, None)
        if following:
            tokens.merge_context_messages(ledger, messages[: turn + 1], following, tools)
    prompt = len(ledger.prompt_ids)
    return TrainingConversation(ledger.token_ids, [0] * prompt + ledger.response_mask)
