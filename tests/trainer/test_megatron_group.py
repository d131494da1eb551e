"""A `RankGroup` of Megatron ranks in processes of their own, as training runs them, beside `LocalBackend`; on the CPU with gloo."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.megatron.options import MegatronOptions, MegatronRankFactory
from ostinato_trainer.backends.megatron.shape import MegatronLayout
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions
from ostinato_trainer.backends.ranks.workers import RankDiedError
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.segments import Segment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None or torch.cuda.is_available(),
        reason="no megatron.core here, or a GPU; .ci/megatron.py makes an environment for CPUs",
    ),
]

OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4}


@pytest.fixture(autouse=True)
def _factories_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find megatron_on_cpu beside this file."""
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model's folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def group_of(model: Path, num_ranks: int, tensor: int = 1, pipeline: int = 1) -> RankGroup:
    """A group with Megatron ranks."""
    import megatron_on_cpu  # pyright: ignore[reportMissingImports]

    layout = MegatronLayout(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    factory = MegatronRankFactory(path=str(model), options=MegatronOptions(layout=layout, **OPTIMIZER))
    options = RankProcessOptions(num_ranks=num_ranks, collective_timeout_s=120.0, call_timeout_s=200.0)
    return RankGroup(RankProcesses(options), megatron_on_cpu.OnCPU(factory))


def batch_of(num_sequences: int = 5) -> Batch:
    """Sequences of unlike length."""
    segments = []
    for place in range(num_sequences):
        length = 3 + 4 * place
        ids = [(7 * place + 3 * index) % 96 for index in range(length)]
        segments.append(Segment(ids[:1], ids[1:], [1] * (length - 1), None, "g", f"t{place}", 0.0))
    return Batch.from_segments(segments)


@pytest.mark.parametrize(("num_ranks", "tensor", "pipeline"), [(2, 1, 1), (2, 1, 2)])
def test_a_group_is_one_backend(model: Path, tmp_path: Path, num_ranks: int, tensor: int, pipeline: int) -> None:
    """Log-probabilities, metrics, norms, streamed weights and what is saved are those of one device, whatever the layout; after a checkpoint is
    loaded the weights are those that were saved. A rank that is killed ends the next call by name, and none is left."""
    import megatron_on_cpu  # pyright: ignore[reportMissingImports]

    local = LocalBackend.from_pretrained(model, LocalBackendOptions(device="cpu", **OPTIMIZER))
    group = group_of(model, num_ranks, tensor, pipeline)
    loss, batch = megatron_on_cpu.WeightedLogProbs(0.1), batch_of()
    try:
        torch.testing.assert_close(
            group.log_probs(batch, temperature=0.7), local.log_probs(batch, temperature=0.7), rtol=0, atol=5e-6
        )
        parts = [batch.select([0, 1, 2]), batch.select([3, 4])]
        for _ in range(2):
            ours = group.forward_backward(parts, loss, temperature=0.7, entropy=EntropyMode.GRADIENT)
            theirs = local.forward_backward(parts, loss, temperature=0.7, entropy=EntropyMode.GRADIENT)
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
            mine, other = group.optimizer_step(), local.optimizer_step()
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        expected = dict(local.weights()[1]())
        manifest, stream = group.weights()
        streamed = {name: tensor.clone() for name, tensor in stream()}
        assert [spec.name for spec in manifest.tensors] == list(streamed)
        assert manifest.version == group.policy_version == 2
        for name, tensor in expected.items():
            torch.testing.assert_close(streamed[name], tensor.detach(), rtol=0, atol=2e-6)
        group.save(tmp_path / "checkpoint")
        group.forward_backward(parts, loss)
        group.optimizer_step()
        group.load(tmp_path / "checkpoint")
        assert group.policy_version == 2
        loaded = {name: tensor.clone() for name, tensor in group.weights()[1]()}
        assert all(torch.equal(loaded[name], tensor) for name, tensor in streamed.items())
        group.save_hf(tmp_path / "huggingface")
        workers = group._workers
        assert isinstance(workers, RankProcesses)
        os.kill(workers.process_ids[1], signal.SIGKILL)
        with pytest.raises(RankDiedError, match="rank 1"):
            group.forward_backward(parts, loss)
        assert workers.process_ids == []
    finally:
        group.close()
    exported = dict(LocalBackend.from_pretrained(tmp_path / "huggingface").weights()[1]())
    assert all(torch.equal(exported[name].detach().cpu(), tensor) for name, tensor in streamed.items())


def test_a_cpu_is_refused(model: Path) -> None:
    """Without what these tests do to it, Megatron has no use for a CPU: that is said by the key when the ranks start."""
    factory = MegatronRankFactory(path=str(model), options=MegatronOptions(**OPTIMIZER))
    with pytest.raises(
        BackendError, match=r"trainer\.device must be cuda with actor_rollout_ref\.actor\.strategy=megatron, got cpu"
    ):
        RankGroup(
            RankProcesses(RankProcessOptions(num_ranks=1, collective_timeout_s=120.0, call_timeout_s=200.0)), factory
        )
