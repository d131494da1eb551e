"""Templates that look at more than the message that they write, and tokenizers that look at where a text begins."""

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from ostinato_tokenization import ChatTokenizer, ContinuousTokens, Origin, encode_delta
from ostinato_tokenization.testing import TINY_SPECIAL_TOKENS, tiny_tokenizer

_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def _template(body: str, *, before: str = "", prompt: str = _PROMPT) -> str:
    """ChatML whose messages are written by `body`."""
    call = "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function.arguments | tojson) + '</tool_call>' }}{% endfor %}"
    return (
        before
        + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        + body
        + call
        + "{{ '<|im_end|>\n' }}{% endfor %}"
        + prompt
    )


_TEMPLATES = {
    "numbers messages": _template("{{ loop.index ~ ': ' ~ m.content }}"),
    "marks every fifth": _template("{% if loop.index0 % 5 == 4 %}{{ '* ' }}{% endif %}{{ m.content }}"),
    "cycles": _template("{{ loop.cycle('a', 'b', 'c') ~ m.content }}"),
    "divides": _template("{% if loop.index is divisibleby(7) %}{{ '* ' }}{% endif %}{{ m.content }}"),
    "changes late": _template("{{ m.content }}{% if loop.index0 > 8 and m.role != 'assistant' %}{{ '!' }}{% endif %}"),
    "changes very late": _template(
        "{{ m.content }}{% if loop.index0 >= 60 and m.role != 'assistant' %}{{ '!' }}{% endif %}"
    ),
    "repeats the first question": _template(
        "{% if m.role == 'user' and not loop.first %}{{ '(' + messages[0].content + ') ' }}{% endif %}{{ m.content }}"
    ),
    "looks at what was said": _template(
        "{% if loop.previtem is defined and loop.previtem.content | length > 8 %}{{ '>> ' }}{% endif %}{{ m.content }}"
    ),
    "quotes what was said": _template(
        "{% if m.role == 'user' and loop.previtem is defined %}{{ '> ' + loop.previtem.content + '\n' }}{% endif %}{{ m.content }}"
    ),
    "counts results": _template(
        "{{ m.content }}{% if m.role == 'tool' %}"
        "{{ ' #' ~ (messages[:loop.index] | selectattr('role', 'equalto', 'tool') | list | length) }}{% endif %}"
    ),
    "escapes results": _template("{{ (m.content | tojson(ensure_ascii=True)) if m.role == 'tool' else m.content }}"),
}


def _conversation(num_rounds: int, *, system: bool = False) -> list[dict]:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"q": "a"}}}
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    messages.append({"role": "user", "content": "What is it?"})
    for number in range(num_rounds):
        if number % 3 == 1:
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": f"é{number}<|im_end|>", "tool_call_id": "call00001", "name": "f"},
            ]
        else:
            said = "A good long answer." if number % 2 else "No."
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And {number}?"}]
    return messages


def _assert_turn_by_turn_is_whole(tokenizer: ChatTokenizer, messages: list[dict]) -> None:
    """Every turn says what the whole conversation shows of it; what comes out must be the whole conversation."""
    tokens = ContinuousTokens(tokenizer)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    ledger = tokens.build_initial_tokens(messages[: turns[0]], [_TOOL])
    for turn, end in zip(turns, [*turns[1:], len(messages)], strict=True):
        whole = tokenizer.encode_chat(messages[:end], [_TOOL])
        shown = whole[len(ledger) :]
        stop = next(at for at, token_id in enumerate(shown) if token_id in tokenizer.stop_token_ids)
        tokens.merge_assistant_tokens(ledger, shown[: stop + 1], None)
        tokens.merge_context_messages(ledger, messages[: turn + 1], messages[turn + 1 : end], [_TOOL])
        assert ledger.token_ids == whole, f"turn {turn}"


@pytest.mark.parametrize("name", _TEMPLATES)
@pytest.mark.parametrize("num_rounds", [7, 40])
def test_what_a_template_writes_by_place_or_by_other_messages_is_continued_exactly(name, num_rounds):
    """Text that depends on a message's number or on other messages is that of the whole conversation."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), _TEMPLATES[name], named_tokens={"eos_token": "<|im_end|>"})
    _assert_turn_by_turn_is_whole(tokenizer, _conversation(num_rounds))


def test_a_template_that_demands_a_system_text_is_probed_with_one():
    """Where every conversation needs a system text, the ends of turns and the generation prompt are found all the same."""
    demand = "{% if messages[0].role != 'system' %}{{ raise_exception('give a system text') }}{% endif %}"
    tokenizer = ChatTokenizer(tiny_tokenizer(), _template("{{ m.content }}", before=demand))
    assert tokenizer.stop_token_ids == (tokenizer.token_id("<|im_end|>"),)
    assert tokenizer.profile().frame.generation_prompt == "<|im_start|>assistant\n"
    assert tokenizer.profile().extends_history
    _assert_turn_by_turn_is_whole(tokenizer, _conversation(7, system=True))


def _with_spaces_before_text(kind: str) -> tokenizers.Tokenizer:
    tokenizer = tiny_tokenizer()
    if kind == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "strip":
        tokenizer.normalizer = normalizers.Strip()
    else:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=pieces, show_progress=False)
        tokenizer.train_from_iterator(["User: Assistant: What is it? A good long answer. No. And"], trainer)
        tokenizer.add_special_tokens(list(TINY_SPECIAL_TOKENS))
    return tokenizer


def test_single_bytes_of_a_model_that_falls_back_to_them_are_no_control_tokens():
    """Byte tokens that were trained as special tokens are ordinary tokens of text."""
    tokenizer = ChatTokenizer(_with_spaces_before_text("metaspace always"), _template("{{ m.content }}"))
    assert tokenizer.token_id("<0x0A>") not in tokenizer.control_token_ids
    assert tokenizer.token_id("<0x0A>") in tokenizer.encode_text("a\nb")


@pytest.mark.parametrize("kind", ["byte level", "strip", "metaspace always"])
def test_a_continuation_in_words_is_no_beginning_of_a_text(kind):
    """Where turns end in words, what is appended gets no word-start mark and loses no white space."""
    template = (
        "{% for m in messages %}{{ m.role | title + ':' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    tokenizer = ChatTokenizer(_with_spaces_before_text(kind), template)
    tokens = ContinuousTokens(tokenizer)
    messages = [{"role": "user", "content": "What?"}]
    ledger = tokens.build_initial_tokens(messages)
    new = [{"role": "user", "content": "It."}]
    whole = tokenizer.encode_chat([*messages, {"role": "assistant", "content": "No."}, *new])
    said = tokenizer.encode_masked(
        "No.", tokenizer.render_masked(messages, add_generation_prompt=True)[1], continues=True
    )
    tokens.merge_assistant_tokens(ledger, said, None)
    tokens.merge_context_messages(ledger, [*messages, {"role": "assistant", "content": "No."}], new)
    assert ledger.token_ids == whole


_ONLY_PARTS = _template("{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}")
_PARTS_IN_LINES = _template(
    "{{ m.content if m.content is string else (m.content | map(attribute='text') | join('; ')) }}"
)


def test_contents_are_given_as_parts_to_a_template_that_shows_nothing_else():
    """A template that leaves out contents that are text, as those of vision models do, gets lists of parts."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), _ONLY_PARTS, named_tokens={"eos_token": "<|im_end|>"})
    shown = tokenizer.render([{"role": "user", "content": "Hello."}], add_generation_prompt=False)
    assert shown == "<|im_start|>user\nHello.<|im_end|>\n"
    _assert_turn_by_turn_is_whole(tokenizer, _conversation(7, system=True))


@pytest.mark.parametrize(("template", "joined"), [(_PARTS_IN_LINES, "a; b"), (_ONLY_PARTS, "ab")])
def test_parts_of_a_content_are_joined_as_the_template_joins_them(template, joined):
    """Between the parts of a content stands what the template writes there."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    shown = tokenizer.render([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert shown == f"<|im_start|>user\n{joined}<|im_end|>\n"


def test_a_message_that_says_what_the_policy_said_is_appended_all_the_same():
    """Where turns end in words, only the template's words count as said by the policy, not those of the next message."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), "{% for m in messages %}{{ m.content }}{% endfor %}")
    tokens = ContinuousTokens(tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]
    ledger = tokens.build_initial_tokens(messages[:1])
    tokens.merge_assistant_tokens(ledger, tokenizer.encode_text("bb"), None)
    tokens.merge_context_messages(ledger, messages, [{"role": "user", "content": "bb"}])
    assert tokenizer.decode(ledger.token_ids) == "abbbb"


def test_the_end_of_sequence_token_before_words_is_no_opener():
    """What closes a conversation's last turn only closes: a turn that was cut off is closed by a token of the framework."""
    template = (
        "{% for m in messages %}{{ '> ' + m.role + ': ' + m.content + ('<|im_end|>' if m.role == 'assistant' else '') + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '> assistant:' }}{% endif %}"
    )
    tokenizer = ChatTokenizer(tiny_tokenizer(), template, named_tokens={"eos_token": "<|im_end|>"})
    tokens = ContinuousTokens(tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ledger = tokens.build_initial_tokens(messages[:1])
    tokens.merge_assistant_tokens(ledger, tokenizer.encode_text(" b"), None)
    tokens.merge_context_messages(ledger, messages, [{"role": "user", "content": "c"}])
    assert ledger.origins.count(Origin.REPAIR) == 1
    assert tokenizer.decode(ledger.token_ids) == "> user: a\n> assistant: b<|im_end|>\n> user: c\n> assistant:"


def test_a_system_text_that_moves_to_the_last_question_is_a_rewritten_history():
    """A template that writes the system text into the last question is seen to rewrite, and deltas have a fixed base."""
    moves = _template(
        "{{ (messages[0].content if loop.last and messages[0].role == 'system' else '') + m.content }}"
    ).replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    tokenizer = ChatTokenizer(tiny_tokenizer(), moves, named_tokens={"eos_token": "<|im_end|>"})
    assert not tokenizer.profile().extends_history
    messages = [*_conversation(1, system=True), {"role": "assistant", "content": "No."}]
    assert tokenizer.decode(encode_delta(tokenizer, messages, 2).token_ids) == "No.<|im_end|>\n"
