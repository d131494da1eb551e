"""What is written of a model later is what it was at the moment of its snapshot."""

import filecmp
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato_trainer.backends.critic import LocalCritic
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.state import ModelState
from ostinato_trainer.backends.value_model import load_value_model

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def step(trained: LocalBackend | LocalCritic) -> None:
    """One optimizer step by a gradient that is as good as any."""
    torch.manual_seed(0)
    for parameter in trained.optimizer.parameters.values():
        parameter.grad = torch.randn_like(parameter)
    assert not trained.optimizer_step().skipped


def relative_files(folder: Path) -> list[str]:
    """All files below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def must_be_alike(first: Path, second: Path) -> None:
    """Both folders hold the same files, byte for byte."""
    names = relative_files(first)
    assert names
    assert names == relative_files(second)
    assert not [name for name in names if not filecmp.cmp(first / name, second / name, shallow=False)]


@pytest.mark.parametrize("tied", [True, False])
def test_a_snapshot_is_written_as_the_backend_would_have_been(tmp_path: Path, tied: bool) -> None:
    """Steps taken after the snapshot change nothing of it: its files are those that the backend wrote at that moment, tied weights too."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))  # pyright: ignore[reportArgumentType]
    backend = LocalBackend(model, LocalBackendOptions(device="cpu", lr=0.1))
    step(backend)
    backend.save(tmp_path / "then" / "actor")
    backend.save_hf(tmp_path / "then" / "huggingface")
    snapshot = backend.snapshot()
    step(backend)
    snapshot.save(tmp_path / "later" / "actor")
    snapshot.save_hf(tmp_path / "later" / "huggingface")
    must_be_alike(tmp_path / "then", tmp_path / "later")
    backend.load(tmp_path / "later" / "actor")
    assert backend.policy_version == 1
    backend.save_hf(tmp_path / "loaded")
    must_be_alike(tmp_path / "then" / "huggingface", tmp_path / "loaded")


def test_a_snapshot_of_a_critic(tmp_path: Path) -> None:
    """The critic's snapshot too is what the critic was."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "model")  # pyright: ignore[reportArgumentType]
    value_model = load_value_model(tmp_path / "model", dtype=torch.float32, device=torch.device("cpu"))
    critic = LocalCritic(value_model, LocalBackendOptions(device="cpu", lr=0.1))
    step(critic)
    critic.save(tmp_path / "then")
    snapshot = critic.snapshot()
    assert isinstance(snapshot, ModelState)
    step(critic)
    snapshot.save(tmp_path / "later")
    must_be_alike(tmp_path / "then", tmp_path / "later")
