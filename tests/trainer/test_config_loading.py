"""Loading configuration: what is accepted, and what an error says."""

import logging
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.config import Config
from ostinato_trainer.config.docs import config_rows
from ostinato_trainer.config.loading import flat_values, load_config, to_yaml
from ostinato_trainer.config.schema import schema_keys
from ostinato_trainer.errors import ConfigError

SHARED = Path(os.environ.get("OSTINATO_SHARED", Path(__file__).parents[3] / "shared"))
FRAGMENTS = SHARED / "data" / "config_fragments.yaml"

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
REPLACEMENTS = {
    1: f"{ROLLOUT}.multi_turn.enable=true",
    2: f"{ROLLOUT}.multi_turn.tool_config_path",
    8: f"{ROLLOUT}.agent.default_agent_loop",
    10: f"{ROLLOUT}.name=transformers",
    12: f"{ROLLOUT}.mode=async",
}


def message_of(files: object = (), overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides or [])  # type: ignore[arg-type]
    return str(caught.value)


def test_nothing_given_is_the_default_tree() -> None:
    """Without files and overrides every key has its default."""
    assert load_config() == Config()


@pytest.mark.skipif(not FRAGMENTS.exists(), reason=f"needs {FRAGMENTS}")
@pytest.mark.parametrize("number", range(16))
def test_fragments_of_guides_load_or_name_their_replacement(number: int, tmp_path: Path) -> None:
    """Each fragment as guides of this field write it loads, or fails naming what to write instead."""
    fragment = yaml.safe_load(FRAGMENTS.read_text())[number]
    file = tmp_path / "fragment.yaml"
    file.write_text(yaml.safe_dump(fragment))
    if number in REPLACEMENTS:
        message = message_of(file)
        assert REPLACEMENTS[number] in message
        assert str(file) in message
    else:
        config = load_config(file)
        assert config == load_config([], [f"{key}={value}" for key, value in _dotted(fragment) if not isinstance(value, list)]
                                     + [f"{key}=[{','.join(value)}]" for key, value in _dotted(fragment) if isinstance(value, list)])  # fmt: skip


def _dotted(raw: dict, prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in raw.items():
        pairs += _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def test_nested_and_dotted_keys_mean_the_same(tmp_path: Path) -> None:
    """A dotted key in a file, at any depth, is the nested key."""
    (tmp_path / "a.yaml").write_text("data: {seed: 3}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    (tmp_path / "b.yaml").write_text("data.seed: 3\nactor_rollout_ref:\n  rollout.n: 4\n")
    assert load_config(tmp_path / "a.yaml") == load_config(tmp_path / "b.yaml")


def test_later_sources_win_key_by_key(tmp_path: Path) -> None:
    """A later file and then overrides replace single keys and leave the others."""
    (tmp_path / "a.yaml").write_text("data: {seed: 3, shuffle: false}\n")
    (tmp_path / "b.yaml").write_text("data: {seed: 4}\n")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml"], ["data.seed=5", "trainer.logger=[jsonl]"])
    assert (config.data.seed, config.data.shuffle, config.trainer.logger) == (5, False, ("jsonl",))


def test_mappings_of_own_keys_are_merged(tmp_path: Path) -> None:
    """Template and reward arguments take single keys from several sources and may hold anything."""
    (tmp_path / "a.yaml").write_text("data: {apply_chat_template_kwargs: {enable_thinking: true, a.b: 1}}\n")
    config = load_config(
        tmp_path / "a.yaml",
        ["data.apply_chat_template_kwargs.enable_thinking=false", "reward.custom_reward_function.reward_kwargs={m: x}"],
    )
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "a.b": 1}
    assert config.reward.custom_reward_function.reward_kwargs == {"m": "x"}


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    """`1e-6` is a number in files and overrides, as people mean it, and not text."""
    (tmp_path / "a.yaml").write_text("actor_rollout_ref.actor.optim.lr: 1e-6\n")
    assert load_config(tmp_path / "a.yaml").actor_rollout_ref.actor.optim.lr == 1e-6
    assert load_config([], [f"{ACTOR}.optim.lr=5e-4"]).actor_rollout_ref.actor.optim.lr == 5e-4


def test_interpolations_and_the_folder_of_the_file(tmp_path: Path) -> None:
    """A value may refer to another key, and `${config_dir}` is the folder of the file that says it."""
    (tmp_path / "a.yaml").write_text(
        "trainer: {project_name: p, experiment_name: '${trainer.project_name}-1'}\n"
        "data: {train_files: ['${config_dir}/x.parquet']}\n"
    )
    config = load_config(tmp_path / "a.yaml")
    assert config.trainer.experiment_name == "p-1"
    assert config.data.train_paths == (f"{tmp_path.resolve()}/x.parquet",)


@pytest.mark.parametrize(
    ("override", "right"),
    [
        ("data.train_batchsize=8", "data.train_batch_size"),
        (f"{ROLLOUT}s.n=8", ROLLOUT),
        (f"{ROLLOUT}.group_size=8", f"{ROLLOUT}.n"),
        ("num_generations=8", f"{ROLLOUT}.n"),
        (f"{ROLLOUT}.n_samples_per_prompt=8", f"{ROLLOUT}.n"),
        (f"{ROLLOUT}.max_assistant_turns=3", f"{ROLLOUT}.multi_turn.max_assistant_turns"),
        ("actor.optim.lr=1", f"{ACTOR}.optim.lr"),
        (f"{ACTOR}.epsilon=0.2", f"{ACTOR}.clip_ratio"),
        ("custom_reward_function.path=x.py", "reward.custom_reward_function.path"),
        (f"{ROLLOUT}.prompt_length=3", "data.max_prompt_length"),
        ("data.seed.x=1", "data.seed"),
    ],
)
def test_unknown_keys_name_the_right_one(override: str, right: str) -> None:
    """A misspelled, misplaced or renamed key is an error that names the key to write."""
    message = message_of(overrides=[override])
    assert override in message
    assert f" {right}" in message


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("critic.enable=true", "exactly where algorithm.adv_estimator needs values"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size=1", "reference policy"),
        ("async_training.staleness_threshold=0.1", "trainer.max_staleness"),
        (f"{ROLLOUT}.load_format=dummy", "loads the model's files"),
        (f"{ACTOR}.strategy=fsdp", "write actor_rollout_ref.actor.strategy=fsdp2"),
        ("data.return_raw_chat=false", "tokenized a second time"),
        (f"{ROLLOUT}.mode=sync", "synchronous engine"),
        (f"{ROLLOUT}.name=trtllm", "log-probabilities"),
    ],
)
def test_refused_keys_and_values_say_why(override: str, reason: str) -> None:
    """What the field knows and this version does not read is refused with the reason."""
    assert reason in message_of(overrides=[override])


def test_several_problems_come_in_one_message() -> None:
    """Two wrong keys are reported together, so that one run of the command finds both."""
    message = message_of(overrides=["data.sed=1", "trainer.loger=[console]"])
    assert "2 problems" in message
    assert "data.seed" in message
    assert "trainer.logger" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.seed=x", "data.seed must be int | null, got 'x'"),
        ("trainer.seed=null", "trainer.seed must be int, got null"),
        ("trainer.logger=console", "write trainer.logger=[console]"),
        ("trainer.logger=[paper]", "console | jsonl | tensorboard | mlflow | wandb | trackio"),
        ("data.max_prompt_length=0", "data.max_prompt_length must be int >= 1, got 0"),
        ("data.shuffle=1", "data.shuffle must be bool, got 1"),
        ("data.truncation=up", "error | left | right | middle"),
        (f"{ACTOR}.optim.lr=.nan", f"{ACTOR}.optim.lr must be finite"),
        (f"{ACTOR}.optim.betas=[0.9]", f"{ACTOR}.optim.betas must be list of 2"),
        ("data=3", "data must be a mapping of keys, got 3"),
        (f"{ROLLOUT}.multi_turn.max_parallel_calls=0", f"{ROLLOUT}.multi_turn.max_parallel_calls must"),
        (f"{ROLLOUT}.n=0", f"{ROLLOUT}.n must"),
        (f"{ROLLOUT}.top_p=2", f"{ROLLOUT}.top_p must"),
        ("data.prompt_key=${data.nope}", "data.nope"),
        ("data.prompt_key=???", "data.prompt_key"),
    ],
)
def test_wrong_values_name_path_expected_and_got(override: str, expected: str) -> None:
    """A value of the wrong type or out of range is an error with the key, what may stand there, and what stood there."""
    assert expected in message_of(overrides=[override])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+data.seed=1", "write data.seed=1"),
        ("--data.seed=1", "write data.seed=1"),
        ("data.seed", "must be key=value"),
        ("data.seed={", "YAML value"),
        ("=1", "dotted key"),
    ],
)
def test_malformed_overrides_say_how_to_write_them(override: str, expected: str) -> None:
    """An override that is none is an error that shows the form."""
    message = message_of(overrides=[override])
    assert override in message
    assert expected in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: [", "YAML"),
        (b"- 1\n- 2\n", "mapping"),
        (b"data: {seed: 1, seed: 2}\n", "seed"),
        (b"data: {seed: 1}\ndata.seed: 2\n", "data.seed must be given once, got 1 and 2"),
        (b"1: {seed: 1}\n", "a key must be text, got 1"),
        (b"data:\n", "data must be a mapping of keys, got null"),
        (b"\xff\xfe\x00", "YAML"),
    ],
)
def test_broken_files_are_named(content: bytes, expected: str, tmp_path: Path) -> None:
    """A file that is no mapping of keys, or gives one key two values, is an error with its path."""
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    message = message_of(file)
    assert expected in message
    assert str(file) in message


def test_a_key_that_is_to_be_taken_away_is_no_file() -> None:
    """`~key` removes one elsewhere; here every key has a value."""
    assert "an override must set a key, got ~trainer.logger" in message_of("~trainer.logger")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there is an error with its path."""
    assert str(tmp_path / "no.yaml") in message_of(tmp_path / "no.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    """A file of comments only is the default tree."""
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert load_config(tmp_path / "empty.yaml") == Config()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.train_batch_size=10"], ["data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size=10"]),
        ([f"{ROLLOUT}.max_model_len=1000"], ["data.max_prompt_length", f"{ROLLOUT}.max_model_len=1024"]),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=100"],
            [f"{ACTOR}.ppo_max_token_len_per_gpu=1024"],
        ),
        ([f"{ROLLOUT}.temperature=0"], [f"{ROLLOUT}.temperature"]),
        (["data.custom_cls.path=x.py"], ["data.custom_cls"]),
        (["trainer.logger=[console,console]"], ["trainer.logger"]),
    ],
)
def test_contradicting_keys_are_named(overrides: list[str], named: list[str]) -> None:
    """Keys that contradict each other are an error that names both and what to write."""
    message = message_of(overrides=overrides)
    for text in named:
        assert text in message


def test_keys_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A key that another one keeps from having any effect loads, and a warning says so."""
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        load_config([], [f"{ACTOR}.kl_loss_coef=0.01"])
    assert f"{ACTOR}.kl_loss_coef has no effect" in caplog.text
    caplog.clear()
    load_config([], [f"{ACTOR}.kl_loss_coef=0.01", f"{ACTOR}.use_kl_loss=true"])
    assert "no effect" not in caplog.text


def test_a_written_tree_loads_to_an_equal_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """to_yaml and load_config are inverse, and defaults written out cause no warning."""
    config = load_config(
        [], ["data.train_files=[a,b]", f"{ROLLOUT}.val_kwargs.n=2", "data.apply_chat_template_kwargs={a: [1, x]}"]
    )
    (tmp_path / "whole.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "whole.yaml") == config
    assert not caplog.records


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20))
def test_any_text_survives_being_written(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A text value, whatever YAML or interpolations would make of it, comes back as it was."""
    base = Config()
    config = type(base)(trainer=type(base.trainer)(project_name=f"x{text}", experiment_name="${data.seed} \\${x}"))
    file = tmp_path_factory.mktemp("yaml") / "c.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(file) == config


def test_flat_values_has_every_key() -> None:
    """flat_values gives each key of the tree its value."""
    values = flat_values(load_config([], ["data.seed=7"]))
    assert values["data.seed"] == 7
    assert list(values) == list(schema_keys(Config)) == [row.key for row in config_rows()]
