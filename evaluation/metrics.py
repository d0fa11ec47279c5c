"""Metrics of question answering and their bootstrap intervals.

EM and F1 are in `common/rows.py`, because training uses them as well. The bootstrap is not SciPy's: this one accepts a
single score, and its seed reproduces the published intervals.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from ..common.rows import contains_match, token_f1

METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {"em": contains_match, "f1": token_f1}

# For all bootstrap intervals, which are 95 % percentile intervals.
RESAMPLES, TAILS, SEED = 10_000, ((1 - 0.95) / 2, (1 + 0.95) / 2), 0


@functools.lru_cache(maxsize=1)  # most intervals of a run are over equally many questions
def resample_counts(size: int) -> np.ndarray:
    """How often each of `size` rows is drawn in each resample, (RESAMPLES, size)."""
    generator = np.random.default_rng(SEED)
    # Counts rather than indices, so that the sums of all resamples are one matrix product.
    counts = np.empty((RESAMPLES, size))
    for row in counts:
        row[:] = np.bincount(generator.integers(size, size=size), minlength=size)
    return counts


def percent_interval(scores: Sequence[float]) -> list[float]:
    """Mean of `scores` in percent, and the ends of its 95 % bootstrap interval.

    >>> percent_interval([0.5, 0.5])
    [50.0, 50.0, 50.0]
    """
    if not len(scores):
        raise ValueError("The list of scores is empty; expected at least one score.")
    percents, size = [100 * score for score in scores], len(scores)
    ends = np.quantile(resample_counts(size) @ np.array(percents) / size, TAILS)
    return [sum(percents) / size, *ends.tolist()]


def shown_interval(values: Sequence[float], sign: str = "") -> str:
    """A mean and its interval as text.

    >>> shown_interval([1.25, 0.0, 2.5])
    '1.2 [0.0, 2.5]'
    """
    return "{:{sign}.1f} [{:{sign}.1f}, {:{sign}.1f}]".format(*values, sign=sign)
