"""Supervised fine-tuning: right loss, right tokens, right order, and a model folder at the end."""

import math
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato_trainer.backends.base import OptimizerStats
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.errors import BackendError, BatchError
from ostinato_trainer.sft.steps import SftSettings, sft_batch, sft_steps, train_sft


class Conversation(NamedTuple):
    token_ids: list
    mask: list


def make_model(seed=0):
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, **shape, initializer_range=0.3))


def make_backend(**options):
    return LocalBackend(
        make_model(), LocalBackendOptions(**{"device": "cpu", "lr": 0.03, "dtype": "float64", **options})
    )


DATA = [
    Conversation([1, 5, 2, 7, 3], [0, 0, 1, 0, 1]),
    Conversation([1, 4, 2], [0, 1, 1]),
    Conversation([2, 9], [0, 1]),
]


def test_the_loss_is_the_mean_over_trained_tokens():
    """The first step's loss equals the mean negative log-likelihood of all trained tokens, computed plainly."""
    backend = make_backend()
    terms = []
    for ids, mask in DATA:
        table = backend.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        terms += [-table[place - 1, ids[place]].item() for place in range(len(ids)) if mask[place]]
    (first,) = sft_steps(backend, DATA, steps=1, batch_size=3, seed=0)
    assert first.loss == pytest.approx(sum(terms) / len(terms), rel=1e-9)
    assert (first.step, first.skipped) == (1, False)


def test_it_learns_what_the_mask_shows_and_nothing_else():
    """After some steps the trained tokens are likely; tokens outside the mask were never a target."""
    data = [Conversation([1, 5, 6, 7], [0, 0, 0, 1])] * 2
    backend = make_backend()
    losses = [step.loss for step in sft_steps(backend, data, steps=30, batch_size=2, seed=0)]
    assert losses[-1] < 0.1 < losses[0]
    log_probs = backend.log_probs(sft_batch(data[:1]), temperature=1.0)
    assert log_probs[3] > math.log(0.9)
    assert log_probs[1:3].max() < math.log(0.5)


def test_every_epoch_shows_every_conversation_once():
    """Over whole epochs each conversation is used equally often, within a batch never twice, in an order that the seed decides."""
    data = [Conversation([1, number], [0, 1]) for number in range(2, 9)]

    class Recorder:
        pads_sequences = False

        def __init__(self):
            self.seen = []

        def forward_backward(self, micro_batches, loss_fn):
            self.seen.append([number for part in micro_batches for number in part.token_ids[1::2].tolist()])
            return {"train/loss": 0.0}

        def optimizer_step(self):
            return OptimizerStats(grad_norm=1.0, lr=0.0)

    runs = []
    for seed in (0, 0, 1):
        recorder = Recorder()
        list(sft_steps(recorder, data, steps=14, batch_size=3, seed=seed))  # pyright: ignore[reportArgumentType]
        runs.append(recorder.seen)
    assert runs[0] == runs[1] != runs[2]
    assert all(len(set(batch)) == 3 for batch in runs[0])
    counts = [sum(number in batch for batch in runs[0]) for number in range(2, 9)]
    assert max(counts) - min(counts) <= 1


def test_a_folder_in_and_a_folder_out(tmp_path):
    """`train_sft` reads a model folder, decays the rate linearly, and leaves a model folder that saw the data."""
    make_model().save_pretrained(tmp_path / "model")
    settings = SftSettings(steps=4, batch_size=2, lr=0.02, warmup_steps=1, device="cpu")
    steps = list(train_sft(tmp_path / "model", tmp_path / "tuned", DATA, settings, seed=3))
    assert [step.lr for step in steps] == pytest.approx([0.02, 0.02, 0.02 * 2 / 3, 0.02 / 3])
    before = LocalBackend.from_pretrained(tmp_path / "model", LocalBackendOptions(device="cpu"))
    after = LocalBackend.from_pretrained(tmp_path / "tuned", LocalBackendOptions(device="cpu"))
    batch = sft_batch(DATA)
    gain = after.log_probs(batch, temperature=1.0) - before.log_probs(batch, temperature=1.0)
    assert gain[batch.loss_mask].mean() > 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "segments must not be empty"),
        ([Conversation([1, 2], [0])], "conversation 0: mask must have 2 entries, got 1"),
        ([Conversation([1, 2], [1, 1])], "conversation 0: mask must be 0 at the first token"),
        ([Conversation([1, 2], [0, 0])], "mask must be 1 somewhere"),
        ([Conversation([], [])], "must hold a token between them"),
    ],
)
def test_bad_conversations_are_refused(data, message):
    """No data, masks of another length, nothing to learn: an error before the first step."""
    with pytest.raises(BatchError, match=message):
        next(sft_steps(make_backend(), data, steps=1, batch_size=1, seed=0))


def test_bad_settings_are_refused(tmp_path):
    """No steps, no batch, no model."""
    with pytest.raises(BatchError, match="steps and batch_size must be at least 1"):
        next(sft_steps(make_backend(), DATA, steps=0, batch_size=1, seed=0))
    with pytest.raises(BackendError, match="no such folder"):
        next(train_sft(tmp_path / "no", tmp_path / "out", DATA, SftSettings(steps=1, batch_size=1, lr=0.1), seed=0))
    assert not (tmp_path / "out").exists()
