"""Texts of ids are those of the tokenizer, however they are made."""

from array import array

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ostinato_tokenization import VocabularyError
from ostinato_tokenization.decoding import Decoder

_ADDED = ("<|e|>", "two words", "naïve", "日本", "Ġ", "é")


def _byte_level() -> tokenizers.Tokenizer:
    """Bytes, with added tokens that are written in the characters of the vocabulary and others."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_ADDED[0], special=True)])
    tokenizer.add_tokens([AddedToken(text) for text in _ADDED[1:]])
    return tokenizer


TOKENIZER = _byte_level()
SIZE = TOKENIZER.get_vocab_size() + 3  # a model's vocabulary may have ids without a token
DECODER = Decoder(TOKENIZER, SIZE)


@given(st.lists(st.integers(0, SIZE - 1), max_size=30))
def test_byte_level_texts_are_the_tokenizers(ids):
    """Incomplete characters, added tokens of every spelling and ids without a token: the text is the tokenizer's."""
    expected = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert DECODER.text(ids, skip_special_tokens=False) == expected
    assert DECODER.text(array("i", ids), skip_special_tokens=False) == expected
    assert DECODER.text(tuple(ids), skip_special_tokens=False) == expected
    assert DECODER.text(ids, skip_special_tokens=True) == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_byte_level_texts_are_made_without_the_tokenizer():
    """The fast way is taken here, so that the comparison above says something about it."""
    assert DECODER._bytes is not None


def test_the_fast_way_is_left_out_where_texts_would_differ():
    """A decoder that is not byte-level decodes as ever."""
    tokenizer = _byte_level()
    tokenizer.decoder = decoders.Fuse()
    decoder = Decoder(tokenizer, SIZE)
    assert decoder._bytes is None
    assert decoder.text([0, 1, 2], skip_special_tokens=False) == tokenizer.decode([0, 1, 2], skip_special_tokens=False)


@pytest.mark.parametrize("bad", [[1.0], ["a"], [None], array("d", [1.0]), "ab"])
def test_what_is_no_integer_is_refused(bad):
    """An id of another type is an error that shows it, even if it equals an id."""
    with pytest.raises(VocabularyError, match="must be integers"):
        DECODER.text(bad, skip_special_tokens=False)


@pytest.mark.parametrize("bad", [-1, SIZE, 2**31, 2**40, -(2**40)])
def test_ids_beyond_the_vocabulary_are_refused(bad):
    """The error names the id, however large it is."""
    with pytest.raises(VocabularyError, match=f"got {bad};"):
        DECODER.text([0, bad], skip_special_tokens=False)


def test_bytes_are_numbers():
    """A bytes object is a sequence of small integers, not packed ids."""
    assert DECODER.text(bytes([1, 2, 3, 4]), skip_special_tokens=False) == TOKENIZER.decode([1, 2, 3, 4])


@pytest.mark.parametrize("name", ["qwen", "qwen25", "llama3", "smollm2"])
def test_real_byte_level_tokenizers_are_decoded_the_fast_way(shared_tokenizers, name):
    """Published byte-level tokenizers: every one of the first and last ids, alone and beside others."""
    path = shared_tokenizers / name / "tokenizer.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()
    decoder = Decoder(tokenizer, size)
    assert decoder._bytes is not None
    for start in (*range(0, 2000, 3), *range(size - 1000, size - 3, 3)):
        ids = [start, start + 1, start + 2]
        assert decoder.text(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
