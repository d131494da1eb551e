"""The sanity check finds what training and inference would see differently, and nothing else."""

import json
import logging

import pytest
import tokenizers

from ostinato_tokenization import (
    ChatTokenizer,
    ContinuousTokens,
    Origin,
    SanityCheckMode,
    TokenizationMismatchError,
    TokenLedger,
    check_ledger,
    num_mismatches,
)
from ostinato_tokenization.control_text import MaskTable
from ostinato_tokenization.testing import TINY_CHAT_TEMPLATE, tiny_tokenizer

STRICT, IGNORE, DISABLE = SanityCheckMode.STRICT, SanityCheckMode.IGNORE_STRIPPABLE, SanityCheckMode.DISABLE


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def ids_of(tokenizer, text):
    return tokenizer.encode_masked(text, MaskTable())


def play(tokenizer, *turns, template_kwargs=None):
    """A ledger of user texts and sampled texts in turn, and the messages that it stands for."""
    tokens = ContinuousTokens(tokenizer, template_kwargs=template_kwargs)
    messages = [user(turns[0])]
    ledger = tokens.build_initial_tokens(messages)
    for number, text in enumerate(turns[1:]):
        if number % 2:
            tokens.merge_context_messages(ledger, messages, [user(text)])
            messages.append(user(text))
        else:
            tokens.merge_assistant_tokens(ledger, ids_of(tokenizer, text), None)
            messages.append(said(text.removesuffix("<|e|>").removesuffix("<|im_end|>")))
    return ledger, messages


def test_an_honest_ledger_has_nothing_to_report(tiny, make):
    """Natural stops, several turns, an unfinished conversation: no report."""
    for tokenizer, stop in ((tiny, "<|im_end|>"), (make("default_system"), "<|e|>"), (make("prints_bos"), "<|e|>")):
        for turns in (("q", "x" + stop), ("q", "x" + stop, "k"), ("q", "x" + stop, "k", "y" + stop), ("q",)):
            ledger, messages = play(tokenizer, *turns)
            assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is None


def test_sampled_spans_compare_as_text(make):
    """Ids that are not canonical are no difference."""
    tokenizer = make("plain")
    ledger = ContinuousTokens(tokenizer).build_initial_tokens([user("q")])
    ledger.append_sampled([tokenizer.token_id(text) for text in ("ab", "cd", "<|e|>")], None)
    assert check_ledger(ledger, tokenizer, [user("q"), said("abcd")], mode=STRICT) is None
    report = check_ledger(ledger, tokenizer, [user("q"), said("abcdx")], mode=STRICT)
    assert report is not None
    assert report.reason == "sampled text differs"


def test_a_difference_is_described(tiny, caplog):
    """The report names the first differing token, both texts, message, turn and template, and is logged as a warning."""
    ledger, messages = play(tiny, "q", "x<|im_end|>", "the second question", "y<|im_end|>")
    messages[2] = user("the other question")
    with caplog.at_level(logging.WARNING, logger="ostinato_tokenization"):
        report = check_ledger(ledger, tiny, messages, mode=STRICT)
    assert report is not None
    assert (report.turn, report.message_index) == (1, 2)
    assert report.template_hash == tiny.template_hash
    assert ledger.token_ids[report.position] == report.recorded_id != report.rendered_id
    assert "second" in report.recorded_text
    assert "other" in report.rendered_text
    assert caplog.records[0].getMessage().startswith("Inconsistent training and inference tokenization detected")


def test_a_lost_newline_is_found(tiny):
    """A ledger built without the newline after the stop token is reported."""
    honest, messages = play(tiny, "q", "x<|im_end|>", "k")
    ids, start = honest.token_ids, len(honest.prompt_ids)
    ledger = TokenLedger()
    ledger.append(ids[:start], Origin.CONTEXT)
    ledger.append_sampled(ids[start : start + 2], None)
    ledger.append(ids[start + 3 :], Origin.CONTEXT)
    report = check_ledger(ledger, tiny, messages, mode=STRICT)
    assert report is not None
    assert report.position == start + 2
    assert check_ledger(ledger, tiny, messages, mode=IGNORE) is None


@pytest.mark.parametrize("change", [" ", "\n", "\t\r "])
def test_ignore_strippable_forgives_whitespace_and_nothing_else(tiny, change):
    """Whitespace in context and sampled text is forgiven; a letter, or a no-break space, is not."""
    ledger, messages = play(tiny, "q", "x y<|im_end|>", "k", "z<|im_end|>")
    for index in range(3):
        other = [*messages]
        other[index] = {**messages[index], "content": messages[index]["content"] + change}
        assert check_ledger(ledger, tiny, other, mode=STRICT) is not None
        assert check_ledger(ledger, tiny, other, mode=IGNORE) is None
        other[index] = {**messages[index], "content": messages[index]["content"] + "\u00a0"}
        assert check_ledger(ledger, tiny, other, mode=IGNORE) is not None


def test_disabled_compares_nothing(tiny):
    """With `disable` even a wrong ledger is not looked at."""
    ledger, _ = play(tiny, "q", "x<|im_end|>")
    assert check_ledger(ledger, tiny, [user("other")], mode=DISABLE) is None


def test_a_repaired_turn_is_no_fault(tiny):
    """A turn that the framework closed is not reported, and what follows it is still compared."""
    ledger, messages = play(tiny, "q", "par", "k", "y<|im_end|>")
    assert check_ledger(ledger, tiny, messages, mode=STRICT) is None
    messages[2] = user("other")
    assert check_ledger(ledger, tiny, messages, mode=STRICT) is not None


def test_a_forced_opening_of_reasoning_belongs_to_what_is_said():
    """A generation prompt that opens reasoning is no difference, whether the template keeps or drops it later."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"
    )
    tokenizer = ChatTokenizer(tiny_tokenizer(), template)
    for turns in (
        ("q", "r</think>x<|im_end|>"),
        ("q", "r</think>x<|im_end|>", "k"),
        ("q", "r</think>x<|im_end|>", "k", "r"),
    ):
        ledger, messages = play(tokenizer, *turns)
        assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is None
    ledger, messages = play(tokenizer, "q", "r</think>x<|im_end|>", "k")
    messages[1] = said("r</think>w")
    assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is not None


def test_reasoning_that_the_template_forgets_is_a_choice(make):
    """Reasoning kept in the ledger and dropped by the template is not reported; a changed answer is."""
    tokenizer = make("forgets_reasoning")
    ledger, messages = play(tokenizer, "q", "<think>\nr\n</think>\n\nx<|e|>", "k", "y<|e|>")
    assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is None
    messages[1] = said("<think>\nr\n</think>\n\nw")
    assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is not None


def test_a_record_that_ends_too_early_is_found(tiny):
    """A message that the ledger never saw is reported."""
    ledger, messages = play(tiny, "q", "x<|im_end|>")
    report = check_ledger(ledger, tiny, [*messages, user("k")], mode=STRICT)
    assert report is not None
    assert "goes on" in report.reason


def test_a_conversation_that_no_longer_renders_is_reported(make):
    """A refusal of the template is a report, not an exception."""
    tokenizer = make("alternates")
    ledger, messages = play(tokenizer, "q", "x<|e|>")
    report = check_ledger(ledger, tokenizer, [*messages, said("y")], mode=STRICT)
    assert report is not None
    assert "no longer renders" in report.reason


def merging_tokenizer():
    """A tokenizer that merges the newline of the generation prompt with the first letter that is said."""
    base = tiny_tokenizer()
    document = json.loads(base.to_str())
    document["pre_tokenizer"]["use_regex"] = False
    vocab, merges = document["model"]["vocab"], document["model"]["merges"]
    merged = vocab.pop("".join(merges.pop()))
    vocab["ĊX"] = merged
    merges.insert(0, ["Ċ", "X"])
    return ChatTokenizer(tokenizers.Tokenizer.from_str(json.dumps(document)), TINY_CHAT_TEMPLATE), merged


@pytest.mark.parametrize("mode", [STRICT, IGNORE])
def test_a_prompt_that_merges_with_what_was_said_is_no_fault(mode):
    """Where a fresh encoding joins the end of the generation prompt with the first words, the texts are compared, in
    every turn; another word in the prompt, or another text, is still found."""
    tokenizer, merged = merging_tokenizer()
    ledger, messages = play(tokenizer, "q", "Xy<|im_end|>", "k", "Xz<|im_end|>")
    assert tokenizer.encode_chat(messages, add_generation_prompt=False).count(merged) == 2
    assert merged not in ledger.token_ids
    assert check_ledger(ledger, tokenizer, messages, mode=mode) is None
    for index, other in ((1, said("Xw")), (2, user("l")), (3, said("Yz"))):
        changed = [*messages]
        changed[index] = other
        assert check_ledger(ledger, tokenizer, changed, mode=mode) is not None
    wrong = TokenLedger()
    start = len(ledger.prompt_ids)
    wrong.append([*ledger.prompt_ids[:-2], tokenizer.encode_text("user")[0], ledger.prompt_ids[-1]], Origin.CONTEXT)
    wrong.append_sampled(ledger.token_ids[start : start + 3], None)
    assert check_ledger(wrong, tokenizer, messages[:2], mode=mode) is not None


def test_the_caller_says_which_turns_are_the_same(tiny):
    """A turn written otherwise than the template writes it is reported, unless `same_turn` takes both for the same; what
    was not sampled is not left to it."""
    ledger, messages = play(tiny, "q", '{"a":1}<|im_end|>', "k", "y<|im_end|>")
    messages[1] = said('{"a": 1}')
    asked = []

    def same_json(one, other):
        asked.append((one, other))
        return json.loads(one) == json.loads(other)

    assert check_ledger(ledger, tiny, messages, mode=STRICT) is not None
    assert check_ledger(ledger, tiny, messages, mode=STRICT, same_turn=same_json) is None
    assert asked == [('{"a":1}', '{"a": 1}')]
    messages[2] = user("l")
    assert check_ledger(ledger, tiny, messages, mode=STRICT, same_turn=lambda one, other: True) is not None


@pytest.mark.parametrize("mode", [STRICT, IGNORE])
def test_a_difference_can_be_an_error_and_is_counted(tiny, mode):
    """With `raise_on_mismatch` a difference is an error with the report as its message; each difference counts once."""
    ledger, messages = play(tiny, "q", "x<|im_end|>", "k")
    count = num_mismatches()
    assert check_ledger(ledger, tiny, messages, mode=mode, raise_on_mismatch=True) is None
    assert num_mismatches() == count
    with pytest.raises(
        TokenizationMismatchError, match=r"^Inconsistent training and inference tokenization detected.*other"
    ):
        check_ledger(ledger, tiny, [*messages[:2], user("other")], mode=mode, raise_on_mismatch=True)
    check_ledger(ledger, tiny, [*messages[:2], user("other")], mode=mode)
    assert num_mismatches() == count + 2


def test_changed_reasoning_is_no_choice(make):
    """Reasoning that the template drops is a choice; other words in the place of reasoning are a difference."""
    ledger, messages = play(make("plain"), "q", "<think>\nr\n</think>\n\nx<|e|>")
    for text, reported in (("x", False), ("<think>\n\n</think>\n\nx", False), ("<think>\ns\n</think>\n\nx", True)):
        report = check_ledger(ledger, make("plain"), [messages[0], said(text)], mode=STRICT)
        assert (report is not None) == reported


SEVERAL = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}{{ '<|im_start|>assistant<think>' + m.thinking + '<|im_end|>' }}{% endif %}"
    "{{ '<|im_start|>assistant<final>' + m.content + ('<|endoftext|>' if loop.last else '<|im_end|>') }}"
    "{% else %}{{ '<|im_start|>' + m.role + '<message>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


def test_a_turn_of_several_messages_ends_with_its_last_stop_token():
    """Where end tokens stand within a turn, the messages before the last may be kept or dropped by the template; a changed
    word in any that is shown is found, and so is a change in the next turn."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), SEVERAL)
    first = "<think>r<|im_end|><|im_start|>assistant<final>x"
    for turns in (
        (first + "<|endoftext|>",),
        (first + "<|endoftext|>", "k"),
        (first + "<|endoftext|>", "k", "<final>y<|endoftext|>"),
    ):
        ledger, messages = play(tokenizer, "q", *turns)
        messages[1] = {"role": "assistant", "content": "x", "thinking": "r"}
        if len(messages) > 3:
            messages[3] = said("y")
        assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is None
        for index in range(len(messages)):
            changed = [*messages]
            changed[index] = {**messages[index], "content": "other"}
            assert check_ledger(ledger, tokenizer, changed, mode=STRICT) is not None
    ledger, messages = play(tokenizer, "q", first + "<|endoftext|>")
    messages[1] = {"role": "assistant", "content": "x", "thinking": "other"}
    assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is not None


@pytest.mark.parametrize("mode", [STRICT, IGNORE])
@pytest.mark.parametrize("long", ["turns", "text"])
def test_the_check_is_linear(mode, long, monkeypatch):
    """Four times the conversation decodes at most five times the tokens, in many turns or in one long text, also where
    white space differs."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), TINY_CHAT_TEMPLATE)
    decode, decoded = tokenizer.decode, []

    def count(token_ids, **options):
        decoded.append(len(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", count)
    costs = []
    for size in (50, 200):
        turns = ["k", "x<|im_end|>"] * size if long == "turns" else ["word é " * size, "x " * size + "<|im_end|>"]
        ledger, messages = play(tokenizer, *turns)
        if mode == IGNORE:
            messages = [{**message, "content": message["content"] + " \n"} for message in messages]
        decoded.clear()
        assert check_ledger(ledger, tokenizer, messages, mode=mode) is None
        costs.append(sum(decoded))
    assert costs[1] <= 5 * costs[0]


def test_a_template_without_control_tokens_is_compared_too():
    """Where turns end with words an honest ledger has nothing to report, and a changed word in any message is found."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = ChatTokenizer(tiny_tokenizer(), template)
    ledger, messages = play(tokenizer, "q", "X", "k", "Y", "l")
    assert ledger.token_ids == tokenizer.encode_chat(messages)
    assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is None
    for index, message in enumerate(messages):
        changed = [*messages]
        changed[index] = {**message, "content": "Xother"}
        assert check_ledger(ledger, tokenizer, changed, mode=STRICT) is not None


def test_newlines_before_an_answer_without_reasoning_are_a_difference(tiny):
    """Strictly, white space at the beginning of what was said or of a prompt's last words counts where no reasoning was cut."""
    messages = [user("q"), said("x")]
    for text in ("\n\nx<|im_end|>", "\n\nx"):  # whole, and cut off
        ledger, _ = play(tiny, "q", text)
        assert check_ledger(ledger, tiny, messages, mode=STRICT) is not None
        assert check_ledger(ledger, tiny, messages, mode=IGNORE) is None


def test_a_template_that_always_writes_a_generation_prompt_is_no_difference():
    """Where the template opens the assistant's turn whether asked to or not, an honest ledger has nothing to report."""
    always = TINY_CHAT_TEMPLATE.replace("{%- if add_generation_prompt %}", "{%- if true %}")
    tokenizer = ChatTokenizer(tiny_tokenizer(), always, named_tokens={"eos_token": "<|im_end|>"})
    ledger, messages = play(tokenizer, "q", "x<|im_end|>", "k", "y<|im_end|>")
    assert check_ledger(ledger, tokenizer, messages, mode=STRICT) is None
    longer = [*messages, user("z")]
    assert check_ledger(ledger, tokenizer, longer, mode=STRICT) is not None
