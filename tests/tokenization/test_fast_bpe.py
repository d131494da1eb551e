"""Faster encoders give the ids of the tokenizers that they stand for, or are left out."""

import json
import sys
from array import array

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ostinato_tokenization.fast_bpe import describe, fast_encoder
from ostinato_tokenization.plain_text import PlainEncoder, _Recent, control_tokens
from ostinato_tokenization.word_split import (
    GPT2_PATTERN,
    beyond_ascii,
    is_known,
    splitter,
    translate,
    without_lookahead_first,
    word_start_splitters,
)

MODERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The quick brown fox said: I'm here, aren't I? 12345 times.",
    "def f(self, x):\n    return {'a': x}  # naïve café\n\n",
    "привет мир 日本語 12 ½ ²",
    "f(x) is «x²», (y). g(x) is «y²», (z).",
] * 3
TEXT = st.text(
    st.sampled_from("abTHe \n\r\t.,'_(){}0159½é\u0301日п\u00a0\u2028\U0001f642ſK<")
    | st.characters(exclude_categories=["Cs"]),
    max_size=40,
) | st.lists(
    st.sampled_from(CORPUS[0].split() + CORPUS[1].split(" ") + ["  ", "\n\n", "WE'LL", "it's"]), max_size=12
).map(" ".join)


def byte_level(*steps, normalizer=None):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def split_by(pattern):
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def sentence_piece(trained_apart=None, **metaspace):
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        special_tokens=["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    apart = [trained_apart] if trained_apart else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), *apart])
    tokenizer.train_from_iterator(CORPUS, trainer)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**metaspace)
    else:
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def no_regex():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


KINDS = {
    "modern": lambda: byte_level(split_by(MODERN), no_regex(), normalizer=normalizers.NFC()),
    "cased": lambda: byte_level(split_by(CASED), no_regex()),
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "digits": lambda: byte_level(
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    ),
    "two splits": lambda: byte_level(split_by(r"\p{N}{1,3}"), split_by(r"[一-龥]+"), split_by(MODERN), no_regex()),
    "prepending": sentence_piece,
    "prepending, punctuation apart": lambda: sentence_piece(split_by(r"[a-z0-9]+|[^a-z0-9]+")),
    "metaspace": lambda: sentence_piece(prepend_scheme="first", split=False),
    "splitting metaspace": lambda: sentence_piece(prepend_scheme="always", split=True),
}
_made: dict[tuple[str, bool], tuple[PlainEncoder, tokenizers.Tokenizer]] = {}


def pair(kind, with_tiktoken):
    key = kind, with_tiktoken
    if key not in _made:
        tokenizer = KINDS[kind]()
        with pytest.MonkeyPatch.context() as patch:
            if not with_tiktoken:
                patch.setitem(sys.modules, "tiktoken", None)
            _made[key] = PlainEncoder(tokenizer, control_tokens(tokenizer)), tokenizer
    return _made[key]


@pytest.mark.parametrize("with_tiktoken", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=TEXT)
def test_ids_are_those_of_the_tokenizer(kind, with_tiktoken, text):
    """Any text without control strings has the tokenizer's own ids, for each kind, with and without tiktoken."""
    if with_tiktoken:
        pytest.importorskip("tiktoken")
    encoder, tokenizer = pair(kind, with_tiktoken)
    if not any(token.content in text for token in control_tokens(tokenizer)):
        assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_words_end_at_punctuation_where_no_merge_reaches_across():
    """ASCII punctuation begins a word except after a space, more of it, or what some token holds before it."""
    vocabulary = {*"ab(.²» ", "ab", "(a", " (", "²)", "»).", ")", ").", ".a"}
    split, split_ascii = word_start_splitters(vocabulary)
    assert split_ascii("ab(a). (b.a") == ["ab", "(a", ").", " (b", ".a"]
    assert split("ab(²)») .\u00e9.a") == ["ab", "(²)»)", " .é", ".a"]
    assert word_start_splitters({"a", "(", " ", "a("})[0]("a(a") == ["a(a"]
    assert word_start_splitters({"a", " ", "a "}) is None


@given(text=TEXT)
def test_the_group_before_the_lookahead_changes_no_split(text):
    """A pattern means the same after its alternatives before the lookahead are put in a group."""
    for pattern in (MODERN, GPT2_PATTERN):
        regrouped = without_lookahead_first(pattern)
        assert regrouped != pattern
        pieces = [[piece for piece, _ in split_by(p).pre_tokenize_str(text)] for p in (pattern, regrouped)]
        assert pieces[0] == pieces[1]
    assert without_lookahead_first(r"a(?=b)|\s+(?!\S)|\s+") == r"a(?=b)|\s+(?!\S)|\s+"


@pytest.mark.parametrize("kind", KINDS)
def test_these_kinds_are_fast(kind):
    """The encoder of each kind is one of the fast ones, so that the test above is about them."""
    assert pair(kind, False)[0].is_fast


def test_an_encoder_that_differs_is_left_out():
    """What does not give the reference's ids on the texts that are compared is not used."""
    tokenizer = KINDS["gpt2"]()
    parts = describe(tokenizer.normalizer), describe(tokenizer.pre_tokenizer)

    def reference(text):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return ids[::-1] if "½" in text else ids

    assert fast_encoder(tokenizer, *parts, (), reference, ()) is None


@pytest.mark.parametrize(
    "pre_tokenizer",
    [pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Whitespace(), split_by(r"\X")],
)
def test_other_kinds_are_left_to_the_tokenizer(pre_tokenizer):
    """Prefix spaces, other splits and patterns that are not understood are not imitated."""
    tokenizer = KINDS["gpt2"]()
    tokenizer.pre_tokenizer = pre_tokenizer
    assert not PlainEncoder(tokenizer, control_tokens(tokenizer)).is_fast


def test_tokens_that_reach_across_words_are_left_to_the_tokenizer():
    """A vocabulary with a merge across the start of a word is not cut there."""
    vocab = {char: index for index, char in enumerate(["<unk>", "a", "b", "▁", "a▁", "a▁b"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "▁"), ("a▁", "b")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    encoder = PlainEncoder(tokenizer, control_tokens(tokenizer))
    assert not encoder.is_fast
    assert encoder.encode("a b") == [5]


def test_a_word_that_is_a_control_token_is_not_encoded_fast():
    """A control token that the model's own vocabulary holds never comes out of text."""
    tokenizer = KINDS["gpt2"]()
    inside = tokenizer.token_to_id("fox") or tokenizer.token_to_id("Ġfox") or tokenizer.token_to_id("he")
    content = tokenizer.id_to_token(inside)
    tokenizer.add_special_tokens([content])
    controls = control_tokens(tokenizer)
    ids = PlainEncoder(tokenizer, controls).encode(f"the {content.replace('Ġ', ' ')} the")
    assert not {token.id for token in controls} & set(ids)


@settings(deadline=None)
@given(text=TEXT)
@pytest.mark.parametrize("pattern", [MODERN, CASED, GPT2_PATTERN])
def test_translated_patterns_split_as_the_library_does(pattern, text):
    """Words are those of the library's Split, for text of the basic plane whose characters are known."""
    if not is_known(beyond_ascii(text)) or max(text, default="") > "\uffff":
        return
    split = splitter([pattern], limit=0x80 if text.isascii() else 0x10000)
    assert split is not None
    assert split(text) == [word for word, _ in split_by(pattern).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "pattern", [r"\X", r"a.b", r"[a&&b]", r"\p{Han}+", r"(?<=a)b", r"[[:alpha:]]", r"\bx", r"^a", r"a$", r"(a"]
)
def test_patterns_that_are_not_understood_are_refused(pattern):
    """What might mean something else in Python is not translated."""
    assert translate(pattern, limit=0x10000) is None


@pytest.mark.parametrize("text", [" " * 30_000 + "x", "a" * 30_000, "\n" * 30_000, "é\U0001f642" * 15_000])
@pytest.mark.parametrize("with_tiktoken", [False, True])
def test_very_long_runs_are_encoded_like_others(with_tiktoken, text):
    """One word of thousands of characters has the tokenizer's ids, whoever computes them."""
    encoder, tokenizer = pair("modern", with_tiktoken)
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("marks", [False, True])
def test_texts_met_again_are_not_encoded_again(make, marks):
    """What was encoded not long ago is known, by the way of beginning a text where that makes a difference."""
    tokenizer = tokenizers.Tokenizer.from_str(make("plain")._tokenizer.to_str())  # one of its own, to be changed
    if marks:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    encoder = PlainEncoder(tokenizer, ())
    asked: list[str] = []
    computed = encoder._computed
    encoder._computed = lambda text, *, with_prefix: asked.append(text) or computed(text, with_prefix=with_prefix)
    first = [encoder.encode(text, with_prefix=with_prefix) for text in ("abcd", "x") for with_prefix in (True, False)]
    again = [encoder.encode(text, with_prefix=with_prefix) for text in ("abcd", "x") for with_prefix in (True, False)]
    assert first == again
    assert asked == (["abcd", "abcd", "x", "x"] if marks else ["abcd", "x"])
    assert (first[0] != first[1]) is marks


@pytest.mark.parametrize("size", [1, 300, 100_000, 1_000_000])
def test_recent_texts_take_a_bounded_part_of_memory(size):
    """However many texts of whatever length come by, only the last few megabytes are kept, and what is asked for stays.

    A text that alone would take much of that is not kept."""
    recent = _Recent()
    recent.keep("often", array("i", [1]))
    for number in range(40_000_000 // (size + 200)):
        recent.keep(f"{number}".ljust(size), array("i"))
        if number % 10 == 0:
            assert recent.get("often") is not None
    kept = [*recent._young, *recent._old]
    assert sum(map(len, kept)) + 200 * len(kept) < 10_000_000
    assert (len(kept) == 1) == (size == 1_000_000)
