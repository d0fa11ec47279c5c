"""Fixtures of the tests of evaluation."""

import pytest

from arcaligner.evaluation import answering


@pytest.fixture
def few_tokens(monkeypatch):
    """Answers of four tokens, and no model from or for another test."""
    monkeypatch.setattr(answering, "MAX_NEW_TOKENS", 4)
    answering.load_aligner.cache_clear()
    yield
    answering.load_aligner.cache_clear()


@pytest.fixture
def asked(monkeypatch) -> list[list[str]]:
    """Ids of each batch that was answered."""
    batches, original = [], answering._generate

    def watched(model, processor, inputs, rows, *args, **kwargs):
        found = original(model, processor, inputs, rows, *args, **kwargs)
        batches.append([row["id"] for row in rows])
        return found

    monkeypatch.setattr(answering, "_generate", watched)
    return batches
