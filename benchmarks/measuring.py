"""Time in turns, operations, and memory.

The speed of a machine drifts, but ratios within a moment do not. So the arms of a comparison take turns in one process,
who goes first rotates, and a ratio is taken within a round. Its median over rounds is reported with the middle half.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_PROCESS = Path("/proc/self")


def wait_for(device: str | torch.device) -> None:
    """Waits until everything that was started on `device` is done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def time_interleaved(
    arms: dict[str, Callable[[], Any]], first: int, device: str, before: Callable[[str], Any] = lambda name: None
) -> dict[str, float]:
    """Seconds of each arm, in the order of `arms`; the one at `first`, modulo their number, goes first. `before` is
    called with the name of each arm, and not timed."""
    names = list(arms)
    start = first % len(names)
    seconds = dict.fromkeys(names, 0.0)
    for name in names[start:] + names[:start]:
        before(name)
        wait_for(device)
        begin = time.perf_counter()
        arms[name]()
        wait_for(device)
        seconds[name] = time.perf_counter() - begin
    return seconds


def quartiles(values: list[float]) -> dict[str, float]:
    """The median and the middle half."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"lower": lower, "median": median, "upper": upper}


def ratio(seconds: list[dict[str, float]], slow: str, fast: str) -> dict[str, float]:
    """How many times faster one arm is than another: quartiles over rounds."""
    return quartiles([each[slow] / each[fast] for each in seconds])


def flop_counter() -> FlopCounterMode:
    """Counts the operations of products inside, masked attention in full; it also knows the CPU's attention kernel."""

    def attention(query, key, value, *args, **kwargs) -> int:
        return sdpa_flop_count(query, key, value)

    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={on_cpu: attention})


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, int | None]]:
    """Peak memory in use inside, beyond what was in use before: gives a dictionary whose `bytes` are known afterwards.
    On a CPU it is the growth of the resident size, which only Linux reports; elsewhere `None`."""
    found: dict[str, int | None] = {"bytes": None}
    if torch.device(device).type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found["bytes"] = torch.cuda.max_memory_allocated(device) - before
    elif (_PROCESS / "clear_refs").exists():
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before is given back, so that it counts again
        (_PROCESS / "clear_refs").write_text("5")  # resets the peak
        before = _status_bytes("VmRSS")
        yield found
        found["bytes"] = max(0, _status_bytes("VmHWM") - before)
    else:
        yield found


def _status_bytes(field: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024
