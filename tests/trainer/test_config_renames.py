"""The tables of renamed and unread keys agree with the tree."""

import re

import pytest

from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.config.renames import RENAMED_NAMES, RENAMED_PATHS
from ostinato_trainer.config.schema import schema_keys, schema_sections
from ostinato_trainer.config.unread import REFUSED_VALUES, UNREAD_NAMES, UNREAD_SECTIONS
from ostinato_trainer.errors import ConfigError

PLACES = {*schema_keys(Config), *schema_sections(Config)}


@pytest.mark.parametrize("old", [*RENAMED_NAMES, *RENAMED_PATHS])
def test_every_replacement_exists(old: str) -> None:
    """What a message tells to write is a key or node of the tree, and the old spelling is none."""
    assert {**RENAMED_NAMES, **RENAMED_PATHS}[old] in PLACES
    assert old not in PLACES


@pytest.mark.parametrize("old", RENAMED_NAMES)
def test_every_renamed_name_is_an_error_that_names_the_replacement(old: str) -> None:
    """A name that other frameworks use fails naming ours, wherever it stands."""
    for place in (old, f"trainer.{old}", f"actor_rollout_ref.rollout.{old}"):
        with pytest.raises(ConfigError) as caught:
            load_config([], [f"{place}=1"])
        assert RENAMED_NAMES[old] in str(caught.value)


def test_unread_names_are_no_keys_of_the_tree() -> None:
    """Nothing is refused as unread that the tree has."""
    last_names = {path.rpartition(".")[2] for path in PLACES}
    assert not last_names & set(UNREAD_NAMES)
    assert not last_names & set(RENAMED_NAMES)
    assert not PLACES & set(UNREAD_SECTIONS)


def test_refused_values_speak_of_places_that_exist() -> None:
    """Every refused value belongs to a key or node of the tree."""
    assert {path for path, _ in REFUSED_VALUES} <= PLACES


@pytest.mark.parametrize(
    ("override", "right"),
    [
        ("actor_rollout_ref.rollout.temprature=1", "did you mean actor_rollout_ref.rollout.temperature?"),
        ("data.max_promt_length=3", "did you mean data.max_prompt_length?"),
        ("trainer.n_gpu_per_node=8", "did you mean trainer.n_gpus_per_node?"),
        ("temperature=1", "write actor_rollout_ref.rollout.temperature"),
        ("seed=1", "write trainer.seed"),
    ],
)
def test_a_misspelling_is_told_the_key(override: str, right: str) -> None:
    """What a user mistypes, or writes without its section, is answered with the key that was meant."""
    with pytest.raises(ConfigError, match=re.escape(right)):
        load_config([], [override])


@pytest.mark.parametrize("key", ["reward_model.reward_manager", "reward.reward_manager.name"])
def test_a_manager_of_rewards_is_told_where_scorers_go(key: str) -> None:
    """Whoever chooses how trajectories are scored by another system's key is sent to the function, not to a reward model."""
    with pytest.raises(ConfigError, match=r"reward\.custom_reward_function") as caught:
        load_config([], [f"{key}=naive"])
    assert "HTTP" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("actor_rollout_ref.actor.router_replay.mode", "routed anew"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "how weights travel"),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path", "agent.agent_loop_config_path"),
        ("actor_rollout_ref.actor.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", "as many replicas as devices allow"),
        ("actor_rollout_ref.model.tokenizer_path", "in the folder actor_rollout_ref.model.path"),
        ("actor_rollout_ref.model.hf_config_path", "in the folder actor_rollout_ref.model.path"),
        ("actor_rollout_ref.model.lora.merge", "adapters are plain LoRA"),
        ("actor_rollout_ref.model.mtp.enable", "several tokens at once"),
        ("actor_rollout_ref.model.tiled_mlp.enabled", "ppo_max_token_len_per_gpu"),
        ("actor_rollout_ref.actor.calculate_sum_pi_squared", "no estimator"),
        ("actor_rollout_ref.actor.fsdp_config.seed", "write trainer.seed"),
        ("actor_rollout_ref.actor.optim.optimizer_impl", "AdamW"),
        ("actor_rollout_ref.rollout.agent.agent_name", "agent.default_agent_loop"),
        ("actor_rollout_ref.rollout.engine_kwargs.trtllm", "no adapter"),
        ("actor_rollout_ref.rollout.multi_stage_wake_up", "free_cache_engine"),
        ("actor_rollout_ref.rollout.over_sample_rate", "awaited"),
        ("actor_rollout_ref.rollout.presence_penalty", "repetition_penalty"),
        ("actor_rollout_ref.rollout.profiler.enable", "no profiler"),
        ("actor_rollout_ref.rollout.prometheus.enable", "trainer.logger"),
        ("actor_rollout_ref.rollout.quantization", "weights that are trained"),
        ("actor_rollout_ref.rollout.stop", "stop tokens"),
        ("actor_rollout_ref.rollout.val_kwargs.max_tokens", "data.max_response_length"),
        ("algorithm.rollout_is_level", "algorithm.rollout_correction.rollout_is"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold", "algorithm.rollout_correction.rollout_rs"),
        ("critic.forward_micro_batch_size_per_gpu", "critic.ppo_max_token_len_per_gpu"),
        ("critic.profiler.enable", "no profiler"),
        ("distillation.enabled", "teacher"),
        ("reward_manager.name", "reward.custom_reward_function"),
        ("reward.reward_model.nnodes", "reward.reward_model.url"),
        ("trainer.del_local_ckpt_after_load", "trainer.max_ckpt_to_keep"),
        ("trainer.esi_redundant_time", "trainer.save_freq"),
        ("trainer.profile_steps", "no profiler"),
        ("trainer.ray_wait_register_center_timeout", "ray_kwargs.start_timeout_s"),
        ("trainer.use_legacy_worker_impl", "one trainer"),
        ("transfer_queue.enable", "straight to the trainer"),
    ],
)
def test_a_key_of_another_system_is_not_taken_for_one_that_looks_alike(key: str, right: str) -> None:
    """Keys of the field that resemble one of ours in letters only are told what they mean here, with no guess."""
    with pytest.raises(ConfigError, match=re.escape(right)) as caught:
        load_config([], [f"{key}=1"])
    assert "did you mean" not in str(caught.value)
    assert "lists all keys" not in str(caught.value)


@pytest.mark.parametrize("override", ["trainer.bananas=1", "actor_rollout_ref.model.colour=x", "hovercraft=eels"])
def test_no_key_is_guessed_that_shares_no_word(override: str) -> None:
    """A guess that has nothing to do with what was written would mislead; the list of keys is named instead."""
    with pytest.raises(ConfigError, match="lists all keys") as caught:
        load_config([], [override])
    assert "did you mean" not in str(caught.value)


def test_a_wrong_item_is_not_cured_by_brackets() -> None:
    """A single word where a list belongs is told the brackets only if the word may be in the list."""
    with pytest.raises(ConfigError, match=r"write trainer.logger=\[console\]"):
        load_config([], ["trainer.logger=console"])
    with pytest.raises(ConfigError, match=re.escape("(console | jsonl | ")) as caught:
        load_config([], ["trainer.logger=paper"])
    assert "[paper]" not in str(caught.value)
