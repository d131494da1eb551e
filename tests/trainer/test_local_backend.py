"""The backend on the CPU: gradients that no split changes, bad steps that change nothing, state that comes back bit for bit."""

import itertools
import json
import logging
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ostinato_trainer.algorithms.advantages import with_advantages
from ostinato_trainer.algorithms.aggregation import LossAggMode, aggregate, with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.assembly import backend_options
from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.state import fingerprint
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import BackendError, BatchError, CheckpointError
from ostinato_trainer.segments import Segment
from ostinato_trainer.sft.steps import sft_loss


def make_backend(*, seed=0, layers=2, **options):
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    return LocalBackend(Qwen3ForCausalLM(config), LocalBackendOptions(**{"device": "cpu", "lr": 1e-2, **options}))


def make_batch():
    """Trajectories of unlike length, one with two segments, tool tokens in the middle and at the end, one fully masked."""
    generator = torch.Generator().manual_seed(5)
    shapes = [
        ("a", [1, 1, 0, 0, 1]),
        ("b", [1] * 9 + [0, 0]),
        ("c", [1]),
        ("d", [1, 0, 1, 1]),
        ("d", [1, 1]),
        ("e", [0, 0, 0]),
        ("f", []),
    ]
    segments = []
    for place, (name, mask) in enumerate(shapes):
        ids = torch.randint(0, 48, (3 + place % 2 + len(mask),), generator=generator).tolist()
        split = len(ids) - len(mask)
        segments.append(Segment(ids[:split], ids[split:], mask, None, f"g{ord(name) // 2}", name, float(ord(name) % 3)))
    return Batch.from_segments(segments)


def gradients(backend):
    return {name: parameter.grad.clone() for name, parameter in backend.model.named_parameters()}


def parameters(backend):
    return {name: parameter.detach().clone() for name, parameter in backend.model.named_parameters()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def step(backend, batch=None):
    weighted = with_loss_weights(batch or make_batch(), LossAggMode.TOKEN_MEAN)
    metrics = backend.forward_backward([weighted], sft_loss)
    return metrics, backend.optimizer_step()


@pytest.mark.parametrize("mode", list(LossAggMode))
def test_gradients_are_those_of_the_mini_batch_for_any_split(mode):
    """Policy, KL and entropy terms through a float64 model: whole, one by one, by tokens, reversed: same gradients and metrics."""
    backend = make_backend(dtype="float64", keep_reference=True)
    step(backend)
    batch = with_advantages(make_batch(), "grpo")
    old = backend.log_probs(batch, temperature=0.8)
    reference = backend.log_probs(batch, temperature=0.8, reference=True)
    batch = batch.with_columns(old_log_probs=old + 0.1 * torch.sin(torch.arange(len(old))), ref_log_probs=reference)
    weighted = with_loss_weights(batch, mode, loss_scale_factor=11)
    loss_fn = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.1, entropy_coeff=0.01))
    splits = [
        [weighted],
        weighted.split_by_count(1),
        weighted.split_by_count(3)[::-1],
        weighted.split_by_tokens(20),
        weighted.split_by_tokens(20, padded=False),
    ]
    results = []
    for micro_batches in splits:
        metrics = backend.forward_backward(micro_batches, loss_fn, temperature=0.8, entropy=EntropyMode.GRADIENT)
        results.append((metrics, gradients(backend)))
        backend.model.zero_grad(set_to_none=True)
    for metrics, found in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-10, abs=1e-13)
        for name, gradient in found.items():
            scale = results[0][1][name].abs().max()
            assert torch.allclose(gradient, results[0][1][name], rtol=0, atol=1e-11 * float(scale) + 1e-16)


def test_a_sequence_cannot_see_another():
    """The loss of one sequence has no gradient from the ids of another: changing those changes nothing."""
    backend = make_backend(dtype="float64")
    batch = make_batch()
    before = backend.log_probs(batch, temperature=1.0)
    other = batch.token_sequence == 1
    changed = batch.with_columns(token_ids=torch.where(other, (batch.token_ids + 1) % 48, batch.token_ids))
    after = backend.log_probs(changed, temperature=1.0)
    assert torch.allclose(before[~other], after[~other], rtol=0, atol=1e-13)
    assert not torch.allclose(before[other], after[other])


def test_log_probs_are_zero_at_starts_and_the_same_in_any_chunking():
    """The forward budget changes how sequences are grouped and nothing else; `loss_tokens_only` leaves 0 elsewhere."""
    batch = make_batch()
    wide = make_backend(dtype="float64").log_probs(batch, temperature=1.0)
    narrow_backend = make_backend(dtype="float64", max_tokens_per_forward=5)
    assert torch.allclose(wide, narrow_backend.log_probs(batch, temperature=1.0), rtol=0, atol=1e-12)
    assert not wide[batch.cu_seqlens[:-1]].any()
    sparse = narrow_backend.log_probs(batch, temperature=1.0, loss_tokens_only=True)
    assert torch.allclose(sparse, torch.where(batch.loss_mask, wide, 0.0), rtol=0, atol=1e-12)


def test_the_update_is_adamw_with_clipping():
    """One step equals torch's AdamW on the same gradients, clipped to the norm; its statistics are those of before clipping."""
    backend = make_backend(dtype="float64", grad_clip=0.05, weight_decay=0.1, betas=(0.8, 0.9))
    reference = make_backend(dtype="float64")
    weighted = with_loss_weights(make_batch(), "token-mean")
    for one in (backend, reference):
        one.forward_backward([weighted], sft_loss)
    norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)
    torch.optim.AdamW(reference.model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1).step()
    stats = backend.optimizer_step()
    assert stats.grad_norm == pytest.approx(norm.item())
    assert norm > 0.05
    assert (stats.lr, stats.skipped, backend.policy_version) == (1e-2, False, 1)
    for name, value in parameters(backend).items():
        assert torch.allclose(value, parameters(reference)[name], rtol=1e-9, atol=1e-12)


def test_a_step_with_nan_gradients_changes_nothing(caplog):
    """Step 2 of 4 gets a NaN: weights, moments and version stay, the parameter is named, and the steps after are as if it had not been."""
    damaged, clean = make_backend(), make_backend()
    for number in range(4):
        if number != 1:
            step(damaged)
            step(clean)
            continue
        weights, moments = parameters(damaged), damaged.optimizer.moments()
        moments = {name: value.clone() for name, value in moments.items()}
        weighted = with_loss_weights(make_batch(), "token-mean")
        damaged.forward_backward(
            [weighted], lambda output, batch: (aggregate(output.log_probs * float("nan"), batch), {})
        )
        with caplog.at_level(logging.WARNING):
            stats = damaged.optimizer_step()
        assert stats.skipped
        assert stats.reason is not None
        assert "model." in stats.reason
        assert stats.reason in caplog.text
        assert (damaged.optimizer.num_skipped, damaged.policy_version) == (1, 1)
        assert same(parameters(damaged), weights)
        assert moments
        assert same(damaged.optimizer.moments(), moments)
    assert same(parameters(damaged), parameters(clean))
    assert (damaged.optimizer.num_steps, damaged.policy_version) == (4, 3)


def test_a_step_without_a_trained_token_is_skipped():
    """A mini-batch that trains nothing costs no forward pass, decays no weight and says why."""
    backend = make_backend(weight_decay=0.5)
    before = parameters(backend)
    metrics, stats = step(backend, make_batch().select([5, 6]))
    assert metrics == {}
    assert stats.skipped
    assert stats.reason == "no token was trained on"
    assert same(parameters(backend), before)


def test_the_schedule_counts_every_step():
    """Rates follow the schedule by step number, skipped steps included."""
    backend = make_backend(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=2, total_steps=6)
    empty = make_batch().select([6])
    rates = [step(backend, empty)[1].lr for _ in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_same_calls_same_bits():
    """Two backends that do the same end up with the same bits; another batch leads elsewhere."""
    first, second, third = make_backend(), make_backend(), make_backend()
    for _ in range(3):
        step(first)
        step(second)
        step(third, make_batch().select([0, 1]))
    assert same(parameters(first), parameters(second))
    assert not same(parameters(first), parameters(third))


def test_the_reference_stays():
    """Training moves the policy's log-probabilities and not the reference's; without a copy the reference is refused by name."""
    backend, batch = make_backend(keep_reference=True), make_batch()
    start = backend.log_probs(batch, temperature=1.0)
    step(backend)
    assert torch.equal(backend.log_probs(batch, temperature=1.0, reference=True), start)
    assert not torch.allclose(backend.log_probs(batch, temperature=1.0), start)
    with pytest.raises(BackendError, match="keep_reference must be true"):
        make_backend().log_probs(batch, temperature=1.0, reference=True)


def test_an_error_in_the_loss_leaves_no_gradient():
    """When the second micro-batch fails, the first one's gradients are gone too, and the step is skipped."""
    backend, calls = make_backend(), []

    def loss_fn(output, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise ValueError("a fault")
        return sft_loss(output, batch)

    weighted = with_loss_weights(make_batch(), "token-mean")
    with pytest.raises(ValueError, match="a fault"):
        backend.forward_backward(weighted.split_by_count(2), loss_fn)
    assert all(parameter.grad is None for parameter in backend.model.parameters())
    assert backend.optimizer_step().skipped


def test_memory_running_out_names_the_keys():
    """Out of memory becomes one message with the keys to lower."""

    def loss_fn(output, batch):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(BackendError, match="ppo_micro_batch_size_per_gpu"):
        make_backend().forward_backward([with_loss_weights(make_batch(), "token-mean")], loss_fn)


def test_bad_input_is_refused():
    """A foreign id, a temperature of 0, a loss without a gradient, values without a critic, options out of range."""
    backend, batch = make_backend(), make_batch()
    foreign = batch.with_columns(token_ids=batch.token_ids + 48)
    with pytest.raises(BatchError, match="vocabulary of 48, got "):
        backend.log_probs(foreign, temperature=1.0)
    with pytest.raises(BatchError, match="vocabulary of 48, got "):
        step(backend, foreign)
    with pytest.raises(BackendError, match="temperature must be above 0, got 0"):
        backend.log_probs(batch, temperature=0.0)
    with pytest.raises(BackendError, match="loss must depend on the log-probabilities"):
        backend.forward_backward(
            [with_loss_weights(batch, "token-mean")], lambda output, _: (output.log_probs.detach().sum(), {})
        )
    for bad in ({"dtype": "float16"}, {"lr": -1.0}, {"grad_clip": 0.0}, {"lr_scheduler_type": "step"}):
        with pytest.raises(BackendError, match=f"{next(iter(bad))} must be"):
            make_backend(**bad)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_compiled_layers_give_the_same_numbers():
    """With use_torch_compile, log-probabilities and gradients are those of the plain model to float32 rounding."""
    plain, compiled = make_backend(layers=1), make_backend(layers=1, use_torch_compile=True)
    weighted = with_loss_weights(make_batch(), "token-mean")
    for backend in (plain, compiled):
        backend.forward_backward([weighted], sft_loss, temperature=0.7)
    for name, gradient in gradients(compiled).items():
        assert torch.allclose(gradient, gradients(plain)[name], rtol=1e-4, atol=1e-6)
    expected = plain.log_probs(weighted, temperature=0.7)
    assert torch.allclose(compiled.log_probs(weighted, temperature=0.7), expected, rtol=0, atol=1e-5)


def test_metrics_merge_by_sum_and_by_extreme():
    """Metrics add up over micro-batches; those that end in _max or _min keep the extreme."""

    def loss_fn(output, batch):
        size = float(batch.num_loss_tokens)
        return aggregate(output.log_probs, batch), {"tokens": size, "tokens_max": size, "tokens_min": size}

    weighted = with_loss_weights(make_batch(), "token-mean")
    metrics = make_backend().forward_backward(
        [weighted.select([0]), weighted.select([1]), weighted.select([6])], loss_fn
    )
    assert metrics == {"tokens": 12.0, "tokens_max": 9.0, "tokens_min": 3.0}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.sets(st.integers(1, 6)), packed=st.booleans())
def test_any_order_and_any_cuts_give_one_gradient(seed, cuts, packed):
    """In float64, sequences in a random order, cut anywhere, packed or padded: the mini-batch's gradient to 1e-12."""
    weighted = with_loss_weights(make_batch(), "seq-mean-token-mean")
    order = torch.randperm(weighted.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()
    edges = [0, *sorted(cuts), weighted.num_sequences]
    parts = [weighted.select(order[start:stop]) for start, stop in itertools.pairwise(edges)]
    found = []
    for backend, micro_batches in (
        (make_backend(dtype="float64"), [weighted]),
        (make_backend(dtype="float64", use_remove_padding=packed), parts),
    ):
        backend.forward_backward(micro_batches, sft_loss)
        found.append(torch.cat([gradient.flatten() for gradient in gradients(backend).values()]))
    assert (found[0] - found[1]).norm() <= 1e-12 * found[0].norm()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_layout_split_and_order_change_gradients_within_rounding(dtype):
    """Packed or padded, whole or split, in any order: one gradient, to 1e-12 in float64, 1e-5 in float32 and 3e-2 in bfloat16, relative."""
    bound = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}[dtype]
    weighted = with_loss_weights(make_batch(), "token-mean")
    reversed_order = weighted.select(list(range(weighted.num_sequences))[::-1])
    found = []
    for packed in (True, False):
        backend = make_backend(dtype=dtype, use_remove_padding=packed)
        assert backend.pads_sequences is not packed
        for parts in (
            [weighted],
            [reversed_order],
            weighted.split_by_tokens(16, padded=False),
            weighted.split_by_count(1),
        ):
            backend.forward_backward(parts, sft_loss, temperature=0.9)
            found.append(torch.cat([gradient.double().flatten() for gradient in gradients(backend).values()]))
            backend.model.zero_grad(set_to_none=True)
    for gradient in found[1:]:
        assert (gradient - found[0]).norm() <= bound * found[0].norm()


def test_bfloat16_gradients_add_up_in_float32():
    """The sum of many micro-batches' gradients is float32: forty equal ones give forty times one, not what 8 bits can hold."""
    backend = make_backend(dtype="bfloat16")
    weighted = with_loss_weights(make_batch(), "token-mean")
    backend.forward_backward([weighted], sft_loss)
    once = gradients(backend)
    backend.model.zero_grad(set_to_none=True)
    backend.forward_backward([weighted] * 40, sft_loss)
    for name, gradient in gradients(backend).items():
        assert gradient.dtype == torch.float32
        assert torch.allclose(gradient, 40 * once[name], rtol=1e-5, atol=1e-6 * float(once[name].abs().max()))


def test_bfloat16_keeps_float32_weights():
    """bfloat16 computes in 16 bits near the float32 result, while weights stay float32, so that a tiny step is not lost."""
    half, full, batch = make_backend(dtype="bfloat16", lr=1e-6), make_backend(lr=1e-6), make_batch()
    exact, rough = full.log_probs(batch, temperature=1.0), half.log_probs(batch, temperature=1.0)
    assert torch.allclose(exact, rough, atol=0.2)
    assert not torch.equal(exact, rough)
    before = parameters(half)
    step(half)
    after = parameters(half)
    assert {value.dtype for value in after.values()} == {torch.float32}
    assert not same(before, after)


def test_the_weight_stream_is_what_the_manifest_says():
    """Names, shapes and types agree in order; it may be opened twice; a model loaded with it answers like the policy."""
    backend, other, batch = make_backend(), make_backend(seed=1), make_batch()
    step(backend)
    manifest, open_stream = backend.weights(version=7)
    assert manifest.version == 7
    assert backend.weights()[0].version == 1
    listed = [(spec.name, tuple(spec.shape), spec.dtype) for spec in manifest.tensors]
    for _ in range(2):
        streamed = dict(open_stream())
        assert [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in streamed.items()] == listed
    other.model.load_state_dict(streamed, strict=False)
    assert torch.equal(other.log_probs(batch, temperature=1.0), backend.log_probs(batch, temperature=1.0))


def test_a_saved_backend_continues_bit_for_bit(tmp_path):
    """Three steps, save, load elsewhere, three more: same bits, rates and counters as six without stopping."""
    options = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "total_steps": 9}
    straight, stopped, resumed = make_backend(**options), make_backend(**options), make_backend(seed=9, **options)
    for _ in range(3):
        step(straight)
        step(stopped)
    stopped.save(tmp_path / "actor")
    resumed.load(tmp_path / "actor")
    for _ in range(3):
        assert step(straight) == step(resumed)
    assert same(parameters(straight), parameters(resumed))
    assert (resumed.optimizer.num_steps, resumed.policy_version) == (6, 6)


def test_a_reference_must_be_the_one_of_the_run(tmp_path):
    """A run that keeps a reference does not go on with other weights as one, such as those of its own checkpoint; without one any do."""
    backend = make_backend(keep_reference=True)
    step(backend)
    backend.save(tmp_path / "state")
    backend.save_hf(tmp_path / "huggingface")
    make_backend(keep_reference=True).load(tmp_path / "state")
    options = LocalBackendOptions(device="cpu", keep_reference=True)
    trained = LocalBackend.from_pretrained(tmp_path / "huggingface", options)
    before = {name: tensor.clone() for name, tensor in trained.model.named_parameters()}
    with pytest.raises(
        CheckpointError, match=r"model.path must name the weights that the run began with, .*got others"
    ):
        trained.load(tmp_path / "state")
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.model.named_parameters())
    make_backend(seed=1).load(tmp_path / "state")


def test_a_fingerprint_tells_weights_apart():
    """It depends on names, types and every bit, and on nothing else."""
    tensors = {"a": torch.randn(3, 4, dtype=torch.bfloat16), "b": torch.tensor(1.0), "c": torch.tensor([True, False])}
    found = fingerprint(tensors)
    assert fingerprint({name: tensor.clone() for name, tensor in reversed(tensors.items())}) == found
    flipped = tensors["a"].clone()
    flipped.view(torch.int16)[1, 2] ^= 1
    others = [
        {**tensors, "a": flipped},
        {**tensors, "a": tensors["a"].t()},
        {**tensors, "b": torch.tensor(1.0, dtype=torch.float64)},
        {**tensors, "d": torch.zeros(0)},
        {name: tensor for name, tensor in tensors.items() if name != "c"},
    ]
    assert len({found, *map(fingerprint, others)}) == 1 + len(others)


def test_an_unstepped_backend_can_be_saved_and_loaded(tmp_path):
    """Before the first step there are no moments, and that is no fault."""
    backend, other = make_backend(), make_backend(seed=2)
    backend.save(tmp_path)
    other.load(tmp_path)
    assert step(backend) == step(other)


def test_a_foreign_or_damaged_state_is_refused_and_changes_nothing(tmp_path):
    """Another model's state, a cut file, a missing one, an unknown format: refused by name, the backend as it was."""
    backend = make_backend()
    step(backend)
    before = parameters(backend)
    bigger = make_backend(layers=3)
    step(bigger)
    bigger.save(tmp_path / "bigger")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* must be absent, got of shape"):
        backend.load(tmp_path / "bigger")
    backend.save(tmp_path / "cut")
    weights = tmp_path / "cut" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"whole weights\.safetensors"):
        backend.load(tmp_path / "cut")
    with pytest.raises(CheckpointError, match=r"backend\.json, got .*nowhere"):
        backend.load(tmp_path / "nowhere")
    backend.save(tmp_path / "format")
    state = tmp_path / "format" / "backend.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": "other-1"}))
    with pytest.raises(CheckpointError, match=r"format ostinato-backend.*, got other-1"):
        backend.load(tmp_path / "format")
    assert same(parameters(backend), before)


def test_the_exported_folder_is_an_ordinary_model(tmp_path):
    """transformers loads it, it answers like the policy, and the tokenizer's files came along unchanged."""
    source = tmp_path / "source"
    make_backend().model.save_pretrained(source)
    (source / "tokenizer.json").write_text('{"made": "up"}')
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "optimizer.pt").write_text("not for export")
    backend = LocalBackend.from_pretrained(source, LocalBackendOptions(device="cpu", lr=1e-2))
    step(backend)
    backend.save_hf(tmp_path / "export")
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    } <= names
    assert "optimizer.pt" not in names
    assert (tmp_path / "export" / "tokenizer.json").read_text() == '{"made": "up"}'
    loaded = LocalBackend(AutoModelForCausalLM.from_pretrained(tmp_path / "export"), LocalBackendOptions(device="cpu"))
    batch = make_batch()
    assert torch.equal(loaded.log_probs(batch, temperature=1.0), backend.log_probs(batch, temperature=1.0))


@pytest.mark.parametrize("text", ['{"eos_token_id": [5, 7], "temperature": 0.6}', None])
def test_what_a_model_says_of_sampling_travels_unchanged(tmp_path, monkeypatch, text):
    """Also what transformers reads and refuses to write, a temperature without `do_sample`; a model without a file keeps what its
    configuration says."""
    source, export = tmp_path / "source", tmp_path / "export"
    make_backend().model.save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": 9, "top_p": 0.9}))
    (source / "generation_config.json").unlink()
    if text is not None:
        (source / "generation_config.json").write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    backend = LocalBackend.from_pretrained("~/source", LocalBackendOptions(device="cpu"))
    before = backend.model.generation_config
    for _ in range(2):
        backend.save_hf(export)
        written = (export / "generation_config.json").read_text()
        assert written == text if text is not None else json.loads(written)["top_p"] == 0.9
        assert json.loads((export / "config.json").read_text())["eos_token_id"] == 9
    assert backend.model.generation_config is before


def test_the_configuration_decides_layout_and_compilation():
    """`model.use_remove_padding` and `actor.use_torch_compile` reach the backend; by default it packs, and the device decides on compilation."""
    keys = ["actor_rollout_ref.model.use_remove_padding=false", "actor_rollout_ref.actor.use_torch_compile=true"]
    default, chosen = (backend_options(load_config([], overrides), 1) for overrides in ([], keys))
    assert (default.use_remove_padding, default.use_torch_compile) == (True, None)
    assert (chosen.use_remove_padding, chosen.use_torch_compile) == (False, True)
