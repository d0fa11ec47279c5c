"""Time in turns.

The speed of a machine drifts, but ratios within a moment do not. So the arms of a comparison take turns in one process,
who goes first rotates, and a ratio is taken within a round. Its median over rounds is reported with the middle half.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

MIN_ROUNDS = 3


def wait_for(device: str) -> None:
    """Waits until everything that was started on `device` is done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def time_rounds(
    arms_of: Callable[[int], dict[str, Callable[[], Any]]],
    device: str,
    rounds: int,
    seconds: float,
    before: Callable[[str], Any] = lambda name: None,
) -> list[dict[str, float]]:
    """Seconds of each arm in each round: at least `MIN_ROUNDS`, then at most `rounds`, until `seconds` are used.
    `arms_of` gives the arms of a round by its number; `before` is called with the name of each arm, and not timed."""
    found, start = [], time.perf_counter()
    while len(found) < MIN_ROUNDS or (len(found) < rounds and time.perf_counter() - start < seconds):
        arms = arms_of(len(found))
        names, first, taken = list(arms), len(found) % len(arms), dict.fromkeys(arms, 0.0)
        for name in names[first:] + names[:first]:
            before(name)
            wait_for(device)
            begin = time.perf_counter()
            arms[name]()
            wait_for(device)
            taken[name] = time.perf_counter() - begin
        found.append(taken)
    return found


def quartiles(values: list[float]) -> dict[str, float]:
    """The median and the middle half."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"lower": lower, "median": median, "upper": upper}


def first_tokens(found: list[dict[str, float]], name: str, text: str) -> dict[str, dict[str, float]]:
    """Seconds of an arm, and how many times sooner it is than the arm `text`: quartiles over rounds."""
    return {
        "first_token": quartiles([each[name] for each in found]),
        "speed_up": quartiles([each[text] / each[name] for each in found]),
    }
