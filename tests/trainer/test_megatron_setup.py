"""What of a configuration keeps a run from training with Megatron, and what the ranks are told; needs no Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato_trainer.backends.local import LocalBackendOptions
from ostinato_trainer.backends.megatron import setup
from ostinato_trainer.backends.megatron.setup import megatron_factory, megatron_problems
from ostinato_trainer.backends.memory import EngineShare
from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.config.strategy_checks import unread_strategy_keys
from ostinato_trainer.errors import ConfigError

MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "is_megatron_installed", lambda: True)


def config_of(folder: Path, *overrides: str, model: dict[str, Any] = MODEL) -> Config:
    """A configuration that trains with Megatron a model of which there is a config.json."""
    (folder / "config.json").write_text(json.dumps(model))
    keys = (f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.actor.strategy=megatron", *overrides)
    return load_config([], list(keys))


def test_a_sound_run_has_no_problems(tmp_path: Path) -> None:
    """Tensor and pipeline ranks that divide model and world are taken, and reach the ranks with optimizer, precision and reference."""
    config = config_of(
        tmp_path,
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.dtype=bfloat16",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    assert megatron_problems(config) == []
    factory = megatron_factory(
        config,
        LocalBackendOptions(
            lr=3e-6,
            total_steps=7,
            lr_scheduler_type="linear",
            dtype="bfloat16",
            keep_reference=True,
            engine=EngineShare(fraction=0.4),
        ),
        enable_gradient_checkpointing=True,
    )
    options = factory.options
    assert factory.path == str(tmp_path)
    layout = options.layout
    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, layout.splits_tokens) == (
        2,
        2,
        True,
    )
    assert (options.dtype, options.keep_reference, options.enable_gradient_checkpointing) == ("bfloat16", True, True)
    assert (options.lr, options.total_steps, options.lr_scheduler_type) == (3e-6, 7, "linear")
    assert options.engine.fraction == 0.4


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor_rollout_ref.model.lora_rank=8", "lora_rank must be 0"),
        ("actor_rollout_ref.actor.use_torch_compile=true", "use_torch_compile must be false"),
        ("actor_rollout_ref.model.use_remove_padding=false", "use_remove_padding must be true"),
        ("trainer.n_gpus_per_node=3", "must divide the number of ranks, got 2 x 1 with 3"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3", "must divide the number of ranks"),
    ],
)
def test_what_cannot_run_is_said_with_its_key(tmp_path: Path, override: str, named: str) -> None:
    """Each thing that Megatron does not do here is one sentence with the key to change."""
    keys = ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2", override)
    (problem,) = megatron_problems(config_of(tmp_path, *keys))
    assert named in problem
    assert "actor_rollout_ref." in problem


def test_a_model_that_is_not_mapped_is_said_before_the_start(tmp_path: Path) -> None:
    """config.json is enough to refuse a model, and its reading is not tried with another strategy."""
    unmapped = {**MODEL, "model_type": "gemma3"}
    (problem,) = megatron_problems(config_of(tmp_path, model=unmapped))
    assert "gemma3" in problem
    assert megatron_problems(config_of(tmp_path, "actor_rollout_ref.actor.strategy=local", model=unmapped)) == []


def test_a_critic_is_split_as_the_policy_is(tmp_path: Path) -> None:
    """A critic reaches the ranks with its own folder and optimizer, in the policy's layout; one that does not divide is said before the start."""
    keys = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")
    config = config_of(tmp_path, *keys)
    factory = megatron_factory(
        config,
        LocalBackendOptions(lr=3e-6),
        enable_gradient_checkpointing=False,
        critic=("critic folder", LocalBackendOptions(lr=1e-4, dtype="bfloat16")),
    )
    assert factory.critic is not None
    path, options = factory.critic
    assert (path, options.lr, options.dtype) == ("critic folder", 1e-4, "bfloat16")
    assert options.layout == factory.options.layout
    narrow = tmp_path / "critic"
    narrow.mkdir()
    (narrow / "config.json").write_text(json.dumps({**MODEL, "num_key_value_heads": 1}))
    keys = (*keys, f"critic.model.path={narrow}")
    (problem,) = megatron_problems(config_of(tmp_path, *keys, "algorithm.adv_estimator=gae"))
    assert "the key-value heads of the critic, got 2 with 1" in problem
    for without_critic in ("grpo", "no_such_estimator"):  # the latter is said elsewhere
        assert megatron_problems(config_of(tmp_path, *keys, f"algorithm.adv_estimator={without_critic}")) == []


def test_an_absent_megatron_is_said_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the run does not start."""
    monkeypatch.setattr(setup, "is_megatron_installed", lambda: False)
    (problem,) = megatron_problems(config_of(tmp_path))
    assert "ostinato-trainer[megatron]" in problem


@pytest.mark.parametrize(
    "key",
    [
        "context_parallel_size",
        "expert_model_parallel_size",
        "param_offload",
        "grad_offload",
        "optimizer_offload",
        "use_distributed_optimizer",
        "use_mbridge",
        "override_transformer_config.recompute_granularity",
    ],
)
def test_keys_of_other_systems_are_told_why_they_are_none(tmp_path: Path, key: str) -> None:
    """What is known of Megatron elsewhere and has no effect here is an error that says why."""
    with pytest.raises(ConfigError, match="is not a key: "):
        config_of(tmp_path, f"actor_rollout_ref.actor.megatron.{key}=true")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tensor_parallel_size", "tensor_model_parallel_size"),
        ("tp_size", "tensor_model_parallel_size"),
        ("pp_size", "pipeline_model_parallel_size"),
    ],
)
def test_short_names_of_the_layout_are_told_the_key_beside_them(tmp_path: Path, key: str, meant: str) -> None:
    """Not the engine's of the same name."""
    prefix = "actor_rollout_ref.actor.megatron"
    with pytest.raises(ConfigError, match=f"write {prefix}.{meant}$"):
        config_of(tmp_path, f"{prefix}.{key}=2")


def test_a_folder_that_holds_no_model_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """A config.json with a number that no model has is a sentence with the key."""
    (problem,) = megatron_problems(config_of(tmp_path, model={**MODEL, "num_attention_heads": 0}))
    assert "num_attention_heads must be at least 1" in problem
    assert "fix actor_rollout_ref.model.path" in problem


@pytest.mark.parametrize(("tensor", "is_unread"), [(1, True), (2, False)])
def test_splitting_tokens_over_one_rank_is_said(tmp_path: Path, tensor: int, is_unread: bool) -> None:
    """Where one rank has whole layers, sequence_parallel splits nothing, and that is said; where several share them, it can be turned off."""
    prefix = "actor_rollout_ref.actor.megatron"
    keys = (f"{prefix}.tensor_model_parallel_size={tensor}", f"{prefix}.sequence_parallel=false")
    config = config_of(tmp_path, "trainer.n_gpus_per_node=2", *keys)
    rules = unread_strategy_keys(config)
    assert any(applies and f"{prefix}.sequence_parallel" in unread for applies, _, unread in rules) is is_unread
    factory = megatron_factory(config, LocalBackendOptions(total_steps=1), enable_gradient_checkpointing=False)
    assert factory.options.layout.splits_tokens is False
