"""The critic's loss against its formula, and its update: passes, mini-batches, and the keys that say so."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.value_loss import value_loss
from ostinato_trainer.backends.base import OptimizerStats
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.loop.critic_update import CriticUpdate, critic_update_settings, explained_variance
from ostinato_trainer.segments import Segment

NUMBERS = [(0.3, 0.1, 1.0), (2.0, 0.1, 1.0), (-2.0, 0.1, 1.0), (0.7, 0.1, -5.0), (1e3, 0.0, 0.0), (0.6, 0.1, 0.6)]
"""(prediction, value at the start, return)."""


def make_batch(mask: Sequence[int]) -> Batch:
    ids = list(range(1, len(mask) + 1))
    return Batch.from_segments(
        [Segment([0], ids, mask, None, group_id=name, trajectory_id=name, reward=1.0) for name in ("a", "b")]
    )


def columns(values: Sequence[float]) -> torch.Tensor:
    """One entry for each prompt, which is never trained on, and the same numbers for both sequences."""
    return torch.tensor([math.nan, *values, math.nan, *values], dtype=torch.float64)


@pytest.mark.parametrize("clip", [0.2, 0.5, math.inf])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_loss_and_gradient_are_the_formulas(clip: float, mode: str) -> None:
    """Loss, clip fraction, mean and gradient equal a plain reference; NaN outside the mask changes nothing."""
    mask = [1, 1, 0, 1, 1, 1]
    batch = with_loss_weights(make_batch(mask), mode)
    batch = batch.with_columns(values=columns([v for _, v, _ in NUMBERS]), returns=columns([r for *_, r in NUMBERS]))
    predicted = columns([v for v, *_ in NUMBERS]).requires_grad_()
    loss, metrics = value_loss(predicted, batch, cliprange_value=clip)
    loss.backward()
    share = 2 * sum(mask) if mode == "token-mean" else 2
    expected, slopes, clipped, total = 0.0, [], 0, 0.0
    for (now, old, target), trained in zip(NUMBERS, mask, strict=True):
        bound = min(max(now, old - clip), old + clip)
        plain, bounded = (now - target) ** 2, (bound - target) ** 2
        expected += trained * max(plain, bounded) / share
        slopes.append(trained * (0.0 if bounded > plain else now - target) / share)
        clipped += trained * (bounded > plain)
        total += trained * now
    assert loss.item() == pytest.approx(expected, rel=1e-12)  # half of it, for two sequences
    assert predicted.grad is not None
    gradient = predicted.grad.view(2, -1)
    assert gradient[0].tolist() == pytest.approx([0.0, *slopes], rel=1e-12)
    assert torch.equal(gradient[0], gradient[1])
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(clipped / sum(mask))
    assert float(metrics["critic/vpred_mean"]) == pytest.approx(total / sum(mask))
    assert float(metrics["critic/vf_loss"]) == loss.item()


def test_explained_variance() -> None:
    """1 where values are returns up to a constant, 0 where they are constant, absent where returns do not vary."""
    batch = make_batch([1, 1, 0])
    returns = columns([1.0, 3.0, 99.0])

    def found(values: torch.Tensor, returns: torch.Tensor = returns) -> dict[str, float]:
        return explained_variance(batch.with_columns(values=values, returns=returns))

    assert found(returns + 1) == {"critic/vf_explained_var": pytest.approx(1.0)}
    assert found(columns([5.0, 5.0, 0.0])) == {"critic/vf_explained_var": pytest.approx(0.0)}
    assert found(columns([3.0, 1.0, 0.0])) == {"critic/vf_explained_var": pytest.approx(-3.0)}
    assert found(returns, columns([2.0, 2.0, 7.0])) == {}
    assert explained_variance(batch) == {}


class Recorder:
    """A critic that notes the batches it is given."""

    pads_sequences = False

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self._current: list[int] = []

    def forward_backward(self, micro_batches: Sequence[Batch], loss_fn: Any) -> dict[str, float]:
        self._current = [part.num_sequences for part in micro_batches]
        return {"critic/vf_loss": 1.0}

    def optimizer_step(self) -> OptimizerStats:
        self.steps.append(self._current)
        return OptimizerStats(grad_norm=2.0, lr=0.5, skipped=len(self.steps) == 1)


def test_the_critic_has_passes_and_mini_batches_of_its_own() -> None:
    """critic.ppo_epochs and the batch sizes below `critic` hold for the critic; metrics are means over its updates."""
    config = load_config(
        [],
        [
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=1",
            "algorithm.adv_estimator=gae",
            "critic.ppo_epochs=3",
            "critic.ppo_mini_batch_size=1",
        ],
    )
    critic, batch = Recorder(), make_batch([1, 1, 0])
    batch = batch.with_columns(values=columns([0, 0, 0]), returns=columns([1, 2, 3]))
    metrics = CriticUpdate(config).run(batch, critic)  # pyright: ignore[reportArgumentType]
    assert critic.steps == [[1]] * 6
    assert metrics == {
        "critic/vf_loss": 1.0,
        "critic/grad_norm": 2.0,
        "critic/lr": 0.5,
        "critic/num_skipped_steps": 1.0,
        "critic/num_empty_mini_batches": 0.0,
        "critic/vf_explained_var": pytest.approx(0.0),
    }


def test_what_is_null_follows_the_actor() -> None:
    """Every key of the update that `critic` leaves open is the actor's; one that is written is its own."""
    actor = ["use_dynamic_bsz=true", "ppo_max_token_len_per_gpu=5000", "ppo_epochs=2", "loss_agg_mode=token-sum"]
    overrides = [f"actor_rollout_ref.actor.{text}" for text in (*actor, "ppo_mini_batch_size=64")]
    follows = critic_update_settings(load_config([], overrides))
    assert (follows.use_dynamic_bsz, follows.max_tokens, follows.epochs) == (True, 5000, 2)
    assert (follows.loss_agg_mode, follows.mini_batch_trajectories) == ("token-sum", 64)
    own = critic_update_settings(load_config([], [*overrides, "critic.use_dynamic_bsz=false", "critic.ppo_epochs=1"]))
    assert (own.use_dynamic_bsz, own.epochs, own.max_tokens) == (False, 1, 5000)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("critic.ppo_mini_batch_size=100", "critic.ppo_mini_batch_size=1024 or null"),
        ("critic.ppo_max_token_len_per_gpu=100", "critic.ppo_max_token_len_per_gpu=1024 or more"),
        ("critic.cliprange=0.2", "critic.cliprange is not a key; write critic.cliprange_value"),
        ("critic.clip_grad=1", "write critic.grad_clip"),
        ("critic.enable=true", "a critic is trained exactly where algorithm.adv_estimator needs values"),
        ("critic.optim.lr=-1", "critic.optim.lr must be"),
    ],
)
def test_a_wrong_key_of_the_critic_names_the_right_one(override: str, message: str) -> None:
    """Sizes that cannot be, other systems' names and misspellings are refused with the critic's own key."""
    with pytest.raises(ConfigError, match=message):
        load_config([], ["actor_rollout_ref.actor.use_dynamic_bsz=true", override])


def test_the_critics_rate_has_a_default_of_its_own() -> None:
    """A partly written optimizer keeps the critic's default rate, not the actor's."""
    assert load_config([], ["critic.optim.weight_decay=0"]).critic.optim.lr == 1e-5


def test_a_key_without_a_critic_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Without an estimator that needs values, what is written below `critic` is said to have no effect."""
    load_config([], ["critic.optim.lr=0.1", "trainer.critic_warmup=3", "algorithm.adv_estimator=rloo"])
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "critic.optim.lr has no effect" in said
    assert "trainer.critic_warmup has no effect" in said
