"""How many passages to use: which passages a question gets, and whose answers are counted."""

import numpy as np
import pytest

from arcaligner.common.rows import token_f1
from arcaligner.train import num_passages
from arcaligner.train.num_passages import WAYS, answers_by_way, mixed_rows, table
from arcaligner.train.validate import read_recipe


@pytest.fixture
def rows(recipe_file):
    return mixed_rows(read_recipe(recipe_file, None), 20)


def test_needed_passages_are_mixed_in(recipe_file, rows):
    """Two, three or five passages in a fixed order; those outside `gold` do not answer."""
    assert rows == mixed_rows(read_recipe(recipe_file, None), 20)
    assert {len(row["passages"]) for row in rows} == {2, 3, 5}
    assert len({row["gold"][0] for row in rows}) > 1
    for row in rows:
        for number, passage in enumerate(row["passages"]):
            has_answer = any(answer.lower() in passage["text"].lower().split() for answer in row["answers"])
            assert number in row["gold"] or not has_answer


def test_each_way_uses_its_passages(rows, separate, monkeypatch):
    """The answers are those from the passages of each way; the prior is 0 for the top-ranked one alone."""
    model, reader = separate
    model.set_answerability_layers([1])
    row, used, priors = next(row for row in rows if len(row["passages"]) == 3), [], []
    cache = type(model.passage_cache(reader))
    prepare = cache.prepare

    def recorded(self, questions, passages, **settings):
        if "passage_prior" in settings:
            used.append(passages[0])
            priors.append(settings["passage_prior"])
        return prepare(self, questions, passages, **settings)

    monkeypatch.setattr(cache, "prepare", recorded)
    monkeypatch.setattr(num_passages, "greedy_answers", lambda *args: (["Ada", None], None))
    scores = answers_by_way(model, reader, [row], 2)
    given = row["passages"]
    assert [len(each) for each in used] == [1, 2, 3, 3, 1]
    assert used[0][0] in used[1] and used[2] == used[3] == given and used[4] == [given[row["gold"][0]]]
    assert priors[:3] == [None] * 3 and priors[4] is None
    assert max(priors[3][0]) == 0.0 and given[priors[3][0].index(0.0)] == used[0][0]
    np.testing.assert_array_equal(scores, np.full((1, len(WAYS)), 100 * token_f1("Ada", row["answers"])))


def test_needs_are_counted_separately():
    rows = [{"needs": "one"}, {"needs": "several"}, {"needs": "one"}]
    scores = np.array([[100.0] * 5, [50.0] * 5, [0.0] * 5])
    lines = table(rows, scores).splitlines()
    assert lines[2].startswith("| one (2 questions) | 50.0 ± 35.4 |")
    assert lines[3].startswith("| several (1 questions) | 50.0 ± 0.0 |")
