"""The environment of a result: the machine, and the versions of software."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from .._version import __version__


def environment(device: torch.device) -> dict[str, str]:
    """Names and versions of hardware and software, for a report."""
    found = {
        "graphwright": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["cuda"] = torch.version.cuda or "none"
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["driver"] = _driver()
    triton = _version("triton")
    if triton != "unknown":
        found["triton"] = triton
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as handle:
            words = handle.readline().split()
    except OSError:
        return "unknown"
    return next((w for w in words if w[0].isdigit() and w.count(".") >= 1), "unknown")
