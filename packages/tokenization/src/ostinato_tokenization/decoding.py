"""From ids to text. For byte-level tokenizers without the tokenizer: there an id stands for the same bytes whatever is beside it.

That way is compared with the tokenizer itself when it is first used, and left out if a text differs. Invariant: what is
returned is the tokenizer's own text of the ids.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import cached_property

import tokenizers

from ostinato_tokenization.errors import VocabularyError
from ostinato_tokenization.fast_bpe import TO_BYTES, describe

_NUM_CHECKS = 200


class Decoder:
    """Decodes.

    Args:
        tokenizer: Whose ids they are.
        vocab_size: One more than the largest id.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids; bytes that are no complete character become U+FFFD.

        Raises:
            VocabularyError: An id is not in the vocabulary, or no integer.
        """
        ids = self._checked(token_ids)
        if skip_special_tokens or self._bytes is None:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._bytes.text(ids)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        ids = token_ids if isinstance(token_ids, list) else list(token_ids)
        try:
            array("I", ids)  # the fastest way to see that many objects are integers of at least 0
            if not ids or max(ids) < self._vocab_size:
                return ids
        except TypeError as error:
            raise VocabularyError(
                f"token ids must be integers, got {token_ids!r:.80}; pass the ids as sampled"
            ) from error
        except OverflowError:
            pass
        bad = next(token_id for token_id in ids if not 0 <= token_id < self._vocab_size)
        raise VocabularyError(
            f"token ids must be from 0 to {self._vocab_size - 1}, got {bad};"
            " the model's vocabulary may be padded beyond the tokenizer's"
        )

    @cached_property
    def _bytes(self) -> _Bytes | None:
        """The bytes of the ids; None where they do not certainly give the tokenizer's texts."""
        kind = describe(self._tokenizer.decoder)
        if kind is None or kind.get("type") != "ByteLevel":
            return None
        found = _Bytes(self._tokenizer)
        rng = random.Random(20_241)
        checks = [[rng.randrange(self._vocab_size) for _ in range(rng.randint(1, 12))] for _ in range(_NUM_CHECKS)]
        checks.append(list(self._tokenizer.get_added_tokens_decoder()))
        same = all(found.text(ids) == self._tokenizer.decode(ids, skip_special_tokens=False) for ids in checks)
        return found if same else None


class _Bytes(dict[int, bytes]):
    """The bytes of each id, looked up when first asked for; an id without a token has none."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._token_of = tokenizer.id_to_token

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        found = self[token_id] = b"" if token is None else _bytes_of(token)
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids."""
        return b"".join(map(self.__getitem__, token_ids)).decode("utf-8", "replace")


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(TO_BYTES.__getitem__, map(ord, token)))
    except KeyError:  # an added token that is not written in the characters of the vocabulary stands for itself
        return token.encode()
