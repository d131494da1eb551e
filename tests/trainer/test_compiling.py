"""When layers are compiled, and that neither lengths nor numbers of sequences compile them again."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from ostinato_trainer.algorithms.advantages import with_advantages
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.algorithms.value_loss import value_loss
from ostinato_trainer.backends import compiling, packed_attention
from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.compiling import resolve_compile
from ostinato_trainer.backends.critic import LocalCritic
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.value_model import ValueModel
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.segments import Segment

GPU, CPU = torch.device("cuda"), torch.device("cpu")
FIRST = [5, 9, 3]
OTHERS = [[7, 2], [4, 4, 4, 4, 4], [3], [30, 4, 1, 2], [2, 2], [13] * 6, [16]]


def make_model(**changes: Any) -> Qwen3ForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, **changes}
    config = Qwen3Config(
        vocab_size=48, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, initializer_range=0.2, **shape
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def make_batch(lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(sum(lengths))
    segments = []
    for place, length in enumerate(lengths):
        ids = torch.randint(0, 48, (length,), generator=generator).tolist()
        segments.append(Segment(ids[:1], ids[1:], [1] * (length - 1), None, f"g{place // 2}", f"t{place}", place % 3))
    return with_loss_weights(with_advantages(Batch.from_segments(segments), "grpo"), "token-mean")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are traced as for any compiler, and then run operator by operator."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiling._obstacle.cache_clear()
    yield
    compiling._obstacle.cache_clear()
    torch._dynamo.reset()


def num_graphs() -> int:
    """Pieces of code that were compiled so far."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("choice", "device", "obstacle", "expected"),
    [
        (None, CPU, None, False),
        (None, GPU, None, True),
        (None, GPU, "no compiler", False),
        (False, GPU, None, False),
        (True, CPU, None, True),
        (True, GPU, None, True),
    ],
)
def test_layers_are_compiled_where_it_pays_and_works(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    choice: bool | None,
    device: torch.device,
    obstacle: str | None,
    expected: bool,
) -> None:
    """null compiles on CUDA unless the compiler does not work, which is said in the log; so is that layers are compiled."""
    monkeypatch.setattr(compiling, "_obstacle", lambda device: obstacle)
    with caplog.at_level(logging.INFO, logger=compiling.__name__):
        assert resolve_compile(choice, device) is expected
    assert ("Layers are compiled" in caplog.text) is expected
    assert ("no compiler" in caplog.text) is (obstacle is not None)


def test_a_compiler_that_does_not_work_is_refused_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """use_torch_compile=true without a compiler names the key and what the compiler said, for policy and critic, before anything is trained."""

    def broken(*arguments: Any, **named: Any) -> Callable[..., Any]:
        raise RuntimeError("no C compiler was found")

    monkeypatch.setattr(torch, "compile", broken)
    options = LocalBackendOptions(device="cpu", use_torch_compile=True)
    compiling._obstacle.cache_clear()
    try:
        for make in (
            lambda: LocalBackend(make_model(), options),
            lambda: LocalCritic(ValueModel(make_model().model), options),
        ):
            with pytest.raises(BackendError, match=r"actor.use_torch_compile must be false .* no C compiler was found"):
                make()
        assert not resolve_compile(None, GPU)
    finally:
        compiling._obstacle.cache_clear()


def test_layers_that_cannot_be_compiled_name_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that works and then fails at a layer ends the pass with what it said and the way out, with gradients and without."""

    def refuses(*arguments: Any) -> Any:
        raise RuntimeError("no kernel for this layer")

    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "_obstacle", lambda device: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=refuses))
    backend = LocalBackend(make_model(), LocalBackendOptions(device="cpu", use_torch_compile=True))
    batch = make_batch(FIRST)
    loss = policy_loss_fn(PolicyLossOptions())
    trained = batch.with_columns(old_log_probs=torch.zeros(batch.num_tokens))
    for compute in (
        lambda: backend.log_probs(batch, temperature=1.0),
        lambda: backend.forward_backward([trained], loss),
    ):
        with pytest.raises(
            BackendError, match=r"no kernel for this layer.*; write actor_rollout_ref.actor.use_torch_compile=false"
        ):
            compute()
    torch._dynamo.reset()


def work(backend: LocalBackend, batch: Batch) -> list[torch.Tensor]:
    """What a training step asks of a policy: its log-probabilities, the reference's, and an update's gradients."""
    found = [backend.log_probs(batch, temperature=0.7, reference=reference) for reference in (False, True)]
    batch = batch.with_columns(old_log_probs=found[0] - 0.1, ref_log_probs=found[1])
    loss = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.1))
    backend.forward_backward([batch], loss, temperature=0.7, entropy=EntropyMode.VALUE)
    gradients = [parameter.grad.clone() for parameter in backend.model.parameters()]
    backend.optimizer_step()
    return found + gradients


@pytest.mark.parametrize("packed", [True, False])
def test_a_policys_layers_are_compiled_once_a_kind_of_pass(traced: None, packed: bool) -> None:
    """After the first batch, others of any lengths and numbers of sequences compile nothing, packed or padded; and all numbers are those of plain
    layers. Weights have their names, and a copy that becomes the reference is compiled by itself."""
    options = LocalBackendOptions(
        device="cpu", lr=1e-2, keep_reference=True, dtype="float64", use_remove_padding=packed
    )
    plain = LocalBackend(make_model(), options)
    compiled = LocalBackend(make_model(), LocalBackendOptions(**{**_fields(options), "use_torch_compile": True}))
    assert compiled.weights()[0] == plain.weights()[0]
    shapes = [
        FIRST,
        *(lengths for lengths in OTHERS if packed or len(set(lengths)) > 1),
    ]  # without padding there is no mask
    after_first = 0
    for number, lengths in enumerate(shapes):
        for one, other in zip(work(compiled, make_batch(lengths)), work(plain, make_batch(lengths)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
        if number == 0:
            after_first = num_graphs()
            assert after_first > 0
    assert num_graphs() == after_first


def test_a_critics_layers_are_compiled_once(traced: None) -> None:
    """As for a policy, beside one of other widths, whose layers are of the same class."""
    policy = LocalBackend(make_model(), LocalBackendOptions(device="cpu", use_torch_compile=True, keep_reference=True))
    work(policy, make_batch(FIRST))
    options = LocalBackendOptions(device="cpu", lr=1e-2, dtype="float64")
    found = []
    for compiled in (True, False):
        critic = LocalCritic(
            ValueModel(make_model(hidden_size=24).model),
            LocalBackendOptions(**{**_fields(options), "use_torch_compile": compiled}),
        )
        seen, counts = [], []
        for lengths in (FIRST, *OTHERS):
            batch = make_batch(lengths)
            seen.append(critic.values(batch))
            returns = torch.arange(batch.num_tokens, dtype=torch.float64).cos()
            batch = batch.with_columns(values=seen[-1], returns=returns)
            critic.forward_backward([batch], partial(value_loss, cliprange_value=0.5))
            critic.optimizer_step()
            counts.append(num_graphs())
        assert len(set(counts)) == 1
        found.append(torch.cat(seen))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def test_a_kernel_for_all_sequences_is_part_of_the_layers_graph(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one kernel attends over all sequences, in 16 bits, a layer is one graph a kind of pass, whatever lengths are."""

    def kernel(query, key, value, starts, other_starts, longest, other_longest, *, scale, window_size, enable_gqa):
        return torch.ops.ostinato_tests.attend(query, key, value, starts, longest, scale)

    monkeypatch.setattr(packed_attention, "_VARLEN", kernel)
    monkeypatch.setattr(packed_attention, "_VARLEN_GROUPS", True)
    monkeypatch.setattr(packed_attention, "CUDA", "cpu")
    backend = LocalBackend(
        make_model(), LocalBackendOptions(device="cpu", dtype="bfloat16", lr=1e-2, use_torch_compile=True)
    )
    assert not backend.pads_sequences
    before = num_graphs()
    for lengths in (FIRST, *OTHERS):
        backend.log_probs(make_batch(lengths), temperature=1.0)
        backend.forward_backward([make_batch(lengths)], policy_loss_fn(PolicyLossOptions()))
        backend.optimizer_step()
    of_layers, of_logits = 2, 2
    assert num_graphs() - before == of_layers + of_logits


@torch.library.custom_op("ostinato_tests::attend", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """A stand-in for the kernel that only GPUs have; its gradients are none, so it says nothing of numbers."""
    assert longest == int(starts.diff().max())
    rows = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    return packed_attention._by_sequence(*rows, starts, scale, None).squeeze(0).transpose(0, 1).contiguous()


@_attend.register_fake
def _(query, key, value, starts, longest, scale):
    return torch.empty_like(query)


_attend.register_autograd(lambda context, gradient: (gradient.clone(), None, None, None, None, None))


def _fields(options: LocalBackendOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__struct_fields__}
