"""What loads and cannot run in this version."""

import logging

import pytest

from ostinato_trainer.config_checks import check_runnable
from ostinato_trainer.config_loading import load_config
from ostinato_trainer.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
RUNNABLE = ["actor_rollout_ref.model.path=m", "data.train_files=a.parquet", f"{ROLLOUT}.n=4"]


def test_a_model_and_rows_are_all_that_must_be_given() -> None:
    """With model and training rows the defaults run."""
    check_runnable(load_config([], RUNNABLE))


def test_the_defaults_alone_name_what_is_missing() -> None:
    """Without model and rows both are named in one message."""
    with pytest.raises(ConfigError) as caught:
        check_runnable(load_config())
    assert "actor_rollout_ref.model.path" in str(caught.value)
    assert "data.train_files" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        (f"{ROLLOUT}.name=vllm", f"write {ROLLOUT}.name=transformers"),
        (f"{ROLLOUT}.name=sglang", f"write {ROLLOUT}.name=transformers"),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", f"write {ROLLOUT}.tensor_model_parallel_size=1"),
        ("trainer.nnodes=2", "write trainer.nnodes=1"),
        ("trainer.n_gpus_per_node=8", "write trainer.n_gpus_per_node=1"),
        ("trainer.test_freq=5", "write data.val_files=PATH"),
        ("algorithm.adv_estimator=gae", "needs a critic"),
        ("algorithm.adv_estimator=remax", "write algorithm.adv_estimator=grpo"),
    ],
)
def test_what_this_version_lacks_is_refused_with_the_cure(override: str, cure: str) -> None:
    """A value that another version could run is refused with the reason and what to write."""
    with pytest.raises(ConfigError, match=cure.replace(".", r"\.")):
        check_runnable(load_config([], [*RUNNABLE, override]))


def test_a_server_of_one_s_own_makes_any_engine_name_runnable() -> None:
    """custom_async_server takes the place of the named engine."""
    own = [f"{ROLLOUT}.agent.custom_async_server.path=s.py", f"{ROLLOUT}.agent.custom_async_server.name=S"]
    check_runnable(load_config([], [*RUNNABLE, *own, f"{ROLLOUT}.name=vllm"]))


def test_a_group_of_one_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """GRPO with one trajectory a prompt runs, and a warning says that it has no baseline."""
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        check_runnable(load_config([], [*RUNNABLE, f"{ROLLOUT}.n=1"]))
    assert f"{ROLLOUT}.n" in caplog.text
