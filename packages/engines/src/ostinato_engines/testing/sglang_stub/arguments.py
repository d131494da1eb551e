"""SGLang's arguments, as far as an adapter gives them, and the plugins that SGLang looks for before it reads them."""

import argparse
import importlib
import json
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

VERSION = "0.5.17"
"""Whose protocol is spoken."""
_BACKENDS = ("flashinfer", "pytorch", "ascend")
_FLAGS = (
    "disable-cuda-graph",
    "disable-radix-cache",
    "enable-memory-saver",
    "skip-server-warmup",
    "skip-tokenizer-init",
)
_IGNORED = (
    "attention-backend",
    "chunked-prefill-size",
    "grammar-backend",
    "log-level",
    "log-level-http",
    "mem-fraction-static",
    "sampling-defaults",
    "tensor-parallel-size",
)


def load_plugins() -> list[str]:
    """Names of the sampling backends that plugins would bring, their lifelines taken up.

    What they do to SGLang itself needs SGLang; the embedded engine samples so anyway.
    """
    found = []
    for point in entry_points(group="sglang.srt.plugins"):
        importlib.import_module(point.module).watch_parent()
        found.append(point.name)
    return found


def read_arguments(line: Sequence[str], backends: Sequence[str]) -> argparse.Namespace:
    """SGLang's command line; what it would refuse ends the process with a message."""
    parser = argparse.ArgumentParser("sglang_stub")
    parser.add_argument("--config")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--sampling-backend", choices=(*_BACKENDS, *backends), default="pytorch")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    for name in _IGNORED:
        parser.add_argument(f"--{name}")
    return parser.parse_args([*_from_file(line), *line])


def _from_file(line: Sequence[str]) -> list[str]:
    if "--config" not in line:
        return []
    told = json.loads(Path(line[line.index("--config") + 1]).read_text())
    return [part for name, value in told.items() for part in (f"--{name}", str(value))]
