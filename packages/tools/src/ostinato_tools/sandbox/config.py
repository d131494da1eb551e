"""`SandboxConfig`: the limits of sandboxed Python, as they stand under `config:` of the tool."""

import math
import sysconfig
from collections.abc import Mapping
from typing import Any

import msgspec

from ostinato_tools.errors import ToolConfigError
from ostinato_tools.sandbox.inside.facts import MECHANISMS, PROTECTIONS

PROCESS_BACKEND = "process"


class SandboxConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits and choices of a sandbox; equal configurations share their warm workers.

    Raises:
        ToolConfigError: a value is out of range, or a name is not known.
    """

    wall_s: float = 10.0
    """Seconds of each call. Then the code is interrupted, and where that does not help its interpreter is replaced."""
    cpu_s: int = 60
    """Processor seconds of each process over the whole trajectory."""
    memory_mb: int = 512
    """Mebibytes of address space of each process; with a control group also of all processes together, `disk_mb` added."""
    disk_mb: int = 64
    """Mebibytes of all files in the scratch folder together."""
    file_mb: int = 32
    """Mebibytes of each file."""
    processes: int = 16
    """Processes and threads at one time, the interpreter itself included."""
    open_files: int = 64
    """Open files of each process."""
    output_bytes: int = 65536
    """Bytes of printed text that are kept of each call; as many of the value and of the traceback."""
    site_packages: bool = True
    """Whether packages of this process's environment can be imported; they are read-only in any case."""
    preload: tuple[str, ...] = ()
    """Modules to import, inside of the sandbox, before the first call."""
    warm_workers: int = 2
    """Workers that are kept ready for trajectories to come."""
    max_workers: int = 512
    """Workers at one time, ready ones included; a trajectory beyond waits for another to end."""
    max_restarts: int = 5
    """Interpreters that a trajectory may lose before it gets no more."""
    start_s: float = 30.0
    """Seconds that a worker may take to become ready, waiting for its turn included."""
    require: tuple[str, ...] = ()
    """Protections without which nothing is started; their names are those of the report."""
    without: tuple[str, ...] = ()
    """Mechanisms to leave out: namespaces, drop_root, seccomp, landlock, cgroup."""
    backend: str = PROCESS_BACKEND
    """`process`, or the dotted path of a class that has the methods of `SandboxBackend`."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "start_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ToolConfigError(f"{name} must be a positive finite number, got {value}; give seconds")
        lowest = {
            "memory_mb": 64,
            "processes": 1,
            "open_files": 16,
            "output_bytes": 256,
            "warm_workers": 0,
            "max_restarts": 0,
        }
        for name in ("cpu_s", "disk_mb", "file_mb", "max_workers", *lowest):
            value, least = getattr(self, name), lowest.get(name, 1)
            if not least <= value < 1 << 30:
                raise ToolConfigError(f"{name} must be from {least} to {(1 << 30) - 1}, got {value}; choose another")
        for name, known in (("require", tuple(PROTECTIONS)), ("without", MECHANISMS)):
            unknown = [item for item in getattr(self, name) if item not in known]
            if unknown and self.backend == PROCESS_BACKEND:
                raise ToolConfigError(f"{name} must name some of {', '.join(known)}, got {unknown}; correct the names")

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> "SandboxConfig":
        """Read a tool's `config` mapping; its `type` is the loader's.

        Raises:
            ToolConfigError: a key is unknown, or a value is wrong.
        """
        values = {key: value for key, value in config.items() if key != "type"}
        unknown = [key for key in values if key not in cls.__struct_fields__]
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            raise ToolConfigError(f"config of the sandbox must have keys of {known} only, got {unknown}; remove them")
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ToolConfigError(
                f"config of the sandbox must have values of the right type, got: {error}; correct it"
            ) from error

    def as_settings(self) -> dict[str, Any]:
        """Return what a worker needs to know, as JSON values."""
        paths = sysconfig.get_paths()
        packages = list(dict.fromkeys([paths["purelib"], paths["platlib"]])) if self.site_packages else []
        return {
            "cpu_s": self.cpu_s,
            "memory_bytes": self.memory_mb << 20,
            "disk_bytes": self.disk_mb << 20,
            "file_bytes": self.file_mb << 20,
            "processes": self.processes,
            "open_files": self.open_files,
            "output_bytes": self.output_bytes,
            "packages": packages,
            "preload": self.preload,
            "without": self.without,
        }
