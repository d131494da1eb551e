"""KL estimators: their formulas, and finite values and gradients where the policies are worlds apart."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.algorithms.kl import KLKind, kl_estimate, kl_kind
from ostinato_trainer.errors import AlgorithmError


@settings(deadline=None)
@given(st.floats(-12, 0), st.floats(-10, 10))
def test_each_estimator_is_its_formula(policy, gap):
    """With d = ref - policy: |d|, -d, d^2/2 and exp(d) - d - 1, within a log-ratio of 10."""
    new, ref = torch.tensor([policy], dtype=torch.float64), torch.tensor([policy + gap], dtype=torch.float64)
    d = ref - new
    for kind, expected in ((KLKind.ABS, d.abs()), (KLKind.K1, -d), (KLKind.K2, d**2 / 2), (KLKind.K3, d.exp() - d - 1)):
        assert torch.allclose(kl_estimate(new, ref, kind), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", list(KLKind))
@pytest.mark.parametrize("gap", [100.0, 12.0, -100.0, -12.0])
def test_values_and_gradients_stay_finite(dtype, kind, gap):
    """One token with a huge log-ratio among normal ones poisons neither its own gradient nor the others'."""
    policy = torch.tensor([-1.0, -1.0 - max(gap, 0), -2.0], dtype=dtype, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0 + min(gap, 0), -2.0], dtype=dtype)
    estimate = kl_estimate(policy, reference, kind)
    estimate.sum().backward()
    assert policy.grad is not None
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(policy.grad).all()
    alone = kl_estimate(policy.detach()[[0, 2]], reference[[0, 2]], kind)
    assert torch.equal(estimate.detach()[[0, 2]], alone)


def test_an_abandoned_token_is_pulled_back():
    """Beyond the bound k3 still grows and its gradient still asks for more probability."""
    policy = torch.tensor([-100.0, -40.0], requires_grad=True)
    estimate = kl_estimate(policy, torch.zeros(2), "k3")
    estimate.sum().backward()
    assert policy.grad is not None
    assert estimate[0] > estimate[1] > 0
    assert (policy.grad < 0).all()


@settings(deadline=None)
@given(st.floats(-60, 0), st.floats(-60, 0))
def test_k3_is_never_negative_and_zero_at_equality(policy, reference):
    """KL(p, p) is 0 and no estimate is below 0, in float32 too."""
    new, ref = torch.tensor([policy]), torch.tensor([reference])
    assert kl_estimate(new, new, "low_var_kl").item() == 0.0
    assert kl_estimate(new, ref, "low_var_kl").item() >= 0.0


def test_k3_estimates_the_true_divergence():
    """Its expectation under the policy is KL(policy || reference), and not the reverse."""
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    expected = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        estimate = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
        assert estimate.item() == pytest.approx(expected.item(), abs=1e-12)


def test_the_names_of_the_field_are_understood():
    """kl, mse and low_var_kl are k1, k2 and k3; an unknown name lists the known."""
    assert [kl_kind(name) for name in ("kl", "mse", "low_var_kl", "abs")] == [
        KLKind.K1,
        KLKind.K2,
        KLKind.K3,
        KLKind.ABS,
    ]
    assert kl_kind("low_var_kl+") is KLKind.K3
    for unknown in ("k4", "k4+", "+", "full", "k3++"):
        with pytest.raises(AlgorithmError, match=rf"low_var_kl, got '{re.escape(unknown)}'"):
            kl_kind(unknown)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "kl", "mse", "low_var_kl"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    """Straight through: the estimate itself, and policy - reference as its derivative, for ratios of any size, in float32 too."""
    for dtype in (torch.float64, torch.float32):
        policy = torch.tensor([-0.5, -3.0, -100.0, 0.0, -1.0], dtype=dtype, requires_grad=True)
        reference = torch.tensor([-1.5, -2.5, 0.0, -100.0, -1.0], dtype=dtype)
        estimate = kl_estimate(policy, reference, f"{kind}+")
        assert torch.equal(estimate, kl_estimate(policy, reference, kind))
        (gradient,) = torch.autograd.grad(estimate.sum(), policy)
        assert torch.equal(gradient, (policy - reference).detach())


def test_the_expected_gradient_of_a_plus_is_that_of_the_divergence():
    """Over a whole vocabulary, k3+ under the policy has the gradient of KL(policy || reference), which k1 and k3 have not."""
    logits = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    log_probs = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits, retain_graph=True)

    def expected(kind):
        weighted = log_probs.exp().detach() * kl_estimate(log_probs, reference, kind)
        return torch.autograd.grad(weighted.sum(), logits, retain_graph=True)[0]

    assert torch.allclose(expected("k3+"), exact, atol=1e-12)
    assert torch.allclose(expected("k1+"), exact, atol=1e-12)
    assert not torch.allclose(expected("k1"), exact, atol=1e-3)
