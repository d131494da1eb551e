"""Every recipe loads, can run, and its files are there."""

import sys
from pathlib import Path

import pytest

from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import load_tools
from ostinato_trainer.chat_template import chat_template_text
from ostinato_trainer.config.checks import check_runnable
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.data.gsm8k_dialogues import Gsm8kDialogues
from ostinato_trainer.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
NEEDED = ["actor_rollout_ref.model.path=m", "data.train_files=train.parquet", "data.val_files=test.parquet"]
pytestmark = pytest.mark.skipif(not RECIPES, reason=f"needs the recipes in {FOLDER}")

CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
CONVERSATION = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "5"},
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_once_model_and_rows_are_given(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A recipe has no unknown, contradicting or ineffective key and asks for nothing that this version lacks."""
    config = load_config(path, NEEDED)
    assert not caplog.records
    if config.trainer.executor == "ray":
        pytest.importorskip("ray")
        config = load_config(path, [*NEEDED, "ray_kwargs.ray_init.runtime_env={pip: [an-engine]}"])
    elif config.actor_rollout_ref.rollout.name != "transformers":  # another engine may have an environment of its own
        config = load_config(path, [*NEEDED, f"actor_rollout_ref.rollout.engine_python={sys.executable}"])
    if config.actor_rollout_ref.actor.strategy == "megatron":
        pytest.importorskip("megatron.core")
    check_runnable(config)
    assert not caplog.records


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_files_of_a_recipe_are_there(path: Path) -> None:
    """Tools and templates that a recipe names exist beside it and load, from any working directory."""
    config = load_config(path, NEEDED)
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    registry = load_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
    assert bool(registry.names) is multi_turn.enable
    chat_template_text(config.actor_rollout_ref.model)


def test_the_tool_recipe_s_template_shows_tools_and_never_rewrites() -> None:
    """The template shows the tools to the model, and every conversation begins with its own beginnings."""
    config = load_config(FOLDER / "gsm8k_tool_cpu.yaml", NEEDED)
    template = chat_template_text(config.actor_rollout_ref.model)
    assert template is not None
    tokenizer = tiny_chat_tokenizer(chat_template=template)
    schemas = load_tools(config.actor_rollout_ref.rollout.multi_turn.tool_config_path).schemas()
    for messages in (CONVERSATION, [{"role": "system", "content": "s"}, *CONVERSATION]):
        whole = tokenizer.render(messages, schemas, add_generation_prompt=False)
        assert '"name": "calculator"' in whole
        assert '"name": "calc_gsm8k_reward"' in whole
        for end in range(1, len(messages)):
            if messages[end]["role"] != "tool":
                assert whole.startswith(tokenizer.render(messages[:end], schemas, add_generation_prompt=False))
    assert "tool" not in tokenizer.render(CONVERSATION[:1], None, add_generation_prompt=True)


def test_demonstrations_show_the_tools_of_the_tool_recipe() -> None:
    """What `prepare gsm8k` demonstrates is rendered with the very schemas, in the very order, that the recipe's rollout shows."""
    config = load_config(FOLDER / "gsm8k_tool_cpu.yaml", NEEDED)
    registry = load_tools(config.actor_rollout_ref.rollout.multi_turn.tool_config_path)
    assert Gsm8kDialogues().tools == registry.schemas()
    config = load_config(FOLDER / "gsm8k_calculator.yaml", NEEDED)
    registry = load_tools(config.actor_rollout_ref.rollout.multi_turn.tool_config_path)
    assert Gsm8kDialogues(checks=False).tools == registry.schemas()


def test_a_template_file_that_is_missing_is_named() -> None:
    """A chat template that names a file which is not there is an error with the key."""
    model = load_config([], ["actor_rollout_ref.model.chat_template=no/such.jinja"]).actor_rollout_ref.model
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.chat_template must be a readable file"):
        chat_template_text(model)
    assert chat_template_text(load_config().actor_rollout_ref.model) is None
