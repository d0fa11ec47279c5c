"""Scores of questions as a mean in percent with its interval."""

from collections.abc import Sequence

from ..metrics import bootstrap_interval


def percent_interval(scores: Sequence[float]) -> list[float]:
    """Mean, and the ends of its 95 % bootstrap interval.

    >>> percent_interval([0.5, 0.5])
    [50.0, 50.0, 50.0]
    """
    percents = [100 * score for score in scores]
    return [sum(percents) / len(percents), *bootstrap_interval(percents)]
