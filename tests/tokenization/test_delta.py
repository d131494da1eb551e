"""The delta encoding adds up to the conversation, and never cuts blindly."""

import logging

import pytest

from ostinato_tokenization import BASE_CHAT_HISTORY, HistoryRewrittenError, MessageError, encode_delta

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"k": 1}'}}
CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "r1"},
    {"role": "tool", "content": "r2"},
    {"role": "assistant", "content": "y"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "z"},
]


def test_deltas_add_up_to_the_conversation(tiny):
    """For a template that extends history the deltas are the ids of the whole, tool runs taken together."""
    deltas = [encode_delta(tiny, CONVERSATION, index) for index in range(len(CONVERSATION))]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == tiny.encode_chat(
        CONVERSATION, add_generation_prompt=False
    )
    assert deltas[3].token_ids == []


def test_the_mask_covers_the_assistants_words_and_stop_token_only(make):
    """Headers, the newline after the stop token, user and tool text have mask 0."""
    tokenizer = make("plain")
    messages = [
        {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "x"), ("user", "k"), ("assistant", "y"))
    ]
    deltas = [encode_delta(tokenizer, messages, index) for index in range(4)]
    kept = [i for delta in deltas for i, mask in zip(delta.token_ids, delta.mask, strict=True) if mask]
    assert tokenizer.decode(kept) == "x<|e|>y<|e|>"
    assert deltas[1].mask == [1, 1, 0]


def test_a_template_that_rewrites_history_gets_the_fixed_base_and_says_so_once(make, caplog):
    """The probe finds the rewriting, encodes against BASE_CHAT_HISTORY and logs that once."""
    tokenizer = make("forgets_reasoning")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nr\n</think>\n\nx"},
        {"role": "user", "content": "k"},
    ]
    with caplog.at_level(logging.INFO, logger="ostinato_tokenization"):
        assistant = encode_delta(tokenizer, messages, 1)
        context = encode_delta(tokenizer, messages, 2)
    assert tokenizer.decode(assistant.token_ids) == "<think>\nr\n</think>\n\nx<|e|>\n"
    assert tokenizer.decode(context.token_ids) == "<|s|>user\nk<|e|>\n"
    assert [record for record in caplog.records if "BASE_CHAT_HISTORY" in record.message].__len__() == 1


def test_without_the_fixed_base_rewriting_is_an_error(make):
    """Forced to the real history, a rewriting template raises with the first differing characters."""
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nr\n</think>\n\nx"},
        {"role": "user", "content": "k"},
    ]
    with pytest.raises(HistoryRewrittenError, match="difference at character"):
        encode_delta(make("forgets_reasoning"), messages, 2, fixed_base=False)


def test_the_fixed_base_can_be_forced(make):
    """Both bases agree where the template does not rewrite."""
    tokenizer = make("default_system")
    for index in range(1, len(CONVERSATION)):
        forced = encode_delta(tokenizer, CONVERSATION, index, fixed_base=True)
        assert forced == encode_delta(tokenizer, CONVERSATION, index, fixed_base=False)


def test_the_fixed_base_suits_templates_with_rules_for_roles(make):
    """Where two users in a row are refused, an answer is put between."""
    messages = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "x"), ("user", "k"))]
    tokenizer = make("alternates")
    assert encode_delta(tokenizer, messages, 2, fixed_base=True) == encode_delta(
        tokenizer, messages, 2, fixed_base=False
    )


def test_an_index_outside_is_named(tiny):
    """An index that is no message is an error."""
    for index in (-1, len(CONVERSATION)):
        with pytest.raises(MessageError, match=f"got {index}"):
            encode_delta(tiny, CONVERSATION, index)
    assert [message["role"] for message in BASE_CHAT_HISTORY] == ["system", "user"]
