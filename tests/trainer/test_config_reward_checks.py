"""Keys of rewards that contradict each other, and those that have no effect."""

import re
from pathlib import Path

import pytest

from ostinato_trainer.config.checks import consistency_problems
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.config.reward import CustomRewardConfig, RewardConfig
from ostinato_trainer.config.without_effect import unread_keys
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.rewards.functions import custom_function

URL = "reward.reward_model.url=http://127.0.0.1:1/classify"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["reward.combine.reward_model=1"],
            "reward.reward_model.url must be given while reward.combine.reward_model is 1",
        ),
        ([URL], "reward.combine.reward_model must not be 0 while reward.reward_model.url is given"),
        (
            ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=513"],
            "reward.overlong_buffer.len must be at most data.max_response_length, got 513 > 512",
        ),
    ],
)
def test_contradictions_are_refused_with_both_keys(overrides: list[str], said: str) -> None:
    """A part without a weight, a weight without a part and a buffer longer than an answer are refused when a file is loaded."""
    with pytest.raises(ConfigError, match=said):
        load_config([], overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [URL, "reward.combine.reward_model=1", "reward.combine.score=0"],
        ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=512"],
        ["reward.combine.tool_rewards=0.1", "reward.combine.reduction=mean"],
        [
            "reward.custom_reward_function.path=x.py",
            "reward.executor=process",
            "reward.max_memory_mb=64",
            "reward.max_rpm=6",
        ],
    ],
)
def test_what_belongs_together_passes(overrides: list[str]) -> None:
    """Keys that complete each other are neither refused nor said to have no effect."""
    config = load_config([], overrides)
    assert not consistency_problems(config)
    assert not unread_keys(config, [override.partition("=")[0] for override in overrides])


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        (["reward.executor=process"], {"reward.executor"}),
        (["reward.max_memory_mb=64"], {"reward.max_memory_mb"}),
        (["reward.max_rpm=60"], {"reward.max_rpm"}),
        (["reward.custom_reward_function.name=f"], {"reward.custom_reward_function.name"}),
        (
            ["reward.custom_reward_function.path=x.py", "reward.combine.score=0", "reward.combine.turn_scores=1"],
            {"reward.custom_reward_function.path"},
        ),
        (["reward.reward_model.max_retries=3"], {"reward.reward_model.max_retries"}),
        ([URL, "reward.combine.reward_model=1", "reward.reward_model.pattern=(x)"], {"reward.reward_model.pattern"}),
        (["reward.overlong_buffer.len=5"], {"reward.overlong_buffer.len"}),
        (["reward.combine.reduction=mean"], {"reward.combine.reduction"}),
    ],
)
def test_keys_without_effect_are_named(overrides: list[str], unread: set[str]) -> None:
    """A written key that nothing reads for what others say is named."""
    config = load_config([], overrides)
    said = unread_keys(config, [override.partition("=")[0] for override in overrides])
    assert {sentence.split()[0] for sentence in said} == unread


@pytest.mark.parametrize(
    ("old", "ours"),
    [
        ("reward_model.overlong_buffer.len=5", "reward.overlong_buffer.len"),
        ("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1", "reward.overlong_buffer.penalty_factor"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.enable=true", "reward.overlong_buffer.enable"),
        ("reward.reward_manager.name=dapo", "scored as soon as it ends"),
        ("reward_model.enable=true", "reward.reward_model.url"),
        ("reward.reward_model.enable=true", "reward.reward_model.url"),
        ("remote_rm_url=x", "reward.reward_model.url"),
        ("reward_model.max_concurrent=4", "reward.num_workers"),
    ],
)
def test_names_of_other_systems_lead_to_ours(old: str, ours: str) -> None:
    """What users of other systems write is an error that names the key here."""
    with pytest.raises(ConfigError, match=ours):
        load_config([], [old])


def test_the_readme_s_rewards_load(tmp_path: Path) -> None:
    """The configuration and the function that the README shows are read as they stand there."""
    readme = Path(__file__).resolve().parents[2] / "packages" / "trainer" / "README.md"
    if not readme.is_file():
        pytest.skip("the repository's README is not here")
    section = readme.read_text().split("## Rewards\n")[1].split("\n## ")[0]
    (tmp_path / "config.yaml").write_text(re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[0])
    (tmp_path / "reward.py").write_text(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0])
    config = load_config([tmp_path / "config.yaml"], [])
    assert config.reward.combine.reward_model == 1.0
    assert "{response}" in (config.reward.reward_model.template or "")
    custom = CustomRewardConfig(path=str(tmp_path / "reward.py"), reward_kwargs={"bonus": 0.1})
    assert custom_function(RewardConfig(custom_reward_function=custom), None) is not None
