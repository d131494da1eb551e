"""Finds our servers by name and a third party's by `{path, name}`. Knows nothing of what the class does.

Importing runs the third party's code: whatever it raises, `SystemExit` too, comes out as the caller's error. Only a
`KeyboardInterrupt` and the like go through.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ostinato_engines.errors import EngineLoadError
from ostinato_engines.server import AsyncServerBase

ENGINES = {
    "transformers": ("ostinato_engines.transformers_server", "TransformersServer"),
    "vllm": ("ostinato_engines.vllm_server", "VLLMServer"),
    "sglang": ("ostinato_engines.sglang_server", "SGLangServer"),
}
"""Our own engines by name: module and class."""


def engine_class(name: str) -> type[AsyncServerBase]:
    """The class of one of our own engines; loads its module, not yet the engine.

    Raises:
        EngineLoadError: There is no adapter of this name.
        MissingDependencyError: torch is not installed.
    """
    if name not in ENGINES:
        raise EngineLoadError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}; or name a class of your own")
    module, attribute = ENGINES[name]
    return getattr(importlib.import_module(module), attribute)


def server_class_of(engine: str) -> type[AsyncServerBase]:
    """The class that a text names: one of our own engines, or a place and a class, `module:Class` or `file.py:Class`.

    Raises:
        EngineLoadError: As `engine_class` and `load_server_class`.
        MissingDependencyError: What our own engine needs is not installed.
    """
    place, _, name = engine.rpartition(":")
    return load_server_class(place, name) if place else engine_class(engine)


def load_server_class(path: str | Path, name: str) -> type[AsyncServerBase]:
    """Loads class `name` from `path`.

    Args:
        path: A Python file (`.../server.py`) or a dotted module (`my_package.server`).
        name: A concrete subclass of `AsyncServerBase` in it.

    Raises:
        EngineLoadError: No such file, module or class, the module fails to import, or the class does not fit.
    """
    module = _load_file(Path(path)) if str(path).endswith(".py") else _load_module(str(path))
    found = getattr(module, name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise EngineLoadError(
            f"name must be a class in {path}, got {name!r}; it defines {', '.join(classes) or 'none'}"
        )
    if not inspect.isclass(found) or not issubclass(found, AsyncServerBase):
        raise EngineLoadError(f"{name} in {path} must be a subclass of AsyncServerBase, got {found!r}; derive it")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise EngineLoadError(f"{name} in {path} must be concrete, got a class without {missing}; implement them")
    return found


def names_not_taken(server_class: type[AsyncServerBase], names: Collection[str]) -> list[str]:
    """Those that the class's `__init__` does not name; none if it has `**kwargs`."""
    parameters = inspect.signature(server_class).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in names if name not in parameters]


def construct_server(
    server_class: type[AsyncServerBase], model_path: str, settings: Mapping[str, Any], *, required: Collection[str] = ()
) -> AsyncServerBase:
    """Makes a server of a class whose parameters are its author's choice.

    Args:
        server_class: Its first parameter takes the model; the others are given by name.
        model_path: Of the checkpoint to serve.
        settings: What a run knows of its engine. The class gets those that its `__init__` names, or all if it has
            `**kwargs`; it need not care for the rest.
        required: Names of settings that must not be lost on it: somebody chose their values.

    Raises:
        EngineLoadError: It takes no model, demands a parameter that no setting provides, or lacks a required one.
    """
    signature = inspect.signature(server_class)
    not_taken = names_not_taken(server_class, settings)
    if lost := [name for name in not_taken if name in required]:
        raise EngineLoadError(
            f"{server_class.__name__} must take {', '.join(lost)}, which is set, got {server_class.__name__}{signature}; "
            "leave it unset, or name it in the constructor"
        )
    chosen = {name: value for name, value in settings.items() if name not in not_taken}
    try:
        signature.bind(model_path, **chosen)
    except TypeError as error:
        raise EngineLoadError(
            f"{server_class.__name__} must be constructible from a model path and some of {', '.join(settings)}, "
            f"got {server_class.__name__}{signature}: {error}; give its other parameters defaults"
        ) from error
    return server_class(model_path, **chosen)  # pyright: ignore[reportCallIssue]


def _load_file(file: Path) -> ModuleType:
    try:
        file = file.expanduser().resolve()
    except RuntimeError as error:
        raise EngineLoadError(
            f"path must begin with the home of a known user where it begins with ~, got {file}: {error}; write the whole path"
        ) from error
    if not file.is_file():
        raise EngineLoadError(f"path must be an existing Python file, got {file}; check custom_async_server.path")
    # The same name in every process, so that instances of the class pickle.
    module_name = f"ostinato_server_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise EngineLoadError(f"path must be importable as Python, got {file}; check the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise EngineLoadError(f"{file} must import cleanly, got {_place(error, file.name)}; mend the file") from error
    return module


def _load_module(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:
        raise EngineLoadError(
            f"path must be a .py file or an importable module, got {path!r} ({_place(error, None)}); "
            "install the package, mend the module, or give a file's path"
        ) from error


def _place(error: BaseException, file_name: str | None) -> str:
    """The error, with the line of the user's file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if Path(frame.filename).name == file_name), None)
    return f"{type(error).__name__}: {error}" + ("" if line is None else f" (line {line})")
