"""The classic delta encoding: what one more message adds to a rendered conversation.

Invariant: the earlier text is a checked prefix of the later one; nothing is cut at a length. For templates that rewrite
earlier turns both texts begin with `BASE_CHAT_HISTORY` instead of the real conversation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.control_text import MaskTable
from ostinato_tokenization.errors import ChatTemplateError, HistoryRewrittenError, MediaNotSupportedError, MessageError
from ostinato_tokenization.messages import Message, normalize_messages
from ostinato_tokenization.template_profile import check_prefix

_logger = logging.getLogger(__name__)

BASE_CHAT_HISTORY: tuple[Mapping[str, str], ...] = (
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
)
"""The conversation that stands in for the real one where a template rewrites earlier turns."""

_logged: set[str] = set()
_taken_over: WeakKeyDictionary[Any, tuple[str, ChatTokenizer]] = WeakKeyDictionary()


class DeltaEncoding(msgspec.Struct, frozen=True):
    """The ids that one message adds."""

    token_ids: list[int]
    mask: list[int]
    """1 for the assistant's tokens up to and including the stop token, else 0; as long as `token_ids`."""


def encode_delta(
    tokenizer: ChatTokenizer | Any,
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    fixed_base: bool | None = None,
    started_at: float | None = None,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
) -> DeltaEncoding:
    """Encode what `messages[index]` adds to the conversation before it.

    For an assistant message the earlier text ends with the generation prompt. Other messages that follow each other are
    one turn: the last of them adds the whole run, with the generation prompt if an assistant message comes next, and
    those before it add nothing. For a template that extends history the deltas of all messages add up to the text of
    the conversation, and to its ids unless a fresh encoding merges the end of a generation prompt with what is said.

    Args:
        tokenizer: A ChatTokenizer, or a fast tokenizer of transformers, or a processor with one.
        started_at: When the conversation began, in seconds since 1970, for templates that print the date; None for now.
        images: Refused for now, like `videos`.
        fixed_base: Whether `BASE_CHAT_HISTORY` stands in for the conversation; None asks the template, by a probe.

    Raises:
        HistoryRewrittenError: The earlier text is not a prefix of the later one.
        ChatTemplateError: The template refuses one of the two.
        MessageError: `index` is out of range, or the messages cannot be rendered.
        MediaNotSupportedError: There are images or videos.
    """
    if images or videos:
        raise MediaNotSupportedError("images and videos must be empty for now, got some; remove them")
    tokenizer = as_chat_tokenizer(tokenizer)
    if started_at is None:
        started_at = time.time()
    if messages:
        normalize_messages(messages)  # for its errors
    if not isinstance(index, int) or not 0 <= index < len(messages):
        raise MessageError(f"index must be from 0 to {len(messages) - 1}, got {index}; count from the first message")
    end = index + 1
    if messages[index].get("role") == "assistant":
        base = _base(tokenizer, template_kwargs, fixed_base) if index else BASE_CHAT_HISTORY
        return encode_assistant_delta(
            tokenizer,
            messages[:index] if base is None else base,
            messages[index],
            tools,
            template_kwargs=template_kwargs,
            started_at=started_at,
        )
    follows = messages[end].get("role") if end < len(messages) else None
    if follows not in (None, "assistant"):
        return DeltaEncoding([], [])
    start = index
    while start and messages[start - 1].get("role") != "assistant":
        start -= 1
    ids = _context_delta(
        tokenizer,
        messages[:end],
        start,
        tools,
        base=_base(tokenizer, template_kwargs, fixed_base) if start else None,
        add_generation_prompt=follows is not None,
        template_kwargs=template_kwargs,
        started_at=started_at,
    )
    return DeltaEncoding(ids, [0] * len(ids))


def as_chat_tokenizer(tokenizer: Any) -> ChatTokenizer:
    """A ChatTokenizer for an object of transformers; made anew where its template or its tokens have changed.

    Raises:
        TokenizerLoadError: It is neither a ChatTokenizer nor a fast tokenizer or a processor with one.
        ChatTemplateError: It has no chat template.
    """
    if isinstance(tokenizer, ChatTokenizer):
        return tokenizer
    if not hasattr(tokenizer, "__weakref__"):
        return ChatTokenizer.from_transformers(tokenizer)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    templates = [getattr(one, "chat_template", None) for one in (tokenizer, inner)]
    state = repr((templates, len(inner) if hasattr(inner, "__len__") else None))
    known = _taken_over.get(tokenizer)
    if known is None or known[0] != state:
        known = _taken_over[tokenizer] = (state, ChatTokenizer.from_transformers(tokenizer))
    return known[1]


def encode_assistant_delta(
    tokenizer: ChatTokenizer,
    before: Sequence[Message],
    message: Message,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    started_at: float | None = None,
) -> DeltaEncoding:
    """The ids of one assistant message behind the generation prompt of `before`.

    Raises:
        HistoryRewrittenError: The template does not render the message behind its own generation prompt.
    """
    try:
        text, table = _difference(tokenizer, before, [message], tools, True, False, template_kwargs, started_at)
    except (ChatTemplateError, HistoryRewrittenError):
        if before is not BASE_CHAT_HISTORY:
            raise
        text, table = _difference(tokenizer, before[1:], [message], tools, True, False, template_kwargs, started_at)
    ids = tokenizer.encode_masked(text, table, continues=True)
    said = next((at for at in range(len(ids), 0, -1) if ids[at - 1] in tokenizer.end_token_ids), len(ids))
    return DeltaEncoding(ids, [1] * said + [0] * (len(ids) - said))


def _base(
    tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any] | None, fixed_base: bool | None
) -> Sequence[Message] | None:
    if fixed_base is None:
        fixed_base = not tokenizer.profile(template_kwargs).extends_history
        if fixed_base and tokenizer.template_hash not in _logged:
            _logged.add(tokenizer.template_hash)
            _logger.info(
                "chat template %s rewrites earlier turns: deltas are encoded against BASE_CHAT_HISTORY",
                tokenizer.template_hash,
            )
    return BASE_CHAT_HISTORY if fixed_base else None


def _context_delta(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    start: int,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    base: Sequence[Message] | None,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any] | None,
    started_at: float | None,
) -> list[int]:
    if start == 0:
        return tokenizer.encode_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            started_at=started_at,
        )
    candidates: list[Sequence[Message]] = [messages[:start]]
    if base is not None:
        answered = [*base, {"role": "assistant", "content": "Yes."}]
        candidates = [base, answered, base[1:], answered[1:]]
    refusal: ChatTemplateError | HistoryRewrittenError | None = None
    for before in candidates:
        try:
            text, table = _difference(
                tokenizer, before, messages[start:], tools, False, add_generation_prompt, template_kwargs, started_at
            )
        except (ChatTemplateError, HistoryRewrittenError) as error:
            refusal = refusal or error
            continue
        return tokenizer.encode_masked(text, table, continues=not tokenizer.starts_with_control(text))
    assert refusal is not None
    raise refusal


def _difference(
    tokenizer: ChatTokenizer,
    before: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    prompt_before: bool,
    prompt_after: bool,
    template_kwargs: Mapping[str, Any] | None,
    started_at: float | None,
) -> tuple[str, MaskTable]:
    """What the template adds to its rendering of `before` for `new`, its control strings masked."""
    table = MaskTable()
    earlier = tokenizer.mask_messages(before, table)
    later = [*earlier, *tokenizer.mask_messages(new, table)]
    schemas = tokenizer.mask_tools(tools, table)
    old, whole = (
        tokenizer.render_as_is(
            rendered, schemas, add_generation_prompt=prompt, template_kwargs=template_kwargs, started_at=started_at
        )
        for rendered, prompt in ((earlier, prompt_before), (later, prompt_after))
    )
    check_prefix(old, whole)
    return whole[len(old) :], table
