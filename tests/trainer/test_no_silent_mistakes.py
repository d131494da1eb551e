"""What cannot work is refused before anything starts, by the keys to change: layouts, batches, vocabularies, model types."""

import json
from pathlib import Path

import pytest

from ostinato_trainer.config.checks import check_runnable
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def problems(folder: Path, model: dict[str, object], *overrides: str) -> str:
    """What is said of a run with such a model, which has no weights yet."""
    (folder / "config.json").write_text(json.dumps(QWEN3 | model))
    keys = [f"actor_rollout_ref.model.path={folder}", "data.train_files=a.parquet", f"{ROLLOUT}.n=4", *overrides]
    with pytest.raises(ConfigError) as refused:
        check_runnable(load_config([], keys))
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "overrides", "parts"),
    [
        (
            {},
            ("trainer.n_gpus_per_node=3", f"{MEGATRON}.tensor_model_parallel_size=2"),
            ("got 2 x 1 with 3", "n_gpus_per_node"),
        ),
        (
            {"vocab_size": 63},
            ("trainer.n_gpus_per_node=2", f"{MEGATRON}.tensor_model_parallel_size=2"),
            ("tensor_model_parallel_size must divide the vocabulary of the model, got 2 with 63",),
        ),
        (
            {"num_key_value_heads": 2},
            ("trainer.n_gpus_per_node=4", f"{MEGATRON}.tensor_model_parallel_size=4"),
            ("tensor_model_parallel_size must divide the key-value heads of the model, got 4 with 2",),
        ),
        (
            {},
            ("trainer.n_gpus_per_node=3", f"{MEGATRON}.pipeline_model_parallel_size=3"),
            ("pipeline_model_parallel_size must divide the layers of the model, got 3 with 4",),
        ),
        ({"model_type": "gpt2"}, (), ("model type must be one of", "got gpt2", f"use {ACTOR}.strategy=fsdp2 or local")),
        ({"attention_bias": True}, (), ("must be without a bias in attention", f"use {ACTOR}.strategy=fsdp2 or local")),
    ],
    ids=["ranks", "vocabulary", "heads", "stages", "model type", "part of a model"],
)
def test_a_model_that_megatron_cannot_share_out_is_refused(
    tmp_path: Path, model: dict[str, object], overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    """Ranks that do not divide, a vocabulary, heads or layers that do not split, a model that is not mapped: named with the keys, before a process
    starts or Megatron is imported."""
    said = problems(tmp_path, model, f"{ACTOR}.strategy=megatron", *overrides)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ("data.train_batch_size=10", f"{ACTOR}.ppo_mini_batch_size=4"),
            ("data.train_batch_size must be a multiple of", "ppo_mini_batch_size=10"),
        ),
        (("critic.ppo_mini_batch_size=100",), ("must be a multiple of critic.ppo_mini_batch_size",)),
        (
            (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=100"),
            ("must hold one whole sequence", "=1024 or more"),
        ),
        (
            (f"{ROLLOUT}.max_model_len=600",),
            ("must be at most actor_rollout_ref.rollout.max_model_len", "max_model_len=1024"),
        ),
        (("trainer.n_gpus_per_node=2",), ("trainer.n_gpus_per_node must be 1", "strategy=fsdp2")),
        (
            ("trainer.nnodes=2", f"{ACTOR}.strategy=fsdp2"),
            ("trainer.nnodes must be 1 with trainer.executor=local", "executor=ray"),
        ),
        (("trainer.device=abacus",), ("trainer.device: device must be auto or one of", "got 'abacus'")),
        (
            ("trainer.device=cuda:1", f"{ACTOR}.strategy=fsdp2", "trainer.n_gpus_per_node=2"),
            ("trainer.device must be a kind of device", "got cuda:1; write trainer.device=cuda"),
        ),
        (
            ("trainer.executor=ray", "trainer.n_gpus_per_node=3", f"{ROLLOUT}.tensor_model_parallel_size=2"),
            ("trainer.n_gpus_per_node must be a multiple of actor_rollout_ref.rollout.tensor_model_parallel_size",),
        ),
    ],
    ids=["mini-batch", "critic", "tokens", "context", "devices", "nodes", "device", "device of ranks", "replicas"],
)
def test_batches_and_devices_that_do_not_divide_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    """Sizes that do not divide each other, or cannot hold what they must, are named with what to write, whatever the strategy."""
    said = problems(tmp_path, {}, *overrides)
    assert all(part in said for part in parts), said
