"""The quickstart from an empty folder to a trained checkpoint and its report.

Invariant: nothing is taken from outside the folder, and after the warm start the run is `ostinato train DIR/config.yaml`, no more and no less.
"""

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf
from rich.console import Console

from ostinato_engines.device import HOST, host_threads
from ostinato_tokenization import ChatTokenizer, encode_training_conversation
from ostinato_tools import ToolExecutor, load_tools
from ostinato_trainer.checkpoints.whole_folder import writing_below
from ostinato_trainer.config import Config
from ostinato_trainer.config.checks import problems_text, runnable_problems
from ostinato_trainer.config.loading import load_config, load_tree
from ostinato_trainer.errors import CheckpointError, ConfigError
from ostinato_trainer.home_paths import home_path
from ostinato_trainer.progress import step_progress
from ostinato_trainer.quickstart import files
from ostinato_trainer.quickstart.dialogues import FAULTY_SHARE, DialogueMaker
from ostinato_trainer.quickstart.report import print_report, require_drawing
from ostinato_trainer.quickstart.task import distinct_problems
from ostinato_trainer.quickstart.tiny_model import save_model, save_tokenizer
from ostinato_trainer.sft.steps import SftSettings, train_sft

NUM_TRAIN_ROWS = 1024
NUM_VAL_ROWS = 64
NUM_STEPS = 80


WARM_START = SftSettings(steps=600, batch_size=16, lr=4e-3, warmup_steps=20, device=HOST)
"""How the model learns the form of a dialogue before any reward."""


def next_free_folder(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def run_quickstart(
    output: Path, *, seed: int, console: Console, warm_start: SftSettings = WARM_START, overrides: tuple[str, ...] = ()
) -> None:
    """Make model and data below `output`, warm-start, train, report.

    Args:
        output: A folder that does not exist yet, or is empty.
        seed: Makes everything that is random.
        console: Where progress and the report go.
        warm_start: Shorter or longer than the default.
        overrides: Configuration overrides for the reinforcement learning.

    Raises:
        ConfigError: An override cannot be used; nothing is made then.
        CheckpointError: `output` holds something already or cannot be made.
        MissingExtraError: The extra quickstart is not installed.
    """
    require_drawing()
    output = home_path(output, "--output", CheckpointError).absolute()
    check_overrides(output, seed=seed, overrides=overrides)
    try:
        output.mkdir(parents=True, exist_ok=True)
        occupied = any(output.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"the output folder must be one that can be written, got {output} ({error.strerror}); choose another --output"
        ) from error
    if occupied:
        raise CheckpointError(
            f"the output folder must be new or empty, but {output} is not; choose another --output or remove it"
        )
    with writing_below(output):
        num_parameters = make_files(output, seed=seed)
    console.print(
        f"A Qwen3-shaped model of {num_parameters:,} parameters, its tokenizer and {NUM_TRAIN_ROWS:,} problems are in {output}"
    )
    with host_threads(1):
        make_warm_start(output, seed=seed, settings=warm_start, console=console)
        _train(output, overrides=overrides, console=console)
    print_report(output, console)


def check_overrides(output: Path, *, seed: int, overrides: tuple[str, ...]) -> None:
    """Refuse overrides that the run could not be trained with, before a minute of warm start.

    Raises:
        ConfigError: Naming what must be changed.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        OmegaConf.save(_config(output, seed), file)
        config, _ = load_tree(Config, file, overrides)
    if problems := runnable_problems(config):
        raise ConfigError(problems_text(problems))


def make_files(output: Path, *, seed: int) -> int:
    """Write tools, reward, data, dialogues, tokenizer, model and configuration; returns the model's number of parameters."""
    for name in ("tools.py", "reward.py"):
        shutil.copyfile(Path(files.__file__).with_name(name), output / name)
    for split, count in (("train", NUM_TRAIN_ROWS), ("val", NUM_VAL_ROWS)):
        problems = distinct_problems(count, held_out=split == "val", seed=seed)
        rows = [problem.row(index, split) for index, problem in enumerate(problems)]
        pq.write_table(pa.Table.from_pylist(rows), output / f"{split}.parquet")
    executor = _executor(output)
    dialogues = asyncio.run(DialogueMaker(executor, seed=seed).make(2000))
    tools = executor.registry.schemas()
    lines = [json.dumps({"messages": dialogue, "tools": tools}) for dialogue in dialogues]
    (output / "dialogues.jsonl").write_text("\n".join(lines) + "\n")
    save_tokenizer(output / "model", list(_plain_texts(dialogues)))
    num_parameters = save_model(output / "model", seed=seed)
    OmegaConf.save(_config(output, seed), output / "config.yaml")
    return num_parameters


def _executor(output: Path) -> ToolExecutor:
    return ToolExecutor(load_tools(None, str(output / "tools.py")))


def _plain_texts(dialogues: list[list[dict]]) -> Iterator[str]:
    """What the template writes between control tokens: the corpus from which the tokenizer learns its merges."""
    for _ in dialogues:
        yield "system\nTools: calculator(expression)"
    for message in itertools.chain.from_iterable(dialogues):
        yield f"{message['role']}\n{message['content']}"
        for call in message.get("tool_calls", ()):
            yield f"\n{json.dumps(call['function'])}\n"


def _config(output: Path, seed: int) -> dict:
    """The run's configuration, with the keys of any run of this field."""
    return {
        "data": {
            "train_files": str(output / "train.parquet"),
            "val_files": str(output / "val.parquet"),
            "max_prompt_length": 96,
            "max_response_length": 128,
            "train_batch_size": 8,
            "seed": seed,
        },
        "actor_rollout_ref": {
            "model": {"path": str(output / "warm_start")},
            "actor": {
                "ppo_mini_batch_size": 8,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": 4096,
                "optim": {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.0},
            },
            "rollout": {
                "name": "transformers",
                "n": 8,
                "max_model_len": 224,
                "max_num_seqs": 64,
                "full_determinism": True,
                "val_kwargs": {"do_sample": True, "temperature": 1.0},
                "multi_turn": {
                    "enable": True,
                    "format": "hermes",
                    "max_assistant_turns": 4,
                    "function_tool_path": str(output / "tools.py"),
                },
                "agent": {"default_agent_loop": "tool_agent"},
            },
        },
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {"custom_reward_function": {"path": str(output / "reward.py"), "name": "compute_score"}},
        "trainer": {
            "total_training_steps": NUM_STEPS,
            "test_freq": NUM_STEPS,
            "val_before_train": True,
            "save_freq": NUM_STEPS,
            "seed": seed,
            "device": HOST,
            "project_name": "ostinato",
            "experiment_name": "quickstart",
            "logger": ["console", "jsonl"],
            "default_local_dir": str(output),
        },
    }


def make_warm_start(output: Path, *, seed: int, settings: SftSettings, console: Console) -> None:
    """Supervised fine-tuning on dialogues of which most are faulty; the result is `output/warm_start`."""
    console.print(
        f"Warm start: dialogues of which {FAULTY_SHARE:.0%} carry a fault that reinforcement learning is to remove"
    )
    tokenizer = ChatTokenizer.from_pretrained(output / "model")
    executor = _executor(output)
    schemas = load_tools(None, str(output / "tools.py")).schemas()
    dialogues = asyncio.run(DialogueMaker(executor, seed=seed + 1).make(settings.steps * settings.batch_size))
    conversations = [encode_training_conversation(tokenizer, dialogue, schemas) for dialogue in dialogues]
    unfinished = output / ".warm_start.unfinished"
    with writing_below(output), step_progress(console) as progress:
        bar = progress.add_task("supervised", total=settings.steps, note="")
        for step in train_sft(output / "model", unfinished, conversations, settings, seed=seed):
            progress.update(bar, completed=step.step, note=f"loss {step.loss:.3f}")
        unfinished.rename(output / "warm_start")


def _train(output: Path, *, overrides: tuple[str, ...], console: Console) -> None:
    """GRPO by the written configuration, with a bar instead of a log."""
    from ostinato_trainer.assembly import run_training

    config = load_config([output / "config.yaml"], ["trainer.logger=[jsonl]", *overrides])
    with step_progress(console) as progress:
        bar = progress.add_task("GRPO", total=config.trainer.total_training_steps, note="")

        def show(step: int, metrics: Mapping[str, float]) -> None:
            if "critic/score/mean" in metrics:
                progress.update(bar, completed=step, note=f"reward {metrics['critic/score/mean']:.2f}")

        run_training(config, on_step=show)
