"""The gap between engine and trainer: its numbers by hand, and a likely cause for what is planted in a real engine."""

import asyncio
import logging
import math
import re
from pathlib import Path

import pytest
import torch

from ostinato_agent_loop import AgentLoopOutput, RewardResult, Trajectory
from ostinato_engines import PolicySpan, SamplingParams
from ostinato_engines.transformers_server import TransformersServer
from ostinato_rollout import Failure, FailureKind
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    Config,
    LogProbCheckConfig,
    RolloutConfig,
    TrainerConfig,
)
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import PolicyMismatchError
from ostinato_trainer.metrics.log_prob_gap import LogProbGapWatch, fresh_tokens, log_prob_gap
from ostinato_trainer.quickstart.tiny_model import save_model, save_tokenizer
from ostinato_trainer.segments import Segment, segments_of


def test_the_gap_by_hand():
    """Differences of probabilities and log-probabilities, on compared tokens only."""
    rollout = torch.tensor([math.log(0.5), math.log(0.2), float("nan"), -7.0])
    trainer = torch.tensor([math.log(0.4), math.log(0.3), -3.0, float("nan")])
    metrics = log_prob_gap(rollout, trainer, torch.tensor([True, True, True, False]))
    d = [math.log(0.4 / 0.5), math.log(0.3 / 0.2)]
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(d[1], abs=1e-6)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)


def test_the_gap_at_the_edges():
    """Equal policies have no gap; nothing to compare gives no metric; a world apart stays finite."""
    same = torch.tensor([-1.0, -2.0])
    mask = torch.ones(2, dtype=torch.bool)
    assert log_prob_gap(same, same, mask)["training/rollout_log_probs_diff_max"] == 0.0
    assert log_prob_gap(torch.full((2,), float("nan")), same, mask) == {"training/rollout_log_probs_missing": 1.0}
    assert "training/rollout_actor_probs_pearson_corr" not in log_prob_gap(same[:1], same[:1], mask[:1])
    apart = log_prob_gap(torch.tensor([-1000.0, -1.0]), torch.tensor([-0.1, -1.0]), mask)
    assert all(math.isfinite(value) for value in apart.values())


def test_the_engine_s_own_word_is_not_compared_with_itself():
    """Where old_log_probs are the engine's (bypass_mode) there is no gap to measure, instead of one of 0."""
    config = load_config([], ["algorithm.rollout_correction.bypass_mode=true"])
    batch = Batch.from_segments([Segment([1], [2], [1], [-1.0], "g", "t", 1.0)])
    batch = batch.with_columns(old_log_probs=batch.rollout_log_probs)
    assert LogProbGapWatch(config).observe(batch, [], policy_version=0) == {}


def segment(*versions, prompt=2, failed=False):
    """A trajectory of one segment of four sampled tokens, with spans of policy versions."""
    output = AgentLoopOutput(
        prompt_ids=[1] * prompt,
        response_ids=[2, 3, 4, 5],
        response_mask=[1, 1, 1, 1],
        response_logprobs=[-1.0] * 4,
        policy_versions=tuple(PolicySpan(start, version) for start, version in versions),
    )
    failure = Failure("tool", FailureKind.TOOL, "broke") if failed else None
    reward = None if failed else RewardResult(0.0, {})
    return Trajectory(
        group_id="g", trajectory_id=f"t{prompt}", row={}, segments=[output], reward=reward, failure=failure
    )


def test_fresh_tokens_are_those_of_the_current_policy():
    """Spans of other versions are left out, a segment without spans counts, a failed trajectory is in no batch."""
    trajectories = [
        segment((0, 6), (2, 7), prompt=2),
        segment(prompt=9, failed=True),
        segment(prompt=1),
        segment((0, 7), (3, 8), prompt=3),
    ]
    batch = Batch.from_segments(segments_of(trajectories))
    fresh = fresh_tokens(batch, trajectories, 7)
    assert fresh.tolist() == [
        *([False] * 2 + [False, False, True, True]),
        *([False] + [True] * 4),
        *([False] * 3 + [True, True, True, False]),
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Two models of one shape and tokenizer."""
    folders = {}
    for seed, name in enumerate(("policy", "other")):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        save_tokenizer(folder, ["a question and its answer"])
        save_model(folder, seed=seed)
    return folders


async def sampled_by(
    folder: Path, params: SamplingParams, *, version: int = 0, server_class=TransformersServer, **settings
) -> list[Trajectory]:
    """Trajectories of one turn from the embedded engine."""
    server = server_class(str(folder), max_model_len=128, **settings)
    await server.start()
    try:
        prompts = [[7, 8, 9, 10 + number] for number in range(8)]
        outputs = await asyncio.gather(
            *(server.generate(prompt, params, f"r{number}") for number, prompt in enumerate(prompts))
        )
    finally:
        await server.shutdown()
    return [
        Trajectory(
            group_id="g",
            trajectory_id=f"t{number}",
            row={},
            segments=[
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=output.token_ids,
                    response_mask=[1] * len(output.token_ids),
                    response_logprobs=output.logprobs,
                    policy_versions=(PolicySpan(0, version),),
                )
            ],
            reward=RewardResult(0.0, {}),
            failure=None,
        )
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def configured(dtype="float32", *, max_staleness=0, **rollout) -> Config:
    """A configuration that differs from the default in these keys."""
    node = ActorRolloutRefConfig(actor=ActorConfig(dtype=dtype), rollout=RolloutConfig(**rollout))
    return Config(actor_rollout_ref=node, trainer=TrainerConfig(max_staleness=max_staleness))


def observed(folder: Path, trajectories: list[Trajectory], config: Config, *, version: int = 0) -> dict[str, float]:
    """The metrics of a step whose log-probabilities come from a real backend."""
    batch = Batch.from_segments(segments_of(trajectories))
    log_probs = LocalBackend.from_pretrained(folder).log_probs(batch, temperature=1.0)
    watch = LogProbGapWatch(config)
    metrics = watch.observe(batch.with_columns(old_log_probs=log_probs), trajectories, version)
    assert watch.observe(batch.with_columns(old_log_probs=log_probs), trajectories, version) == metrics
    return metrics


async def test_an_honest_engine_is_silent(models, caplog):
    """The same weights, type and sampling have a gap of roundings, and nothing is warned about."""
    ran = await sampled_by(models["policy"], SamplingParams(max_tokens=16, seed=1))
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        metrics = observed(models["policy"], ran, configured())
    assert metrics["training/rollout_log_probs_diff_max"] < 1e-4
    assert metrics["training/rollout_log_probs_missing"] == 0.0
    assert caplog.text == ""


async def test_planted_causes_are_named(models, caplog):
    """Truncated sampling, another temperature, other weights, a shorter type, missing log-probabilities: each is said once, with its cause."""
    policy = models["policy"]
    plain = SamplingParams(max_tokens=16, seed=1)
    cases = [
        (await sampled_by(models["other"], plain), configured(), "weights are not the trainer's"),
        (
            await sampled_by(policy, SamplingParams(max_tokens=16, seed=1, temperature=0.5)),
            configured(),
            "parameters of its own",
        ),
        (
            await sampled_by(policy, SamplingParams(max_tokens=16, seed=1, top_p=0.3)),
            configured(top_p=0.3),
            "top_p=0.3",
        ),
        (await sampled_by(policy, plain, dtype="bfloat16"), configured(), "shorter type"),
        (await sampled_by(policy, SamplingParams(max_tokens=16, seed=1, logprobs=False)), configured(), "100.0%"),
    ]
    for ran, config, cause in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
            observed(policy, ran, config)
        assert [cause in record.message for record in caplog.records] == [True], (cause, caplog.text)


async def test_tokens_of_an_older_policy_are_measured_and_not_warned_about(models, caplog):
    """What another version sampled has a gap by right: it is in the metrics, and the warning is about current tokens only."""
    ran = await sampled_by(models["other"], SamplingParams(max_tokens=16, seed=1), version=3)
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        metrics = observed(models["policy"], ran, configured(max_staleness=1), version=4)
    assert metrics["training/rollout_log_probs_diff_mean"] > 0.1
    assert caplog.text == ""


@pytest.mark.parametrize(("gap", "is_far"), [(0.9, False), (1.1, True), (float("nan"), True)])
def test_tokens_of_older_policies_alone_may_be_no_farther_than_training_goes(caplog, gap, is_far):
    """Where sampling is always ahead, nothing else would tell of an engine with other weights; the run goes on or ends as the key says."""
    trajectories = [segment((0, 6))]
    batch = Batch.from_segments(segments_of(trajectories))
    batch = batch.with_columns(old_log_probs=batch.rollout_log_probs.nan_to_num() - gap)
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        metrics = LogProbGapWatch(configured(max_staleness=1)).observe(batch, trajectories, 7)
    assert "training/log_probs_agree" not in metrics
    assert ["tokens of earlier policies alone" in record.message for record in caplog.records] == [True] * is_far
    if is_far:
        check = LogProbCheckConfig(action="stop")
        with pytest.raises(PolicyMismatchError, match=r"step 8: .* more than steps of training explain"):
            LogProbGapWatch(configured(max_staleness=1, log_prob_check=check)).observe(batch, trajectories, 7)


async def test_another_version_is_no_matter_of_course_where_sampling_and_training_take_turns(models, caplog):
    """An engine that did not take the newest weights, or does not say which it has, is named, once."""
    ran = await sampled_by(models["other"], SamplingParams(max_tokens=16, seed=1), version=3)
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        observed(models["policy"], ran, configured(), version=4)
    assert ["100.0% of the sampled tokens" in record.message for record in caplog.records] == [True]
    assert "weight update" in caplog.text


def test_a_trainer_without_numbers_is_no_agreement(caplog):
    """Log-probabilities of the trainer that are NaN are warned about, not taken for a gap of nothing."""
    trajectories = [segment((0, 7))]
    batch = Batch.from_segments(segments_of(trajectories))
    batch = batch.with_columns(old_log_probs=torch.full((batch.num_tokens,), float("nan")))
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        LogProbGapWatch(configured()).observe(batch, trajectories, 7)
    assert "differ by nan" in caplog.text


class StaleServer(TransformersServer):
    """Says that it took new weights, and samples from the old ones."""

    async def update_weights(self, manifest, weights):
        """See AsyncServerBase."""
        for _ in weights:
            pass
        self.policy_version = manifest.version


@pytest.fixture(scope="module")
def trained_backend(models) -> LocalBackend:
    """The policy after one optimizer step."""
    backend = LocalBackend.from_pretrained(models["policy"], LocalBackendOptions(lr=1.5e-4))
    batch = Batch.from_segments([Segment([7], [8, 9, 10, 11], [1] * 4, None, "g", "t", 1.0)])
    batch = with_loss_weights(batch.with_columns(advantages=batch.loss_mask.double()), "token-mean")
    backend.forward_backward([batch], policy_loss_fn(PolicyLossOptions(), "vanilla"))
    assert not backend.optimizer_step().skipped
    return backend


async def sampled_after_sync(server_class: type[TransformersServer], folder: Path, backend: LocalBackend):
    """Trajectories from an engine that was given the trained weights, as a batch with the trainer's log-probabilities, and themselves."""
    manifest, stream = backend.weights(version=1)

    class Updated(server_class):  # pyright: ignore[reportGeneralTypeIssues]  whichever it is
        async def start(self):
            await super().start()
            await self.update_weights(manifest, stream())

    ran = await sampled_by(folder, SamplingParams(max_tokens=16, seed=1), version=1, server_class=Updated)
    batch = Batch.from_segments(segments_of(ran))
    return batch.with_columns(old_log_probs=backend.log_probs(batch, temperature=1.0)), ran


@pytest.mark.parametrize("action", ["warn", "stop"])
async def test_an_engine_that_kept_its_old_weights_is_told(models, trained_backend, caplog, action):
    """An engine that claims a weight update and samples from the weights before: the step is named with both numbers, and with what was
    seen when both agreed; or the run ends there. One that took it passes."""
    watch = LogProbGapWatch(configured(log_prob_check=LogProbCheckConfig(action=action)))
    fresh, trajectories = await sampled_after_sync(TransformersServer, models["policy"], trained_backend)
    stale, of_old = await sampled_after_sync(StaleServer, models["policy"], trained_backend)
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        assert watch.observe(fresh, trajectories, 1)["training/log_probs_agree"] == 1.0
        assert caplog.text == ""
        text = r"step 2: log-probabilities .* differ by 0\.\d+ on average .* the 0\.005 of .*max_mean_diff \(in step 2 it was \S+\); .*old ones"
        if action == "stop":
            with pytest.raises(PolicyMismatchError, match=text):
                watch.observe(stale, of_old, 1)
        else:
            assert watch.observe(stale, of_old, 1)["training/log_probs_agree"] == 0.0
            assert re.search(text, caplog.text)


async def test_the_bound_is_the_key_s_or_that_of_the_type(models, trained_backend, caplog):
    """The same gap is one too many by default and in float32, and none where the key, or a shorter type, allows it."""
    stale, of_old = await sampled_after_sync(StaleServer, models["policy"], trained_backend)
    assert stale.old_log_probs is not None
    mean = log_prob_gap(stale.rollout_log_probs, stale.old_log_probs, stale.loss_mask)[
        "training/rollout_log_probs_diff_mean"
    ]
    assert 0.005 < mean < 0.5
    cases = [
        (configured(), False),
        (configured(log_prob_check=LogProbCheckConfig(max_mean_diff=1.01 * mean)), True),
        (configured(log_prob_check=LogProbCheckConfig(max_mean_diff=0.99 * mean)), False),
        (configured("bfloat16"), mean <= 0.05),
    ]
    for config, agrees in cases:
        assert LogProbGapWatch(config).observe(stale, of_old, 1)["training/log_probs_agree"] == float(agrees)


def test_an_update_that_an_engine_did_not_take_ends_a_run_that_is_to_stop():
    """Where sampling and training take turns, tokens that are said to be of an older version are a mismatch, too."""
    trajectories = [segment((0, 6))]
    batch = Batch.from_segments(segments_of(trajectories))
    batch = batch.with_columns(old_log_probs=torch.full((batch.num_tokens,), -1.0))
    watch = LogProbGapWatch(configured(log_prob_check=LogProbCheckConfig(action="stop")))
    with pytest.raises(
        PolicyMismatchError, match=r"step 8: 100\.0% of the sampled tokens .* another policy version than 7"
    ):
        watch.observe(batch, trajectories, 7)


def test_temperature_that_an_engine_left_out_is_among_the_causes(caplog):
    """With a temperature beside 1 the warning says that the engine may not have applied it to what it reports."""
    trajectories = [segment((0, 0))]
    batch = Batch.from_segments(segments_of(trajectories))
    batch = batch.with_columns(old_log_probs=torch.full((batch.num_tokens,), -2.0))
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        LogProbGapWatch(configured(temperature=0.7)).observe(batch, trajectories, 0)
    assert "rollout.temperature=0.7" in caplog.text


def test_a_check_without_effect_is_said(caplog):
    """With bypass_mode there is nothing to compare, so a bound that was written is told to have no effect."""
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        load_config(
            [],
            [
                "algorithm.rollout_correction.bypass_mode=true",
                "actor_rollout_ref.rollout.log_prob_check.max_mean_diff=0.1",
            ],
        )
    assert "log_prob_check.max_mean_diff has no effect" in caplog.text
