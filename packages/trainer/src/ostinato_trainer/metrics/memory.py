"""How much memory a run holds, under the field's names."""

from __future__ import annotations

import resource
import sys

from ostinato_engines.device import device_kind, is_available, max_memory_allocated, max_memory_reserved, pick_device

__all__ = ["memory_metrics"]

_GIB = 1 << 30


def memory_metrics(device: str = "auto") -> dict[str, float]:
    """`perf/cpu_memory_used_gb`, the most that this process has held since it began, and where the device's memory is
    counted `perf/max_memory_allocated_gb` and `perf/max_memory_reserved_gb`, likewise. All in GiB. Where ranks of other hosts train on a
    kind of device that this host has none of, only the first.

    Args:
        device: That trains; see `ostinato_engines.device.pick_device`.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    metrics = {"perf/cpu_memory_used_gb": peak / _GIB}
    if device != "auto" and not is_available(device_kind(device)):
        return metrics
    device = pick_device(device)
    if allocated := max_memory_allocated(device):
        metrics["perf/max_memory_allocated_gb"] = allocated / _GIB
        metrics["perf/max_memory_reserved_gb"] = max_memory_reserved(device) / _GIB
    return metrics
