"""The caller's end of an engine process: a server of the contract whose engine lives elsewhere.

Invariant: every call is answered, by the engine, or by an error that quotes the process's log once it is gone.
"""

import asyncio
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import msgspec

from ostinato_engines.engine_process import wire
from ostinato_engines.engine_process.wire import Build, Built, Call, Cancel, Generate, Hello
from ostinato_engines.engine_status import EngineStatus
from ostinato_engines.errors import (
    EngineClosedError,
    EngineCrashedError,
    EngineError,
    EngineInputError,
    EngineStartError,
    MissingDependencyError,
)
from ostinato_engines.forwarding import ForwardingServer, error_named
from ostinato_engines.socket_folder import new_socket_folder
from ostinato_engines.types import (
    Capabilities,
    EngineState,
    Health,
    SamplingParams,
    TokenOutput,
    WeightManifest,
)
from ostinato_engines.vllm_engine.diagnosis import explain
from ostinato_engines.weight_routes import WeightRoute

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_TAIL_BYTES = 256 << 10
_CONNECT_S = 120.0
_END_S = 60.0
_GIVE_UP_S = 5.0
_GONE = "the process is gone"


class EngineProcess(ForwardingServer):
    """A server in a process of its own, under an interpreter of its own.

    The interpreter's environment must hold this package, in the same version, and the engine. `policy_version` counts the
    updates that came through here.

    Args:
        engine: One of ours by name ("vllm", "transformers"), or a class: `module:Class`, `file.py:Class`.
        model: Path of a checkpoint.
        python: The interpreter; by default this one.
        settings: What the class takes by name beside the model; plain values. It gets those that it names.
        required: Names of settings without which it must not start.
        environment: Variables of the process beside those of this one, such as the devices that it may see.
        log_path: Where what the process prints is kept, anew with each start; by default it goes with the server.
        start_timeout_s: Longest wait for the engine to start.
    """

    def __init__(
        self,
        engine: str,
        model: str | Path,
        *,
        python: str | Path = sys.executable,
        settings: Mapping[str, Any] | None = None,
        required: Collection[str] = (),
        environment: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        start_timeout_s: float = 900.0,
    ) -> None:
        try:
            self._build = Build(engine, str(model), dict(settings or {}), tuple(required))
            wire.encode(self._build)
        except TypeError as error:
            raise EngineInputError(
                f"settings must be plain values, got {error}; give numbers, texts and lists"
            ) from error
        self._python = str(python)
        self._environment = {**_environment_for(self._python), **(environment or {})}
        self._start_timeout_s = start_timeout_s
        self._status = EngineStatus()
        self._starting = asyncio.Lock()
        self._folder: Path | None = None
        self._kept_log = None if log_path is None else Path(log_path)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._capabilities = Capabilities(engine=engine)
        self._versions = ""

    # Life

    async def start(self) -> None:
        """Starts the process and the engine in it; a second call does nothing.

        Raises:
            EngineStartError: With the lines of its log that matter, and the likely cure.
            EngineError: As the engine's own `start`.
        """
        async with self._starting:
            if self._status.closed:
                raise EngineClosedError("server must not be shut down before start, got closed; create a new one")
            if self._status.loaded:
                return
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await self._launch()
                    built = await self._call("build", self._build, Built)
            except BaseException as error:
                is_gone = self._reading is not None and self._reading.done()
                await self._end_process()
                explained = self._start_error(error, is_gone=is_gone)
                self._remove_folder()
                if explained is not None:
                    raise explained from error
                raise
            self._capabilities = built.capabilities
            self.max_model_len = built.max_model_len
            self.policy_version = built.policy_version
            self._versions = built.versions
            self._status.loaded = True

    def _start_error(self, error: BaseException, *, is_gone: bool) -> EngineError | None:
        """An error that says more to people who know neither the process nor its log; None where there is no more to say."""
        wanted = f"{self._build.engine} must start under {self._python}"
        if isinstance(error, TimeoutError):
            told = self._told(EngineError("it did not answer"))
            return EngineStartError(f"{wanted} within {self._start_timeout_s:g} s, got no answer:{told}")
        if isinstance(error, EngineCrashedError):
            return EngineStartError(f"{wanted}, got an error:{self._told(EngineError(_GONE) if is_gone else error)}")
        if isinstance(error, MissingDependencyError):
            return MissingDependencyError(f"{wanted}, which lacks something: {error} there")
        if isinstance(error, EngineStartError):
            return EngineStartError(f"{error}{self._where_log_is}")
        return None

    async def _launch(self) -> None:
        """The process, connected, of this version."""
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )

        def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not connected.done():
                connected.set_result((reader, writer))

        self._folder = new_socket_folder("ostinato-engine-")
        path = self._folder / "socket"
        listener = await asyncio.start_unix_server(meet, path)
        try:
            with self._open_log(self._kept_log or self._folder / "log") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(self._python, "-m", "ostinato_engines.engine_process", str(path)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
            ended = asyncio.ensure_future(self._process.wait())
            await asyncio.wait([ended, connected], timeout=_CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not connected.done():
                raise EngineStartError(
                    f"{self._build.engine} must start under {self._python}, got no connection:"
                    f"{explain(self._log_tail(), self._install_hint())}"
                )
        except OSError as error:
            raise EngineStartError(
                f"python must be an interpreter that runs here, got {self._python} ({error}); check the path"
            ) from error
        finally:
            listener.close()
        reader, self._writer = connected.result()
        await self._check_hello(reader)
        self._reading = asyncio.ensure_future(self._read(reader))

    @staticmethod
    def _open_log(path: Path) -> IO[bytes]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("wb")
        except OSError as error:
            raise EngineStartError(
                f"log_path must be a file that can be written, got {path} ({error}); choose another"
            ) from error

    def _install_hint(self) -> EngineError:
        return EngineError(
            f"the environment of {self._python} must hold this package, got none; run, with this project's own folder,"
            f" {self._python} -m pip install ./packages/engines"
        )

    async def _check_hello(self, reader: asyncio.StreamReader) -> None:
        body = await wire.read_body(reader)
        hello = None if body is None else wire.decode(body, Hello)
        mine = metadata.version("ostinato-engines")
        if hello is None or (hello.protocol, hello.package_version) != (wire.PROTOCOL, mine):
            theirs = "nothing" if hello is None else hello.package_version
            raise EngineStartError(
                f"ostinato-engines must be of version {mine} at both ends, got {theirs} under {self._python}; install it there"
            )

    async def shutdown(self) -> None:
        """Shuts the engine down, fails requests in flight with `EngineClosedError`, and ends the process."""
        if self._status.closed:
            return
        self._status.closed = True
        patience_s = _GIVE_UP_S
        try:
            if self._reading is not None and not self._reading.done():
                with suppress(EngineError, TimeoutError):
                    async with asyncio.timeout(_END_S):
                        await self._call("shutdown", None, object)
                    patience_s = _END_S
        finally:
            # A caller who goes, and a process that does not answer, leave nothing behind either.
            await self._end_process(patience_s)
            self._remove_folder()

    async def _end_process(self, patience_s: float = _GIVE_UP_S) -> None:
        """Closes the connection, on which the process ends by itself, or is ended after a while."""
        if self._writer is not None:
            self._writer.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), patience_s)
            finally:
                # Its own children too, whatever has become of it: they are of its session and of no other.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        self._writer = self._reading = None

    async def health(self) -> Health:
        state, detail = self._status.now()
        if state is not EngineState.READY:
            return Health(state, self.policy_version, detail=detail)
        try:
            return await self._call("health", None, Health)
        except EngineCrashedError:
            return Health(EngineState.FAILED, self.policy_version, detail=self._status.now()[1])

    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def versions(self) -> str:
        """Of what the engine runs on there; empty before it has started."""
        return self._versions

    # Calls

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        request_id: str,
        media: Sequence[Any] = (),
    ) -> TokenOutput:
        """Continues a prompt; see `AsyncServerBase.generate`. Media do not cross processes."""
        self.refuse_media(media)
        params = SamplingParams.from_mapping(sampling_params)
        try:
            prompt = [int(token_id) for token_id in prompt_ids]
        except (TypeError, ValueError) as error:
            raise EngineInputError(f"prompt_ids must be a sequence of integers, got {error}; pass token ids") from error
        return await self._ask("generate", Generate(prompt, params, request_id), TokenOutput)

    async def release(self, request_id: str) -> None:
        if self._status.loaded and not self._status.closed and self._status.failure is None:
            await self._ask("release", request_id, object)

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Streams through shared memory; see `AsyncServerBase.update_weights` for what a failure means."""
        self._status.require_loaded()
        await super().update_weights(manifest, weights)
        self.policy_version = manifest.version

    async def receive_weights(self, manifest: WeightManifest, route: WeightRoute) -> None:
        await super().receive_weights(manifest, route)
        self.policy_version = manifest.version

    async def _ask(self, method: str, argument: Any, kind: type[T]) -> T:
        """A call to a started engine."""
        self._status.require_loaded()
        return await self._call(method, argument, kind)

    async def _call(self, method: str, argument: Any, kind: type[T]) -> T:
        if self._writer is None or self._reading is None or self._reading.done():
            raise self._gone()
        try:
            raw = wire.encode_raw(argument)
        except TypeError as error:
            raise EngineInputError(f"{method} must get plain values, got {error}; they cross a process") from error
        number = next(self._numbers)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            wire.write(self._writer, Call(number, method, raw))
            return wire.decode(await asyncio.shield(answer), kind)
        except asyncio.CancelledError:
            # The engine forgets the request before its caller does: the same id can then be used again. One that stands still
            # keeps nobody.
            if self._writer is not None and not answer.done():
                wire.write(self._writer, Cancel(number))
                await asyncio.wait([answer], timeout=_GIVE_UP_S)
            if answer.done() and not answer.cancelled():
                answer.exception()
            raise
        finally:
            self._waiting.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hands answers to those who wait, until the process is gone."""
        try:
            while (answer := await wire.read_answer(reader)) is not None:
                future = self._waiting.get(answer.number)
                if future is None or future.done():
                    continue
                if answer.error:
                    future.set_exception(error_named(answer.error, answer.message))
                else:
                    future.set_result(answer.result)
        finally:
            error = self._gone()
            if self._status.loaded and not self._status.closed:
                self._status.failure = error
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)

    def _gone(self) -> EngineError:
        if self._status.closed:
            return EngineClosedError("server must be running, is shut down; create a new server")
        return EngineCrashedError(f"engine process must not end, got an error:{self._told(EngineError(_GONE))}")

    def _told(self, error: EngineError) -> str:
        """What the end of the log and an error say, the likely cure, and where the rest is."""
        return f"{explain(self._log_tail(), error)}{self._where_log_is}"

    @property
    def _where_log_is(self) -> str:
        return "" if self._kept_log is None else f"\nthe whole log is in {self._kept_log}"

    def _log_tail(self) -> str:
        """The end of what the process printed."""
        path = self._kept_log or (self._folder and self._folder / "log")
        if path is None or not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _remove_folder(self) -> None:
        """Of the socket, and of a log that is not to be kept."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _environment_for(python: str) -> dict[str, str]:
    """The variables of this process, but for those that would lead another interpreter to this one's packages."""
    ours = () if python == sys.executable else ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours}
