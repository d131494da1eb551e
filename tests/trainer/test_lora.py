"""Adapters: the base never changes, what leaves is merged, and everything else is as with a whole model."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ostinato_engines.transformers_server import TransformersServer
from ostinato_rollout import ServerPool
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.lora import LoraAdapters, LoraOptions, lora_options
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.actor import ModelConfig
from ostinato_trainer.errors import BackendError, CheckpointError, MissingExtraError
from ostinato_trainer.segments import Segment
from ostinato_trainer.sft.steps import sft_loss

peft = pytest.importorskip("peft")

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=20, **SHAPE, initializer_range=0.3, tie_word_embeddings=tied, attention_bias=True)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return LlamaForCausalLM(config)


def make_backend(model: Any = None, *, rank: int = 3, dtype: str = "float64", **changes: Any) -> LocalBackend:
    options = {"device": "cpu", "dtype": dtype, "lr": 3e-2, "weight_decay": 0.0, "keep_reference": True}
    lora = {name: changes.pop(name) for name in list(changes) if name in LoraOptions.__struct_fields__}
    options["lora"] = LoraOptions(rank=rank, **lora) if rank or lora else None
    return LocalBackend(make_model() if model is None else model, LocalBackendOptions(**options, **changes))  # pyright: ignore[reportArgumentType]


def make_batch() -> Batch:
    rows = [([1, 2, 3], [4, 5, 6, 7], [1, 0, 1, 1]), ([9], [10, 11], [1, 1])]
    return Batch.from_segments(
        [Segment(*row, None, group_id=str(at), trajectory_id=str(at), reward=1.0) for at, row in enumerate(rows)]
    )


def step(backend: LocalBackend, count: int = 1) -> None:
    for _ in range(count):
        backend.forward_backward([with_loss_weights(make_batch(), "token-mean")], sft_loss)
        backend.optimizer_step()


def log_probs(backend: LocalBackend, *, reference: bool = False) -> torch.Tensor:
    return backend.log_probs(make_batch(), temperature=0.7, reference=reference)


def sent(backend: LocalBackend) -> dict[str, torch.Tensor]:
    """What an engine would get, checked against the manifest."""
    manifest, stream = backend.weights(version=3)
    tensors = {name: tensor.clone() for name, tensor in stream()}
    assert [(spec.name, tuple(spec.shape)) for spec in manifest.tensors] == [
        (name, tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    return tensors


def base_weights(backend: LocalBackend) -> dict[str, torch.Tensor]:
    """The parameters that are not trained, under the names of a model without adapters."""
    return {
        name.replace(".base_layer", ""): value.clone()
        for name, value in backend.model.named_parameters()
        if "lora_" not in name
    }


def test_untrained_adapters_change_nothing() -> None:
    """At the start the model with adapters says bit for bit what the model without them says, and sends the same weights."""
    plain, adapted = make_backend(rank=0), make_backend()
    assert torch.equal(log_probs(adapted), log_probs(plain))
    theirs, ours = sent(plain), sent(adapted)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_only_adapters_are_trained_and_the_base_stays_bit_for_bit() -> None:
    """After some steps the base weights are as they were and hold no gradient, while the adapters and the log-probabilities moved."""
    backend = make_backend()
    assert all(".lora_" in name for name in backend.optimizer.parameters)
    assert len(backend.optimizer.parameters) == 2 * 2 * len(LINEAR)
    before, said = base_weights(backend), log_probs(backend)
    step(backend, 3)
    after = base_weights(backend)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(value.grad is None for name, value in backend.model.named_parameters() if "lora_" not in name)
    assert float((log_probs(backend) - said).abs().max()) > 1e-3


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.1)])
@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_say_what_the_adapters_say(dtype: str, bound: float, tied: bool) -> None:
    """A model without adapters that gets the sent weights has the log-probabilities of the one with adapters, within a bound; and sending
    merges nothing into the model itself."""
    backend = make_backend(make_model(tied=tied), dtype=dtype)
    step(backend, 3)
    expected, before = log_probs(backend), base_weights(backend)
    weights = sent(backend)
    other = LocalBackend(make_model(tied=tied), LocalBackendOptions(device="cpu", dtype=dtype))
    named = dict(other.model.named_parameters())
    assert set(weights) == set(named)
    with torch.no_grad():
        for name, value in weights.items():
            named[name].copy_(value)
    torch.testing.assert_close(log_probs(other), expected, rtol=0, atol=bound)
    assert all(torch.equal(base_weights(backend)[name], value) for name, value in before.items())
    assert sum(not torch.equal(weights[name], before[name]) for name in weights) == 2 * len(LINEAR)


def test_the_first_step_is_that_of_the_chain_rule() -> None:
    """The adapters' first gradients are those of the whole weights, projected: dB = scale * dW A^T and dA = 0, as B is 0."""
    adapted, whole = make_backend(alpha=6.0), make_backend(rank=0)
    for backend in (adapted, whole):
        backend.forward_backward([with_loss_weights(make_batch(), "token-mean")], sft_loss)
    ours, theirs = dict(adapted.model.named_parameters()), dict(whole.model.named_parameters())
    for name in [name.removesuffix(".lora_B.default.weight") for name in ours if ".lora_B." in name]:
        down, up = (ours[f"{name}.lora_{part}.default.weight"] for part in "AB")
        full = theirs[f"{name}.weight"].grad
        assert full is not None
        torch.testing.assert_close(up.grad, 6.0 / 3 * full @ down.T, rtol=1e-10, atol=1e-12)
        assert not bool(down.grad.any())  # pyright: ignore[reportOptionalMemberAccess]


def test_the_reference_is_the_model_without_adapters() -> None:
    """The reference needs no second copy and stays what the model said before training, bit for bit; asking it changes nothing."""
    backend = make_backend()
    before = log_probs(backend)
    num_parameters = sum(value.numel() for value in backend.model.parameters())
    step(backend, 2)
    now = log_probs(backend)
    assert torch.equal(log_probs(backend, reference=True), before)
    assert torch.equal(log_probs(backend), now)
    assert backend._reference is backend._lm
    step(backend)
    assert not torch.equal(log_probs(backend), now)
    assert sum(value.numel() for value in backend.model.parameters()) == num_parameters


def test_saved_and_loaded_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """What is saved are the adapters alone; a backend that loads them takes the same next step."""
    first, second = make_backend(), make_backend(seed=7)
    step(first, 2)
    first.save(tmp_path / "actor")
    assert set(load_file(tmp_path / "actor" / "weights.safetensors")) == set(first.optimizer.parameters)
    second.load(tmp_path / "actor")
    for backend in (first, second):
        step(backend)
    assert torch.equal(log_probs(first), log_probs(second))
    assert second.policy_version == 3
    with pytest.raises(
        CheckpointError, match=r"lora_A\.default\.weight must be of shape \[2, 16\], got of shape \[3, 16\]"
    ):
        make_backend(rank=2).load(tmp_path / "actor")
    with pytest.raises(CheckpointError, match="must be of shape"):
        make_backend(rank=0).load(tmp_path / "actor")


def test_adapters_must_rest_on_the_weights_that_they_were_trained_on(tmp_path: Path) -> None:
    """A checkpoint of adapters is not put on other weights of the same shapes, such as its own merged ones."""
    backend = make_backend()
    step(backend, 2)
    backend.save(tmp_path)
    merged = make_model()
    with torch.no_grad():
        for name, tensor in sent(backend).items():
            merged.get_parameter(name).copy_(tensor)
    with pytest.raises(CheckpointError, match=r"model.path must name the weights that the run began with"):
        make_backend(merged).load(tmp_path)
    make_backend().load(tmp_path)


def test_the_exported_folder_is_merged_and_has_the_adapters_beside_it(tmp_path: Path) -> None:
    """transformers loads the folder as an ordinary model with the adapters' log-probabilities, peft loads the adapters onto the base, and a
    snapshot that is written later is the model of its moment."""
    make_model().double().save_pretrained(tmp_path / "base")
    backend = make_backend()
    step(backend, 2)
    expected, snapshot = log_probs(backend), backend.snapshot()
    step(backend)
    snapshot.save_hf(tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert type(whole) is LlamaForCausalLM
    assert not any("lora" in name for name, _ in whole.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "lora_adapter").merge_and_unload()
    for model in (whole, theirs):
        again = LocalBackend(model.requires_grad_(True), LocalBackendOptions(device="cpu", dtype="float64"))
        torch.testing.assert_close(log_probs(again), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("family", "adapted"), [("gpt2", {"c_attn", "c_proj", "c_fc"}), ("mixtral", set(LINEAR[:4]))])
def test_unusual_layers_are_merged_right_or_left_alone(family: str, adapted: set[str], tmp_path: Path) -> None:
    """Transposed layers are merged as they lie, and experts that are one tensor, like their router, get no adapter; the exported folder says
    what the adapters say."""
    torch.manual_seed(0)
    model = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2)),
        "mixtral": lambda: MixtralForCausalLM(
            MixtralConfig(vocab_size=20, **SHAPE, num_key_value_heads=2, num_local_experts=2)  # pyright: ignore[reportArgumentType, reportCallIssue]
        ),
    }[family]()
    backend = make_backend(model, dtype="float32")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in backend.optimizer.parameters} == adapted
    before = log_probs(backend)
    step(backend, 2)
    backend.save_hf(tmp_path)
    again = LocalBackend.from_pretrained(tmp_path, LocalBackendOptions(device="cpu"))
    torch.testing.assert_close(log_probs(again), log_probs(backend), rtol=0, atol=1e-5)
    assert float((log_probs(again) - before).abs().max()) > 1e-3


def test_adapters_of_a_folder_are_gone_on_from(tmp_path: Path) -> None:
    """`lora_adapter_path` brings values, rank, alpha and modules; another rank or a folder without adapters is refused."""
    backend = make_backend(alpha=5.0, target_modules=["q_proj", "down_proj"])
    step(backend, 2)
    backend.save_hf(tmp_path)
    again = make_backend(rank=0, adapter_path=str(tmp_path / "lora_adapter"))
    assert torch.equal(log_probs(again), log_probs(backend))
    assert set(again.optimizer.parameters) == set(backend.optimizer.parameters)
    with pytest.raises(CheckpointError, match=r"lora_rank must be that of the adapters in .*, 3, or 0, got 4"):
        make_backend(rank=4, adapter_path=str(tmp_path / "lora_adapter"))
    with pytest.raises(CheckpointError, match="lora_adapter_path must hold adapters as peft writes them"):
        make_backend(rank=0, adapter_path=str(tmp_path / "nothing"))
    torch.manual_seed(0)
    deeper = LlamaForCausalLM(LlamaConfig(vocab_size=20, **{**SHAPE, "num_hidden_layers": 3}))  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.self_attn\.q_proj\.lora_A\.weight must be of shape .*, got absent"
    ):
        make_backend(deeper, rank=0, adapter_path=str(tmp_path / "lora_adapter"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("alpha_pattern", {"q_proj": 3}),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2], [0, 2]]),
        ("trainable_token_indices", [1]),
    ],
)
def test_adapters_that_are_more_than_low_rank_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    """Whatever would be merged wrongly, such as DoRA, trained biases or first values that move the base, is refused by name."""
    make_backend().save_hf(tmp_path)
    file = tmp_path / "lora_adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(CheckpointError, match=name):
        make_backend(rank=0, adapter_path=str(tmp_path / "lora_adapter"))


def test_other_first_values_are_plain_still(tmp_path: Path) -> None:
    """Adapters that began elsewhere, on some layers only and with dropout are read and give the log-probabilities that they had."""
    backend = make_backend()
    step(backend, 2)
    backend.save_hf(tmp_path)
    file = tmp_path / "lora_adapter" / "adapter_config.json"
    changes = {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "layers_to_transform": [0, 1]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    again = make_backend(rank=0, adapter_path=str(tmp_path / "lora_adapter"))
    assert torch.equal(log_probs(again), log_probs(backend))


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        ("all-linear", None, LINEAR),
        (["q_proj", "v_proj"], None, ("q_proj", "v_proj")),
        (r".*\.mlp\.(up|down)_proj", None, ("up_proj", "down_proj")),
        ("all-linear", ["gate_proj", "up_proj", "down_proj"], ("q_proj", "k_proj", "v_proj", "o_proj")),
        (["self_attn.q_proj"], None, ("q_proj",)),
    ],
)
def test_modules_are_chosen_as_peft_chooses_them(targets: Any, excluded: Any, expected: tuple[str, ...]) -> None:
    """all-linear leaves out the output layer; lists are ends of names, a text is a regular expression; exclusions win."""
    backend = make_backend(target_modules=targets, exclude_modules=excluded)
    found = {name.split(".lora_")[0].rpartition(".")[2] for name in backend.optimizer.parameters}
    assert found == set(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_modules": ["q_proj", "w_pack"]},
            "must name linear layers of the model, got 'w_pack'; choose among q_proj, k_proj",
        ),
        ({"target_modules": []}, "must name linear layers of the model, got none; choose among q_proj"),
        ({"target_modules": "nothing.*"}, "must name linear layers of the model, got 'nothing"),
        ({"target_modules": "("}, "must be a regular expression or a list of names"),
        ({"target_modules": ["q_proj", "lm_head"]}, "got 'lm_head'; choose among q_proj"),
        ({"target_modules": ".*(q_proj|embed_tokens)"}, r"linear layers only, .*, got model.embed_tokens"),
        ({"exclude_modules": ["w_pack"]}, r"exclude_modules must name linear layers of the model, got 'w_pack'"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "must leave a module"),
        ({"rank": -1}, "lora_rank must be at least 1"),
        ({"alpha": 0}, "lora_alpha above 0"),
    ],
)
def test_wrong_modules_are_refused_with_those_that_exist(changes: dict[str, Any], message: str) -> None:
    """A name that no layer has, layers that cannot have adapters, nothing left, no rank: one message with the choices."""
    model = make_model()
    with pytest.raises(BackendError, match=message):
        LoraAdapters(model, LoraOptions(**{"rank": 2, **changes}))
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_first_values_follow_the_seed_alone() -> None:
    """Adapters begin alike for one seed whatever was drawn before, and making them draws nothing from the run's generator."""
    states = []
    for noise in (0, 5):
        torch.manual_seed(1)
        torch.rand(noise)
        before = torch.get_rng_state()
        adapters = LoraAdapters(make_qwen(), LoraOptions(rank=2, seed=3))
        assert torch.equal(torch.get_rng_state(), before)
        states.append({name: value.clone() for name, value in adapters.parameters().items()})
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    other = LoraAdapters(make_qwen(), LoraOptions(rank=2, seed=4)).parameters()
    assert any(not torch.equal(states[0][name], value) for name, value in other.items())


def make_qwen() -> Qwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=20, **SHAPE, num_key_value_heads=2, head_dim=8))  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_a_missing_extra_is_said_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without peft a configuration with adapters is refused with the command that installs it; one without them needs it not."""
    monkeypatch.setattr("ostinato_trainer.backends.lora.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ostinato-trainer\[lora\]'"):
        lora_options(ModelConfig(lora_rank=2), seed=0)
    assert lora_options(ModelConfig(), seed=0) is None


def test_the_manifest_says_what_adapters_cannot_change() -> None:
    """With adapters on some layers the manifest names the blocks that they touch, and a base that stays from step to step and depends on model
    and layers; what it leaves out keeps its bits. Without adapters everything may change."""
    backend = make_backend(target_modules=["v_proj"])
    first, _ = backend.weights(version=0)
    before = sent(backend)
    step(backend, 2)
    later, _ = backend.weights(version=2)
    after = sent(backend)
    assert later.base == first.base != ""
    assert set(first.changing) == {name for name in before if ".self_attn." in name}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("v_proj.weight")}
    assert moved <= set(first.changing)
    assert make_backend(target_modules=["q_proj"]).weights()[0].base == first.base  # the same blocks of the same model
    assert make_backend(target_modules=["up_proj"]).weights()[0].base != first.base
    with torch.no_grad():
        other = make_model()
        other.lm_head.weight.add_(1.0)
    assert make_backend(other, target_modules=["v_proj"]).weights()[0].base != first.base
    assert make_backend(rank=0).weights()[0].partial() is None


async def test_an_engine_that_gets_adapted_layers_alone_has_the_whole_policy(caplog: pytest.LogCaptureFixture) -> None:
    """Through a pool, sync after sync: the first brings all tensors, the others those that adapters touch, and the engine has the merged bits."""
    model = make_model().float()
    backend, served = make_backend(model, dtype="float32", target_modules=["down_proj"]), make_model().float()
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.zero_()
    pool = ServerPool([TransformersServer(served, max_model_len=32)])
    await pool.start()
    try:
        with caplog.at_level(logging.INFO, logger="ostinato_rollout"):
            for version in range(3):
                manifest, stream = backend.weights(version=version)
                await pool.update_weights(manifest, stream, replayable=True)
                merged = sent(backend)
                assert all(torch.equal(tensor, merged[name]) for name, tensor in served.named_parameters())
                await pool.withdraw_weights()
                step(backend)
        assert caplog.text.count(f"got 6 of {len(manifest.tensors)} tensors") == 2
    finally:
        await pool.shutdown()
