"""The delta encoding adds up to the conversation, and never cuts blindly."""

import logging

import pytest

from ostinato_tokenization import (
    BASE_CHAT_HISTORY,
    ChatTokenizer,
    HistoryRewrittenError,
    MediaNotSupportedError,
    MessageError,
    encode_delta,
    encode_training_conversation,
)
from ostinato_tokenization.testing import TINY_CHAT_TEMPLATE, tiny_tokenizer

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


DATED = (
    "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
)


def test_the_date_is_that_of_the_conversations_start():
    """Deltas and training conversations print the date that the caller gives, whatever today is."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), DATED)
    moment = 86400.0 * 400
    first = encode_delta(tokenizer, CONVERSATION, 1, started_at=moment)
    assert tokenizer.decode(first.token_ids).startswith("1971-02-05")
    whole = encode_training_conversation(tokenizer, CONVERSATION[:3], started_at=moment)
    assert tokenizer.decode(whole.token_ids).startswith("1971-02-05")
    assert (
        encode_delta(tokenizer, CONVERSATION, 2, started_at=moment).token_ids
        == encode_delta(tokenizer, CONVERSATION, 2, started_at=0.0).token_ids
    )


class Processor:
    """What a processor of transformers is to this package: something with a tokenizer, and perhaps a template of its own."""

    def __init__(self, tokenizer, chat_template=None):
        self.tokenizer, self.chat_template = tokenizer, chat_template


def test_a_processor_is_taken_for_its_tokenizer():
    """A tokenizer of transformers, a processor with it and our own encode the same; a processor's own template wins, also
    when it changes; images are refused by name."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), chat_template=TINY_CHAT_TEMPLATE, eos_token="<|im_end|>"
    )
    ours = ChatTokenizer.from_transformers(reference)
    processor = Processor(reference)
    for index in range(len(CONVERSATION)):
        expected = encode_delta(ours, CONVERSATION, index)
        assert encode_delta(reference, CONVERSATION, index) == expected
        assert encode_delta(processor, CONVERSATION, index) == expected
    assert encode_training_conversation(processor, CONVERSATION) == encode_training_conversation(ours, CONVERSATION)
    processor.chat_template = DATED
    assert encode_delta(processor, CONVERSATION, 1, started_at=0.0) == encode_delta(
        ChatTokenizer(tiny_tokenizer(), DATED, named_tokens={"eos_token": "<|im_end|>"}),
        CONVERSATION,
        1,
        started_at=0.0,
    )
    with pytest.raises(MediaNotSupportedError, match="images and videos must be empty for now"):
        encode_delta(processor, CONVERSATION, 1, images=["x"])


def test_a_template_that_rewrites_calls_gets_the_fixed_base():
    """Where a call is written otherwise once its result follows, the probe finds that, and a delta against the real
    conversation is an error."""
    template = TINY_CHAT_TEMPLATE.replace(
        "{{- (call.function.arguments | tojson)",
        "{{- ('' if loop.last and not ns.more else '!') + (call.function.arguments | tojson)",
    ).replace(
        "{%- for message in messages %}", "{%- for message in messages %}{% set ns = namespace(more=not loop.last) %}"
    )
    tokenizer = ChatTokenizer(tiny_tokenizer(), template)
    delta = encode_delta(tokenizer, CONVERSATION, 4)
    assert tokenizer.decode(delta.token_ids).count("<tool_response>") == 2
    with pytest.raises(HistoryRewrittenError, match="difference at character"):
        encode_delta(tokenizer, CONVERSATION, 4, fixed_base=False)
