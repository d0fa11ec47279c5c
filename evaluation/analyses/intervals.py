"""Bootstrap intervals of quantities that are a ratio of sums: a mean over the tokens, or slots, of whole rows."""

import numpy as np


def ratio_interval(
    numerators: np.ndarray,
    denominators: np.ndarray,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Percentile bootstrap interval of `sum(numerators) / sum(denominators)`, over rows.

    Args:
        numerators, denominators (`np.ndarray` of shape `(num_rows, ...)`): Of each row.

    Returns:
        Lower and upper ends, each of the shape of a row.

    >>> low, high = ratio_interval(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    >>> float(low), float(high)
    (2.0, 2.0)
    """
    generator = np.random.default_rng(seed)
    ratios = []
    for _ in range(num_resamples):
        picks = generator.integers(len(numerators), size=len(numerators))
        ratios.append(numerators[picks].sum(axis=0) / denominators[picks].sum(axis=0))
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high
