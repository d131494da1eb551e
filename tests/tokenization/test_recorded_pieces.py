"""A rendering that repeats the record needs no encoding, and nothing is taken for the same that is not."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tokenization import ChatTokenizer, ContinuousTokens, Origin, SanityCheckMode, TokenLedger, check_ledger
from ostinato_tokenization.recorded_pieces import ids_as_recorded
from ostinato_tokenization.testing import tiny_chat_tokenizer

TINY = tiny_chat_tokenizer()
WORDS = st.text(st.sampled_from("ab \n{}<é"), min_size=1, max_size=8)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4)


def conversation(
    tokenizer: ChatTokenizer, turns: list[tuple[str, str]], *, split: bool
) -> tuple[TokenLedger, list[dict]]:
    """A ledger and its messages; with `split`, sampled turns are spelled character by character."""
    tokens = ContinuousTokens(tokenizer)
    messages: list[dict] = [{"role": "user", "content": turns[0][0]}]
    ledger = tokens.build_initial_tokens(messages)
    for number, (asked, said) in enumerate(turns):
        if number:
            new = [{"role": "user", "content": asked}]
            tokens.merge_context_messages(ledger, messages, new)
            messages += new
        pieces = list(said) if split else [said]
        ids = [token_id for piece in pieces for token_id in tokenizer.encode_text(piece)]
        ids.append(tokenizer.stop_token_ids[0])
        tokens.merge_assistant_tokens(ledger, ids, None)
        messages.append({"role": "assistant", "content": said})
    return ledger, messages


def changed(ledger: TokenLedger, at: int, token_id: int) -> TokenLedger:
    """The same record with another id at one place."""
    ids, origins = ledger.token_ids, ledger.origins
    ids[at] = token_id
    other = TokenLedger()
    for place, value in enumerate(ids):
        if origins[place] == Origin.SAMPLED:
            other.append_sampled([value], None)
        else:
            other.append(array("i", [value]), Origin(origins[place]), template_tail=int(origins[place] == 0))
    return other


@given(TURNS, st.booleans())
def test_a_plain_conversation_is_recognised(turns, split):
    """Canonical or not, what was sampled and what was given is found in the rendering, whole, with what follows it."""
    turns = [(asked.replace("<", "x"), said.replace("<", "x")) for asked, said in turns]
    ledger, messages = conversation(TINY, turns, split=split)
    text = TINY.render(messages, add_generation_prompt=False)
    ids = ids_as_recorded(TINY, text, ledger)
    assert ids is not None
    assert ids[: len(ledger)] == ledger.token_ids
    assert TINY.decode(ids) == text


@settings(deadline=None)
@given(TURNS, st.booleans(), st.data())
def test_the_check_says_the_same_with_and_without_it(turns, split, data):
    """Whatever one id is changed to, the check reports what it reports when everything is encoded."""
    ledger, messages = conversation(TINY, turns, split=split)
    if data.draw(st.booleans()):
        at, other = data.draw(st.integers(0, len(ledger) - 1)), data.draw(st.integers(0, TINY.vocab_size - 1))
        ledger = changed(ledger, at, other)
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(messages) - 1))
        messages[place] = {**messages[place], "content": data.draw(WORDS)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato_tokenization.sanity.ids_as_recorded", lambda *_: None)
        expected = check_ledger(ledger, TINY, messages, mode=SanityCheckMode.STRICT)
    assert check_ledger(ledger, TINY, messages, mode=SanityCheckMode.STRICT) == expected


def test_ids_of_what_was_given_count_not_its_text(shared_tokenizers):
    """A message that was recorded by other ids than its text has is no repetition, though it reads the same."""
    tokenizer = ChatTokenizer.from_pretrained(shared_tokenizers / "qwen25")
    ledger, messages = conversation(tokenizer, [("hello", "x")], split=False)
    text = tokenizer.render(messages, add_generation_prompt=False)
    assert ids_as_recorded(tokenizer, text, ledger) is not None
    ids, (merged,) = ledger.token_ids, tokenizer.encode_text("hello")
    at, end = ids.index(merged), len(ids) - ledger.num_sampled
    spelled = [*tokenizer.encode_text("he"), *tokenizer.encode_text("llo")]
    other = TokenLedger()
    other.append([*ids[:at], *spelled, *ids[at + 1 : end]], Origin.CONTEXT, template_tail=2)
    other.append_sampled(ids[end:], None)
    assert tokenizer.decode(other.token_ids) == tokenizer.decode(ids)
    assert ids_as_recorded(tokenizer, text, other) is None


@pytest.mark.parametrize("cut", [1, 3])
def test_a_rendering_that_ends_before_the_record_is_no_repetition(cut):
    """The record must be there to its end."""
    ledger, messages = conversation(TINY, [("a", "b"), ("a", "b")], split=False)
    text = TINY.render(messages, add_generation_prompt=False)
    whole = text.rindex("<|im_end|>")
    assert ids_as_recorded(TINY, text[: whole - cut], ledger) is None


@settings(deadline=None)
@given(TURNS)
def test_the_check_encodes_nothing_of_a_plain_conversation(turns):
    """What was given was encoded when it was given, and what was sampled is compared by its text."""
    turns = [(asked.replace("<", "x") + "y", said.replace("<", "x")) for asked, said in turns]
    ledger, messages = conversation(TINY, turns, split=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TINY.plain_encoder, "_computed", lambda text, *, with_prefix: pytest.fail(f"{text!r} was encoded")
        )
        assert check_ledger(ledger, TINY, messages, mode=SanityCheckMode.STRICT) is None
