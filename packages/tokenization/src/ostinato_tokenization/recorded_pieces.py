"""The ids of a rendering, taken from the record that it repeats: far less work than to encode all of it again.

Invariant: what is returned is what `check_ledger` takes for the same. Between two control tokens, what was given has the same
ids, and what the policy sampled, with the generation prompt before it, has the same text.
"""

from __future__ import annotations

import re

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.control_text import MaskTable
from ostinato_tokenization.ledger import Origin, TokenLedger

_SAID = re.compile(rb"\x00*\x02+")


def ids_as_recorded(tokenizer: ChatTokenizer, text: str, ledger: TokenLedger) -> list[int] | None:
    """The ids of a rendered text, in which nothing is masked, that begins with what the ledger holds; None where that
    is not plain to see."""
    if not tokenizer.plain_encoder.is_local:
        return None
    recorded, origins = ledger.snapshot(), ledger.origins
    encode, length = tokenizer.plain_encoder.encode_array, len(recorded)
    at = start = 0
    for place, string in tokenizer.find_control(text):
        if at == length:
            break
        control = tokenizer.control_token(string).id
        piece = text[start:place]
        if piece and origins[at] == Origin.CONTEXT:
            ids = encode(piece, with_prefix=False)
            end = at + len(ids)
            if recorded[at:end] != ids:
                return None
            at = end
        elif piece:
            try:
                end = recorded.index(control, at)
            except ValueError:
                return None
            if not _SAID.fullmatch(origins, at, end) or tokenizer.decode(recorded[at:end]) != piece:
                return None
            at = end
        if at == length or recorded[at] != control:
            return None
        at, start = at + 1, place + len(string)
    if at < length:
        return None
    return [*recorded, *tokenizer.encode_masked(text[start:], MaskTable(), continues=True)]
