"""Chunked log-probabilities are the whole ones, gradients included."""

import pytest
import torch

from ostinato_trainer.backend import EntropyMode
from ostinato_trainer.token_log_probs import chosen_log_probs


def parts(chunk_tokens, temperature, entropy):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(20, 6, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(0, 20, (11,), generator=generator)
    log_probs, spread = chosen_log_probs(
        hidden,
        targets,
        lambda states: states @ weight.T,
        vocab_size=20,
        temperature=temperature,
        entropy=entropy,
        chunk_tokens=chunk_tokens,
    )
    return hidden, weight, targets, log_probs, spread


@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 11])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_any_chunk_size_gives_the_plain_values_and_gradients(chunk_tokens, temperature):
    """Values and gradients of log-probability and entropy equal a plain log_softmax over all logits."""
    hidden, weight, targets, log_probs, spread = parts(chunk_tokens, temperature, EntropyMode.GRADIENT)
    assert spread is not None
    factors = torch.linspace(-1, 1, 11, dtype=torch.float64)
    (log_probs * factors + spread * factors**2).sum().backward()
    got = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    whole = (hidden @ weight.T / temperature).log_softmax(-1)
    plain, plain_spread = whole[torch.arange(11), targets], -(whole.exp() * whole).sum(-1)
    (plain * factors + plain_spread * factors**2).sum().backward()
    assert torch.allclose(log_probs, plain, rtol=1e-12)
    assert torch.allclose(spread, plain_spread, rtol=1e-12)
    for mine, theirs in zip(got, (hidden.grad, weight.grad), strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_entropy_modes(chunk_tokens):
    """OFF gives none; VALUE gives the number without a gradient."""
    assert parts(chunk_tokens, 1.0, EntropyMode.OFF)[4] is None
    *_, log_probs, spread = parts(chunk_tokens, 1.0, EntropyMode.VALUE)
    reference = parts(chunk_tokens, 1.0, EntropyMode.GRADIENT)[4]
    assert spread is not None
    assert reference is not None
    assert torch.equal(spread, reference)
    assert log_probs.requires_grad
    assert not spread.requires_grad


def test_sixteen_bit_logits_are_normalized_in_float32():
    """The softmax of bfloat16 logits is taken in float32."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    got, _ = chosen_log_probs(logits, torch.tensor([0, 1, 2]), lambda states: states, vocab_size=50)
    expected = logits.float().log_softmax(-1)[torch.arange(3), torch.arange(3)]
    assert got.dtype == torch.float32
    assert torch.allclose(got, expected, atol=1e-6)
