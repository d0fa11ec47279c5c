"""Curves of quality against what it takes: F1 and EM of the answers, with bootstrap intervals."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from ..answering import Row
from ..metrics import percent_interval
from ..runs import AnswerFile

METRICS = {"f1": "F1", "em": "EM (non-strict)"}


def answers_to(rows: list[Row], folder: Path, task: str, name: str) -> list[dict[str, Any]]:
    """The answers to `rows` alone, of all that a file holds."""
    asked = {row["id"] for row in rows}
    return [answer for answer in AnswerFile(folder, task, name).read() if answer["id"] in asked]


def quality(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """How many answers there are and, for each of `METRICS`, the mean in percent and the ends of its interval."""
    scores = {metric: percent_interval([answer[metric] for answer in answers]) for metric in METRICS}
    return {"questions": len(answers), **scores}


def draw_curve(axes: Axes, points: list[dict[str, Any]], across: str, metric: str, **style: Any) -> None:
    """A line through a metric of the points, with its intervals, across another of their numbers."""
    means, lows, highs = zip(*(point[metric] for point in points), strict=True)
    below = [max(0.0, mean - low) for mean, low in zip(means, lows, strict=True)]  # an interval of one value may
    above = [max(0.0, high - mean) for mean, high in zip(means, highs, strict=True)]  # miss it by rounding
    style = {"marker": "o", "markersize": 4, "capsize": 2} | style
    axes.errorbar([point[across] for point in points], means, [below, above], **style)
