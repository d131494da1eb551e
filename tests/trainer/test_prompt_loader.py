"""The loader: every epoch its own order, and resuming as if nothing had happened."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_trainer.data.fingerprint import DataFingerprint
from ostinato_trainer.data.prompt_loader import PromptLoader
from ostinato_trainer.errors import DatasetError


class Numbers:
    """A dataset of its own indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index}


def loader(size: int = 12, batch_size: int = 3, shuffle: bool = True, seed: int = 5) -> PromptLoader:
    return PromptLoader(Numbers(size), batch_size=batch_size, shuffle=shuffle, seed=seed)


def test_an_epoch_gives_every_row_once() -> None:
    """Four batches of three give all twelve rows once; the next epoch has another order."""
    batches = loader()
    epochs = [[row["x"] for batch in batches for row in batch] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert batches.epoch == 2
    assert batches.num_batches_done == 8


def test_without_shuffling_the_rows_keep_their_order() -> None:
    """shuffle=false gives the rows as they are, in each epoch."""
    batches = loader(shuffle=False)
    for _ in range(2):
        assert [batches.next_indices() for _ in range(len(batches))] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@given(
    size=st.integers(3, 20),
    batch_size=st.integers(1, 3),
    shuffle=st.booleans(),
    seed=st.integers(-3, 2**40),
    stop=st.integers(0, 25),
)
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(
    size: int, batch_size: int, shuffle: bool, seed: int, stop: int
) -> None:
    """Wherever it is left, in an epoch or at its end, the rows before and after are those of one run."""
    whole = loader(size, batch_size, shuffle, seed)
    expected = [whole.next_indices() for _ in range(stop + 10)]
    first = loader(size, batch_size, shuffle, seed)
    seen = [first.next_indices() for _ in range(stop)]
    second = loader(size, batch_size, shuffle, seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + [second.next_indices() for _ in range(10)] == expected


@pytest.mark.parametrize("saved_at", [3, 4, 5, 8])
def test_resuming_at_the_end_of_an_epoch_goes_on(saved_at: int) -> None:
    """A state saved exactly at the end of an epoch does not say that everything is used up."""
    first = loader()
    for _ in range(saved_at):
        first.next_batch()
    second = loader()
    second.load_state_dict(first.state_dict())
    assert second.num_batches_done == saved_at
    assert second.batch_in_epoch < len(second)
    assert len(list(second)) == len(second) - saved_at % len(second)


def test_a_place_at_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    """A state written as (epoch, all batches done) is taken for the next epoch's first batch."""
    batches = loader()
    batches.load_state_dict({**batches.state_dict(), "epoch": 0, "batch": 4})
    assert (batches.epoch, batches.batch_in_epoch) == (1, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 6), ("num_rows", 11), ("batch_size", 4), ("shuffle", False), ("batch", 5), ("epoch", -1)],
)
def test_a_state_of_another_run_is_refused(key: str, value: int) -> None:
    """A state that does not belong to these rows and settings is an error, not another order."""
    batches = loader()
    with pytest.raises(DatasetError):
        batches.load_state_dict({**batches.state_dict(), key: value})


def test_a_state_without_its_keys_is_refused() -> None:
    """A mapping that is no loader state is an error that lists the keys."""
    with pytest.raises(DatasetError, match="epoch, batch"):
        loader().load_state_dict({})


def test_fewer_rows_than_a_batch_are_an_error() -> None:
    """A batch that cannot be filled names the key and the largest value that can."""
    with pytest.raises(DatasetError, match=r"data.train_batch_size=2"):
        loader(size=2, batch_size=3)


class Known(Numbers):
    """Numbers that say what they are."""

    def __init__(self, size: int, *, files: list[tuple[str, str]], rows: str = "all") -> None:
        super().__init__(size)
        self.fingerprint = DataFingerprint(files=files, rows=rows)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Known(12, files=[("b", "2")]), "got another content of b (then a); put the file back"),
        (Known(12, files=[("a", "1"), ("b", "2")]), "must name the files of the state, 1 of them, got 2"),
        (Known(12, files=[("a", "1")], rows="few"), "data.filter_overlong_prompts"),
        (Known(11, files=[("a", "1")]), "must hold the 12 rows"),
    ],
)
def test_the_state_of_other_rows_is_refused_by_name(dataset: Known, expected: str) -> None:
    """Another content, number of files or choice of rows is said, with what to put back."""
    first = PromptLoader(Known(12, files=[("a", "1")]), batch_size=3, shuffle=True, seed=5)
    state = json.loads(json.dumps(first.state_dict()))
    with pytest.raises(DatasetError) as caught:
        PromptLoader(dataset, batch_size=3, shuffle=True, seed=5).load_state_dict(state)
    assert expected in str(caught.value)


def test_the_same_rows_may_lie_elsewhere() -> None:
    """Files that were moved or renamed are the same rows."""
    first = PromptLoader(Known(12, files=[("a", "1")]), batch_size=3, shuffle=True, seed=5)
    first.next_indices()
    second = PromptLoader(Known(12, files=[("elsewhere/a", "1")]), batch_size=3, shuffle=True, seed=5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.next_indices() == first.next_indices()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("seed", 6, "data.seed must be what it was when the state was saved, got 5 instead of 6; write data.seed=6"),
        ("batch_size", 4, "write data.train_batch_size=4"),
        ("shuffle", False, "write data.shuffle=false"),
        ("batch", "2", "must be inside an epoch of 4 batches"),
        ("epoch", None, "must be inside an epoch of 4 batches"),
        ("data", {"files": 3}, "must be a fingerprint"),
    ],
)
def test_a_wrong_entry_of_a_state_is_named_with_its_key(key: str, value: object, expected: str) -> None:
    """What differs is named by the key of the configuration that sets it; nonsense is refused."""
    batches = PromptLoader(Known(12, files=[("a", "1")]), batch_size=3, shuffle=True, seed=5)
    with pytest.raises(DatasetError) as caught:
        batches.load_state_dict({**batches.state_dict(), key: value})
    assert expected in str(caught.value)
