"""The `ostinato` command: quickstart, train, sft, prepare, config, export, chat, serve.

Every foreseen failure ends in one message (what is wrong, where, and the cure) and a non-zero exit; only a fault of ours shows a traceback.
Heavy imports happen inside the commands, so that `ostinato config` and `--help` are quick.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ostinato_trainer.error_reporting import run_reporting_errors
from ostinato_trainer.loggers.thread import end_in_time

if TYPE_CHECKING:
    from ostinato_trainer.config.docs import ConfigRow

app = typer.Typer(
    name="ostinato",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
prepare_app = typer.Typer(help="Turn a public dataset into rows that a run can read.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ostinato {version('ostinato-trainer')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning for language-model agents."""


@app.command()
def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the reinforcement learning, as for train."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A new folder for everything the run writes.")] = None,
    seed: Annotated[int, typer.Option(help="Makes model, data and sampling; the same seed gives the same curve.")] = 0,
) -> None:
    """Train a tiny tool-calling agent on this machine's CPU, in about two minutes."""
    from ostinato_trainer.quickstart.run import next_free_folder, run_quickstart

    folder = output or next_free_folder(Path("outputs/quickstart"))
    run_quickstart(folder, seed=seed, console=Console(), overrides=tuple(overrides or ()))


@app.command()
def train(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.yaml [KEY=VALUE]...", help="YAML files, then dotted overrides, merged in order."
        ),
    ],
) -> None:
    """Train by a configuration: `ostinato train recipes/gsm8k_tool_cpu.yaml actor_rollout_ref.model.path=PATH`."""
    from ostinato_trainer.config.loading import load_config

    files, overrides = _files_and_overrides(arguments)
    config = load_config(files, overrides)
    console = Console(quiet="console" not in config.trainer.logger)
    console.print(f"starting the run in {config.trainer.local_dir} …", markup=False, highlight=False, soft_wrap=True)
    from ostinato_trainer.assembly import run_training  # after the configuration: a wrong key is told at once

    run_training(config)
    from ostinato_trainer.checkpoints.manager import CheckpointManager

    with CheckpointManager(config.trainer.local_dir) as checkpoints:
        newest = checkpoints.latest()
    if newest is not None:
        console.print(f"the newest checkpoint is {newest}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def sft(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [KEY=VALUE]...", help="YAML files, then dotted overrides; options go last."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model folder in the Hugging Face format.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="JSONL, JSON or parquet: `messages`, and `tools` where there are any.")
    ] = None,
    val_data: Annotated[list[str] | None, typer.Option(help="Conversations to measure the loss on.")] = None,
    output: Annotated[str | None, typer.Option(help="A new folder for the trained model.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: as many as the epochs take.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the conversations; default: 1.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Conversations a step; default: 8.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate, which falls to 0 in a line; default: 2e-5.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens; longer conversations are left out; default: 2048.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A .jinja file, if the model's own template is not to be used.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Chooses and orders the conversations; default: 0.")] = None,
) -> None:
    """Teach a model to talk as in given conversations: a warm start for `ostinato train`. All keys: `ostinato config --sft`."""
    from ostinato_trainer.config.loading import load_tree
    from ostinato_trainer.config.sft import SftConfig

    given = {
        "model.path": ("--model", model),
        "data.train_files": ("--data", data),
        "data.val_files": ("--val-data", val_data),
        "trainer.default_local_dir": ("--output", output),
        "trainer.total_training_steps": ("--steps", steps),
        "trainer.total_epochs": ("--epochs", epochs),
        "data.train_batch_size": ("--batch-size", batch_size),
        "optim.lr": ("--lr", lr),
        "data.max_length": ("--max-length", max_length),
        "model.chat_template": ("--chat-template", chat_template),
        "trainer.seed": ("--seed", seed),
    }
    files, overrides = _files_and_overrides(arguments or [])
    options = {key: option for key, option in given.items() if option[1] is not None}
    config, written = load_tree(SftConfig, files, overrides, options=options)
    from ostinato_trainer.sft.checks import check_sft  # after the configuration: a wrong key is told at once
    from ostinato_trainer.sft.run import run_sft

    check_sft(config, written)
    run_sft(config, console=Console())


@prepare_app.command("gsm8k")
def prepare_gsm8k(
    input: Annotated[
        str, typer.Option(help="A folder with train.jsonl and test.jsonl, or a dataset id of the Hugging Face hub.")
    ],
    output: Annotated[Path, typer.Option(help="Where train.parquet, test.parquet and sft.jsonl go.")],
    agent: Annotated[str, typer.Option(help="The agent loop that the rows ask for.")] = "tool_agent",
    check: Annotated[
        bool,
        typer.Option(help="A tool that says whether an answer is right; leave it out where accuracy is measured."),
    ] = True,
) -> None:
    """GSM8K questions as rows for the tool agent."""
    from ostinato_trainer.data.prepare_gsm8k import prepare_gsm8k as prepare

    for path, num_rows in prepare(input, output, agent=agent, checks=check).items():
        typer.echo(f"{path}: {num_rows} rows")


@app.command()
def config(
    prefix: Annotated[str, typer.Argument(help="Show only keys that begin with this.")] = "",
    sft: Annotated[bool, typer.Option("--sft", help="The keys of `ostinato sft` instead of those of `train`.")] = False,
) -> None:
    """Show every configuration key with its type, default and meaning."""
    from ostinato_trainer.config import Config
    from ostinato_trainer.config.docs import config_rows
    from ostinato_trainer.config.sft import SftConfig
    from ostinato_trainer.config.unknown import unknown_key_message
    from ostinato_trainer.errors import ConfigError

    root = SftConfig if sft else Config
    rows = [row for row in config_rows(root) if row.key.startswith(prefix)]
    if not rows:
        raise ConfigError(unknown_key_message(prefix, root))
    console = Console()
    for row in rows:
        _print_key(console, row)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, global_step_N, or the folder of a run: its newest.")
    ],
    output: Annotated[Path, typer.Argument(help="A new folder for the model, in the Hugging Face format.")],
    best: Annotated[bool, typer.Option("--best", help="Of a run's folder, the best by trainer.best_metric.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Convert the weights: bfloat16, float16 or float32; default: as they are.")
    ] = None,
) -> None:
    """Copy the model of a checkpoint to a folder of its own, after a look at its checksums."""
    from ostinato_trainer.checkpoints.export import export_model

    export_model(checkpoint, output, best=best, dtype=dtype, console=Console())


@app.command()
def chat(
    path: Annotated[Path, typer.Argument(help="A checkpoint of a run, or any Hugging Face model folder.")],
    tools: Annotated[
        Path | None, typer.Option(help="A Python file with function tools; default: those of the run.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
) -> None:
    """Talk to a model, with its tools. /new begins another conversation, /quit or end of input leaves."""
    from ostinato_trainer.chat import run_chat

    run_chat(path, function_tool_path=tools, temperature=temperature, console=Console())


@app.command()
def serve(
    path: Annotated[Path, typer.Argument(help="A checkpoint of a run, or any Hugging Face model folder.")],
    host: Annotated[str, typer.Option(help="Where to listen; anything but loopback needs an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="OSTINATO_API_KEY", help="What clients must bring; none: nothing.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="What clients ask for; default: the folder's name.")] = None,
    engine: Annotated[str, typer.Option(help="The engine that samples, by name.")] = "transformers",
    engine_python: Annotated[
        Path | None, typer.Option(help="The interpreter of an environment that has the engine; default: this one.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer together; default: the model's.")
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            "--format", help="How the model writes tool calls; default: the run's, or what the template tells."
        ),
    ] = None,
) -> None:
    """Serve a model by OpenAI's chat API until Ctrl-C."""
    from ostinato_trainer.serve import ServeSettings, run_serve

    settings = ServeSettings(
        host=host,
        port=port,
        api_key=api_key,
        model_name=model_name,
        engine=engine,
        engine_python=engine_python,
        max_model_len=max_model_len,
        tool_format=tool_format,
    )
    run_serve(path, settings, console=Console())


def _files_and_overrides(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """What is a file's name, or has no `=`, and what is `KEY=VALUE`."""
    files = [Path(argument) for argument in arguments if "=" not in argument or Path(argument).is_file()]
    return files, [argument for argument in arguments if "=" in argument and not Path(argument).is_file()]


def main() -> None:
    """Run the command line; the one boundary at which expected errors become messages."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' own bars would cut through ours
    sys.path.append("")  # modules of the user's own lie where the command is given; what is installed goes first
    status = run_reporting_errors(lambda: app(standalone_mode=False))
    end_in_time(status)
    sys.exit(status)


def _print_key(console: Console, row: "ConfigRow") -> None:
    """A key on a line that can be copied, with type and default beside or, where it is long, below it; then its meaning."""
    from rich.padding import Padding
    from rich.text import Text

    value = Text.assemble((row.type, "cyan"), " = ", (row.default, "green"))
    key = Text(row.key, "bold")
    if len(row.key) + 2 + value.cell_len <= console.width:
        console.print(Text.assemble(key, "  ", value), soft_wrap=True)
    else:
        console.print(key, soft_wrap=True)
        console.print(Padding(value, (0, 0, 0, 4), expand=False))
    console.print(Padding(Text(row.meaning), (0, 0, 0, 4), expand=False))
