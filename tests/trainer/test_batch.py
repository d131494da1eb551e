"""A batch agrees with itself however it was made, selected or split."""

import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BatchError
from ostinato_trainer.segments import Segment


def segment(**changes):
    defaults = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "response_mask": [1, 0, 1],
        "response_logprobs": [-0.5, 0.0, -1.5],
        "group_id": "g",
        "trajectory_id": "t",
        "reward": 1.0,
    }
    return Segment(**{**defaults, **changes})


@st.composite
def segment_lists(draw):
    segments = []
    for trajectory in range(draw(st.integers(1, 8))):
        reward = draw(st.floats(-2, 2))
        for _ in range(draw(st.integers(1, 3))):
            mask = draw(st.lists(st.integers(0, 1), max_size=6))
            segments.append(
                Segment(
                    prompt_ids=draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)),
                    response_ids=draw(st.lists(st.integers(0, 9), min_size=len(mask), max_size=len(mask))),
                    response_mask=mask,
                    response_logprobs=draw(st.sampled_from([None, [-0.25] * len(mask)])),
                    group_id=f"g{trajectory // 2}",
                    trajectory_id=f"t{trajectory}",
                    reward=reward,
                )
            )
    return draw(st.permutations(segments))


def rows(batch):
    """What each sequence is, without numbering: the multiset that no selection may change."""
    result = []
    for place in range(batch.num_sequences):
        start, stop = batch.cu_seqlens[place : place + 2].tolist()
        trajectory = int(batch.trajectory_index[place])
        result.append(
            (
                batch.trajectory_ids[trajectory],
                batch.group_ids[int(batch.group_index[place])],
                float(batch.rewards[trajectory]),
                tuple(batch.token_ids[start:stop].tolist()),
                tuple(batch.loss_mask[start:stop].tolist()),
                int(batch.prompt_lengths[place]),
            )
        )
    return result


def test_columns_of_one_segment():
    """Ids, mask and log-probabilities land on the tokens that they are about; unsampled tokens have no log-probability."""
    batch = Batch.from_segments([segment()])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.loss_mask.tolist() == [False, False, True, False, True]
    assert batch.rollout_log_probs[[2, 4]].tolist() == [-0.5, -1.5]
    assert batch.rollout_log_probs[[0, 1, 3]].isnan().all()
    assert batch.cu_seqlens.tolist() == [0, 5]
    assert (batch.num_sequences, batch.num_trajectories, batch.num_groups) == (1, 1, 1)
    assert batch.response_lengths.tolist() == [3]


def test_a_turn_without_log_probabilities_is_absent_not_wrong():
    """A trajectory of which one turn came from an engine that reports none is trained on like the others."""
    batch = Batch.from_segments([segment(response_logprobs=[-1.0, 0.0, float("nan")])])
    assert batch.rollout_log_probs[2] == -1.0
    assert batch.rollout_log_probs[4].isnan()
    assert batch.loss_mask[4]


def test_arrays_are_accepted():
    """Ids may be `array('i')`, as a ledger keeps them."""
    batch = Batch.from_segments(
        [segment(prompt_ids=array.array("i", [1, 2]), response_ids=array.array("i", [3, 4, 5]))]
    )
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_segments_of_a_trajectory_share_one_reward():
    """Two segments of a trajectory are two sequences but one trajectory, wherever they stand."""
    batch = Batch.from_segments(
        [segment(trajectory_id="a"), segment(trajectory_id="b", reward=0.0), segment(trajectory_id="a")]
    )
    assert batch.trajectory_ids == ("a", "b")
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.trajectory_index.tolist() == [0, 1, 0]
    assert batch.trajectory_loss_tokens.tolist() == [4, 2]


def test_an_empty_response_keeps_its_prompt():
    """A response without a token leaves the prompt whole and trains nothing."""
    batch = Batch.from_segments([segment(response_ids=[], response_mask=[], response_logprobs=None)])
    assert batch.token_ids.tolist() == [1, 2]
    assert batch.num_loss_tokens == 0


def test_positions_are_filled_in_where_some_are_given():
    """A segment without positions counts from 0 beside one that brings its own; with none at all there is no column."""
    batch = Batch.from_segments([segment(position_ids=[0, 1, 7, 8, 9]), segment(trajectory_id="u")])
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [0, 1, 7, 8, 9, 0, 1, 2, 3, 4]
    assert Batch.from_segments([segment()]).position_ids is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_mask": [1, 0]}, "response_mask must have 3 entries, got 2"),
        ({"response_mask": [1, 2, 1]}, "response_mask must hold 0 and 1 only, got 2"),
        ({"response_mask": [1.0, 0.0, 1.0]}, "response_mask must be a flat sequence of integers"),
        ({"response_logprobs": [-1.0]}, "response_logprobs must have 3 entries, got 1"),
        (
            {"response_logprobs": [-1.0, 0.0, float("-inf")]},
            r"response_logprobs\[2\] must be finite, or NaN for none, where the mask is 1, got -inf",
        ),
        ({"response_logprobs": [None, 0.0, "x"]}, "response_logprobs must hold numbers only"),
        ({"prompt_ids": [1, -3]}, "token ids must be at least 0, got -3"),
        ({"prompt_ids": [[1], [2]]}, "prompt_ids must be a flat sequence of integers"),
        ({"prompt_ids": [[1], [2, 3]]}, "prompt_ids must be a flat sequence of integers"),
        ({"prompt_ids": []}, "prompt_ids must hold a token where the first response token is trained on"),
        ({"position_ids": [0, 1]}, "position_ids must have 5 entries, got 2"),
        ({"reward": float("nan")}, "reward must be a finite number, got nan"),
        ({"reward": None}, "reward must be a finite number, got None"),
        (
            {"prompt_ids": [], "response_ids": [], "response_mask": [], "response_logprobs": []},
            "must hold a token between them",
        ),
    ],
)
def test_a_contradictory_segment_is_named(changes, message):
    """Whatever disagrees is an error with the trajectory, the column and what was found."""
    with pytest.raises(BatchError, match=f"trajectory 't': .*{message}"):
        Batch.from_segments([segment(**changes)])


@pytest.mark.parametrize("changes", [{"group_id": "h"}, {"reward": 0.5}])
def test_segments_of_a_trajectory_must_agree(changes):
    """One trajectory cannot be in two groups or have two rewards."""
    with pytest.raises(BatchError, match=f"{next(iter(changes))} must be .* in every segment"):
        Batch.from_segments([segment(), segment(**changes)])


def test_no_segment_at_all_is_an_error():
    """A step of which every trajectory failed says so."""
    with pytest.raises(BatchError, match="segments must not be empty"):
        Batch.from_segments([])


def test_a_column_of_the_wrong_length_is_refused():
    """A column has one entry a token, and only known columns exist."""
    batch = Batch.from_segments([segment()])
    with pytest.raises(BatchError, match=r"advantages must have shape \[5\]"):
        batch.with_columns(advantages=torch.zeros(3))
    with pytest.raises(BatchError, match=r"baselines must have shape \[1\]"):
        batch.with_columns(baselines=torch.zeros(5))
    with pytest.raises(BatchError, match="column must be one of"):
        batch.with_columns(advantage=torch.zeros(5))


@settings(deadline=None)
@given(segment_lists(), st.randoms(use_true_random=False))
def test_selecting_keeps_what_each_sequence_is(segments, random):
    """A selection in any order holds exactly the sequences asked for, with their ids, rewards and columns."""
    batch = Batch.from_segments(segments)
    marks = torch.arange(batch.num_tokens, dtype=torch.float64)
    batch = batch.with_columns(old_log_probs=marks, baselines=batch.rewards + 1)
    chosen = random.sample(range(batch.num_sequences), random.randint(1, batch.num_sequences))
    part = batch.select(chosen)
    assert rows(part) == [rows(batch)[place] for place in chosen]
    assert part.old_log_probs is not None
    assert torch.equal(part.old_log_probs, marks[batch.token_positions(torch.tensor(chosen))])
    assert len(set(part.trajectory_index.tolist())) == part.num_trajectories == len(part.rewards)
    assert part.baselines is not None
    assert torch.equal(part.baselines, part.rewards + 1)


@settings(deadline=None)
@given(segment_lists(), st.integers(1, 5))
def test_splits_lose_nothing(segments, size):
    """Micro-batches by count and by tokens, padded or not, hold every sequence once."""
    batch = Batch.from_segments(segments)
    longest = int(batch.sequence_lengths.max())
    for parts in (
        batch.split_by_count(size),
        batch.split_by_tokens(longest * size),
        batch.split_by_tokens(longest * size, padded=False),
    ):
        assert sorted(row for part in parts for row in rows(part)) == sorted(rows(batch))


@settings(deadline=None)
@given(segment_lists(), st.integers(1, 5))
def test_micro_batches_keep_trajectories_whole_where_asked(segments, size):
    """By count and by tokens, padded or not, all segments of a trajectory are in one micro-batch and none is lost."""
    batch = Batch.from_segments(segments)
    longest = int(batch.sequence_lengths.max())
    for parts in (
        batch.split_by_count(size, whole_trajectories=True),
        batch.split_by_tokens(longest * size, whole_trajectories=True),
        batch.split_by_tokens(longest * size, padded=False, whole_trajectories=True),
    ):
        assert sorted(row for part in parts for row in rows(part)) == sorted(rows(batch))
        assert sorted(name for part in parts for name in part.trajectory_ids) == sorted(batch.trajectory_ids)
    if longest > 1:
        with pytest.raises(BatchError, match="max_tokens must be at least the longest sequence"):
            batch.split_by_tokens(longest - 1, whole_trajectories=True)


@settings(deadline=None)
@given(segment_lists(), st.integers(1, 5), st.booleans())
def test_mini_batches_keep_trajectories_whole(segments, size, shuffled):
    """All segments of a trajectory are in one mini-batch; sizes differ by one trajectory at most."""
    batch = Batch.from_segments(segments)
    parts = batch.mini_batches(size, generator=torch.Generator().manual_seed(0) if shuffled else None)
    assert sorted(row for part in parts for row in rows(part)) == sorted(rows(batch))
    counts = [part.num_trajectories for part in parts]
    assert sum(counts) == batch.num_trajectories
    assert max(counts) <= size
    assert max(counts) - min(counts) <= 1


def test_mini_batches_keep_the_order_without_a_generator():
    """Unshuffled, the first mini-batch holds the first trajectories."""
    batch = Batch.from_segments([segment(trajectory_id=f"t{number}") for number in range(5)])
    parts = batch.mini_batches(2)
    assert [part.trajectory_ids for part in parts] == [("t0",), ("t1", "t2"), ("t3", "t4")]


@pytest.mark.parametrize("chosen", [[], [0, 0], [2], [-1]])
def test_an_impossible_selection_is_refused(chosen):
    """Nothing, the same twice, or what is not there cannot be selected."""
    batch = Batch.from_segments([segment(), segment(trajectory_id="u")])
    with pytest.raises(BatchError, match="sequences must"):
        batch.select(chosen)


def test_moving_casts_the_floating_columns_only():
    """`to` changes the precision of numbers and leaves ids and masks alone."""
    batch = Batch.from_segments([segment()]).to(torch.device("cpu"), torch.float64)
    assert batch.rollout_log_probs.dtype == torch.float64
    assert (batch.token_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
