"""Where the time of an arm goes: operators by what they are for, and what is left to Python and to waiting."""

import time

import torch
from torch.profiler import ProfilerActivity, profile

from .timing import Turn, wait_for

# By the start of an operator's name, the first that fits.
_KINDS = {
    "weights": ("aten::addmm", "aten::mm", "aten::linear", "aten::_addmm"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient", "aten::bmm"),
    "moving rows": ("aten::index", "aten::gather", "aten::cat", "aten::copy_", "aten::clone", "aten::scatter"),
}
OTHERS, OUTSIDE = "other operators", "outside of operators"


def profile_arm(turn: Turn, device: str) -> dict[str, float]:
    """Seconds of one pass by kind of work; `OUTSIDE` is wall time in which no operator ran."""
    on_cpu = torch.device(device).type == "cpu"
    activities = [ProfilerActivity.CPU] + ([] if on_cpu else [ProfilerActivity.CUDA])
    with turn.state():
        wait_for(device)
        with profile(activities=activities) as profiler:
            begin = time.perf_counter()
            turn.run()
            wait_for(device)
            wall = time.perf_counter() - begin
    seconds = dict.fromkeys([*_KINDS, OTHERS], 0.0)
    for event in profiler.key_averages():
        own = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        seconds[_kind(event.key)] += own / 1e6
    return {**seconds, OUTSIDE: max(0.0, wall - sum(seconds.values()))}


def _kind(name: str) -> str:
    return next((kind for kind, starts in _KINDS.items() if name.startswith(starts)), OTHERS)
