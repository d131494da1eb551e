"""What is written of a model later is what it was at the moment of its snapshot."""

import filecmp
import json
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato_trainer.backends.critic import LocalCritic
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.lora import LoraOptions
from ostinato_trainer.backends.state import ModelState
from ostinato_trainer.backends.value_model import load_value_model
from ostinato_trainer.batch import Batch
from ostinato_trainer.segments import Segment

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


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=2)])
def test_a_snapshot_is_written_while_the_model_computes_in_another_type(
    tmp_path: Path, lora: LoraOptions | None
) -> None:
    """The thread that writes it meets the model in the middle of a pass: weights and configuration are those of the moment of the snapshot."""
    if lora is not None:
        pytest.importorskip("peft")
    torch.manual_seed(1)
    options = LocalBackendOptions(device="cpu", dtype="bfloat16", lr=0.1, lora=lora)
    backend = LocalBackend(LlamaForCausalLM(LlamaConfig(**SHAPE)), options)  # pyright: ignore[reportArgumentType]
    for _ in range(2):  # the first leaves half of an adapter's matrices where they were
        step(backend)
    snapshot = backend.snapshot()
    snapshot.save_hf(tmp_path / "then")

    def write(module: torch.nn.Module, *_: object) -> None:
        assert module.weight.dtype == torch.bfloat16
        writer = Thread(target=snapshot.save_hf, args=(tmp_path / "later",))
        writer.start()
        writer.join()

    norm = next(module for name, module in backend.model.named_modules() if name.endswith("model.norm"))
    hook = norm.register_forward_hook(write)
    backend.log_probs(Batch.from_segments([Segment([1, 2], [3, 4], [1, 1], None, "0", "0", 1.0)]), temperature=1.0)
    hook.remove()
    must_be_alike(tmp_path / "then", tmp_path / "later")
    assert {tensor.dtype for tensor in load_file(tmp_path / "later" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "later" / "config.json").read_text())["dtype"] == "float32"


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
