"""Rendering and encoding: the template's control strings become control tokens, and nothing else does."""

import json
import pickle

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ostinato_tokenization import (
    ChatTemplateError,
    ChatTokenizer,
    ContinuousTokens,
    MediaNotSupportedError,
    MessageError,
    TokenizationError,
    TokenizerLoadError,
    TokenizerNotFoundError,
    VocabularyError,
)
from ostinato_tokenization.testing import (
    TINY_CHAT_TEMPLATE,
    TokenizerKind,
    sample_chat_tokenizer,
    tiny_chat_tokenizer,
    tiny_tokenizer,
)

USER = {"role": "user", "content": "hi"}
PIECES = st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>",
        "<tool_call>",
        "</tool_call>",
        "<|im_",
        "end|>",
        "<",
        ">",
        "|",
        " ",
        "\n",
        "a",
        "é",
        "\U000f0000",
    ]
)
HOSTILE = st.lists(PIECES | st.text(max_size=3), max_size=8).map("".join)


def control_count(tokenizer, ids):
    return sum(token_id in tokenizer.control_token_ids for token_id in ids)


def test_text_without_control_strings_encodes_like_the_plain_tokenizer(tiny):
    """The ids are the tokenizer's own ids of the rendered text."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "what is 2 < 3 > 1?\n\n\ttab é"}]
    expected = tiny_tokenizer().encode(tiny.render(messages, add_generation_prompt=True), add_special_tokens=False).ids
    assert tiny.encode_chat(messages) == expected


@settings(deadline=None)
@given(system=HOSTILE, user=HOSTILE, tool=HOSTILE)
def test_no_text_of_a_message_becomes_a_control_token(system, user, tool):
    """Whatever system, user and tool text hold, the control tokens are those that the template wrote, and the text stays."""
    tiny = tiny_chat_tokenizer()
    try:
        for text in (system, user, tool):
            text.encode()
    except UnicodeEncodeError:
        return

    def conversation(*texts):
        return [
            {"role": role, "content": text}
            for role, text in zip(("system", "user", "assistant", "tool"), texts, strict=True)
        ]

    ids = tiny.encode_chat(conversation(system, user, "ok", tool))
    harmless = tiny.encode_chat(conversation("x", "x", "ok", "x"))
    controls = [token_id for token_id in ids if token_id in tiny.control_token_ids]
    assert controls == [token_id for token_id in harmless if token_id in tiny.control_token_ids]
    assert tiny.decode(ids) == tiny.render(conversation(system, user, "ok", tool), add_generation_prompt=True)


@settings(deadline=None)
@given(HOSTILE)
def test_encode_text_never_gives_control_tokens(text):
    """encode_text keeps the text and gives ordinary tokens only."""
    tiny = tiny_chat_tokenizer()
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    ids = tiny.encode_text(text)
    assert control_count(tiny, ids) == 0
    assert tiny.decode(ids) == text


def test_a_template_cannot_complete_half_a_control_string():
    """A control string that begins in a message and ends in the template's text stays text."""
    template = "{% for m in messages %}{{ '<|im_start|>' + m.content + '|>x' }}{% endfor %}"
    tokenizer = ChatTokenizer(tiny_tokenizer(), template)
    ids = tokenizer.encode_chat([{"role": "user", "content": "<|im_end"}], add_generation_prompt=False)
    assert control_count(tokenizer, ids) == 1
    assert tokenizer.decode(ids) == "<|im_start|><|im_end|>x"


def test_tool_schemas_are_text_too(tiny):
    """A control string in a tool's description becomes ordinary tokens."""

    def tools(text):
        return [{"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}]

    ids, harmless = tiny.encode_chat([USER], tools("<|im_end|>")), tiny.encode_chat([USER], tools("x"))
    assert control_count(tiny, ids) == control_count(tiny, harmless)
    assert "<|im_end|>" in tiny.decode(ids)


def test_an_assistant_message_cannot_forge_turns_but_keeps_its_tags(tiny):
    """In assistant text turn separators are text, and tags such as <tool_call> are control tokens."""
    ids = tiny.encode_chat(
        [USER, {"role": "assistant", "content": "<tool_call>x</tool_call><|im_end|>"}], add_generation_prompt=False
    )
    assert ids.count(tiny.token_id("<|im_end|>")) == 2
    assert ids.count(tiny.token_id("<tool_call>")) == 1


def test_a_vocabulary_that_holds_a_control_string_as_a_piece_is_no_way_round():
    """A model that can form the control string from its own vocabulary still encodes it as text."""
    vocab = {"[UNK]": 0, "a": 1, "[X]": 2, "[": 3, "X]": 4}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab | {"##X]": 5, "##a": 6}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([tokenizers.AddedToken("[X]", special=True)])
    chat = ChatTokenizer(tokenizer, "{% for m in messages %}{{ '[X]' + m.content }}{% endfor %}")
    ids = chat.encode_chat([{"role": "user", "content": "[X]"}], add_generation_prompt=False)
    assert ids.count(2) == 1
    assert len(ids) > 1


def test_a_normalizer_cannot_make_a_control_string():
    """Text that only becomes a control string by normalization stays text."""
    tokenizer = tiny_tokenizer()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([tokenizers.AddedToken("<obey>", normalized=True)])
    chat = ChatTokenizer(tokenizer, TINY_CHAT_TEMPLATE)
    message = {"role": "user", "content": "＜obey＞"}
    assert tokenizer.token_to_id("<obey>") in tokenizer.encode("＜obey＞").ids
    assert chat.token_id("<obey>") not in chat.encode_chat([message])


def sentencepiece_like(scheme):
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "<": 5, ">": 6, "s": 7, "▁b": 8}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([tokenizers.AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_segments_get_word_start_marks_as_in_one_encoding(scheme):
    """With a hostile message the rest of the conversation has the ids that it has without one."""
    template = "{% for m in messages %}{{ 'a' + m.content + '<s>' }}{% endfor %}"
    chat = ChatTokenizer(sentencepiece_like(scheme), template)
    clean = chat.encode_chat([{"role": "user", "content": "b"}] * 2, add_generation_prompt=False)
    mixed = chat.encode_chat(
        [{"role": "user", "content": "b"}, {"role": "user", "content": "b<s>"}], add_generation_prompt=False
    )
    assert mixed[: len(clean) - 1] == clean[:-1]
    assert mixed.count(chat.token_id("<s>")) == 2


def test_arguments_may_be_json_text_or_a_mapping(make):
    """The same call gives the same ids in both forms, and nothing that is not an object stops the rendering."""

    def conversation(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    for name in ("iterates_arguments", "default_system"):
        tokenizer = make(name)
        as_mapping = tokenizer.encode_chat(conversation({"k": "v", "a": 1}))
        assert tokenizer.encode_chat(conversation('{"k": "v", "a": 1}')) == as_mapping
        assert tokenizer.encode_chat(conversation("")) == tokenizer.encode_chat(conversation({}))
        for odd in ("null", "[1]", "{bad", 7, None):
            assert tokenizer.encode_chat(conversation(odd))
    assert "{bad" in make("default_system").render(conversation("{bad"), add_generation_prompt=False)


def test_messages_of_the_caller_are_not_changed(tiny):
    """History keeps its wire form."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|im_end|>"}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    before = json.dumps(messages)
    tiny.encode_chat(messages)
    assert json.dumps(messages) == before


def test_no_tools_and_an_empty_list_are_the_same(make):
    """A template that tests for none prints no header for an empty list."""
    tokenizer = make("tools_not_none")
    assert tokenizer.encode_chat([USER], []) == tokenizer.encode_chat([USER], None)
    assert tokenizer.encode_chat([USER], [{"type": "function"}]) != tokenizer.encode_chat([USER], None)


def test_bos_is_written_once(make):
    """A template that prints BOS gives exactly one."""
    tokenizer = make("prints_bos")
    ids = tokenizer.encode_chat([USER])
    assert ids[0] == tokenizer.token_id("<|bos|>")
    assert ids.count(tokenizer.token_id("<|bos|>")) == 1


def test_text_parts_and_none_are_text(tiny):
    """None is the empty text, text parts are joined, and tool_calls None is no call."""
    plain = tiny.encode_chat([USER, {"role": "assistant", "content": ""}])
    assert tiny.encode_chat([USER, {"role": "assistant", "content": None, "tool_calls": None}]) == plain
    assert tiny.encode_chat([USER, {"role": "assistant"}]) == plain
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert tiny.encode_chat([{"role": "user", "content": parts}]) == tiny.encode_chat([USER])


@pytest.mark.parametrize(
    ("messages", "error", "says"),
    [
        ([], MessageError, "must not be empty"),
        ("hi", MessageError, "must be a sequence of messages"),
        (["hi"], MessageError, r"messages\[0\] must be a mapping"),
        ([{"content": "x"}], MessageError, r"messages\[0\].role"),
        ([{"from": "human", "value": "x"}], MessageError, r"messages\[0\].role must be .* got the keys from, value"),
        ([{"role": "user", "content": 3}], MessageError, "got int"),
        ([{"role": "user", "content": "\ud800"}], MessageError, "surrogate"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], MediaNotSupportedError, "image_url"),
        ([{"role": "assistant", "content": "", "tool_calls": {"a": 1}}], MessageError, "tool_calls must be a list"),
    ],
)
def test_bad_messages_are_named(tiny, messages, error, says):
    """Each malformed message is one error that says where and what."""
    with pytest.raises(error, match=says):
        tiny.encode_chat(messages)


def test_a_call_that_no_parser_can_read_is_shown_as_it_was(tiny):
    """Arguments that are no JSON, or nested deeper than it can be read, render as the text that they are."""
    for arguments in ("{", "[" * 5000, '{"a":' * 5000 + "1" + "}" * 5000):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        shown = tiny.render(
            [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], add_generation_prompt=False
        )
        assert arguments in shown


def test_bad_tools_are_named(tiny):
    """Tools that are no JSON, or no list, are refused."""
    with pytest.raises(MessageError, match="JSON values"):
        tiny.encode_chat([USER], [{"f": object()}])
    with pytest.raises(MessageError, match="sequence of schemas"):
        tiny.encode_chat([USER], {"type": "function"})


def test_templates_are_sandboxed_and_speak_clearly():
    """Reaching for internals, a syntax error and a refusal are template errors."""
    with pytest.raises(ChatTemplateError, match="valid Jinja"):
        ChatTokenizer(tiny_tokenizer(), "{% if %}")
    with pytest.raises(ChatTemplateError, match=r"got 'templates/own\.jinja', which has no tag; read the file first"):
        ChatTokenizer(tiny_tokenizer(), "templates/own.jinja")
    evil = ChatTokenizer(tiny_tokenizer(), "{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError):
        evil.encode_chat([USER])
    growing = ChatTokenizer(tiny_tokenizer(), "{{ messages.append(1) }}")
    with pytest.raises(ChatTemplateError):
        growing.encode_chat([USER])
    refusing = ChatTokenizer(tiny_tokenizer(), "{{ raise_exception('only poems') }}")
    with pytest.raises(ChatTemplateError, match="only poems"):
        refusing.encode_chat([USER])


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("m.role", "user"),
        ("m.nothing", ""),
        ("m.nothing is defined", "False"),
        ("m.items() | length", "3"),
        ("m.get('items')", "mine"),
        ("m['items']", "mine"),
        ("m.__class__", ""),
        ("m.content.upper()", "HI"),
    ],
)
def test_attributes_of_messages_are_found_as_jinja_finds_them(expression, text):
    """Keys are attributes where a dict has none of that name; what is missing is undefined, and no class can be reached."""
    template = "{% for m in messages %}{{ " + expression + " }}{% endfor %}"
    tokenizer = tiny_chat_tokenizer(chat_template=template)
    assert tokenizer.render([{**USER, "items": "mine"}], add_generation_prompt=False) == text


def test_a_message_that_holds_itself_ends_in_an_error(tiny):
    """A value without an end is refused, not looked through for ever."""
    arguments: dict = {}
    arguments["again"] = [arguments]
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises((TokenizationError, RecursionError)):
        tiny.encode_chat([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])


def test_extensions_of_published_templates_work():
    """Loop controls, the generation tag, JSON without escapes and the present date are there."""
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ {'é': '<b>'} | tojson }}{{ strftime_now('%Y') | length }}{% endfor %}"
    )
    tokenizer = ChatTokenizer(tiny_tokenizer(), template)
    assert tokenizer.is_dated
    assert tokenizer.render([USER, USER], add_generation_prompt=False) == 'hi{"é": "<b>"}4'


def test_template_variables_reach_the_template(tiny):
    """template_kwargs are variables of the template."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), "{{ 'deep' if enable_thinking else 'quick' }}")
    assert tokenizer.render([USER], add_generation_prompt=True, template_kwargs={"enable_thinking": True}) == "deep"
    assert tokenizer.render([USER], add_generation_prompt=True) == "quick"


def test_decode_refuses_ids_beyond_the_vocabulary(tiny):
    """An id that no token has is an error, not an empty string."""
    assert tiny.decode([]) == ""
    for bad in (-1, tiny.vocab_size):
        with pytest.raises(VocabularyError, match=f"got {bad}"):
            tiny.decode([bad])


def test_decode_keeps_or_skips_special_tokens(tiny):
    """Tags that are not special stay when special tokens are skipped."""
    ids = [tiny.token_id("<tool_call>"), *tiny.encode_text("x"), tiny.token_id("<|im_end|>")]
    assert tiny.decode(ids) == "<tool_call>x<|im_end|>"
    assert tiny.decode(ids, skip_special_tokens=True) == "<tool_call>x"


def test_stop_tokens_are_found_in_the_template(make, tiny):
    """The stop tokens are what the template writes after an assistant's words, and the end-of-sequence token."""
    assert tiny.stop_token_ids == (tiny.token_id("<|im_end|>"),)
    opener = make("opener_stops")
    assert set(opener.stop_token_ids) == {opener.token_id(text) for text in ("<|user|>", "<|observation|>", "<|eos|>")}


def write(folder, **files):
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


def test_from_pretrained_reads_the_usual_files(tmp_path, tiny):
    """Template file, configuration and special tokens are read as they lie on disk."""
    write(
        tmp_path,
        chat_template__jinja=TINY_CHAT_TEMPLATE,
        tokenizer_config__json={"eos_token": {"content": "<|im_end|>"}, "chat_template": "ignored"},
        special_tokens_map__json={"pad_token": "<|endoftext|>"},
    )
    loaded = ChatTokenizer.from_pretrained(tmp_path)
    assert loaded.encode_chat([USER]) == tiny.encode_chat([USER])
    assert loaded.stop_token_ids == tiny.stop_token_ids
    assert (
        ChatTokenizer.from_pretrained(str(tmp_path), chat_template="x").render([USER], add_generation_prompt=True)
        == "x"
    )


def test_named_templates_are_chosen_by_the_presence_of_tools(tmp_path):
    """A list of named templates in the configuration works as published models use it."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config__json={"chat_template": named})
    tokenizer = ChatTokenizer.from_pretrained(tmp_path)
    assert tokenizer.render([USER], add_generation_prompt=False) == "plain"
    assert tokenizer.render([USER], [{"type": "function"}], add_generation_prompt=False) == "tools"


def test_missing_and_damaged_files_are_named(tmp_path):
    """No directory, no tokenizer, a broken tokenizer, broken JSON and no template are each one clear error."""
    with pytest.raises(TokenizerNotFoundError, match="download the model first") as caught:
        ChatTokenizer.from_pretrained(tmp_path / "nowhere")
    assert isinstance(caught.value, FileNotFoundError)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json"):
        ChatTokenizer.from_pretrained(tmp_path)
    write(tmp_path)
    with pytest.raises(ChatTemplateError, match="pass chat_template"):
        ChatTokenizer.from_pretrained(tmp_path)
    write(tmp_path, tokenizer_config__json="{oops")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer_config\.json must be JSON"):
        ChatTokenizer.from_pretrained(tmp_path)


def test_from_transformers_needs_a_fast_tokenizer():
    """An object without a backend tokenizer is refused with the cure."""
    with pytest.raises(TokenizerLoadError, match="use_fast=True"):
        ChatTokenizer.from_transformers(object())


def test_a_tokenizer_survives_pickling(tiny):
    """A copy in another process encodes the same."""
    copy = pickle.loads(pickle.dumps(tiny))
    assert copy.encode_chat([USER]) == tiny.encode_chat([USER])
    assert copy.stop_token_ids == tiny.stop_token_ids


def test_errors_are_standard_errors_too():
    """Every leaf is also a standard exception."""
    leaves = TokenizationError.__subclasses__()
    assert leaves
    for leaf in leaves:
        assert len(leaf.__mro__) > len(TokenizationError.__mro__) + 1
        assert str(pickle.loads(pickle.dumps(leaf("x")))) == str(leaf("x"))


TRUSTED = "a <image> b <|im_end|><image"


@pytest.mark.parametrize("kind", TokenizerKind)
def test_trusted_placeholders_and_nothing_else_become_control_tokens(kind):
    """Exactly the strings that the caller trusts become control tokens where they stand in text: in the first prompt, in a
    delta, in tools, after pickling; without the option none does."""
    tokenizer = sample_chat_tokenizer(kind, "tools")
    image, end = (tokenizer.token_id(text) for text in ("<image>", "<|im_end|>"))
    user = {"role": "user", "content": TRUSTED}
    plain = [{"role": "user", "content": "a"}]
    for trusted in ((), ("<image>",)):
        ids = tokenizer.encode_chat([user], [{"name": "<image>"}], trusted_control_text=trusted)
        assert (ids.count(image), ids.count(end)) == (2 * len(trusted), 2)
        tokens = ContinuousTokens(tokenizer, trusted_control_text=trusted)
        for one in (tokens, pickle.loads(pickle.dumps(tokens))):
            ledger = one.build_initial_tokens(plain)
            one.merge_assistant_tokens(ledger, [end], None)
            start = len(ledger)
            one.merge_context_messages(ledger, [*plain, {"role": "assistant", "content": ""}], [user])
            delta = ledger.token_ids[start:]
            assert (delta.count(image), delta.count(end)) == (len(trusted), 1)
            assert ledger.token_ids == one.tokenizer.encode_chat([*plain, {"role": "assistant", "content": ""}, user])
    assert image not in tokenizer.encode_chat([user])


@pytest.mark.parametrize("strings", [("<|no such|>",), "<image>", ("a",)])
def test_only_control_tokens_can_be_trusted(strings):
    """A string that is no control token, or one string in place of several, is an error that names it."""
    with pytest.raises(VocabularyError, match="trusted_control_text must hold control tokens"):
        ContinuousTokens(sample_chat_tokenizer("byte_level", "tools"), trusted_control_text=strings)


@pytest.mark.parametrize(
    "options", ["", "indent=0", "indent=2", "sort_keys=true", "separators=(',', ':')", "ensure_ascii=true"]
)
def test_json_is_written_as_the_template_asks(options):
    """`tojson` with any of its options writes what `json.dumps` does; without any, no character is escaped."""
    tokenizer = ChatTokenizer(tiny_tokenizer(), "{{ tools | tojson(" + options + ") }}")
    tools = [{"b": 1, "a": "é<&>'", "c": [True, None, 1.5]}]
    expected = {
        "": json.dumps(tools, ensure_ascii=False),
        "indent=0": json.dumps(tools, ensure_ascii=False, indent=0),
        "indent=2": json.dumps(tools, ensure_ascii=False, indent=2),
        "sort_keys=true": json.dumps(tools, ensure_ascii=False, sort_keys=True),
        "separators=(',', ':')": json.dumps(tools, ensure_ascii=False, separators=(",", ":")),
        "ensure_ascii=true": json.dumps(tools),
    }
    assert tokenizer.render([USER], tools, add_generation_prompt=False) == expected[options]
