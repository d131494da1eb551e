"""Passes over a batch: which mini-batches take a step, and which micro-batches they become."""

import math

import pytest
import torch

from ostinato_trainer.backends.base import OptimizerStats
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.loop.policy_update import PolicyUpdate
from ostinato_trainer.loop.update_loop import UpdateSettings, run_updates
from ostinato_trainer.segments import Segment


def settings(**changes):
    defaults = {
        "epochs": 1, "mini_batch_trajectories": 1, "loss_agg_mode": "token-mean", "loss_scale_factor": 8.0,
        "use_dynamic_bsz": False, "max_tokens": 64, "max_sequences": None,
    }  # fmt: skip
    return UpdateSettings(**{**defaults, **changes})


def batch(*masks):
    """One trajectory a mask, of one segment each; a tuple of masks is a trajectory of several."""
    return Batch.from_segments(
        [
            Segment([1], [2] * len(mask), list(mask), None, "g", f"t{row}", 1.0)
            for row, of_row in enumerate(masks)
            for mask in (of_row if of_row and isinstance(of_row[0], tuple) else (of_row,))
        ]
    )


class CountingBackend:
    """Takes every step and remembers which trajectories it was for."""

    pads_sequences = False

    def __init__(self):
        self.seen = []

    def forward_backward(self, micro_batches, loss_fn, **_):
        self.seen += [part.trajectory_ids for part in micro_batches]
        return {}

    def optimizer_step(self):
        return OptimizerStats(grad_norm=1.0, lr=0.5)


def run(made, chosen):
    """The micro-batches of every step, and the metrics."""
    steps: list[list[Batch]] = []

    def forward_backward(micro_batches):
        steps.append(list(micro_batches))
        return {"loss": float(len(steps))}

    metrics = run_updates(
        made,
        chosen,
        forward_backward,
        lambda: OptimizerStats(grad_norm=1.0, lr=0.5, skipped=len(steps) == 2),
        prefix="actor",
    )
    return steps, metrics


def test_a_mini_batch_without_a_trained_token_takes_no_step():
    """An optimizer step with a gradient of zero would still move the weights by momentum and decay; it is left out and counted."""
    steps, metrics = run(batch((1, 1), (0, 0), (), (0, 1)), settings(epochs=2))
    assert [[part.trajectory_ids for part in parts] for parts in steps] == 2 * [[("t0",)], [("t3",)]]
    assert metrics == {
        "loss": 2.5,
        "actor/grad_norm": 1.0,
        "actor/lr": 0.5,
        "actor/num_skipped_steps": 1.0,
        "actor/num_empty_mini_batches": 4.0,
    }


def test_a_step_of_which_nothing_is_left_only_counts():
    """Everything was rejected: no step, no mean of nothing."""
    steps, metrics = run(batch((0, 0), (0,)), settings())
    assert steps == []
    assert metrics == {"actor/num_skipped_steps": 0.0, "actor/num_empty_mini_batches": 2.0}


def test_weights_that_are_all_zero_move_nothing():
    """Where importance weights take every trained token out, the policy takes no step, not even one of momentum and decay."""
    config = load_config([], ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.rollout.n=1"])
    made = batch((1, 1), (0, 1), (1, 0)).with_columns(
        rollout_is_weights=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, math.nan, 1.0])
    )
    backend = CountingBackend()
    metrics = PolicyUpdate(config).run(made, backend)
    assert backend.seen == [("t2",)]
    assert metrics["actor/num_empty_mini_batches"] == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_that_needs_whole_trajectories_gets_them(dynamic):
    """Two segments of one trajectory share a micro-batch, though one sequence or a few tokens at a time was asked for."""
    made = batch(((1, 1), (1, 1)), (1, 1, 1))
    chosen = settings(
        mini_batch_trajectories=2, use_dynamic_bsz=dynamic, max_tokens=4, max_sequences=1, whole_trajectories=True
    )
    steps, _ = run(made, chosen)
    assert sorted(part.trajectory_ids for part in steps[0]) == [("t0",), ("t1",)]
    apart, _ = run(made, settings(mini_batch_trajectories=2, use_dynamic_bsz=dynamic, max_tokens=4, max_sequences=1))
    assert len(apart[0]) == 3
