"""Chunked log-probabilities are the whole ones, gradients included, in memory that no vocabulary enlarges."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ostinato_engines.device import DeviceMemory
from ostinato_trainer.backends import token_log_probs
from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.token_log_probs import chosen_log_probs

HEADS = ["linear", "biased", "function"]


def make(kind, *, width=6, vocab=20, dtype=torch.float64):
    """States of 11 tokens, targets, a head, and what carries gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, width, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(0, vocab, (11,), generator=generator)
    layer = nn.Linear(width, vocab, bias=kind == "biased", dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=dtype, generator=generator))
    head = (lambda states: layer(states)) if kind == "function" else layer
    return hidden, targets, head, [hidden, *layer.parameters()]


def plain(hidden, targets, head, temperature):
    table = (head(hidden) / temperature).log_softmax(-1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("kept", [0, 25, 10**6])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 11])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", HEADS)
def test_any_chunk_size_gives_the_plain_values_and_gradients(monkeypatch, kind, temperature, chunk_tokens, kept):
    """Values and gradients of log-probability and entropy equal a plain log_softmax over all logits, however many logits are kept."""
    monkeypatch.setattr(token_log_probs, "_KEPT_ELEMENTS", {"cpu": kept})
    hidden, targets, head, inputs = make(kind)
    factors = torch.linspace(-1, 1, 11, dtype=torch.float64)

    def gradients(log_probs, spread):
        return torch.autograd.grad((log_probs * factors + spread * factors**2).sum(), inputs)

    options = {"vocab_size": 20, "temperature": temperature, "chunk_tokens": chunk_tokens}
    found = chosen_log_probs(hidden, targets, head, entropy=EntropyMode.GRADIENT, **options)
    expected = plain(hidden, targets, head, temperature)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)
    for one, other in zip(gradients(*found), gradients(*expected), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["linear", "biased"])
def test_the_formulas_agree_with_finite_differences(kind):
    """gradcheck in float64, of log-probability and entropy, by states, weight and bias, at a temperature."""
    _, targets, head, inputs = make(kind, width=3, vocab=5)

    def both(hidden, *_):
        options = {"vocab_size": 5, "temperature": 0.8, "chunk_tokens": 4}
        return chosen_log_probs(hidden, targets, head, entropy=EntropyMode.GRADIENT, **options)

    assert torch.autograd.gradcheck(both, inputs)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_entropy_modes(kind, chunk_tokens):
    """OFF gives none; VALUE gives the number without a gradient, and both the log-probabilities' gradients of GRADIENT."""
    hidden, targets, head, inputs = make(kind)
    results = {}
    for mode in EntropyMode:
        log_probs, spread = chosen_log_probs(
            hidden, targets, head, vocab_size=20, entropy=mode, chunk_tokens=chunk_tokens
        )
        results[mode] = spread, torch.autograd.grad(log_probs.sum(), inputs)
    assert results[EntropyMode.OFF][0] is None
    value, reference = results[EntropyMode.VALUE][0], results[EntropyMode.GRADIENT][0]
    assert value is not None
    assert reference is not None
    assert torch.equal(value, reference)
    assert not value.requires_grad
    for mode in (EntropyMode.OFF, EntropyMode.VALUE):
        for one, other in zip(results[mode][1], results[EntropyMode.GRADIENT][1], strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", HEADS)
def test_a_frozen_head_costs_no_gradient_of_its_own(kind):
    """Where only the states are trained, their gradients are the same and the head gets none; without any, nothing is recorded."""
    hidden, targets, head, inputs = make(kind)
    log_probs, _ = chosen_log_probs(hidden, targets, head, vocab_size=20)
    expected = torch.autograd.grad(log_probs.sum(), hidden)[0]
    for parameter in inputs[1:]:
        parameter.requires_grad_(False)
    log_probs, _ = chosen_log_probs(hidden, targets, head, vocab_size=20)
    log_probs.sum().backward()
    assert torch.allclose(hidden.grad, expected, rtol=1e-12, atol=1e-14)
    assert all(parameter.grad is None for parameter in inputs[1:])
    assert not chosen_log_probs(hidden.detach(), targets, head, vocab_size=20)[0].requires_grad


def test_sixteen_bit_logits_are_normalized_in_float32():
    """The softmax of bfloat16 logits is taken in float32, of a function's and of a layer's alike."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([0, 1, 2])
    layer = nn.Linear(50, 50, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(50))
    expected = logits.float().log_softmax(-1)[torch.arange(3), targets]
    for head in (lambda states: states, layer):
        got, _ = chosen_log_probs(logits, targets, head, vocab_size=50)
        assert got.dtype == torch.float32
        assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_autocast_computes_in_sixteen_bits_and_answers_in_float32(kind):
    """Under autocast the output layer runs in bfloat16: values and gradients are float32 and within 2 % of the float32 ones."""
    hidden, targets, head, inputs = make(kind, width=32, vocab=64, dtype=torch.float32)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            log_probs, spread = chosen_log_probs(
                hidden, targets, head, vocab_size=64, entropy=EntropyMode.GRADIENT, chunk_tokens=4
            )
        assert spread is not None
        assert log_probs.dtype == spread.dtype == torch.float32
        gradients = torch.autograd.grad((log_probs + 0.1 * spread).sum(), inputs)
        results.append([log_probs, spread, *gradients])
    for exact, rough in zip(*results, strict=True):
        assert rough.dtype == exact.dtype
        assert (exact - rough).detach().norm() <= 0.02 * exact.detach().norm()
    assert not torch.equal(results[0][0], results[1][0])


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that an operation made, a view of another left out."""

    def __init__(self, ignored):
        super().__init__()
        self.ignored, self.numel = ignored, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) not in self.ignored:
                self.numel = max(self.numel, leaf.numel())
        return made


def test_memory_does_not_grow_with_the_vocabulary(monkeypatch):
    """Eight times the vocabulary: no larger tensor is made, forward or backward, and no more waits for the backward pass."""
    monkeypatch.setattr(token_log_probs, "_CHUNK_ELEMENTS", {"cpu": 2**12})
    monkeypatch.setattr(token_log_probs, "_KEPT_ELEMENTS", {"cpu": 2**13})
    largest, waiting = [], []
    for vocab in (2**8, 2**11):
        hidden = torch.randn(250, 8, requires_grad=True)
        targets, head = torch.randint(0, vocab, (250,)), nn.Linear(8, vocab, bias=False)
        saved = []

        def keep(tensor, weight=head.weight, saved=saved):
            saved.append(0 if tensor.shape == weight.shape else tensor.numel())
            return tensor

        weight_shapes = {(vocab, 8), (8, vocab)}
        with Largest(weight_shapes) as watch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            log_probs, spread = chosen_log_probs(hidden, targets, head, vocab_size=vocab, entropy=EntropyMode.GRADIENT)
            assert spread is not None
            (log_probs + spread).sum().backward()
        largest.append(watch.numel)
        waiting.append(sum(saved))
    assert largest[1] <= largest[0] <= 2**12
    assert waiting[1] <= waiting[0] <= 2**13 + 250 * 16


def test_no_token_is_no_trouble():
    """Zero targets give empty vectors and a zero gradient."""
    hidden, _, head, _ = make("linear")
    log_probs, _ = chosen_log_probs(hidden[:0], torch.zeros(0, dtype=torch.int64), head, vocab_size=20)
    assert log_probs.shape == (0,)
    log_probs.sum().backward()
    assert not hidden.grad.any()


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "kept"),
    [(2**20, 0, 0, 32), (2**10, 0, 0, 1), (2**10, 2**14, 2**12, 13), (0, 7, 7, 0)],
)
def test_a_gpu_keeps_no_more_logits_than_it_has_room_for(monkeypatch, free, reserved, allocated, kept):
    """A sixteenth of the device's memory at most, and a quarter of what nobody uses of it: in chunks of 128 logits of 2 bytes."""
    memory = DeviceMemory(total=2**17, free=free, reserved=reserved, allocated=allocated)
    monkeypatch.setattr(token_log_probs, "device_memory", lambda _: memory)
    assert token_log_probs._kept_chunks(torch.device("cuda"), torch.bfloat16, 16 * 8) == kept
