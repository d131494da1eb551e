"""The kernels of flash-attn-4 are asked for what packed attention is, and only where they can do it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from ostinato_trainer.backends import fused_attention as module
from ostinato_trainer.backends import packed_attention as packed

LENGTHS = (5, 1, 130, 64, 300)
HEADS, KEY_HEADS = 8, 4


def states(width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(width)
    shapes = [(1, heads, sum(LENGTHS), width) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return tuple(torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes)


def starts(device: str) -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)


def stand_in(
    query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size
):
    """What the package does, by its documentation: `window_size` counts tokens left and right, None is no bound."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
    left, right = window_size
    assert causal or right == 0
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (
        query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    )
    number = torch.bucketize(torch.arange(len(query)), cu_seqlens_q[1:], right=True)
    distance = torch.arange(len(query)).unsqueeze(1) - torch.arange(len(query))
    seen = (number.unsqueeze(1) == number) & (distance >= 0)
    if left is not None:
        seen &= distance <= left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_package_is_asked_for_the_same_attention(monkeypatch, window, scale):
    """What goes to the package, and what comes back, means packed attention: sequences, grouped heads, scale and window."""
    monkeypatch.setattr(module, "_kernels", lambda: stand_in)
    query, key, value = states(16, torch.float64, "cpu")
    got = module._attend(query, key, value, starts("cpu"), max(LENGTHS), scale, window)
    expected = packed._by_sequence(query, key, value, starts("cpu"), scale, window)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_cpu_keeps_torchs_attention(monkeypatch):
    """The package is for GPUs: on a CPU it is not even loaded."""
    monkeypatch.setattr(module, "_kernels", lambda: pytest.fail("the package was loaded"))
    query, _, value = states(64, torch.bfloat16, "cpu")
    assert module.fused_attention(query, value) is None


def test_a_broken_installation_is_none(monkeypatch, tmp_path, caplog):
    """A package that fails while it is loaded is said and left alone."""
    (tmp_path / "cute.py").write_text("raise RuntimeError('built for another compiler')\n")
    package = ModuleType("flash_attn")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    module._kernels.cache_clear()
    try:
        assert module._kernels() is None
    finally:
        module._kernels.cache_clear()
    assert "built for another compiler" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("kernels", ["flash-attn-4", "torch"])
def test_kernels_agree_with_attention_by_sequence(width, window, kernels):
    """Answers and gradients of the kernels that a GPU uses are those of one call a sequence, to the rounding of bfloat16."""
    tensors = states(width, torch.bfloat16, "cuda")
    arguments = (starts("cuda"), max(LENGTHS), None, window)
    if kernels == "torch":
        if packed._VARLEN is None:
            pytest.skip("torch has no attention over sequences of any length")
        got = packed._varlen(*tensors, *arguments).transpose(0, 1).unsqueeze(0)
    else:
        if importlib.util.find_spec("flash_attn") is None:
            pytest.skip("flash-attn-4 is not installed")
        attend = module.fused_attention(tensors[0], tensors[2])
        assert attend is not None
        got = attend(*tensors, *arguments)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    expected = packed._by_sequence(*exact, starts("cpu"), None, window)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(got, tensors, weights.to("cuda", torch.bfloat16))
    wanted = torch.autograd.grad(expected, exact, weights.to(torch.bfloat16).double())
    for mine, reference in zip((got, *found), (expected, *wanted), strict=True):
        distance = (mine.double().cpu() - reference).norm() / reference.norm()
        assert distance < 0.01
