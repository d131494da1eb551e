"""Serve a checkpoint by OpenAI's chat API: `ostinato serve PATH`.

This module chooses the engine and the format of tool calls, and says where the server is; the API is in
`ostinato_rollout.openai_app`.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ostinato_engines import AsyncServerBase
from ostinato_engines.engine_process import EngineProcess
from ostinato_engines.loading import construct_server, engine_class
from ostinato_rollout import ServerPool, SessionConfig
from ostinato_rollout.openai_app import OpenAIApp, serving
from ostinato_tokenization import ChatTokenizer, ContinuousTokens, SanityCheckMode
from ostinato_tools import ToolParser, UnknownParserError, get_parser, parser_for
from ostinato_trainer.chat import chat_tokenizer, find_model
from ostinato_trainer.home_paths import home_path
from ostinato_trainer.interrupts import run_interruptibly

__all__ = ["ServeSettings", "run_serve"]


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `ostinato serve` is told beside the model; its options say what each one means."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model_name: str | None = None
    engine: str = "transformers"
    engine_python: Path | None = None
    max_model_len: int | None = None
    tool_format: str | None = None


def run_serve(path: Path, settings: ServeSettings, *, console: Console) -> None:
    """Serve the model at `path` until Ctrl-C or SIGTERM, which end it cleanly: that is how a server ends.

    Raises:
        CheckpointError: `path` is neither a checkpoint of a run nor a model folder, or its tokenizer cannot chat.
        EngineError: The engine does not start.
        ServeError: The address cannot be bound, or can be reached from outside without a key.
        KeyboardInterrupt: Ctrl-C came before the server was up.
    """
    model_path, run_config = find_model(path)
    tokenizer = chat_tokenizer(model_path)
    tool_format = settings.tool_format
    if tool_format is None and run_config is not None:
        tool_format = run_config.actor_rollout_ref.rollout.multi_turn.format
    parser = _parser(tool_format, tokenizer, console)
    name = settings.model_name or _name_of(model_path)
    pool = ServerPool([_engine(model_path, settings)], make_server=lambda _: _engine(model_path, settings))
    tokens = ContinuousTokens(
        tokenizer, template_kwargs=None if run_config is None else run_config.data.apply_chat_template_kwargs
    )
    # Nobody trains on what is served here, so nobody wants it compared with what a template would write.
    config = SessionConfig(tokenization_sanity_check_mode=SanityCheckMode.DISABLE)
    app = OpenAIApp(pool, tokens, model=name, parser=parser, config=config, api_key=settings.api_key)
    is_up = threading.Event()
    with _terminated_as_interrupted():
        try:
            run_interruptibly(_serve(pool, app, settings, is_up, console))
        except KeyboardInterrupt:
            if not is_up.is_set():
                raise
            console.print("stopped")


async def _serve(
    pool: ServerPool, app: OpenAIApp, settings: ServeSettings, is_up: threading.Event, console: Console
) -> None:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(app, host=settings.host, port=settings.port))
        console.print(f"loading {app.model} …", highlight=False, markup=False)
        stack.push_async_callback(pool.shutdown)
        await pool.start()
        is_up.set()
        console.print(
            f"serving {app.model} at {url}/v1; Ctrl-C ends it. Try:", highlight=False, markup=False, soft_wrap=True
        )
        console.print(curl_line(url, app.model, needs_key=app.needs_key), highlight=False, markup=False, soft_wrap=True)
        await asyncio.get_running_loop().create_future()


def curl_line(url: str, model: str, *, needs_key: bool) -> str:
    """A command that asks the server something; the key is taken from the environment, never printed."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]}, ensure_ascii=False)
    key = ' -H "Authorization: Bearer $OSTINATO_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def _engine(model_path: Path, settings: ServeSettings) -> AsyncServerBase:
    """One of our engines by name, here or under an interpreter of its own; what is not set is its own choice."""
    chosen: dict[str, Any] = {} if settings.max_model_len is None else {"max_model_len": settings.max_model_len}
    if settings.engine_python is not None:
        python = home_path(settings.engine_python, "--engine-python")
        return EngineProcess(settings.engine, model_path, python=python, settings=chosen, required=tuple(chosen))
    return construct_server(engine_class(settings.engine), str(model_path), chosen, required=tuple(chosen))


def _parser(tool_format: str | None, tokenizer: ChatTokenizer, console: Console) -> ToolParser | None:
    """The parser of a format; without one, that of the template, if it tells any."""
    if tool_format not in (None, "auto"):
        try:
            return get_parser(tool_format)
        except UnknownParserError as error:
            raise UnknownParserError(f"--format: {error}") from error
    try:
        return parser_for(tokenizer.tool_template)
    except UnknownParserError:
        console.print("requests with tools are refused: the chat template tells no format of calls; --format names one")
        return None


def _name_of(model_path: Path) -> str:
    """The folder's name; of a checkpoint that of its step."""
    folder = model_path.resolve()
    return folder.parent.name if folder.name == "huggingface" else folder.name


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda _signal, _frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
