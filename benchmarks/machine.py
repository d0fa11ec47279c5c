"""What the numbers were made on: names and versions, and what the machine can do at most.

Peaks are measured in the same run, as large matrix products and copies, since those of a data sheet are seldom reached
and those of a shared machine are not known.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .timing import Turn, in_turn

_TRIES = 5
_PROCESS = Path("/proc/self")


def machine(device: str) -> dict[str, Any]:
    """Processor, accelerator and versions; `load` tells whether others worked on it."""
    names = [line.split(":")[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "peft", "trl")},
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def measured_peaks(device: str, dtype: torch.dtype, scale: int = 1) -> dict[str, float]:
    """Floating-point operations a second of a matrix product, bytes a second of a copy; `scale` makes both smaller."""
    side = (2048 if device == "cpu" else 8192) // scale
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.empty(2**28 // scale, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    turns = {"product": Turn(lambda: left @ right), "copy": Turn(lambda: target.copy_(source))}
    tries = [in_turn(turns, number, device) for number in range(1 + _TRIES)][1:]
    return {
        "flops_per_second": 2 * side**3 / min(each["product"] for each in tries),
        "bytes_per_second": 2 * source.numel() / min(each["copy"] for each in tries),
    }


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, int | None]]:
    """
    The most memory in use inside, beyond what was in use before.

    Yields:
        `dict`: `bytes`, known afterwards. On a CPU it is the growth of the resident size, which Linux alone tells;
            elsewhere `None`.
    """
    found: dict[str, int | None] = {"bytes": None}
    if torch.device(device).type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found["bytes"] = torch.cuda.max_memory_allocated(device) - before
    elif (_PROCESS / "clear_refs").exists():
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be taken for room that was there
        (_PROCESS / "clear_refs").write_text("5")  # the peak starts anew
        before = _status_bytes("VmRSS")
        yield found
        found["bytes"] = max(0, _status_bytes("VmHWM") - before)
    else:
        yield found


def _status_bytes(field: str) -> int:
    line = next(line for line in _lines(_PROCESS / "status") if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
