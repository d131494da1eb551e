"""`Segment`: one piece of a trajectory as plain lists, and the checks that turn many of them into the columns of a
    `Batch`.

A trajectory has one segment, or several where its conversation could not be extended token for token. This module
trusts nothing that it is given: lengths, masks, ids, log-probabilities and rewards are checked, and an error names
the trajectory and the column.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ostinato_agent_loop import Trajectory
from ostinato_trainer.errors import BatchError


@dataclass(frozen=True, slots=True)
class Segment:
    """What the trainer needs of one `AgentLoopOutput`; ids may be lists or `array('i')`."""

    prompt_ids: Sequence[int]
    """Everything before the first sampled token."""
    response_ids: Sequence[int]
    """Sampled tokens and what the environment put between them; may be empty."""
    response_mask: Sequence[int]
    """1 where the policy sampled the token, 0 elsewhere; as long as `response_ids`."""
    response_logprobs: Sequence[float] | None
    """As long as `response_ids`; read where the mask is 1. NaN where the engine reported none, None if it never did."""
    group_id: str
    """Trajectories of one prompt share it."""
    trajectory_id: str
    reward: float
    """Of the whole trajectory, the same in all its segments."""
    position_ids: Sequence[int] | None = None
    """One a token, prompt and response; None counts from 0."""


def segments_of(trajectories: Sequence[Trajectory]) -> list[Segment]:
    """The segments of the trajectories that neither failed nor lack a reward, in order."""
    return [
        Segment(
            prompt_ids=output.prompt_ids,
            response_ids=output.response_ids,
            response_mask=output.response_mask,
            response_logprobs=output.response_logprobs,
            position_ids=output.position_ids,
            group_id=trajectory.group_id,
            trajectory_id=trajectory.trajectory_id,
            reward=trajectory.reward.score,
        )
        for trajectory in trajectories
        if trajectory.failure is None and trajectory.reward is not None
        for output in trajectory.segments
    ]


def columns_of(segments: Sequence[Segment]) -> dict[str, Any]:
    """Columns of a `Batch`, by field name.

    Raises:
        BatchError: see `Batch.from_segments`.
    """
    if not segments:
        raise BatchError("segments must not be empty, got none; every trajectory of this step failed or was dropped")
    pieces = [_arrays_of(segment) for segment in segments]
    groups, trajectories = _numbering(segments)
    lengths = np.fromiter((len(ids) for ids, _, _, _ in pieces), dtype=np.int64, count=len(pieces))
    cu_seqlens = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    return {
        "token_ids": torch.from_numpy(np.concatenate([ids for ids, _, _, _ in pieces])),
        "loss_mask": torch.from_numpy(np.concatenate([mask for _, mask, _, _ in pieces])),
        "rollout_log_probs": torch.from_numpy(np.concatenate([log_probs for _, _, log_probs, _ in pieces])),
        "position_ids": _positions_of(pieces),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "group_index": torch.tensor([groups[segment.group_id] for segment in segments]),
        "trajectory_index": torch.tensor([trajectories[segment.trajectory_id] for segment in segments]),
        "prompt_lengths": torch.tensor([len(segment.prompt_ids) for segment in segments]),
        "rewards": torch.tensor(list(_rewards_of(segments).values()), dtype=torch.float64),
        "group_ids": tuple(groups),
        "trajectory_ids": tuple(trajectories),
    }


_Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


def _arrays_of(segment: Segment) -> _Pieces:
    """ids int64, mask bool, log-probs float32 (NaN where absent), positions int64 or None, all over prompt and
    response."""
    prompt = _integers(segment, "prompt_ids", segment.prompt_ids)
    response = _integers(segment, "response_ids", segment.response_ids)
    mask = _integers(segment, "response_mask", segment.response_mask)
    _check_length(segment, "response_mask", len(mask), len(response))
    if mask.size and (mask.min() < 0 or mask.max() > 1):
        raise _error(segment, "response_mask must hold 0 and 1 only", sorted(set(mask.tolist()) - {0, 1})[0])
    ids = np.concatenate([prompt, response])
    if not ids.size:
        raise _error(segment, "prompt_ids and response_ids must hold a token between them", "none")
    if ids.min() < 0:
        raise _error(segment, "token ids must be at least 0", int(ids.min()))
    if not prompt.size and mask[0]:
        raise _error(segment, "prompt_ids must hold a token where the first response token is trained on", "none")
    full_mask = np.zeros(len(ids), dtype=np.bool_)
    full_mask[len(prompt) :] = mask
    positions = None
    if segment.position_ids is not None:
        positions = _integers(segment, "position_ids", segment.position_ids)
        _check_length(segment, "position_ids", len(positions), len(ids))
    return ids, full_mask, _log_probs(segment, full_mask), positions


def _log_probs(segment: Segment, full_mask: np.ndarray) -> np.ndarray:
    column = np.full(len(full_mask), np.nan, dtype=np.float32)
    if segment.response_logprobs is None:
        return column
    values = segment.response_logprobs
    try:
        if type(values) is list:  # as for integers
            with contextlib.suppress(TypeError):
                values = array("f", values)
        given = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise _error(segment, "response_logprobs must hold numbers only", str(error)) from error
    num_prompt = len(segment.prompt_ids)
    _check_length(segment, "response_logprobs", len(given), len(full_mask) - num_prompt)
    sampled = full_mask[num_prompt:]
    bad = np.isinf(given) & sampled
    if bad.any():
        place = int(bad.argmax())
        raise _error(
            segment,
            f"response_logprobs[{place}] must be finite, or NaN for none, where the mask is 1",
            float(given[place]),
        )
    column[num_prompt:][sampled] = given[sampled]
    return column


def _integers(segment: Segment, name: str, values: Sequence[int]) -> np.ndarray:
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    if type(values) is list:  # by way of an array several times faster; what an array does not take, numpy names
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array("I", values), dtype=np.uintc).astype(np.int64)
    try:
        numbers = np.asarray(values)
    except ValueError as error:
        raise _error(segment, f"{name} must be a flat sequence of integers", str(error)) from error
    if numbers.ndim != 1 or numbers.dtype.kind not in "iub":
        raise _error(
            segment, f"{name} must be a flat sequence of integers", f"{numbers.dtype} of shape {list(numbers.shape)}"
        )
    return numbers.astype(np.int64, copy=False)


def _positions_of(pieces: Sequence[_Pieces]) -> torch.Tensor | None:
    if all(positions is None for _, _, _, positions in pieces):
        return None
    filled = [np.arange(len(ids)) if positions is None else positions for ids, _, _, positions in pieces]
    return torch.from_numpy(np.concatenate(filled))


def _numbering(segments: Sequence[Segment]) -> tuple[dict[str, int], dict[str, int]]:
    groups: dict[str, int] = {}
    trajectories: dict[str, int] = {}
    group_of: dict[str, str] = {}
    for segment in segments:
        groups.setdefault(segment.group_id, len(groups))
        trajectories.setdefault(segment.trajectory_id, len(trajectories))
        if group_of.setdefault(segment.trajectory_id, segment.group_id) != segment.group_id:
            raise _error(
                segment,
                f"group_id must be {group_of[segment.trajectory_id]!r} in every segment",
                repr(segment.group_id),
            )
    return groups, trajectories


def _rewards_of(segments: Sequence[Segment]) -> dict[str, float]:
    rewards: dict[str, float] = {}
    for segment in segments:
        if not isinstance(segment.reward, int | float | np.number) or not math.isfinite(segment.reward):
            raise _error(segment, "reward must be a finite number", repr(segment.reward))
        if rewards.setdefault(segment.trajectory_id, segment.reward) != segment.reward:
            raise _error(segment, f"reward must be {rewards[segment.trajectory_id]} in every segment", segment.reward)
    return rewards


def _check_length(segment: Segment, name: str, got: int, expected: int) -> None:
    if got != expected:
        raise _error(segment, f"{name} must have {expected} entries", got)


def _error(segment: Segment, constraint: str, got: object) -> BatchError:
    return BatchError(f"trajectory {segment.trajectory_id!r}: {constraint}, got {got}; fix the agent loop that made it")
