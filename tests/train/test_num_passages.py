"""How many passages to use: the passages of each question, and the answers that are counted."""

import numpy as np
import pytest

from arcaligner.common.rows import token_f1
from arcaligner.train import num_passages
from arcaligner.train.num_passages import answers_by_way, mixed_rows, table
from arcaligner.train.validate import read_recipe


@pytest.fixture
def rows(recipe_file):
    return mixed_rows(read_recipe(recipe_file, None), 20, 1)


def test_needed_passages_are_mixed_in(recipe_file, rows):
    """Two, three or five passages in a fixed order; those outside `gold` do not answer."""
    assert rows == mixed_rows(read_recipe(recipe_file, None), 20, 1)
    assert {len(row["passages"]) for row in rows} == {2, 3, 5}
    assert len({row["gold"][0] for row in rows}) > 1
    for row in rows:
        for number, passage in enumerate(row["passages"]):
            has_answer = any(answer.lower() in passage["text"].lower().split() for answer in row["answers"])
            assert number in row["gold"] or not has_answer


@pytest.mark.parametrize("is_sure", [True, False])
def test_each_way_uses_its_passages(rows, separate, monkeypatch, is_sure):
    """Each way answers from its own passages, computed once; the prior is 0 for the pair that the question needs."""
    monkeypatch.setattr(num_passages, "UNSURE", 0.0 if is_sure else 1.0)
    model, reader = separate
    model.set_answerability_layers([1])
    model.set_multihop_head(True)
    model.multihop_head.bias.fill_(1.0)  # each question needs two
    row, used, priors = next(row for row in rows if len(row["passages"]) == 5), [], []
    cache = type(model.passage_cache(reader))
    prepare = cache.prepare

    def recorded(self, questions, passages, **settings):
        if "passage_prior" in settings:
            used.append(passages[0])
            priors.append(settings["passage_prior"])
        return prepare(self, questions, passages, **settings)

    all_passages, needed = row["passages"], [row["passages"][number] for number in row["gold"]]
    monkeypatch.setattr(cache, "prepare", recorded)
    answers = lambda model, processor, inputs, questions, used, **options: ([used[0][0]["text"]], None)  # noqa: E731
    monkeypatch.setattr(num_passages, "greedy_answers", answers)
    scores = answers_by_way(model, reader, [row], 2)
    (top,) = used[0]
    assert [len(passages) for passages in used[:2]] == [1, 2] and top in used[1]
    expected = [top, used[1][0], top if is_sure else used[2][0], used[1][0]]
    expected += [all_passages[0], all_passages[0], needed[0]]
    expected = [100 * token_f1(passage["text"], row["answers"]) for passage in expected]
    np.testing.assert_array_equal(scores, [expected])
    several = used[2:] if is_sure else used[3:]
    assert is_sure or (len(used[2]) == 3 and all(passage in used[2] for passage in used[1]))
    assert several == [all_passages, all_passages] + [needed] * (needed[0] != top)
    prior = priors[used.index(all_passages) + 1][0]
    assert [call_prior for call_prior in priors if call_prior is not None] == [[prior]]
    pair = [passage for passage, bias in zip(all_passages, prior, strict=True) if bias == 0.0]
    assert sorted(prior) == [-1.0] * 3 + [0.0] * 2 and used[1] == pair


def test_needs_are_counted_separately():
    rows = [{"needs": "one"}, {"needs": "several"}, {"needs": "one"}]
    scores = np.array([[100.0] * 7, [50.0] * 7, [0.0] * 7])
    lines = table(rows, scores).splitlines()
    assert lines[2].startswith("| one (2 questions) | 50.0 ± 35.4 |")
    assert lines[3].startswith("| several (1 questions) | 50.0 ± 0.0 |")
