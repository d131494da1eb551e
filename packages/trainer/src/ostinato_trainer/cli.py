"""The `ostinato` command: quickstart, train, sft, prepare, config, export, chat, serve.

Every foreseen failure ends in one message (what is wrong, where, and the cure) and a non-zero exit; only a fault of ours shows a traceback.
Heavy imports happen inside the commands, so that `ostinato config` and `--help` are quick.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ostinato_trainer.error_reporting import run_reporting_errors

if TYPE_CHECKING:
    from ostinato_trainer.config_docs import ConfigRow

app = typer.Typer(
    name="ostinato",
    help="Reinforcement learning for language-model agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
prepare_app = typer.Typer(help="Turn a public dataset into rows that a run can read.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")


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
    from ostinato_trainer.config_loading import load_config

    files = [Path(argument) for argument in arguments if "=" not in argument or Path(argument).is_file()]
    overrides = [argument for argument in arguments if "=" in argument and not Path(argument).is_file()]
    config = load_config(files, overrides)
    from ostinato_trainer.assembly import run_training  # after the configuration: a wrong key is told at once

    run_training(config)


@app.command()
def sft(
    model: Annotated[Path, typer.Option(help="A model folder in the Hugging Face format.")],
    data: Annotated[str, typer.Option(help="JSONL, JSON or parquet: `messages`, and `tools` where there are any.")],
    output: Annotated[Path, typer.Option(help="A new folder for the trained model.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Conversations a step.")] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate, from which it falls to 0 in a line.")] = 2e-5,
    max_length: Annotated[int, typer.Option(help="Tokens; longer conversations are left out.")] = 2048,
    chat_template: Annotated[
        str | None, typer.Option(help="A .jinja file, if the model's own template is not to be used.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses and orders the conversations.")] = 0,
) -> None:
    """Teach a model to talk as in given conversations: a warm start for `ostinato train`."""
    from ostinato_trainer.sft import SftSettings
    from ostinato_trainer.sft_run import run_sft

    settings = SftSettings(steps=steps, batch_size=batch_size, lr=lr, max_tokens_per_micro_batch=4096)
    run_sft(
        model,
        data,
        output,
        settings=settings,
        max_length=max_length,
        chat_template=chat_template,
        seed=seed,
        console=Console(),
    )


@prepare_app.command("gsm8k")
def prepare_gsm8k(
    input: Annotated[
        str, typer.Option(help="A folder with train.jsonl and test.jsonl, or a dataset id of the Hugging Face hub.")
    ],
    output: Annotated[Path, typer.Option(help="Where train.parquet, test.parquet and sft.jsonl go.")],
    agent: Annotated[str, typer.Option(help="The agent loop that the rows ask for.")] = "tool_agent",
) -> None:
    """GSM8K questions as rows for the tool agent."""
    from ostinato_trainer.prepare_gsm8k import prepare_gsm8k as prepare

    for path, num_rows in prepare(input, output, agent=agent).items():
        typer.echo(f"{path}: {num_rows} rows")


@app.command()
def config(
    prefix: Annotated[str, typer.Argument(help="Show only keys that begin with this.")] = "",
) -> None:
    """Show every configuration key with its type, default and meaning."""
    from ostinato_trainer.config_docs import config_rows
    from ostinato_trainer.config_unknown import unknown_key_message
    from ostinato_trainer.errors import ConfigError

    rows = [row for row in config_rows() if row.key.startswith(prefix)]
    if not rows:
        raise ConfigError(unknown_key_message(prefix))
    console = Console()
    for row in rows:
        _print_key(console, row)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, global_step_N, or the folder of a run: its newest.")],
    output: Annotated[Path, typer.Argument(help="A new folder for the model, in the Hugging Face format.")],
    best: Annotated[bool, typer.Option("--best", help="Of a run's folder, the best by trainer.best_metric.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Convert the weights: bfloat16, float16 or float32; default: as they are.")
    ] = None,
) -> None:
    """Copy the model of a checkpoint to a folder of its own, after a look at its checksums."""
    from ostinato_trainer.model_export import export_model

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


def main() -> None:
    """Run the command line; the one boundary at which expected errors become messages."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' own bars would cut through ours
    sys.exit(run_reporting_errors(lambda: app(standalone_mode=False)))


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
