"""A turn is read as what it is, whatever the prompt before it looked like."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_rollout.turn_reader import TurnReader
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import get_parser

TINY = tiny_chat_tokenizer()
PROMPTS = ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n", "<think>", "\n", "")


def ids_of(text: str) -> array:
    """Ids of text whose control strings are control tokens."""
    ids, rest = array("i"), text
    while rest:
        token = next((token for token in TINY.control_strings if rest.startswith(token)), None)
        ids.extend([TINY.token_id(token)] if token else TINY.encode_text(rest[0]))
        rest = rest[len(token or rest[0]) :]
    return ids


@given(
    usual=st.sampled_from(PROMPTS),
    prompt=st.lists(st.sampled_from((*PROMPTS, "<think>\n\n</think>\n\n", "words ", "<|im_end|>"))).map("".join),
    name=st.sampled_from(["hermes", "mistral", "qwen3_coder"]),
)
def test_openers_are_found_with_and_without_knowing_how_prompts_end(usual, prompt, name):
    """Whether a turn begins inside reasoning depends on the prompt before it alone, also where it ends as prompts usually do."""
    parser = get_parser(name)
    expected = TINY.decode(ids_of(prompt)[-8:]).rstrip().endswith(tuple(parser.reasoning_openers or ("\0",)))
    reader = TurnReader(TINY, parser, None, generation_prompt_ids=ids_of(usual))
    assert reader.opens_reasoning(ids_of(prompt)) is expected
    assert reader.opens_reasoning(ids_of(prompt + usual)) is TurnReader(TINY, parser, None).opens_reasoning(
        ids_of(prompt + usual)
    )


@pytest.mark.parametrize("usual", PROMPTS)
def test_nothing_is_read_where_no_parser_is(usual):
    """Without a parser there is no reasoning: the text is the answer."""
    reader = TurnReader(TINY, None, None, generation_prompt_ids=ids_of(usual))
    assert reader.opens_reasoning(ids_of("<think>")) is False
    assert reader.parse("<think>x", turn=0).content == "<think>x"
