"""The critic on one device: values are known before a token is sampled, and no layout, split or order changes them or their gradients."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaModel

from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.value_loss import value_loss
from ostinato_trainer.backends.critic import LocalCritic
from ostinato_trainer.backends.local import LocalBackendOptions
from ostinato_trainer.backends.value_model import ValueModel
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, BatchError, CheckpointError
from ostinato_trainer.segments import Segment


def make_critic(*, hidden: int = 16, **options: object) -> LocalCritic:
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ValueModel(LlamaModel(LlamaConfig(vocab_size=20, **shape, initializer_range=0.3)))  # pyright: ignore[reportArgumentType, reportCallIssue]
    torch.nn.init.normal_(model.score.weight)
    wanted = {"device": "cpu", "dtype": "float64", "lr": 1e-2, **options}
    return LocalCritic(model, LocalBackendOptions(**wanted))  # pyright: ignore[reportArgumentType]


def segment(name: str, prompt: list[int], response: list[int], mask: list[int]) -> Segment:
    return Segment(prompt, response, mask, None, group_id=name, trajectory_id=name, reward=1.0)


def make_batch() -> Batch:
    """Three sequences of different lengths, one with a tool's tokens in the middle, one with nothing sampled."""
    return Batch.from_segments(
        [
            segment("a", [1, 2, 3], [4, 5, 6, 7, 8], [1, 0, 0, 1, 1]),
            segment("b", [9], [10, 11], [1, 1]),
            segment("c", [12, 13], [14], [0]),
        ]
    )


def with_targets(batch: Batch) -> Batch:
    """Values and returns of some size, as at the start of a step."""
    numbers = torch.arange(batch.num_tokens, dtype=torch.float64)
    return batch.with_columns(values=numbers.sin(), returns=numbers.cos() * 2)


def loss_fn(predicted: torch.Tensor, batch: Batch):
    return value_loss(predicted, batch, cliprange_value=0.5)


def gradients(critic: LocalCritic, parts: list[Batch]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    metrics = critic.forward_backward(parts, loss_fn)
    found = {name: value.grad.clone() for name, value in critic.model.named_parameters() if value.grad is not None}
    critic.optimizer.clear_gradients()
    return found, metrics


def test_a_value_is_known_before_its_token() -> None:
    """Entry t is the head of the hidden state at t-1 of its own sequence alone, 0 outside the mask, float32 or better on the CPU."""
    critic, batch = make_critic(), make_batch()
    values = critic.values(batch)
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        alone = critic.model(input_ids=batch.token_ids[start:stop].unsqueeze(0)).logits[0, :, 0]
        expected[start + 1 : stop] = alone[:-1].detach()
    expected[~batch.loss_mask] = 0
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    assert bool((values[batch.loss_mask] != 0).all())
    assert not values.requires_grad
    assert make_critic(dtype="float32").values(batch).dtype == torch.float32


def test_what_comes_after_does_not_change_a_value() -> None:
    """Another token at t leaves the values up to and including entry t as they were."""
    critic, batch = make_critic(), make_batch()
    ids = batch.token_ids.clone()
    ids[6] = 19  # the fourth response token of "a", before which entry 6 looks
    other = Batch(**{**batch.__dict__, "token_ids": ids})
    before, after = critic.values(batch), critic.values(other)
    assert torch.equal(before[:7], after[:7])
    assert before[7] != after[7]


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(3)), cut=st.integers(0, 3), budget=st.integers(1, 60))
def test_no_split_or_order_matters(order: list[int], cut: int, budget: int) -> None:
    """Loss, metrics and every gradient of a mini-batch are those of any split of it, in any order; values too, under any budget."""
    critic = make_critic(max_tokens_per_forward=budget)
    whole = with_loss_weights(with_targets(make_batch()), "seq-mean-token-mean")
    expected, metrics = gradients(critic, [whole])
    parts = [whole.select(part) for part in (order[:cut], order[cut:]) if part]
    found, split_metrics = gradients(critic, parts)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
    assert split_metrics == pytest.approx(metrics, rel=1e-10)
    torch.testing.assert_close(critic.values(whole), make_critic().values(whole), rtol=1e-10, atol=1e-12)


def test_it_learns_the_returns() -> None:
    """After some steps the values are near the returns, and each step reports norm and rate."""
    critic, batch = make_critic(lr=3e-2), make_batch()
    losses = []
    for _ in range(60):
        weighted = with_loss_weights(
            with_targets(batch).with_columns(values=critic.values(batch).double()), "token-mean"
        )
        losses.append(critic.forward_backward([weighted], loss_fn)["critic/vf_loss"])
        assert critic.optimizer_step().lr == 3e-2
    targets = with_targets(batch).returns
    assert targets is not None
    error = (critic.values(batch) - targets)[batch.loss_mask].abs().max()
    assert error < 0.1
    assert losses[-1] < 0.02 < losses[0]
    assert critic.num_updates == 60


def test_bfloat16_stays_near() -> None:
    """Under bfloat16 the values are float32 and within 0.05 of the float64 ones, relative to their size."""
    batch = make_batch()
    exact, rough = make_critic().values(batch), make_critic(dtype="bfloat16").values(batch)
    assert rough.dtype == torch.float32
    assert float((rough - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_saved_and_loaded_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """A critic that was saved after two steps and loaded takes the same third step, with the schedule where it was."""
    batch = with_loss_weights(with_targets(make_batch()), "token-mean")
    options = {"lr_scheduler_type": "linear", "total_steps": 5}

    def step(critic: LocalCritic) -> float:
        critic.forward_backward([batch], loss_fn)
        return critic.optimizer_step().lr

    first = make_critic(**options)
    for _ in range(2):
        step(first)
    first.save(tmp_path / "critic")
    second = make_critic(**options)
    second.load(tmp_path / "critic")
    assert step(first) == step(second)
    assert (first.num_updates, second.num_updates) == (3, 3)
    for name, value in first.model.named_parameters():
        assert torch.equal(value, dict(second.model.named_parameters())[name])


def test_a_foreign_state_is_refused(tmp_path: Path) -> None:
    """A state of another shape names the first tensor that does not fit, and changes nothing."""
    make_critic(hidden=8).save(tmp_path / "critic")
    critic = make_critic()
    before = [value.clone() for value in critic.model.parameters()]
    with pytest.raises(CheckpointError, match=r"must be of shape \[.*16.*\]"):
        critic.load(tmp_path / "critic")
    assert all(map(torch.equal, before, critic.model.parameters()))


def test_bad_input_is_refused_and_leaves_no_gradient() -> None:
    """Ids beyond the vocabulary, a constant loss, missing columns: an error each, after which no gradient is left."""
    critic, batch = make_critic(), make_batch()
    foreign = Batch.from_segments([segment("a", [1], [20], [1])])
    with pytest.raises(BatchError, match="token ids must be below the model's vocabulary of 20, got 20"):
        critic.values(foreign)
    weighted = with_loss_weights(with_targets(batch), "token-mean")
    with pytest.raises(BackendError, match="loss must depend on"):
        critic.forward_backward([weighted], lambda values, _: (values.detach().sum(), {}))
    with pytest.raises(BatchError, match="returns must be set before the critic's loss, got None"):
        critic.forward_backward([weighted, weighted.with_columns(returns=None)], loss_fn)
    with pytest.raises(BatchError, match="values must be set"):
        critic.forward_backward([weighted.with_columns(values=None)], loss_fn)
    assert all(value.grad is None for value in critic.model.parameters())


def test_nothing_to_learn_is_a_skipped_step() -> None:
    """A batch without a trained token has values of 0, no loss and a step that changes nothing."""
    critic = make_critic()
    batch = Batch.from_segments([segment("c", [12, 13], [14], [0])])
    assert critic.values(batch).tolist() == [0.0, 0.0, 0.0]
    assert critic.forward_backward([with_loss_weights(with_targets(batch), "token-mean")], loss_fn) == {}
    assert critic.optimizer_step().skipped
