"""Timing in turns: arms of a comparison alternate in one process, and who goes first rotates.

Machines drift, ratios within a moment do not. So a ratio is taken within a round, and its median over rounds is told
with the middle half.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Turn:
    """What is timed, and the state it is timed in, which is entered and left outside of the clock."""

    run: Callable[[], Any]
    state: Callable[[], AbstractContextManager] = nullcontext


def wait_for(device: str | torch.device) -> None:
    """Until everything that was started on `device` is done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def in_turn(turns: dict[str, Turn], first: int, device: str) -> dict[str, float]:
    """Seconds of each, in the order of `turns`; the one at `first`, modulo their number, goes first."""
    names = list(turns)
    start = first % len(names)
    seconds = dict.fromkeys(names, 0.0)
    for name in names[start:] + names[:start]:
        with turns[name].state():
            wait_for(device)
            begin = time.perf_counter()
            turns[name].run()
            wait_for(device)
            seconds[name] = time.perf_counter() - begin
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median and the middle half."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"lower": lower, "median": median, "upper": upper}
