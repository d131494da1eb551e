"""The ledger records each token once, and everything else is derived from that."""

import math
import pickle
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato_tokenization import LedgerError, Origin, TokenLedger

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
LOGPROB = st.floats(-50, 0)


def test_prompt_and_response_split_at_the_first_sampled_token():
    """The prompt ends where sampling begins; mask and log-probabilities follow the response."""
    ledger = TokenLedger()
    ledger.append([1, 2], Origin.CONTEXT)
    ledger.append([3], Origin.TEMPLATE)
    ledger.append_sampled([4, 5], [-0.5, -0.25], policy_versions=((0, 3), (1, 4)))
    ledger.append([6], Origin.REPAIR)
    ledger.append_sampled([7], [-1.0], policy_versions=((0, 4),))
    assert ledger.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert ledger.prompt_ids == [1, 2, 3]
    assert ledger.response_ids == [4, 5, 6, 7]
    assert ledger.response_mask == [1, 1, 0, 1]
    assert ledger.response_logprobs == [-0.5, -0.25, 0.0, -1.0]
    assert ledger.policy_versions == [(0, 3), (1, 4)]
    assert ledger.media_spans == ()


def test_a_ledger_without_sampled_tokens_has_no_response():
    """Before anything is sampled all tokens are the prompt."""
    ledger = TokenLedger()
    ledger.append([1], Origin.CONTEXT)
    assert (ledger.prompt_ids, ledger.response_ids, ledger.response_mask) == ([1], [], [])
    assert ledger.response_logprobs is None
    assert ledger.policy_versions == []


def test_logprobs_are_absent_not_zero():
    """An engine without log-probabilities gives None; a mixture gives NaN at the tokens that lack one."""
    ledger = TokenLedger()
    ledger.append_sampled([1], None)
    assert ledger.response_logprobs is None
    ledger.append_sampled([2], [-1.0])
    values = ledger.response_logprobs
    assert values is not None
    assert math.isnan(values[0])
    assert values[1] == -1.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=8))
def test_log_probabilities_stand_where_the_mask_is_one(runs):
    """However sampled and other tokens alternate, each sampled token has its own value and every other one 0.0."""
    ledger = TokenLedger()
    ledger.append([0], Origin.CONTEXT)
    given_values = []
    for sampled, length in runs:
        values = [-1.0 - len(given_values) - i for i in range(length)]
        if sampled:
            ledger.append_sampled([1] * length, values)
            given_values += values
        else:
            ledger.append([2] * length, Origin.CONTEXT)
    logprobs, mask = ledger.response_logprobs, ledger.response_mask
    if not given_values:
        assert logprobs is None
        return
    assert logprobs is not None
    assert [value for value, bit in zip(logprobs, mask, strict=True) if bit] == given_values
    assert {value for value, bit in zip(logprobs, mask, strict=True) if not bit} <= {0.0}


def test_sampled_ids_that_are_not_canonical_stay_as_they_are(make):
    """Ids [ab, cd] are recorded as sampled, although their text encodes to one id."""
    tokenizer = make("plain")
    ids = [tokenizer.token_id("ab"), tokenizer.token_id("cd")]
    assert tokenizer.encode_text(tokenizer.decode(ids)) != ids
    ledger = TokenLedger()
    ledger.append_sampled(ids, [-0.1, -0.2])
    assert ledger.response_ids == ids


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda ledger: ledger.append([1], Origin.SAMPLED), "got <Origin.SAMPLED: 2>; .* append_sampled"),
        (lambda ledger: ledger.append([1], 9), "origin must be a member of Origin"),
        (lambda ledger: ledger.append([1], Origin.CONTEXT, template_tail=2), "from 0 to 1, got 2"),
        (lambda ledger: ledger.append(array("i", [1, -1]), Origin.CONTEXT), "must be >= 0, got -1"),
        (lambda ledger: ledger.append([-1], Origin.CONTEXT), "must be >= 0, got -1"),
        (lambda ledger: ledger.append([2**31], Origin.CONTEXT), "below 2"),
        (lambda ledger: ledger.append([1.5], Origin.CONTEXT), "must be integers"),
        (lambda ledger: ledger.append(None, Origin.CONTEXT), "must be integers"),
        (lambda ledger: ledger.append(b"\x01\x00\x00\x00", Origin.CONTEXT), "must be integers, got bytes"),
        (lambda ledger: ledger.append_sampled([1, 2], [-1.0]), r"one entry per token \(2\), got 1"),
        (lambda ledger: ledger.append_sampled([1], [float("nan")]), "must be finite, got nan at 0"),
        (lambda ledger: ledger.append_sampled([1], ["x"]), "must be floats"),
        (lambda ledger: ledger.append_sampled([1], None, policy_versions=()), r"rise from 0 .* got \(\);"),
        (
            lambda ledger: ledger.append_sampled([1], None, policy_versions=((1, 0),)),
            r"rise from 0 .* got \(\(1, 0\),\)",
        ),
        (lambda ledger: ledger.append_sampled([1, 2], None, policy_versions=((0, 0), (2, 1))), "within the 2"),
        (lambda ledger: ledger.append_sampled([1], None, policy_versions=((0, -1),)), "versions numbered from 0"),
        (lambda ledger: ledger.append_sampled([1], None, policy_versions=((0, 1.5),)), "pairs of integers"),
        (lambda ledger: ledger.append_sampled([1], None, policy_versions=None), "pairs of integers"),
        (lambda ledger: ledger.truncate(4), "between 0 and 3, got 4"),
        (lambda ledger: ledger.truncate(1.5), "between 0 and 3, got 1.5"),
        (lambda ledger: ledger.truncate(-1), "between 0 and 3, got -1"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(call, says):
    """Every wrong argument is one error that names it, and the ledger stays as it was."""
    ledger = TokenLedger()
    ledger.append([1], Origin.CONTEXT)
    ledger.append_sampled([2, 3], [-1.0, -2.0])
    before = ledger.to_bytes()
    with pytest.raises(LedgerError, match=says) as caught:
        call(ledger)
    assert ledger.to_bytes() == before
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_numpy_like_and_array_ids_are_taken_without_a_list():
    """An array('i') is accepted as ids, and a snapshot is one."""
    ledger = TokenLedger()
    ledger.append(array("i", [5, 6]), Origin.CONTEXT)
    snapshot = ledger.snapshot()
    ledger.append([7], Origin.CONTEXT)
    assert snapshot == array("i", [5, 6])


def test_damaged_bytes_are_refused():
    """Bytes that are no ledger, or contradict themselves, never become one."""
    ledger = TokenLedger()
    ledger.append_sampled([1, 2], [-1.0, -2.0])
    data = ledger.to_bytes()
    for broken in (b"", b"nonsense", data[:-3], data.replace(b"\x02\x02", b"\x02\x09", 1)):
        with pytest.raises(LedgerError):
            TokenLedger.from_bytes(broken)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_ledger_errors(data):
    """No input of any kind makes from_bytes fail in another way."""
    with pytest.raises(LedgerError):
        TokenLedger.from_bytes(data)


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against the obvious model: a list of (id, sampled, logprob, version)."""

    def __init__(self):
        super().__init__()
        self.ledger = TokenLedger()
        self.model: list[tuple[int, bool, float, int]] = []
        self.marks = [0]

    @rule(ids=IDS, origin=st.sampled_from([Origin.TEMPLATE, Origin.CONTEXT, Origin.REPAIR]))
    def append(self, ids, origin):
        self.ledger.append(ids, origin)
        self.model += [(token_id, False, 0.0, -1) for token_id in ids]

    @rule(pairs=st.lists(st.tuples(st.integers(0, 99), LOGPROB), max_size=6), first=st.integers(0, 3), data=st.data())
    def sample(self, pairs, first, data):
        spans = [(0, first)]
        if len(pairs) > 1 and data.draw(st.booleans()):
            spans.append((data.draw(st.integers(1, len(pairs) - 1)), first + 1))
        self.ledger.append_sampled([i for i, _ in pairs], [p for _, p in pairs], policy_versions=spans)
        for at, (token_id, logprob) in enumerate(pairs):
            version = [version for start, version in spans if start <= at][-1]
            self.model.append((token_id, True, logprob, version))

    @rule()
    def mark(self):
        self.marks.append(self.ledger.mark())

    @rule(data=st.data())
    def truncate(self, data):
        mark = data.draw(st.sampled_from([mark for mark in self.marks if mark <= len(self.model)]))
        self.ledger.truncate(mark)
        del self.model[mark:]

    @rule()
    def round_trip(self):
        self.ledger = TokenLedger.from_bytes(self.ledger.to_bytes())

    @precondition(lambda self: self.model)
    @rule()
    def fork_and_forget(self):
        other = self.ledger.fork()
        other.append([1], Origin.CONTEXT)
        other.truncate(0)

    @invariant()
    def agrees_with_the_model(self):
        ids = [entry[0] for entry in self.model]
        sampled = [entry[1] for entry in self.model]
        first = sampled.index(True) if True in sampled else len(ids)
        assert self.ledger.token_ids == ids
        assert self.ledger.prompt_ids == ids[:first]
        assert self.ledger.response_ids == ids[first:]
        assert self.ledger.response_mask == [int(value) for value in sampled[first:]]
        assert self.ledger.num_sampled == sum(self.ledger.response_mask)
        assert self.ledger.response_logprobs == (
            [entry[2] for entry in self.model[first:]] if True in sampled else None
        )
        for offset, (_, is_sampled, _, version) in enumerate(self.model[first:]):
            if is_sampled:
                assert [v for start, v in self.ledger.policy_versions if start <= offset][-1] == version


TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 5000])
def test_the_last_run_is_counted_however_long_it_is(length):
    """The sampled ids at the end are counted, with and without others before them, in pieces, cut and copied."""
    for before in (0, 1, 300):
        ledger = TokenLedger()
        ledger.append([1] * before, Origin.CONTEXT)
        ledger.append_sampled([2] * length, None)
        ledger.append([], Origin.REPAIR)
        assert ledger.sampled_run == length
        mark = ledger.mark()
        ledger.append_sampled([2, 2], None)
        assert ledger.sampled_run == length + 2
        ledger.append([3], Origin.CONTEXT)
        assert ledger.sampled_run == 0
        ledger.truncate(mark)
        assert ledger.sampled_run == ledger.fork().sampled_run == length
        assert TokenLedger.from_bytes(ledger.to_bytes()).sampled_run == length


@pytest.mark.parametrize("bad", [[1, -1], [2**31], [2**32], [2**40], [1.5], [None], "ab"])
def test_ids_that_are_none_are_refused(bad):
    """Negative, too large and non-integer ids are errors, and nothing is recorded."""
    ledger = TokenLedger()
    with pytest.raises(LedgerError, match="token_ids must be"):
        ledger.append(bad, Origin.CONTEXT)
    assert len(ledger) == 0


def test_log_probabilities_are_finite_one_by_one():
    """Finite log-probabilities are taken also where their sum is not."""
    ledger = TokenLedger()
    ledger.append_sampled([1, 2], [-1e308, -1e308])
    assert ledger.response_logprobs == [-1e308, -1e308]
