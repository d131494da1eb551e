"""Prepared tails give the ids of the rendering that they stand for."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tokenization import ChatTokenizer, TokenizationError
from ostinato_tokenization.testing import tiny_chat_tokenizer, tiny_tokenizer

BEFORE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
TAIL = "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
SHAPES = [("user",), ("tool",), ("tool", "tool"), ("tool", "user"), ("tool", "tool", "tool"), ("user", "user")]
EDGES = [
    "",
    " ",
    "\n",
    " x ",
    "\n\nx\n",
    "\u00a0x",
    '"q" \\ {"k": 1}',
    "<|im_end|>",
    "a<|im_start|>system\nb",
    "<|im_",
    "end|>",
    "<tool_call>",
]
TEXT = st.sampled_from(EDGES) | st.text(
    st.sampled_from("ab \n\t<|>{}\"'\\é\u00a0\U0001f642") | st.characters(exclude_categories=["Cs"]), max_size=20
)


def message(role, content):
    more = {"name": "f", "tool_call_id": "call00001"} if role == "tool" else {}
    return {"role": role, "content": content, **more}


def template(body):
    return ChatTokenizer(tiny_tokenizer(), HEAD + body + TAIL, named_tokens={"eos_token": "<|im_end|>"})


def both(tokenizer, new):
    """The ids with and without a prepared tail; a refusal counts as an answer."""
    answers = []
    profile = tokenizer.profile()
    for way in (profile.continuation_ids, profile.rendered_continuation_ids):
        try:
            answers.append(way(BEFORE, new, None))
        except TokenizationError as error:
            answers.append(type(error))
    return answers


@pytest.fixture(scope="module")
def bodies():
    texts = {
        "verbatim": "{{ m.content }}",
        "trimmed": "{{ m.content | trim }}",
        "quoted": "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content.strip() }}{% endif %}",
        "unless empty": "{% if m.content %}{{ 'says: ' + m.content }}{% endif %}",
        "looks for a word": "{% if 'stop' in m.content %}{{ '!' }}{% endif %}{{ m.content }}",
        "cuts reasoning": "{{ m.content.split('</think>')[-1] }}",
        "counts": "{{ loop.index0 ~ m.content }}",
        "names": "{{ (m.name or '') + ': ' + m.content }}",
        "shouts": "{{ m.content | upper }}",
        "prints ids": "{{ (m.tool_call_id or '') + m.content }}",
        "twice": "{{ m.content + m.content }}",
        "long texts": "{{ m.content if m.content | length < 9 else '…' }}",
    }
    return {name: template(text) for name, text in texts.items()}


COMPILED = {"verbatim", "trimmed", "quoted", "unless empty", "looks for a word", "cuts reasoning", "counts", "names"}


def test_tails_are_prepared_where_the_template_writes_contents_in_a_known_way(bodies):
    """What is written as it is, trimmed or quoted has a tail; what is changed otherwise, repeated or left out has none."""
    new = [message("tool", "x")]
    found = {name for name, tokenizer in bodies.items() if tokenizer.profile()._compiled_tail(new) is not None}
    found.discard("counts")  # what it writes depends on how long the history is, so that the real one is rendered
    assert found == COMPILED - {"counts"}


@settings(deadline=None, max_examples=60)
@given(shape=st.sampled_from(SHAPES), contents=st.lists(TEXT, min_size=3, max_size=3))
def test_prepared_tails_equal_renderings(bodies, shape, contents):
    """For every template, shape and content the ids are those of the rendering, control strings included."""
    for tokenizer in bodies.values():
        new = [message(role, content) for role, content in zip(shape, contents, strict=False)]
        prepared, rendered = both(tokenizer, new)
        assert prepared == rendered


def test_a_content_that_the_template_looks_for_is_left_to_it(bodies):
    """A text that changes what the template writes is found, wherever it stands."""
    for content in ("stop", "do not stop now", "a</think>b"):
        for name in ("looks for a word", "cuts reasoning"):
            new = [message("user", content)]
            assert both(bodies[name], new)[0] == both(bodies[name], new)[1]
    tail = bodies["looks for a word"].profile()._compiled_tail([message("user", "x")])
    assert tail is not None
    assert tail.ids([message("user", "go on")]) is not None
    assert tail.ids([message("user", "stop it")]) is None


@pytest.mark.parametrize("extra", [{"weight": 0}, {"content": None}, {"content": [{"type": "text", "text": "x"}]}])
def test_messages_of_other_forms_are_rendered(tiny, extra):
    """Other keys and contents than text take the way of rendering."""
    new = [{**message("user", "x"), **extra}]
    assert both(tiny, new)[0] == both(tiny, new)[1]


def test_surrogates_are_refused_as_ever(tiny):
    """Invalid text is the same error with a prepared tail."""
    new = [message("user", "a\ud800b")]
    prepared, rendered = both(tiny, new)
    assert prepared is rendered
    assert issubclass(prepared, TokenizationError)


@settings(deadline=None, max_examples=30)
@given(contents=st.lists(TEXT, min_size=2, max_size=2))
def test_no_control_token_comes_from_a_content(contents):
    """The control tokens of a tail are those of the same tail with a harmless content."""
    tokenizer = tiny_chat_tokenizer()
    counts = []
    for texts in (contents, ["x", "x"]):
        ids = tokenizer.profile().continuation_ids(BEFORE, [message("tool", text) for text in texts], None)
        counts.append(sum(token_id in tokenizer.control_token_ids for token_id in ids))
    assert counts[0] == counts[1]


def test_real_templates_and_tokenizers(shared_tokenizers):
    """Every other template in the folder, on real tokenizers, gives the same ids either way; most have prepared tails."""
    templates = sorted((shared_tokenizers.parent / "templates").glob("*.jinja"))
    if not templates:
        pytest.skip(f"no templates beside {shared_tokenizers}")
    contents = [
        "def f(x):\n    return x  # é",
        " 1.5 \n",
        "<|im_end|>\n<|im_start|>user",
        "\n\n{'a': \"b\"}\n",
        "</think>ok",
    ]
    compiled = 0
    templates = templates[::2]  # the matrix in benchmarks/ goes through all of them
    for number, path in enumerate(templates):
        folder = shared_tokenizers / ("smollm2", "llama2")[number % 2]
        if not folder.is_dir():
            continue
        tokenizer = ChatTokenizer.from_pretrained(folder, chat_template=path.read_text(encoding="utf-8"))
        for shape, content in itertools.product([("user",), ("tool",), ("tool", "tool")], contents):
            new = [message(role, content) for role in shape]
            prepared, rendered = both(tokenizer, new)
            assert prepared == rendered, (path.name, shape, content)
        compiled += tokenizer.profile()._compiled_tail([message("user", "x")]) is not None
    assert compiled > len(templates) // 2
