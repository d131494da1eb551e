"""A run goes on from the right checkpoint or says why it does not, and its metrics show each step once."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.checkpoints.manager import LATEST, CheckpointManager
from ostinato_trainer.checkpoints.resume import changed_keys, check_same_run, resume_point, take_up
from ostinato_trainer.checkpoints.run_state import RunState
from ostinato_trainer.config import Config, TrainerConfig
from ostinato_trainer.config.loading import load_config, to_yaml
from ostinato_trainer.errors import CheckpointError, ConfigError
from ostinato_trainer.quickstart.tiny_model import save_model, save_tokenizer


def write_run(root: Path, *steps: int, config: Config | None = None, model: Path | None = None) -> None:
    """A run with checkpoints of these steps, without weights."""

    def write(directory: Path) -> None:
        RunState(step=step, parts={}, loggers={}, random={}).write(directory)
        (directory / "config.yaml").write_text(to_yaml(config or Config()))
        if model is not None:
            shutil.copytree(model, directory / "huggingface")

    with CheckpointManager(root) as manager:
        for step in steps:
            manager.save(step, write, {"critic/score/mean": step / 10, "actor/lr": float("nan")})


def found(root: Path, **keys: Any) -> int | None:
    """The step that a run in `root` goes on from, and takes up."""
    trainer = TrainerConfig(default_local_dir=str(root), **keys)
    root.mkdir(exist_ok=True)
    with CheckpointManager(root) as manager:
        point = resume_point(trainer, manager)
        if point is not None:
            take_up(manager, point)
    return None if point is None else point.step


def damage(path: Path) -> None:
    """Changes a byte and no size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_auto_goes_on_from_the_newest(tmp_path: Path) -> None:
    """Without checkpoints a run begins; with some it goes on from the one that was completed last, whatever its number."""
    assert found(tmp_path / "nothing") is None
    write_run(tmp_path, 2, 4, 6)
    assert found(tmp_path) == 6
    (tmp_path / LATEST).write_text("4\n")
    assert found(tmp_path) == 4
    (tmp_path / LATEST).unlink()
    assert found(tmp_path) == 6


def test_auto_passes_over_what_is_damaged_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged newest checkpoint is named and the one before it taken, never one of a later step; with none whole the run is refused, not
    begun anew."""
    write_run(tmp_path, 2, 4, 6)
    damage(tmp_path / "global_step_6" / "run_state.json")
    assert found(tmp_path) == 4
    assert "global_step_6/run_state.json must be as it was written" in caplog.text
    assert (tmp_path / LATEST).read_text() == "4\n"
    (tmp_path / "global_step_4" / "checkpoint.json").write_text("{}")
    assert found(tmp_path) == 2
    (tmp_path / "global_step_2" / "config.yaml").unlink()
    with pytest.raises(
        CheckpointError, match=r"must hold a whole checkpoint to go on from, got none: .*config.yaml.*no such file"
    ):
        found(tmp_path)


def test_disable_begins_anew_only_where_nothing_is(tmp_path: Path) -> None:
    """A folder with checkpoints is refused, for two runs would mix there."""
    assert found(tmp_path / "new", resume_mode="disable") is None
    write_run(tmp_path, 3)
    with pytest.raises(
        CheckpointError,
        match=r"must hold no checkpoints for a run that begins anew, got .* with step 3; .*resume_mode=auto",
    ):
        found(tmp_path, resume_mode="disable")


def test_a_path_is_taken_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run goes back to the checkpoint that is asked for, after which it is the newest; into a folder of its own where that has none."""
    write_run(tmp_path / "run", 2, 4)
    chosen = str(tmp_path / "run" / "global_step_2")
    assert found(tmp_path / "run", resume_mode="resume_path", resume_from_path=chosen) == 2
    assert "goes back to step 2; checkpoints of later steps (4) stay" in caplog.text
    assert found(tmp_path / "run") == 2
    assert found(tmp_path / "other", resume_mode="resume_path", resume_from_path=chosen) == 2
    write_run(tmp_path / "third", 9)
    with pytest.raises(
        CheckpointError, match=r"default_local_dir must hold no checkpoints .*step 9; .*resume_mode=auto"
    ):
        found(tmp_path / "third", resume_mode="resume_path", resume_from_path=chosen)


def test_a_path_that_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    """Nothing there, a run instead of a checkpoint, a damaged one, or none given: each has its message."""
    write_run(tmp_path / "run", 2)

    def asked(path: Path) -> None:
        found(tmp_path / "other", resume_mode="resume_path", resume_from_path=str(path))

    with pytest.raises(CheckpointError, match="which is no folder"):
        asked(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"which is none; write .*global_step_2"):
        asked(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"which is none; give a directory global_step_N"):
        asked(tmp_path)
    damage(tmp_path / "run" / "global_step_2" / "config.yaml")
    with pytest.raises(CheckpointError, match=r"config.yaml must be as it was written"):
        asked(tmp_path / "run" / "global_step_2")
    with pytest.raises(ConfigError, match=r"trainer.resume_from_path must name a checkpoint"):
        load_config([], ["trainer.resume_mode=resume_path"])


def test_metrics_are_cut_to_the_checkpoint(tmp_path: Path) -> None:
    """Lines of steps that are undone go, so does one that a kill has cut off; a line of the checkpoint's own that is missing comes from it."""
    write_run(tmp_path, 2)
    path = tmp_path / "metrics.jsonl"
    found(tmp_path)
    assert not path.exists()

    lines = [{"step": step, "x": step} for step in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "x"')
    found(tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:3]

    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]) + '{"step": 2, "x"')
    found(tmp_path)
    saved = {"step": 2, "critic/score/mean": 0.2, "actor/lr": None}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*lines[:2], saved]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["global_step_2", LATEST, "metrics.jsonl"]


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    """Until a run takes a checkpoint up, which it may yet refuse, the newest stays the newest and no metric is lost."""
    write_run(tmp_path, 2, 4)
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    trainer = TrainerConfig(resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_2"))
    with CheckpointManager(tmp_path) as manager:
        assert resume_point(trainer, manager) is not None
    assert (tmp_path / LATEST).read_text() == "4\n"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 4}\n'


def test_settings_that_change_the_curve_are_named(tmp_path: Path) -> None:
    """What shapes the curve is named with both values; what does not is left out; the run's length counts where the rate follows it."""
    before = load_config([], ["actor_rollout_ref.actor.optim.lr=1e-5", "data.train_files=a.parquet"])
    write_run(tmp_path, 2, config=before)
    with CheckpointManager(tmp_path) as manager:
        point = resume_point(TrainerConfig(default_local_dir=str(tmp_path)), manager)
    assert point is not None
    assert changed_keys(point, before) == []
    harmless = [
        "trainer.max_restarts=9",
        "actor_rollout_ref.nccl_timeout=5",
        "trainer.save_freq=3",
        "trainer.total_epochs=9",
        "data.train_files=b.parquet",
        "trainer.logger=[jsonl]",
    ]
    assert changed_keys(point, load_config([], ["actor_rollout_ref.actor.optim.lr=1e-5", *harmless])) == []
    changed = changed_keys(
        point, load_config([], ["actor_rollout_ref.actor.optim.lr=1e-4", "actor_rollout_ref.rollout.n=3"])
    )
    assert changed == [
        "actor_rollout_ref.actor.optim.lr is 0.0001 instead of 1e-05",
        "actor_rollout_ref.rollout.n is 3 instead of 1",
    ]
    path = point.directory / "config.yaml"
    path.write_text(re.sub(r"^ +(seed|n): .*\n", "", path.read_text(), flags=re.MULTILINE))
    assert changed_keys(point, before) == []
    cosine = ["actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"]
    write_run(tmp_path / "cosine", 2, config=load_config([], cosine))
    with CheckpointManager(tmp_path / "cosine") as manager:
        point = resume_point(TrainerConfig(default_local_dir=str(tmp_path / "cosine")), manager)
    assert point is not None
    assert changed_keys(point, load_config([], [*cosine, "trainer.total_epochs=9"])) == [
        "trainer.total_epochs is 9 instead of 30"
    ]


def test_the_length_counts_where_the_critics_rate_follows_it(tmp_path: Path) -> None:
    """With a critic, a longer run bends its schedule too."""
    keys = ["algorithm.adv_estimator=gae", "critic.optim.lr_scheduler_type=linear"]
    write_run(tmp_path, 2, config=load_config([], keys))
    with CheckpointManager(tmp_path) as manager:
        point = resume_point(TrainerConfig(default_local_dir=str(tmp_path)), manager)
    assert point is not None
    longer = load_config([], [*keys, "trainer.total_epochs=9"])
    assert changed_keys(point, longer) == ["trainer.total_epochs is 9 instead of 30"]


def test_a_folder_of_a_run_is_no_checkpoint_whatever_lies_in_it(tmp_path: Path) -> None:
    """The newest of its checkpoints is named, by number: not the one that was copied last, nor a link to nothing."""
    write_run(tmp_path / "run", 2, 10)
    (tmp_path / "run" / "global_step_11").symlink_to(tmp_path / "gone")
    (tmp_path / "run" / "global_step_2").touch()
    with pytest.raises(CheckpointError, match=r"which is none; write .*global_step_10, or one beside it"):
        found(tmp_path / "other", resume_mode="resume_path", resume_from_path=str(tmp_path / "run"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "model"
    save_tokenizer(folder, ["one two three", "four five six"])
    save_model(folder, seed=0)
    return folder


def check(tmp_path: Path, model: Path) -> None:
    """Goes on with a model from the checkpoint in `tmp_path`."""
    config = load_config([], [f"actor_rollout_ref.model.path={model}"])
    with CheckpointManager(tmp_path / "run") as manager:
        point = resume_point(TrainerConfig(default_local_dir=str(tmp_path / "run")), manager)
    assert point is not None
    check_same_run(point, config, ChatTokenizer.from_pretrained(model))


def test_the_same_model_elsewhere_is_the_same(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that was moved, or the checkpoint's own copy of it, raises nothing and warns of nothing."""
    write_run(tmp_path / "run", 2, model=model)
    shutil.copytree(model, tmp_path / "moved")
    check(tmp_path, tmp_path / "moved")
    check(tmp_path, tmp_path / "run" / "global_step_2" / "huggingface")
    assert caplog.text == ""


def test_another_model_or_tokenizer_is_refused(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model of the same shapes with another setting, or another vocabulary, is refused by name; another chat template is warned of."""
    write_run(tmp_path / "run", 2, model=model)
    for name in ("rope", "words", "template"):
        shutil.copytree(model, tmp_path / name)
    settings = json.loads((model / "config.json").read_text())
    settings["num_attention_heads"] = settings["num_attention_heads"] * 2
    (tmp_path / "rope" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        CheckpointError, match=r"model.path must name the model of .*global_step_2, but its num_attention_heads is"
    ):
        check(tmp_path, tmp_path / "rope")
    words = json.loads((model / "tokenizer.json").read_text())
    words["added_tokens"][-1]["content"] += "x"
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(
        CheckpointError, match=r"must have the tokenizer of .*global_step_2, but .*tokenizer.json is another"
    ):
        check(tmp_path, tmp_path / "words")
    assert "chat template" not in caplog.text
    template = tmp_path / "template" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    check(tmp_path, tmp_path / "template")
    assert "The chat template is not that of" in caplog.text


@pytest.mark.parametrize(("wrote", "reads"), [("megatron", "fsdp2"), ("local", "megatron"), ("fsdp2", "megatron")])
def test_a_strategy_that_writes_other_files_is_refused(tmp_path: Path, model: Path, wrote: str, reads: str) -> None:
    """Before a rank starts, by the key, with what was written and how to go on with the model alone. local and fsdp2 read each other's."""
    key = "actor_rollout_ref.actor.strategy"
    write_run(tmp_path / "run", 1, config=load_config([], [f"{key}={wrote}"]), model=model)
    own = f"actor_rollout_ref.model.path={model}"
    with CheckpointManager(tmp_path / "run") as manager:
        point = resume_point(TrainerConfig(), manager)
    assert point is not None
    tokenizer = ChatTokenizer.from_pretrained(model)
    wanted = "megatron" if wrote == "megatron" else "local or fsdp2"
    with pytest.raises(CheckpointError, match=rf"{key} must be {wanted} to go on .*global_step_1/huggingface"):
        check_same_run(point, load_config([], [f"{key}={reads}", own]), tokenizer)
    for same in ("local", "fsdp2") if wrote != "megatron" else ("megatron",):
        check_same_run(point, load_config([], [f"{key}={same}", own]), tokenizer)


@pytest.mark.parametrize(
    ("wrote", "reads", "key"),
    [
        (("lora_rank=4",), (), "lora_rank"),
        ((), ("lora_rank=4",), "lora_rank"),
        (("lora_rank=4",), ("lora_rank=8",), "lora_rank"),
        (("lora_rank=4",), ("lora_rank=4", "target_modules=[q_proj]"), "target_modules"),
    ],
)
def test_adapters_of_another_shape_are_refused(
    tmp_path: Path, model: Path, wrote: tuple[str, ...], reads: tuple[str, ...], key: str
) -> None:
    """By the key, with the value that the checkpoint was written with; the same adapters, or a folder's, are not looked at."""
    node = "actor_rollout_ref.model"
    before = load_config([], [f"{node}.{each}" for each in wrote])
    write_run(tmp_path / "run", 1, config=before, model=model)
    with CheckpointManager(tmp_path / "run") as manager:
        point = resume_point(TrainerConfig(), manager)
    assert point is not None
    tokenizer = ChatTokenizer.from_pretrained(model)

    def go_on(*keys: str) -> None:
        check_same_run(
            point, load_config([], [f"{node}.path={model}", *(f"{node}.{each}" for each in keys)]), tokenizer
        )

    with pytest.raises(CheckpointError, match=rf"{node}\.{key} must be .* to go on from .*global_step_1"):
        go_on(*reads)
    go_on(*wrote)
    go_on(*reads, f"lora_adapter_path={tmp_path}")


def test_the_point_of_another_step_is_refused(tmp_path: Path) -> None:
    """A checkpoint whose parts speak of different steps is none."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, lambda directory: RunState(step=3, parts={}, loggers={}, random={}).write(directory))
    with pytest.raises(CheckpointError, match=r"must be of one step, got 2 in checkpoint.json and 3 in its state"):
        found(tmp_path)
    assert msgspec.json.decode((tmp_path / "global_step_2" / "checkpoint.json").read_bytes())["step"] == 2
