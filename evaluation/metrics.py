"""Metrics of question answering: non-strict exact match, token F1, bootstrap intervals.

The paper's EM is non-strict: a prediction is right when it contains a gold answer. Here both sides
are normalised by SQuAD's rule first (lower case, no punctuation, no articles, single spaces). A
gold that normalises to nothing would be contained in everything and is dropped.
`raw_contains_match` compares the strings as they are, as Self-RAG does.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """SQuAD's normalisation.

    >>> normalize_answer("The  Beatles, live!")
    'beatles live'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def usable_golds(golds: Sequence[str]) -> list[str]:
    """The golds that do not normalise to nothing.

    >>> usable_golds(["The", "Paris"])
    ['Paris']
    """
    return [gold for gold in golds if normalize_answer(gold)]


def contains_match(prediction: str, golds: Sequence[str]) -> float:
    """Non-strict EM: 1.0 when the normalised prediction contains a normalised gold.

    >>> contains_match("The capital is PARIS.", ["Paris"])
    1.0
    """
    normalized = normalize_answer(prediction)
    return float(any(normalize_answer(gold) in normalized for gold in usable_golds(golds)))


def raw_contains_match(prediction: str, golds: Sequence[str]) -> float:
    """1.0 when the prediction contains a gold, letter for letter.

    >>> raw_contains_match("The capital is PARIS.", ["Paris"])
    0.0
    """
    return float(any(gold in prediction for gold in usable_golds(golds)))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """SQuAD's F1 of the normalised tokens, the best over the golds.

    >>> token_f1("the capital is Paris", ["Paris"])
    0.5
    """
    predicted = Counter(normalize_answer(prediction).split())
    return max((_f1(predicted, gold) for gold in usable_golds(golds)), default=0.0)


def _f1(predicted: Counter, gold: str) -> float:
    expected = Counter(normalize_answer(gold).split())
    common = (predicted & expected).total()
    if not common:
        return 0.0
    precision, recall = common / predicted.total(), common / expected.total()
    return 2 * precision * recall / (precision + recall)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": contains_match,
    "f1": token_f1,
    "em_raw": raw_contains_match,
}


def bootstrap_interval(
    scores: Sequence[float], confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `scores`.

    >>> bootstrap_interval([1.0, 1.0, 1.0])
    (1.0, 1.0)

    Raises:
        `ValueError`: no scores.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.size == 0:
        raise ValueError("Got no scores; an interval needs at least one.")
    picks = np.random.default_rng(seed).integers(values.size, size=(num_resamples, values.size))
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(values[picks].mean(axis=1), tails)
    return float(low), float(high)


def percent_interval(scores: Sequence[float]) -> list[float]:
    """Mean of `scores` in percent, and the ends of its 95 % bootstrap interval.

    >>> percent_interval([0.5, 0.5])
    [50.0, 50.0, 50.0]
    """
    percents = [100 * score for score in scores]
    return [sum(percents) / len(percents), *bootstrap_interval(percents)]


def shown_interval(values: Sequence[float], sign: str = "") -> str:
    """A mean and its interval for people.

    >>> shown_interval([1.25, 0.0, 2.5])
    '1.2 [0.0, 2.5]'
    """
    return "{:{sign}.1f} [{:{sign}.1f}, {:{sign}.1f}]".format(*values, sign=sign)
