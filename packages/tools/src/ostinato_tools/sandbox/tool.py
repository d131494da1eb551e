"""`PythonTool`: Python for a model, in a sandbox, with variables that live as long as the trajectory."""

import pkgutil
from collections.abc import Mapping
from typing import Any

from ostinato_tools.base import BaseTool
from ostinato_tools.errors import (
    ToolArgumentError,
    ToolConfigError,
    ToolFailedError,
    ToolInfrastructureError,
    ToolTimeoutError,
)
from ostinato_tools.responses import ToolResponse
from ostinato_tools.sandbox.backend import CodeResult, Enforcement, RunEnd, SandboxBackend, SandboxSession
from ostinato_tools.sandbox.config import PROCESS_BACKEND, SandboxConfig
from ostinato_tools.sandbox.process import ProcessBackend

MAX_CODE_LENGTH = 1_000_000
"""Characters of one call's code."""

_STATE_LOST = "Variables and files of earlier calls are lost; the next call starts anew."
_STATE_LOST_BEFORE = "Variables and files from before are lost."
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": (
            "Runs Python code and returns what it prints and the value of its last expression. "
            "Variables, imports and files stay for later calls. There is no network."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python code"}},
            "required": ["code"],
        },
    },
}
_BACKENDS: dict[SandboxConfig, SandboxBackend] = {}


def backend_for(config: SandboxConfig) -> SandboxBackend:
    """Return the backend that all tools of this configuration share.

    Raises:
        ToolConfigError: the configuration names a class that cannot be had, or requires what cannot be enforced here.
    """
    backend = _BACKENDS.get(config)
    if backend is None:
        backend = _make_backend(config)
        if config.require:
            _refuse_unenforced(backend, config)
        _BACKENDS[config] = backend
    return backend


def shut_down() -> None:
    """End every sandbox of this process, also those in use; tools made later start new ones."""
    while _BACKENDS:
        _BACKENDS.popitem()[1].close()


def enforcement(config: Mapping[str, Any] | None = None) -> tuple[Enforcement, ...]:
    """Return what a sandbox of this configuration really enforces on this machine.

    Args:
        config: As in the tool's `config`; the defaults if None.

    Raises:
        ToolConfigError: the configuration is wrong, or requires what cannot be enforced here.
        ToolInfrastructureError: no sandbox can be started.
    """
    return backend_for(SandboxConfig.from_mapping(config or {})).enforcement()


class PythonTool(BaseTool):
    """Runs the model's Python code in a sandbox.

    Configuration: the fields of `SandboxConfig`. The schema may be the author's own, with a string `code`.
    """

    def __init__(self, config: dict | None = None, tool_schema: dict | None = None) -> None:
        """Read the configuration; a sandbox is started when the model first calls.

        Raises:
            ToolConfigError: the configuration or the schema is wrong, or a required protection cannot be enforced here.
        """
        super().__init__({} if config is None else config, _SCHEMA if tool_schema is None else tool_schema)
        if "code" not in self.tool_schema["function"].get("parameters", {}).get("properties", {}):
            raise ToolConfigError("tool_schema of PythonTool must have a property 'code', got none; add it")
        self._sandbox = SandboxConfig.from_mapping(self.config)
        self._backend = backend_for(self._sandbox)
        self._session: SandboxSession | None = None
        self._num_lost = 0
        self._is_cut_off = False
        self._note = ""

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> None:
        """Take a worker.

        Raises:
            ToolConfigError: there are arguments.
            ToolInfrastructureError: no worker can be had.
        """
        if create_kwargs:
            raise ToolConfigError(
                f"create_kwargs of {self.name} must be empty, got {sorted(create_kwargs)}; remove them"
            )
        self._session = await self._backend.start()

    async def execute(
        self, instance_id: str, parameters: dict, **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Run `parameters["code"]`.

        Returns:
            Printed text, value and traceback; no reward; the metric `code_error`, 1.0 where the code raised.

        Raises:
            ToolArgumentError: the code is no text that Python could read.
            ToolTimeoutError: it did not end in time.
            ToolFailedError: it ended its interpreter.
            ToolInfrastructureError: no interpreter can be had.
        """
        code = _readable(parameters.get("code"))
        session = await self._usable_session()
        self._is_cut_off = True  # until an answer is there: a call that is cancelled takes the state with it
        result = await session.run(code)
        self._is_cut_off = False
        if result.state_lost:
            self._num_lost += 1
            await self._end_session()
        text, self._note = self._note + self._text(result), ""
        if result.end is RunEnd.TIMED_OUT:
            raise ToolTimeoutError(text)
        if result.end is RunEnd.DIED:
            raise ToolFailedError(text)
        return ToolResponse(text=text), 0.0, {"code_error": float(result.end is RunEnd.RAISED)}

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """End the worker and everything that it started."""
        await self._end_session()

    async def _usable_session(self) -> SandboxSession:
        if self._is_cut_off:
            self._is_cut_off = False
            self._num_lost += 1
            self._note = f"(An earlier call was cut off. {_STATE_LOST_BEFORE})\n"
            await self._end_session()
        if self._session is None:
            if self._num_lost > self._sandbox.max_restarts:
                raise ToolFailedError(
                    f"{self.name} has lost its interpreter {self._num_lost} times and gets no other one"
                )
            self._session = await self._backend.start()
        return self._session

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _text(self, result: CodeResult) -> str:
        output = result.output
        if result.num_dropped:
            output += f"...(truncated, {result.num_dropped} bytes more)"
        lines = [output.removesuffix("\n"), result.value or "", result.error or ""]
        text = "\n".join(line for line in lines if line)
        if result.state_lost:
            lost = f"{self.name} lost its interpreter: {result.detail}. {_STATE_LOST}"
            return f"{lost}\n{text}" if text else lost
        if result.end is RunEnd.TIMED_OUT:
            return f"the code was interrupted; variables are kept.\n{text}"
        return text or "(no output)"


def _readable(code: Any) -> str:
    if not isinstance(code, str) or len(code) > MAX_CODE_LENGTH:
        raise ToolArgumentError(f"code must be a string of at most {MAX_CODE_LENGTH} characters; split it")
    try:
        code.encode()
    except UnicodeEncodeError as error:
        raise ToolArgumentError(
            f"code must be valid Unicode, got a lone surrogate at character {error.start}"
        ) from None
    return code


def _make_backend(config: SandboxConfig) -> SandboxBackend:
    if config.backend == PROCESS_BACKEND:
        return ProcessBackend(config)
    try:
        return pkgutil.resolve_name(config.backend)(config)
    except Exception as error:  # foreign code: whatever it raises, there is no backend
        raise ToolConfigError(
            f"backend must be 'process' or the dotted path of a class that takes a SandboxConfig, got {config.backend!r} "
            f"({type(error).__name__}: {error}); correct the path"
        ) from error


def _refuse_unenforced(backend: SandboxBackend, config: SandboxConfig) -> None:
    try:
        report = {entry.name: entry for entry in backend.enforcement()}
    except ToolInfrastructureError as error:
        raise ToolConfigError(f"require must hold in a sandbox that starts, got none: {error}") from error
    for name in config.require:
        if name not in report or not report[name].enforced:
            why = report[name].detail if name in report else "the backend does not know it"
            raise ToolConfigError(
                f"require must name what can be enforced here, got {name!r}: {why}; give the process the rights, or leave it out"
            )
