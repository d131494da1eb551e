"""Prompts as bytes, and what both ends of a connection keep of them."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_engines import EngineInputError

pytest.importorskip("zmq")

from ostinato_rollout.transport.prompts import (
    ID_BYTES,
    KeptPrompt,
    KeptPrompts,
    id_bytes,
)

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
FEW_IDS = st.lists(st.integers(0, 2), max_size=6)


@given(IDS)
def test_every_kind_of_ids_gives_the_same_bytes(ids):
    """A list, a tuple, arrays of any width, and numpy's arrays are the same prompt."""
    wanted = array("i", ids).tobytes()
    kinds = (list, tuple, lambda ids: array("i", ids), lambda ids: array("q", ids), lambda ids: array("L", ids))
    numpy_kinds = (np.int32, np.int64, np.uint32)
    forms = [kind(ids) for kind in kinds] + [np.array(ids, dtype=kind) for kind in numpy_kinds]
    assert [bytes(id_bytes(form)) for form in forms] == [wanted] * len(forms)
    assert bytes(id_bytes(np.repeat(np.array(ids, dtype=np.int64), 2)[::2])) == wanted


def test_the_ids_of_a_ledger_are_not_copied():
    """An array('i') is sent from where it is."""
    ids = array("i", [1, 2, 3])
    view = id_bytes(ids)
    ids[1] = 9
    assert view.cast("i").tolist() == [1, 9, 3]


@pytest.mark.parametrize(
    "ids",
    [
        "text",
        b"bytes",
        [1, "two"],
        [1.5],
        [None],
        [2**31],
        array("q", [1, 2**31]),
        array("q", [-(2**31) - 1]),
        array("d", [1.0]),
        np.array([1.0]),
        np.array([[1, 2], [3, 4]]),
        np.array([2**40]),
        7,
        None,
    ],
    ids=repr,
)
def test_what_are_no_ids_is_refused(ids):
    """Text, fractions, other shapes and ids that no vocabulary has are errors that name the prompt."""
    with pytest.raises(EngineInputError, match="prompt_ids must be"):
        id_bytes(ids)


@given(prompts=st.lists(st.tuples(FEW_IDS, FEW_IDS), min_size=1, max_size=6))
def test_both_ends_put_the_same_prompt_together(prompts):
    """Whatever prompts and outputs follow each other, what is sent makes the replica's prompt the caller's, or is whole."""
    here, there = KeptPrompt(), KeptPrompt()
    for turn, (ids, output) in enumerate(prompts):
        prompt = id_bytes(ids)
        if here.is_start_of(prompt):
            with_output = here.output_goes_on_in(prompt)
            new = prompt[here.num_bytes if with_output else len(here.ids) :]
        else:
            here, there, with_output, new = KeptPrompt(), KeptPrompt(), False, prompt
        new = bytes(new)
        for kept in (here, there):
            kept.grow(new, with_output=with_output, turn=turn)
            kept.sampled(output, turn=turn)
        assert bytes(there.ids) == bytes(here.ids) == bytes(prompt)
        assert there.digest == here.digest
        assert len(here) == len(ids)


def test_the_hash_is_that_of_the_whole_prompt():
    """A prompt that grew in steps has the hash of one that came at once, and another prompt has another."""
    grown, whole, other = KeptPrompt(), KeptPrompt(), KeptPrompt()
    grown.grow(id_bytes([1, 2]), with_output=False, turn=1)
    grown.sampled([3], turn=1)
    grown.grow(id_bytes([4]), with_output=True, turn=2)
    whole.grow(id_bytes([1, 2, 3, 4]), with_output=False, turn=1)
    other.grow(id_bytes([1, 2, 4, 3]), with_output=False, turn=1)
    assert grown.digest == whole.digest != other.digest


def test_an_output_that_comes_late_is_not_kept():
    """What an earlier turn sampled does not become the output of a later one, nor do ids that are none."""
    kept = KeptPrompt()
    kept.grow(id_bytes([1]), with_output=False, turn=1)
    kept.grow(id_bytes([2]), with_output=False, turn=2)
    kept.sampled([7], turn=1)
    assert kept.output == b""
    kept.sampled([2**40], turn=2)
    assert kept.output == b""
    kept.sampled([7], turn=2)
    assert kept.output == bytes(id_bytes([7]))


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 12)), max_size=30))
def test_kept_prompts_stay_within_their_bytes(steps):
    """The bound holds after each step, the bytes are counted right, and those used last are kept longest."""
    prompts = KeptPrompts(40)
    last: list[str] = []
    for name, num_ids in steps:
        prompt = KeptPrompt()
        prompt.grow(id_bytes(range(num_ids)), with_output=False, turn=1)
        prompts.keep(name, prompt)
        last = [other for other in last if other != name] + [name]
        kept = [other for other in "abcd" if prompts.get(other) is not None]
        assert prompts.num_bytes == sum(prompts.get(other).num_bytes for other in kept) <= 40
        assert set(kept) == set(last[len(last) - len(kept) :])
        last = [other for other in last if other in kept]
    for name in "abcd":
        prompts.forget(name)
    assert (len(prompts), prompts.num_bytes) == (0, 0)


def test_a_byte_is_a_byte():
    """Ids are four bytes each."""
    assert len(id_bytes([1, 2, 3])) == 3 * ID_BYTES
    assert len(id_bytes([])) == 0
