"""A value model: the policy's backbone with a scalar head, zero or the folder's own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, LlamaConfig, LlamaForCausalLM

from ostinato_trainer.backends.causal_lm import load_causal_lm
from ostinato_trainer.backends.megatron.mapping import Block, Part, Split
from ostinato_trainer.backends.megatron.pretrained import PretrainedTensors
from ostinato_trainer.backends.value_model import ValueModel, load_value_model
from ostinato_trainer.errors import BackendError

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def policy_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return folder


def load(folder: Path) -> ValueModel:
    return load_value_model(folder, dtype=torch.float32, device=CPU)


def test_a_policys_folder_makes_a_critic_that_says_nothing_yet(tmp_path: Path) -> None:
    """The backbone has the policy's weights bit for bit, its output layer is gone, and every value is 0."""
    critic = load(policy_folder(tmp_path))
    stored = {name: value for name, value in load_file(tmp_path / "model.safetensors").items() if "lm_head" not in name}
    found = dict(critic.named_parameters())
    assert set(found) == {*stored, "score.weight", "score.bias"}
    assert all(torch.equal(found[name], value) for name, value in stored.items())
    assert critic(input_ids=torch.tensor([[1, 2, 3]])).logits.tolist() == [[[0.0], [0.0], [0.0]]]


def test_a_folder_with_a_scalar_head_keeps_it(tmp_path: Path) -> None:
    """A classifier of one label, as reward models are stored, gives the values that transformers computes of it."""
    torch.manual_seed(1)
    theirs = AutoModelForTokenClassification.from_config(LlamaConfig(**SHAPE, num_labels=1)).eval()  # pyright: ignore[reportArgumentType, reportCallIssue]
    theirs.save_pretrained(tmp_path)
    ids = torch.tensor([[4, 9, 1]])
    assert torch.equal(load(tmp_path).eval()(input_ids=ids).logits, theirs(ids).logits)


def test_the_head_of_a_hub_id_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward model that the hub's client has fetched gives its head to a critic of either kind, as its folder does."""
    folder = tmp_path / "models--org--reward" / "snapshots" / "abc"
    AutoModelForTokenClassification.from_config(LlamaConfig(**SHAPE, num_labels=1)).save_pretrained(folder)  # pyright: ignore[reportArgumentType, reportCallIssue]
    (tmp_path / "models--org--reward" / "refs").mkdir()
    (tmp_path / "models--org--reward" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    stored = load_file(folder / "model.safetensors")["score.weight"]
    assert torch.equal(load(Path("org/reward")).score.weight, stored)
    split = PretrainedTensors("org/reward", key="critic.model.path")
    assert split.value_head(16)[0] == "score.weight"
    found = split.of_block(Block("end", 0, (Part("score.weight", ("score.weight",), ((1, 16),), Split.WHOLE),)))
    assert torch.equal(found["score.weight"], stored)


def test_a_head_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    """A scalar head in files of pickles, from which nothing is read here, is an error, and no critic that begins at zero."""
    policy_folder(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(stored, tmp_path / "pytorch_model.bin")
    assert not load(tmp_path).score.weight.any()
    torch.save({**stored, "score.weight": torch.ones(1, 16)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BackendError, match=r"must be stored in safetensors.*change critic\.model\.path"):
        load(tmp_path)


def test_a_head_may_be_more_exact_than_its_backbone() -> None:
    """Where the backbone computes in 16 bits, as sharded ones do, the head's own type decides that of the values."""
    backbone = LlamaForCausalLM(LlamaConfig(**SHAPE)).base_model.bfloat16()  # pyright: ignore[reportArgumentType, reportCallIssue]
    values = ValueModel(backbone, torch.nn.Linear(16, 1))(input_ids=torch.tensor([[4, 9, 1]])).logits
    assert values.dtype == torch.float32
    assert bool(values.any())


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    """A classifier of several labels is no critic, and the message says so."""
    policy_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "score.weight": torch.zeros(3, 16)}, file, metadata={"format": "pt"})
    with pytest.raises(BackendError, match=r"critic.model.path must hold a head of width 1 or none, got .* \[3, 16\]"):
        load(tmp_path)


def test_a_folder_without_a_model_is_refused_under_the_critics_key(tmp_path: Path) -> None:
    """The message names critic.model.path, not the policy's key."""
    with pytest.raises(BackendError, match=r"fix critic\.model\.path"):
        load(tmp_path / "nothing")


def test_weights_that_are_missing_are_not_random(tmp_path: Path) -> None:
    """A folder that lacks a layer's weights is refused for policy and critic; one that lacks the output layer is a critic's, and no policy's."""
    policy_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    cpu = torch.device("cpu")
    for lacks, is_critic in (("lm_head.weight", True), ("model.layers.0.mlp.up_proj.weight", False)):
        save_file({name: value for name, value in stored.items() if name != lacks}, file, metadata={"format": "pt"})
        with pytest.raises(BackendError, match=rf"got .* without {lacks}; .*actor_rollout_ref\.model\.path"):
            load_causal_lm(tmp_path, dtype=torch.float32, device=cpu)
        if is_critic:
            load(tmp_path)
            continue
        with pytest.raises(BackendError, match=rf"got .* without {lacks}; .*critic\.model\.path"):
            load(tmp_path)
