"""Real tokenizers and their templates give the ids that transformers gives."""

import pytest

from ostinato_tokenization import ChatTokenizer, ContinuousTokens, SanityCheckMode, TokenizationError, check_ledger

transformers = pytest.importorskip("transformers")

TEXT = "def f(x):\n    return {'a': x}  # ünï ≈ ㅎ e\u0301\n\n\n\tprint('<b>') 12345"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "d <é>",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
LLAMA2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
CASES = [
    ("qwen", "chat_template_qwen3.jinja"),
    ("qwen", "chat_template_qwen2.5.jinja"),
    ("qwen", "chat_template_qwq.jinja"),
    ("qwen", "chat_template_qwen3coder.jinja"),
    ("qwen25", "chat_template.jinja"),
    ("llama3", "chat_template.jinja"),
    ("llama3", "chat_template_llama3.2.jinja"),
    ("llama2", None),
    ("smollm2", "chat_template.jinja"),
]


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def call(content=""):
    function = {"name": "search", "arguments": {"q": "x é"}}
    return message("assistant", content, tool_calls=[{"id": "call00001", "type": "function", "function": function}])


def result(content):
    return message("tool", content, name="search", tool_call_id="call00001")


CONVERSATIONS = [
    [message("user", "hi " + TEXT)],
    [message("system", " sys"), message("user", "q"), message("assistant", "ans"), message("user", TEXT)],
    [message("user", "q"), call(), result(TEXT)],
    [message("user", "q"), call("let me see"), result("1"), message("user", "and?")],
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def pair(request, shared_tokenizers):
    folder, template = request.param
    if not (shared_tokenizers / folder).is_dir():
        pytest.skip(f"no {folder} in {shared_tokenizers}")
    source = LLAMA2_TEMPLATE if template is None else (shared_tokenizers / folder / template).read_text()
    reference = transformers.AutoTokenizer.from_pretrained(shared_tokenizers / folder)
    reference.chat_template = source
    return reference, ChatTokenizer.from_pretrained(shared_tokenizers / folder, chat_template=source)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
def test_encode_chat_equals_transformers(pair, tools):
    """Without control strings in the text the ids are those of apply_chat_template, and refusals agree."""
    reference, tokenizer = pair
    compared = 0
    for conversation in CONVERSATIONS:
        try:
            expected = reference.apply_chat_template(
                conversation, tools=tools, add_generation_prompt=True, return_dict=False
            )
        except Exception:  # whatever a template raises is its refusal
            with pytest.raises(TokenizationError):
                tokenizer.encode_chat(conversation, tools)
            continue
        assert tokenizer.encode_chat(conversation, tools) == expected
        compared += 1
    assert compared


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
def test_a_conversation_turn_by_turn_equals_transformers(pair, tools):
    """Where the template extends history, sampled text and deltas add up to its ids; else the new text is its tail."""
    reference, tokenizer = pair
    tokens = ContinuousTokens(tokenizer)
    compared = 0
    for conversation in CONVERSATIONS[1:]:
        turn = next(index for index, entry in enumerate(conversation) if entry["role"] == "assistant")
        try:
            prompt, whole = (
                reference.apply_chat_template(part, tools=tools, add_generation_prompt=True, tokenize=False)
                for part in (conversation[:turn], conversation)
            )
        except Exception:  # refused, as above
            continue
        ledger = tokens.build_initial_tokens(conversation[:turn], tools)
        expected = reference.encode(whole, add_special_tokens=False)
        if whole.startswith(prompt):
            end = next(i for i in range(len(ledger), len(expected)) if expected[i] in tokenizer.stop_token_ids)
            tokens.merge_assistant_tokens(ledger, expected[len(ledger) : end + 1], None)
            tokens.merge_context_messages(ledger, conversation[: turn + 1], conversation[turn + 1 :], tools)
            assert ledger.token_ids == expected
        else:
            tokens.merge_assistant_tokens(ledger, [*tokenizer.encode_text("x"), tokenizer.stop_token_ids[-1]], None)
            start = len(ledger)
            tokens.merge_context_messages(ledger, conversation[: turn + 1], conversation[turn + 1 :], tools)
            new = tokenizer.decode(ledger.token_ids[start:])
            assert tokenizer.normalize(whole).endswith(new)
            assert tokenizer.normalize(conversation[-1]["content"]) in new
        compared += 1
    assert compared or tools


def test_control_strings_in_text_stay_text(pair):
    """Every control string of the tokenizer, put into user text, leaves the number of control tokens as it was."""
    _, tokenizer = pair
    hostile = "a" + "".join(text for _, text in tokenizer.find_control(" ".join(tokenizer.control_strings)))
    ids = tokenizer.encode_chat([message("user", hostile)])
    harmless = tokenizer.encode_chat([message("user", "a")])
    count = [sum(token_id in tokenizer.control_token_ids for token_id in side) for side in (ids, harmless)]
    assert count[0] == count[1]
    assert hostile in tokenizer.decode(ids).replace(" <", "<")


def test_from_transformers_equals_from_pretrained(pair):
    """Both ways to a ChatTokenizer encode the same and stop at the same tokens."""
    reference, tokenizer = pair
    other = ChatTokenizer.from_transformers(reference)
    assert other.encode_chat(CONVERSATIONS[0]) == tokenizer.encode_chat(CONVERSATIONS[0])
    assert other.stop_token_ids == tokenizer.stop_token_ids
    assert other.vocab_size == tokenizer.vocab_size


def test_the_sanity_check_passes_on_what_we_build(pair):
    """A conversation built turn by turn has no differences to report, dropped reasoning being a choice."""
    _, tokenizer = pair
    tokens = ContinuousTokens(tokenizer)
    messages = [message("user", "q")]
    ledger = tokens.build_initial_tokens(messages)
    for answer in ("an answer", "another"):
        stop = tokenizer.stop_token_ids[-1]
        tokens.merge_assistant_tokens(ledger, [*tokenizer.encode_text(answer), stop], None)
        messages.append(message("assistant", answer))
        tokens.merge_context_messages(ledger, messages, [message("user", TEXT)])
        messages.append(message("user", TEXT))
    report = check_ledger(ledger, tokenizer, messages, mode=SanityCheckMode.IGNORE_STRIPPABLE)
    assert report is None, str(report)
