"""Keys of sampling and of the watchdog: contradictions are refused with both values, unread ones named, staleness without a correction said."""

from __future__ import annotations

import logging

import pytest

from ostinato_trainer.config.checks import check_runnable
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.config.sampling_checks import uncorrected_staleness
from ostinato_trainer.config.without_effect import unread_keys
from ostinato_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("trainer.min_group_size=3", "actor_rollout_ref.rollout.n=2"),
            r"min_group_size must be at most .*rollout\.n.*got 3 and 2",
        ),
        (("algorithm.filter_groups.enable=true",), r"filter_groups\.enable must be false while .*rollout\.n is 1"),
        (("algorithm.filter_groups.metric=seq_final_reward",), r"got seq_final_reward.*metric=score"),
        (("trainer.watchdog.fail_after_s=10",), r"fail_after_s must be above warn_after_s, got 10 and 600"),
        (("trainer.max_staleness=-1",), r"trainer\.max_staleness.*-1"),
    ],
)
def test_contradictions_are_refused(overrides: tuple[str, ...], message: str) -> None:
    """Each is an error that names the keys, the values and what to write."""
    with pytest.raises(ConfigError, match=message):
        load_config([], list(overrides))


def test_keys_of_a_filter_that_is_off_are_named() -> None:
    """What filter_groups would do has no effect while it is off."""
    written = ["algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"]
    assert unread_keys(load_config([], []), written) == [
        f"{key} has no effect while algorithm.filter_groups.enable is false" for key in written
    ]
    config = load_config([], ["algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4"])
    assert unread_keys(config, written) == []


def test_staleness_without_a_correction_is_said() -> None:
    """Sampling ahead asks for importance weights or for the rollout's own log-probabilities; with either, and in turn, nothing is said."""
    ahead = "trainer.max_staleness=2"
    assert "max_staleness is 2" in str(uncorrected_staleness(load_config([], [ahead])))
    for overrides in (
        [],
        [ahead, "algorithm.rollout_correction.rollout_is=token"],
        [ahead, "algorithm.rollout_correction.bypass_mode=true"],
    ):
        assert uncorrected_staleness(load_config([], overrides)) is None


@pytest.mark.parametrize(("given", "n", "needed"), [(None, 1, 1), (None, 8, 2), (8, 8, 8), (1, 8, 1)])
def test_how_many_good_trajectories_a_group_needs(given: int | None, n: int, needed: int) -> None:
    """By default two, since one alone has no baseline; one where a group is one."""
    overrides = [] if given is None else [f"trainer.min_group_size={given}"]
    assert load_config([], [*overrides, f"actor_rollout_ref.rollout.n={n}"]).trainer.good_per_group(n) == needed


def test_a_survivor_that_would_be_alone_is_said(caplog):
    """Where a group may shrink to one, a group estimator gives that one its plain reward; the default, another estimator, or groups of one by
    design say nothing of it."""
    keys = ["actor_rollout_ref.model.path=m", "data.train_files=a.parquet", "actor_rollout_ref.rollout.n=4"]
    lone = [*keys, "trainer.min_group_size=1"]
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        check_runnable(load_config([], keys))
        check_runnable(load_config([], [*lone, "algorithm.adv_estimator=reinforce_plus_plus"]))
        assert "min_group_size" not in caplog.text
        check_runnable(load_config([], lone))
    assert "write trainer.min_group_size=2 or more" in caplog.text
