"""What loads and cannot run in this version."""

import importlib.util
import logging
import re
import sys

import pytest

from ostinato_trainer.config.checks import check_runnable
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
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
        (f"{ROLLOUT}.tensor_model_parallel_size=2", f"write {ROLLOUT}.tensor_model_parallel_size=1"),
        (f"{ROLLOUT}.gpu_memory_utilization=0.5", f"write {ROLLOUT}.gpu_memory_utilization=null"),
        (f"{ROLLOUT}.enforce_eager=true", f"write {ROLLOUT}.enforce_eager=false"),
        (f"{ROLLOUT}.max_num_batched_tokens=64", f"write {ROLLOUT}.max_num_batched_tokens=null"),
        (f"{ROLLOUT}.engine_python=/no/such/python", "environment's bin/python"),
        ("trainer.nnodes=2", "write trainer.nnodes=1"),
        ("trainer.n_gpus_per_node=8", "write trainer.n_gpus_per_node=1"),
        ("trainer.test_freq=5", "write data.val_files=PATH"),
        ("algorithm.adv_estimator=gpro", "algorithm.adv_estimator: adv_estimator must be one of gae, gpg, grpo, "),
        (
            f"{ACTOR}.policy_loss.loss_mode=ppo",
            "loss_mode: policy loss must be one of cispo, gpg, gspo, ",
        ),
    ],
)
def test_what_this_version_lacks_is_refused_with_the_cure(override: str, cure: str) -> None:
    """A value that another version could run is refused with the reason and what to write."""
    with pytest.raises(ConfigError, match=cure.replace(".", r"\.")):
        check_runnable(load_config([], [*RUNNABLE, override]))


def test_the_cures_for_unread_keys_cure() -> None:
    """What the message tells to write makes the same configuration runnable."""
    keys = ("tensor_model_parallel_size=2", "gpu_memory_utilization=0.5", "enforce_eager=true")
    wrong = [*RUNNABLE, *(f"{ROLLOUT}.{key}" for key in keys)]
    with pytest.raises(ConfigError) as caught:
        check_runnable(load_config([], wrong))
    cures = re.findall(r"; write (\S+)", str(caught.value))
    assert len(cures) == len(keys)
    check_runnable(load_config([], [*wrong, *cures]))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_names_the_key_for_its_environment(engine: str) -> None:
    """An engine that is not here needs an interpreter; with one, its keys are accepted."""
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed here")
    with pytest.raises(ConfigError, match=f"write {ROLLOUT}.engine_python=PATH"):
        check_runnable(load_config([], [*RUNNABLE, f"{ROLLOUT}.name={engine}"]))
    elsewhere = [f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.engine_python={sys.executable}"]
    keys = [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.gpu_memory_utilization=0.5"]
    check_runnable(load_config([], [*RUNNABLE, *elsewhere, *keys]))


def test_exact_repetition_is_refused_where_it_cannot_be_kept() -> None:
    """An engine in another process cannot repeat a run bit for bit, and an engine without the setting does not claim to."""
    exact = f"{ROLLOUT}.full_determinism=true"
    with pytest.raises(ConfigError, match=f"write {ROLLOUT}.full_determinism=false or"):
        check_runnable(load_config([], [*RUNNABLE, exact, f"{ROLLOUT}.engine_python={sys.executable}"]))
    with pytest.raises(ConfigError, match="full_determinism must be left out, since vllm does not read it"):
        check_runnable(load_config([], [*RUNNABLE, exact, f"{ROLLOUT}.name=vllm"]))


def test_arguments_of_another_engine_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """What is written for an engine that does not run has no effect, and that is said; for the one that runs it is not."""
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        load_config([], [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm.block_size=32"])
        assert not caplog.text
        load_config([], [f"{ROLLOUT}.engine_kwargs.vllm.block_size=32"])
    assert f"{ROLLOUT}.engine_kwargs.vllm has no effect while {ROLLOUT}.name is transformers" in caplog.text


def test_a_server_of_one_s_own_makes_any_engine_name_runnable() -> None:
    """custom_async_server takes the place of the named engine."""
    own = [f"{ROLLOUT}.agent.custom_async_server.path=s.py", f"{ROLLOUT}.agent.custom_async_server.name=S"]
    check_runnable(load_config([], [*RUNNABLE, *own, f"{ROLLOUT}.name=vllm"]))


def test_a_group_of_one_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """GRPO with one trajectory a prompt runs, and a warning says that it has no baseline."""
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        check_runnable(load_config([], [*RUNNABLE, f"{ROLLOUT}.n=1"]))
    assert f"{ROLLOUT}.n" in caplog.text
