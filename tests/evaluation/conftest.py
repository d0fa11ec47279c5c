"""Fixtures of the tests of evaluation."""

import pytest

from arcaligner.evaluation import answering


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
