"""Metrics against the reference implementations' values (FlashRAG, SQuAD), and their intervals."""

import json
from pathlib import Path

import numpy as np
import pytest

from arcaligner.common.rows import contains_match, token_f1
from arcaligner.evaluation.metrics import percent_interval

CASES = [json.loads(line) for line in Path(__file__).with_name("metric_cases.jsonl").read_text("utf-8").splitlines()]


def test_metrics_equal_the_reference():
    assert len(CASES) == 38
    for case in CASES:
        prediction, golds = case["prediction"], case["golds"]
        assert contains_match(prediction, golds) == case["em"], case["case"]
        assert token_f1(prediction, golds) == pytest.approx(case["f1"], abs=1e-4), case["case"]


@pytest.mark.parametrize("gold", ["The", "?", ""])
def test_a_gold_that_normalizes_to_nothing_is_dropped(gold):
    assert contains_match("anything at all", [gold]) == token_f1("", [gold]) == 0.0
    assert contains_match("in Paris", [gold, "Paris"]) == 1.0


def test_interval_agrees_with_the_normal_approximation():
    scores = np.random.default_rng(1).normal(size=400)
    mean, half = 100 * scores.mean(), 100 * 1.96 * scores.std() / 20
    np.testing.assert_allclose(percent_interval(scores), [mean, mean - half, mean + half], atol=0.8)
    with pytest.raises(ValueError, match="at least one"):
        percent_interval([])
