"""Supervised conversations look like rollouts."""

import pytest

from ostinato_tokenization import (
    ChatTokenizer,
    ContinuousTokens,
    HistoryRewrittenError,
    MessageError,
    encode_training_conversation,
)
from ostinato_tokenization.testing import tiny_tokenizer


def conversation(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_the_mask_is_on_what_the_assistant_says(make):
    """Exactly the assistant's text and stop tokens are trained on; the ids are those of the conversation."""
    tokenizer = make("plain")
    messages = conversation(("user", "q"), ("assistant", "x"), ("user", "k"), ("assistant", "y"))
    encoded = encode_training_conversation(tokenizer, messages)
    kept = [i for i, mask in zip(encoded.token_ids, encoded.mask, strict=True) if mask]
    assert tokenizer.decode(kept) == "x<|e|>y<|e|>"
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert encoded.token_ids == whole[:-1]


def test_it_is_the_record_of_a_rollout_that_says_the_same(make):
    """Reasoning stays in earlier turns, as it does in the ledger of a rollout."""
    tokenizer = make("forgets_reasoning")
    answer = "<think>\nr\n</think>\n\nx"
    messages = conversation(("user", "q"), ("assistant", answer), ("user", "k"), ("assistant", "y"))
    encoded = encode_training_conversation(tokenizer, messages)
    assert tokenizer.decode(encoded.token_ids).count("<think>") == 1
    tokens = ContinuousTokens(tokenizer)
    ledger = tokens.build_initial_tokens(messages[:1])
    stop = tokenizer.token_id("<|e|>")
    think = [tokenizer.token_id("<think>"), *tokenizer.encode_text("\nr\n"), tokenizer.token_id("</think>")]
    tokens.merge_assistant_tokens(ledger, [*think, *tokenizer.encode_text("\n\nx"), stop], None)
    tokens.merge_context_messages(ledger, messages[:2], messages[2:3])
    tokens.merge_assistant_tokens(ledger, [*tokenizer.encode_text("y"), stop], None)
    assert encoded.token_ids == ledger.token_ids
    assert encoded.mask[len(ledger.prompt_ids) :] == ledger.response_mask


def test_a_stop_token_that_opens_the_next_turn_is_trained_on(make):
    """Where turns end with the next opener, the assistant learns to say it."""
    tokenizer = make("opener_stops")
    messages = conversation(("user", "q"), ("assistant", "x"), ("tool", "r"), ("assistant", "y"))
    encoded = encode_training_conversation(tokenizer, messages)
    kept = [i for i, mask in zip(encoded.token_ids, encoded.mask, strict=True) if mask]
    assert tokenizer.decode(kept) == "\nx<|observation|>\ny"
    assert encoded.token_ids == tokenizer.encode_chat(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([("user", "q")], "nothing to train on"),
        ([("assistant", "x")], "nothing to train on"),
        ([], "nothing to train on"),
        ([("user", "q"), ("assistant", "x"), ("assistant", "y")], r"messages\[2\] must not be the assistant's again"),
    ],
)
def test_conversations_without_anything_to_learn_are_refused(tiny, turns, says):
    """There is never a mask of zeros only."""
    with pytest.raises(MessageError, match=says):
        encode_training_conversation(tiny, conversation(*turns))


def test_a_message_that_does_not_follow_its_prompt_is_refused():
    """A template whose generation prompt forces reasoning refuses answers without any."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    tokenizer = ChatTokenizer(tiny_tokenizer(), template)
    with pytest.raises(HistoryRewrittenError):
        encode_training_conversation(tokenizer, conversation(("user", "q"), ("assistant", "x")))
    good = encode_training_conversation(tokenizer, conversation(("user", "q"), ("assistant", "<think>\nr</think>x")))
    assert tokenizer.decode(good.token_ids).count("<think>") == 1
