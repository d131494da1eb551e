"""Talk to a checkpoint, with the tools that it was trained with: `ostinato chat PATH`.

The conversation is a `ChatSession` over the embedded engine, exactly what an agent loop uses; this module only reads and prints lines.
"""

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ostinato_agent_loop import make_parser
from ostinato_engines import SamplingParams
from ostinato_engines.transformers_server import TransformersServer
from ostinato_rollout import BudgetExceededError, ChatSession, LLMServerClient, SessionBudget, SessionConfig
from ostinato_tokenization import ChatTokenizer, ContinuousTokens, TokenizationError
from ostinato_tools import ToolExecutor, TrajectoryTools, load_tools
from ostinato_trainer.checkpoints.manager import LATEST
from ostinato_trainer.config import Config
from ostinato_trainer.config.data import DataConfig
from ostinato_trainer.config.loading import load_config, load_tree
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import CheckpointError, ConfigError
from ostinato_trainer.interrupts import run_interruptibly

MAX_TOOL_TURNS = 8
MAX_TURN_TOKENS = 1024
"""Of one turn of a model that comes without its run's configuration."""


def run_chat(path: Path, *, function_tool_path: Path | None, temperature: float, console: Console) -> None:
    """Open the model at `path` and answer lines until the input ends.

    Raises:
        CheckpointError: `path` is neither a checkpoint of a run nor a model folder, or its tokenizer cannot chat.
        KeyboardInterrupt: Ctrl-C.
    """
    model_path, config = find_model(path)
    if function_tool_path is not None:
        config_path, tools_path = None, str(function_tool_path)
    elif config is not None:
        multi_turn = config.actor_rollout_ref.rollout.multi_turn
        config_path, tools_path = multi_turn.tool_config_path, multi_turn.function_tool_path
    else:
        config_path, tools_path = None, None
    executor = ToolExecutor(load_tools(config_path, tools_path))
    tool_format = config.actor_rollout_ref.rollout.multi_turn.format if config else "hermes"
    max_tokens = config.data.max_response_length if config else MAX_TURN_TOKENS
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    template_kwargs = config.data.apply_chat_template_kwargs if config else {}
    run_interruptibly(_converse(model_path, executor, tool_format, template_kwargs, params, console))


def find_model(path: Path) -> tuple[Path, Config | None]:
    """The model folder at `path`, and the configuration of the run that made it, where there is one."""
    for model_path in (path, path / "huggingface"):
        if (model_path / "config.json").is_file():
            run_config = next(
                (folder / "config.yaml" for folder in (path, path.parent) if (folder / "config.yaml").is_file()), None
            )
            return model_path, _config_of(run_config) if run_config else None
    if not path.is_dir():
        raise CheckpointError(
            f"{path} must be a checkpoint or a model folder, got no folder of that name; check the path"
        )
    pointer = path / LATEST
    newest = f"global_step_{pointer.read_text(errors='replace').strip()}" if pointer.is_file() else None
    cure = f"give {path / newest}" if newest else "give a path that a run printed"
    raise CheckpointError(f"{path} must be a checkpoint or a model folder, but holds no config.json; {cure}")


def _config_of(file: Path) -> Config:
    """The configuration of a run; of a fine-tuning what it has in common with one: how conversations are rendered."""
    try:
        return load_config([file], [])
    except ConfigError as error:
        try:
            tree, _ = load_tree(SftConfig, [file], [])
        except ConfigError:
            raise error from None
        return Config(data=DataConfig(apply_chat_template_kwargs=tree.data.apply_chat_template_kwargs))


def chat_tokenizer(model_path: Path) -> ChatTokenizer:
    """The tokenizer of a model folder.

    Raises:
        CheckpointError: It cannot be loaded, or has no chat template.
    """
    try:
        return ChatTokenizer.from_pretrained(model_path)
    except TokenizationError as error:
        raise CheckpointError(
            f"{model_path} must hold a tokenizer with a chat template, got: {error}; "
            "add tokenizer.json and chat_template.jinja to that folder"
        ) from error


async def _converse(
    model_path: Path,
    executor: ToolExecutor,
    tool_format: str,
    template_kwargs: Mapping[str, Any],
    params: SamplingParams,
    console: Console,
) -> None:
    tokenizer = chat_tokenizer(model_path)
    config = SessionConfig(format=tool_format)
    parser = make_parser(config, tokenizer)
    server = TransformersServer(str(model_path))
    await server.start()
    client = LLMServerClient([server])
    budget = SessionBudget(
        max_prompt_tokens=server.max_model_len,
        max_response_tokens=server.max_model_len,
        max_model_len=server.max_model_len,
    )
    num_conversations = 0
    console.print("[dim]Type a message; /new begins another conversation, /quit leaves.[/dim]")
    try:
        goes_on = True
        while goes_on:
            async with AsyncExitStack() as stack:
                num_conversations += 1
                tools = await stack.enter_async_context(executor.open(f"chat-{num_conversations}"))
                session = ChatSession(
                    client=client,
                    tokens=ContinuousTokens(tokenizer, template_kwargs=template_kwargs),
                    config=config,
                    budget=budget,
                    parser=parser,
                    tools=tools.schemas,
                )
                stack.push_async_callback(session.close)
                goes_on = await _one_conversation(session, tools, params, console)
    finally:
        await executor.close()
        await server.shutdown()


async def _one_conversation(
    session: ChatSession, tools: TrajectoryTools, params: SamplingParams, console: Console
) -> bool:
    """Answer lines until /new (true) or the end (false)."""
    while True:
        line = _read_line()  # nothing else goes on meanwhile, and Ctrl-C reaches it here
        if line is None or line.strip() == "/quit":
            return False
        if line.strip() == "/new":
            return True
        if not line.strip():
            continue
        try:
            await session.extend([{"role": "user", "content": line}])
            await _answer(session, tools, params, console)
        except BudgetExceededError:
            _print(console, "this conversation is as long as the model can read; here begins another", "yellow")
            return True


async def _answer(session: ChatSession, tools: TrajectoryTools, params: SamplingParams, console: Console) -> None:
    """Generate, run the tools that are asked for, until the model has nothing more to ask."""
    for _ in range(MAX_TOOL_TURNS):
        reply = await session.generate(params)
        content = reply.message.get("content")
        if content:
            _print(console, str(content))
        if reply.errors:
            first, *others = reply.errors
            _print(console, f"{first} (and {len(others)} more)" if others else first, "yellow")
        if not reply.tool_calls:
            return
        outcomes = await tools.run(reply.tool_calls)
        for outcome in outcomes:
            call = f"{outcome.call.name}({outcome.call.raw_arguments})"
            _print(console, f"{call} -> {outcome.message['content']}", "dim")
        await session.extend([outcome.message for outcome in outcomes])
    _print(console, f"stopped after {MAX_TOOL_TURNS} turns of tool calls", "yellow")


def _print(console: Console, text: str, style: str = "") -> None:
    """Text of the model's or a tool's: no markup, and no control characters that a terminal would obey."""
    shown = "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)
    console.print(Text(shown, style), soft_wrap=True, highlight=False)


def _read_line() -> str | None:
    """The next line of input, with a prompt and editing keys at a terminal; None at its end."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # not everywhere; it gives input() its editing keys
            import readline  # noqa: F401
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
