"""Fixtures of the tests of evaluation."""

import pytest

from arcaligner.evaluation import reading


@pytest.fixture
def few_tokens(monkeypatch):
    """Answers of four tokens, and no model from or for another test."""
    monkeypatch.setattr(reading, "MAX_NEW_TOKENS", 4)
    reading.load_aligner.cache_clear()
    yield
    reading.load_aligner.cache_clear()
