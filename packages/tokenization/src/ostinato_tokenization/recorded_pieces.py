"""The ids of a rendering, taken from the record that it repeats: far less work than to encode all of it again.

Invariant: what is returned is what `check_ledger` takes for the same. What was given has the same ids, and what the policy
sampled, with the generation prompt before it, has the same text.
"""

from __future__ import annotations

import re
from array import array

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.control_text import MaskTable
from ostinato_tokenization.ledger import Origin, TokenLedger

_RUNS = re.compile(rb"\x01+|\x00*\x02+|.", re.DOTALL)
"""Given, said, and what is neither."""


def ids_as_recorded(tokenizer: ChatTokenizer, text: str, ledger: TokenLedger) -> list[int] | None:
    """The ids of a rendered text, in which nothing is masked, that begins with what the ledger holds; None where that
    is not plain to see."""
    if not tokenizer.plain_encoder.is_local:
        return None
    recorded, origins = ledger.snapshot(), ledger.origins
    place = 0
    for run in _RUNS.finditer(origins):
        start, end = run.span()
        if origins[start] == Origin.CONTEXT:
            place = _behind_given(tokenizer, text, place, recorded[start:end])
        elif origins[end - 1] == Origin.SAMPLED and recorded[end - 1] in tokenizer.control_token_ids:
            said = tokenizer.decode(recorded[start:end])
            place = place + len(said) if text.startswith(said, place) else -1
        else:
            return None
        if place < 0:
            return None
    return [*recorded, *tokenizer.encode_masked(text[place:], MaskTable(), continues=True)]


def _behind_given(tokenizer: ChatTokenizer, text: str, place: int, given: array[int]) -> int:
    """Where, from `place` on, the text ends that has the ids `given`; -1 where the ids there are others.

    They end at a control token, or before one.
    """
    at, length = 0, len(given)
    while at < length:
        control = tokenizer.next_control(text, place)
        piece = text[place:] if control is None else text[place : control.start()]
        if piece:
            ids = tokenizer.plain_encoder.encode_array(piece, with_prefix=False)
        elif control is not None:
            piece, ids = control.group(), array("i", (tokenizer.control_token(control.group()).id,))
        else:
            return -1
        if given[at : at + len(ids)] != ids:
            return -1
        at, place = at + len(ids), place + len(piece)
    return place
