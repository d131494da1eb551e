"""The row table, against a model of it that is a dictionary."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato_engines import SamplingParams
from ostinato_engines.request import Request
from ostinato_engines.rows import RowState, RowTable


def request_for(name, prompt):
    """A request without a caller."""
    return Request(name, np.array(prompt, np.int64), SamplingParams(), len(prompt) + 5, 1, None)  # type: ignore[arg-type]


class RowTableMachine(RuleBasedStateMachine):
    """Conversations come, swap rows and go; each row keeps telling the truth about its own."""

    def __init__(self):
        super().__init__()
        self.table = RowTable(6)
        self.states = {}
        self.prompts = {}

    def exchange(self, first, second, first_length, second_length):
        """A cache that holds a copy of the computed tokens per row."""
        one, two = self.states.get(first, [])[:first_length], self.states.get(second, [])[:second_length]
        self.states[first], self.states[second] = two, one

    @rule(name=st.sampled_from("abcdefghij"), prompt=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def begin(self, name, prompt):
        """A turn of a conversation starts and is computed."""
        table = self.table
        own = table.row_of.get(name)
        if own is None and not (table.state == RowState.FREE).any():
            table.reserve(min(6, table.num_rows + 1), 16)
        table.reserve(table.num_rows, 16)
        row = table.find_row(name)
        if row is None:
            assert own is not None or (table.state > RowState.IDLE).all()
            return
        held = list(self.states.get(row, [])) if own is not None else []
        request = request_for(name, prompt)
        cached = table.place(request, row)
        assert held[:cached] == prompt[:cached]
        assert cached < len(prompt)
        self.states[row] = list(prompt)
        table.num_computed[row] = len(prompt)
        self.prompts[name] = prompt

    @precondition(lambda self: any(self.table.requests))
    @rule(data=st.data())
    def end(self, data):
        """A turn ends; the conversation stays."""
        request = data.draw(st.sampled_from([r for r in self.table.requests if r is not None]))
        self.table.vacate(request.row)

    @precondition(lambda self: self.table.num_rows > 1)
    @rule(data=st.data())
    def swap(self, data):
        """Two rows change places."""
        rows = st.integers(0, self.table.num_rows - 1)
        self.table.swap(data.draw(rows), data.draw(rows), self.exchange)

    @rule()
    def forget(self):
        """Idle conversations are freed."""
        self.table.free_idle()

    @invariant()
    def rows_and_owners_agree(self):
        """Owner, request, tokens and states of a row all belong to the same conversation."""
        table = self.table
        assert sorted(table.row_of.values()) == [row for row, owner in enumerate(table.owners) if owner is not None]
        for name, row in table.row_of.items():
            assert table.owners[row] == name
            computed = int(table.num_computed[row])
            assert table.tokens[row, :computed].tolist() == self.prompts[name][:computed]
            assert self.states[row][:computed] == self.prompts[name][:computed]
            request = table.requests[row]
            assert (request is not None) == (table.state[row] > RowState.IDLE)
            assert request is None or (request.row == row and request.request_id == name)


TestRowTable = RowTableMachine.TestCase
TestRowTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_longest_idle_conversation_gives_way():
    """A new conversation takes a free row, else the row whose last turn ended first."""
    table = RowTable(2)
    table.reserve(2, 16)
    for name in "ab":
        row = table.find_row(name)
        table.place(request_for(name, [1, 2]), row)
        table.num_computed[row] = 2
    assert table.find_row("c") is None
    table.vacate(table.row_of["b"])
    table.vacate(table.row_of["a"])
    assert table.owners[table.find_row("c")] == "b"
    assert table.place(request_for("c", [1, 2, 3]), table.find_row("c")) == 0
    assert "b" not in table.row_of
