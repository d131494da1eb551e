"""The loop over real parts: what is trained on is what was sampled, failures stay out, and every seam takes a part of one's own."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from ostinato_agent_loop import AgentLoopManager
from ostinato_engines import PauseMode, PolicySpan, TokenOutput, WeightManifest
from ostinato_engines.transformers_server import TransformersServer
from ostinato_trainer.assembly import run_training
from ostinato_trainer.backends.local import LocalBackend
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import PolicyMismatchError, TrainingInterrupted
from ostinato_trainer.metrics import log_prob_gap
from ostinato_trainer.quickstart.run import make_files

SMALL = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=3",
    "data.max_response_length=48",
)


class RecordingServer(TransformersServer):
    """The embedded engine, remembering what it was asked and what it answered."""

    calls: ClassVar[list[tuple[list[int], list[int]]]] = []

    def __init__(self, model_path: str, *, max_model_len: int) -> None:
        super().__init__(model_path, max_model_len=max_model_len, full_determinism=True)

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Any, request_id: str, media: Sequence[Any] = ()
    ) -> TokenOutput:
        """See AsyncServerBase."""
        prompt = list(prompt_ids)
        output = await super().generate(prompt_ids, sampling_params, request_id, media)
        type(self).calls.append((prompt, list(output.token_ids)))
        return output


class BareServer(RecordingServer):
    """A third party's server that knows no log-probabilities: it returns the ids alone."""

    async def generate(self, *arguments: Any, **options: Any) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See AsyncServerBase."""
        return (await super().generate(*arguments, **options)).token_ids


class HeldServer(RecordingServer):
    """Answers turns of the third step, of groups 4 and 5, not before it may."""

    may_answer: ClassVar[threading.Event] = threading.Event()

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Any, request_id: str, media: Sequence[Any] = ()
    ) -> TokenOutput:
        """See AsyncServerBase."""
        group = int(request_id.partition("/")[0].rpartition("-")[2])
        while group >= 4 and not type(self).may_answer.is_set():  # noqa: ASYNC110 (a thread sets it)
            await asyncio.sleep(0.001)
        return await super().generate(prompt_ids, sampling_params, request_id, media)


class StaleServer(RecordingServer):
    """Says that it took new weights, and goes on with those that it had."""

    async def update_weights(self, manifest: WeightManifest, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See AsyncServerBase."""
        for _ in weights:
            pass
        self.policy_version = manifest.version

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Any, request_id: str, media: Sequence[Any] = ()
    ) -> TokenOutput:
        """See AsyncServerBase."""
        output = await super().generate(prompt_ids, sampling_params, request_id, media)
        return msgspec.structs.replace(output, policy_versions=(PolicySpan(0, self.policy_version),))


class PausedServer(RecordingServer):
    """Remembers how it was paused."""

    modes: ClassVar[list[PauseMode]] = []

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """See AsyncServerBase."""
        type(self).modes.append(mode)
        await super().pause(mode)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's files; the model is as it was made, without a warm start."""
    folder = tmp_path_factory.mktemp("quickstart")
    make_files(folder, seed=0)
    (folder / "warm_start").symlink_to(folder / "model")
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The micro-batches that reach the backend."""
    seen: list[Batch] = []
    original = LocalBackend.forward_backward

    def forward_backward(self: LocalBackend, micro_batches: Sequence[Batch], *rest: Any, **options: Any) -> Any:
        seen.extend(micro_batches)
        return original(self, micro_batches, *rest, **options)

    monkeypatch.setattr(LocalBackend, "forward_backward", forward_backward)
    RecordingServer.calls = BareServer.calls = []
    return seen


def configured(home: Path, output: Path, *overrides: str) -> Config:
    """The quickstart's configuration, cut down."""
    return load_config([home / "config.yaml"], [*SMALL, f"trainer.default_local_dir={output}", *overrides])


def server_overrides(name: str, folder: Path) -> tuple[str, str]:
    """A server class of this file, as a third party would give it: by path and name."""
    path = folder / "third_party_server.py"
    path.write_text(Path(__file__).read_text())
    prefix = "actor_rollout_ref.rollout.agent.custom_async_server"
    return f"{prefix}.path={path}", f"{prefix}.name={name}"


def varied_reward(folder: Path) -> str:
    """A reward that differs between trajectories, so that there is something to learn."""
    path = folder / "varied_reward.py"
    path.write_text(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(extra_info['sampled_text']) % 7)\n"
    )
    return f"reward.custom_reward_function.path={path}"


def records(output: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def recorded_calls(name: str) -> list[tuple[list[int], list[int]]]:
    """What the server class that was loaded by path has recorded."""
    return third_party_class(name).calls


def third_party_class(name: str) -> Any:
    """The server class that was loaded by path."""
    import sys

    modules = [module for key, module in sys.modules.items() if key.endswith("third_party_server")]
    return getattr(modules[-1], name)


def test_trained_ids_are_the_sampled_ids(home: Path, tmp_path: Path, trained: list[Batch]) -> None:
    """Every token that the engine sampled in a turn is trained on once, under the prompt that the engine saw, and nothing else is."""
    run_training(configured(home, tmp_path, *server_overrides("RecordingServer", tmp_path)))
    calls = recorded_calls("RecordingServer")
    unexplained = [(prompt, sampled) for prompt, sampled in calls if sampled]
    num_trained = 0
    for batch in trained:
        for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
            ids, mask = batch.token_ids[start:end].tolist(), batch.loss_mask[start:end].tolist()
            explained = [False] * len(ids)
            for call in list(unexplained):
                prompt, sampled = call
                span = slice(len(prompt), len(prompt) + len(sampled))
                if ids[: len(prompt)] == prompt and ids[span] == sampled and not any(explained[span]):
                    explained[span] = [True] * len(sampled)
                    unexplained.remove(call)
            assert mask == explained
            num_trained += sum(mask)
    assert not unexplained
    assert num_trained == sum(len(sampled) for _, sampled in calls) > 0


def test_a_server_may_return_bare_ids(home: Path, tmp_path: Path, trained: list[Batch]) -> None:
    """Without log-probabilities a run works too: they are absent, not zero, and no gap to the engine is invented."""
    run_training(configured(home, tmp_path, *server_overrides("BareServer", tmp_path)))
    assert all(batch.rollout_log_probs.isnan().all() for batch in trained)
    steps = records(tmp_path)
    assert len(steps) == 2
    assert all("rollout_corr/kl" not in step and math.isfinite(step["actor/pg_loss"]) for step in steps)


def test_segments_of_their_own(home: Path, tmp_path: Path, trained: list[Batch]) -> None:
    """With prompts rendered as at inference, trajectories of several segments count once in the baseline and train what was sampled."""
    run_training(
        configured(
            home,
            tmp_path,
            "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template=true",
            *server_overrides("RecordingServer", tmp_path),
        )
    )
    assert all(batch.num_sequences >= batch.num_trajectories for batch in trained)
    num_sampled = sum(len(sampled) for _, sampled in recorded_calls("RecordingServer"))
    assert sum(batch.num_loss_tokens for batch in trained) == num_sampled
    assert [step["training/num_trajectories"] for step in records(tmp_path)] == [6.0, 6.0]


def test_failed_rewards_stay_out(home: Path, tmp_path: Path, trained: list[Batch]) -> None:
    """A trajectory whose reward cannot be computed is counted and left out; where too many groups fail, the run ends and says why."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "seen = []\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info, allowed):\n"
        "    seen.append(1)\n"
        "    if len(seen) % 3 == 0 or not allowed:\n"
        "        raise ValueError('the judge is out')\n"
        "    return float(len(seen) % 2)\n"
    )
    prefix = "reward.custom_reward_function"
    some, none = (f"{prefix}.reward_kwargs={{allowed: {flag}}}" for flag in ("true", "false"))
    run_training(configured(home, tmp_path / "some", f"{prefix}.path={reward}", some))
    for step in records(tmp_path / "some"):
        assert step["training/num_failed_trajectories"] == 2
        assert step["training/num_trajectories"] == 4
        assert step["agent_loop/failures/reward"] == 2
    with pytest.raises(TrainingInterrupted, match=r"find 2 good groups.*3 failed.*the judge is out"):
        run_training(configured(home, tmp_path / "none", f"{prefix}.path={reward}", none))


def test_the_engine_gets_the_trained_weights(home: Path, tmp_path: Path) -> None:
    """After each step the engine serves the new weights: the gap between its log-probabilities and the trainer's stays rounding, while
    the checkpoint differs from the start."""
    run_training(
        configured(
            home,
            tmp_path,
            varied_reward(tmp_path),
            "trainer.save_freq=-1",
            "actor_rollout_ref.actor.optim.lr=0.01",
        )
    )
    assert max(step["training/rollout_log_probs_diff_max"] for step in records(tmp_path)) < 1e-4
    before = load_file(home / "model" / "model.safetensors")
    after = load_file(tmp_path / "global_step_2" / "huggingface" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_an_engine_with_old_weights_ends_a_run_that_is_to_stop(
    home: Path, tmp_path: Path, trained: list[Batch]
) -> None:
    """The engine's first update changes nothing, so step 1 agrees; step 2 is the first from weights that the engine did not take, and the run
    ends there, before it learns from them."""
    with pytest.raises(PolicyMismatchError, match=r"step 2: .*in step 1 it was .*old ones"):
        run_training(
            configured(
                home,
                tmp_path,
                varied_reward(tmp_path),
                *server_overrides("StaleServer", tmp_path),
                "actor_rollout_ref.actor.optim.lr=0.01",
                "actor_rollout_ref.rollout.log_prob_check.action=stop",
            )
        )
    (step,) = records(tmp_path)
    assert step["training/log_probs_agree"] == 1.0
    assert sum(batch.num_loss_tokens for batch in trained) == step["training/num_loss_tokens"]


def test_the_engine_is_paused_as_the_key_says(home: Path, tmp_path: Path) -> None:
    """Each update of the weights pauses the engine in the mode of `rollout.pool.sync_pause`."""
    overrides = server_overrides("PausedServer", tmp_path)
    keys = ("trainer.total_training_steps=1", "actor_rollout_ref.rollout.pool.sync_pause=keep")
    run_training(configured(home, tmp_path / "run", *overrides, *keys))
    assert third_party_class("PausedServer").modes == [PauseMode.KEEP] * 2


def test_kl_loss_mini_batches_and_epochs(home: Path, tmp_path: Path, trained: list[Batch]) -> None:
    """Two passes in mini-batches with a KL term: each trajectory is trained on twice, the divergence is zero at the very start only."""
    run_training(
        configured(
            home,
            tmp_path,
            varied_reward(tmp_path),
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.optim.lr=0.01",
        )
    )
    steps = records(tmp_path)
    assert sum(batch.num_trajectories for batch in trained) == 2 * 2 * 6
    assert all(step["actor/kl_loss"] >= 0 for step in steps)
    assert steps[1]["actor/kl_loss"] > 0
    assert all(batch.ref_log_probs is not None for batch in trained)


def test_callbacks_see_every_step(home: Path, tmp_path: Path) -> None:
    """Validation before the first step is reported as step 0, then each step once, with the field's metric names."""
    seen: list[tuple[int, Mapping[str, float]]] = []
    overrides = ("trainer.val_before_train=true", f"data.val_files={home / 'val.parquet'}")
    run_training(
        configured(home, tmp_path, *overrides), on_step=lambda step, metrics: seen.append((step, dict(metrics)))
    )
    assert [step for step, _ in seen] == [0, 1, 2]
    assert "val-core/ostinato/quickstart/acc/mean@1" in seen[0][1]
    expected = {
        "critic/score/mean",
        "actor/pg_loss",
        "response_length/mean",
        "num_turns/mean",
        "timing_s/gen",
        "perf/throughput",
    }
    assert expected <= seen[1][1].keys()


def test_a_run_in_bfloat16_reaches_its_last_step(home: Path, tmp_path: Path) -> None:
    """With actor.dtype=bfloat16 the engine takes the float32 weights of the trainer, rounded, step after step."""
    run_training(configured(home, tmp_path, "actor_rollout_ref.actor.dtype=bfloat16"))
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


class BatchesOnly(AgentLoopManager):
    """A manager of the user's own that defines generate_sequences anew, and so is asked for batches."""

    async def generate_sequences(self, *arguments: Any, **options: Any) -> Any:
        """See AgentLoopManager."""
        return await super().generate_sequences(*arguments, **options)


def test_streams_in_turn_change_nothing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With max_staleness 0 a run over streams is, bit for bit, the run over one batch a step: metrics and trained weights."""
    (tmp_path / "batches_only_for_test.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    batches = "actor_rollout_ref.rollout.agent.agent_loop_manager_class=batches_only_for_test.BatchesOnly"
    overrides = (varied_reward(tmp_path), "trainer.save_freq=-1", "actor_rollout_ref.actor.optim.lr=0.01")
    run_training(configured(home, tmp_path / "streams", *overrides))
    run_training(configured(home, tmp_path / "batches", *overrides, batches))
    clocked = ("timing_", "perf/", "agent_loop/")
    streams, batches = (
        [
            {name: value for name, value in step.items() if not name.startswith(clocked)}
            for step in records(tmp_path / kind)
        ]
        for kind in ("streams", "batches")
    )
    assert streams == batches
    first, second = (
        load_file(tmp_path / kind / "global_step_2" / "huggingface" / "model.safetensors")
        for kind in ("streams", "batches")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sampling_goes_on_while_the_policy_is_trained(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With max_staleness 1 the engine answers turns of the third step during the update of the second, which waits for them here as they wait
    for it; no two calls of the backend overlap, and what is trained on is one version old from the second step on."""
    overrides = server_overrides("HeldServer", tmp_path)
    original, under_way = LocalBackend.forward_backward, threading.Lock()
    answered_meanwhile: list[int] = []

    def forward_backward(self: LocalBackend, *arguments: Any, **options: Any) -> Any:
        assert under_way.acquire(blocking=False)
        try:
            calls = recorded_calls("HeldServer")
            before, deadline = len(calls), time.monotonic() + 60
            if len(answered_meanwhile) == 1:
                third_party_class("HeldServer").may_answer.set()
                while len(calls) == before and time.monotonic() < deadline:
                    time.sleep(0.001)
            answered_meanwhile.append(len(calls) - before)
            return original(self, *arguments, **options)
        finally:
            under_way.release()

    monkeypatch.setattr(LocalBackend, "forward_backward", forward_backward)
    keys = ("trainer.max_staleness=1", "trainer.total_training_steps=3", varied_reward(tmp_path))
    run_training(configured(home, tmp_path, *overrides, *keys))
    assert answered_meanwhile[1] > 0
    steps = records(tmp_path)
    worst = [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps]
    assert worst == [0.0, 1.0, 1.0]
    assert all(math.isfinite(step["actor/pg_loss"]) for step in steps)
    assert [step["training/num_trajectories"] for step in steps] == [6.0] * 3


@pytest.mark.parametrize("name", ["RecordingServer", "StaleServer"])
def test_engines_are_asked_for_tokens_where_none_is_of_the_current_policy(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With sampling always ahead of training, an engine that kept its old weights ends the run all the same, and one that has the new ones
    agrees in each step."""
    monkeypatch.setattr(log_prob_gap, "_LONGEST_UNKNOWN", 1)
    monkeypatch.setattr(log_prob_gap, "fresh_tokens", lambda batch, *_: torch.zeros_like(batch.loss_mask))
    keys = ("trainer.max_staleness=1", "trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr=0.01")
    stops = "actor_rollout_ref.rollout.log_prob_check.action=stop"
    config = configured(home, tmp_path, varied_reward(tmp_path), *server_overrides(name, tmp_path), *keys, stops)
    if name == "RecordingServer":
        run_training(config)
        assert [step["training/log_probs_agree"] for step in records(tmp_path)] == [1.0] * 3
    else:
        with pytest.raises(PolicyMismatchError, match=r"step 2: .*in step 1 it was .*old ones"):
            run_training(config)


def test_remax_runs_with_a_greedy_trajectory_for_each_group(home: Path, tmp_path: Path, trained: list[Batch]) -> None:
    """Greedy trajectories give baselines and are not trained on."""
    run_training(configured(home, tmp_path, varied_reward(tmp_path), "algorithm.adv_estimator=remax"))
    assert [step["training/num_trajectories"] for step in records(tmp_path)] == [6.0, 6.0]
    assert all(batch.baselines is not None for batch in trained)
