"""The node `ray_kwargs`: the cluster of a run with `trainer.executor=ray`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

__all__ = ["RayConfig", "RayInitConfig"]


class RayInitConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the run connects (`ray_kwargs.ray_init`)."""

    address: str | None = None
    """Cluster to join: HOST:PORT, or auto for the one that runs on this host; null takes RAY_ADDRESS, which `ray job submit` sets, and
    without that starts one of this host alone, which ends with the run."""
    num_cpus: Annotated[int, Meta(ge=1)] | None = None
    """CPUs that a cluster which the run starts says it has; null counts this host's."""
    runtime_env: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the run's processes need on other hosts, as Ray takes it: `working_dir`, `env_vars`, `pip` and so on."""


class RayConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cluster of a run (`ray_kwargs`)."""

    ray_init: RayInitConfig = RayInitConfig()
    """How the run connects."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds until places must be free in the cluster, and again until the run's processes must have started there."""
