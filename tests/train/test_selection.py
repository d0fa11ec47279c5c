"""Mixtures of sources: shares, limits, counted rows, blocks made once."""

import logging

import pytest
from training_rows import question_rows, write_rows

from arcaligner.train.data import Example
from arcaligner.train.selection import ExampleSelector


def one_token_examples(row):
    """A stand-in for a builder: one example a row, of as many tokens as the question has words."""
    yield Example(row["id"], [0] * len(row["question"].split()), [0], [""])


@pytest.fixture
def selector(tmp_path):
    return ExampleSelector(one_token_examples, tmp_path / "examples", seed=0)


@pytest.fixture
def two_files(tmp_path):
    many = [{**row, "id": f"many-{row['id']}"} for row in question_rows(30)]
    few = [{**row, "id": f"few-{row['id']}"} for row in question_rows(6)]
    return write_rows(tmp_path / "many.jsonl", many), write_rows(tmp_path / "few.jsonl", few)


def counts(examples):
    return {kind: sum(row_id.startswith(kind) for row_id in examples["row_id"]) for kind in ("many", "few")}


def test_a_mixture_has_the_shares_and_repeats_nothing(selector, two_files):
    many, few = two_files
    mixture = selector.select({many: 3.0, few: 1.0}, 16)
    assert counts(mixture) == {"many": 12, "few": 4}
    assert len(set(mixture["row_id"])) == 16


def test_a_short_file_shrinks_the_mixture_but_keeps_its_shares(selector, two_files):
    many, few = two_files
    for limit in (30, None):
        assert counts(selector.select({many: 1.0, few: 1.0}, limit)) == {"many": 6, "few": 6}


def test_the_selection_is_random_and_repeatable(selector, two_files, tmp_path):
    many, _ = two_files

    def ids(seed):
        return list(ExampleSelector(one_token_examples, tmp_path, seed=seed).select({many: 1.0}, 8)["row_id"])

    assert ids(0) == ids(0) != ids(1)
    assert ids(0) != [f"many-row-{number}" for number in range(8)]


def test_long_examples_are_left_out_made_up_for_and_counted(tmp_path, caplog):
    rows = [row | {"question": "Who is it?" if number % 2 else "Who?"} for number, row in enumerate(question_rows(20))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    selector = ExampleSelector(one_token_examples, tmp_path / "examples", max_tokens=1)
    with caplog.at_level(logging.INFO):
        mixture = selector.select({path: 1.0}, 8)
    assert [len(input_ids) for input_ids in mixture["input_ids"]] == [1] * 8
    assert f"{path}: 8 examples" in caplog.text
    assert f"{path}: left out 10 longer than 1 tokens" in caplog.text


def test_passage_sets_limit_passages_not_questions(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(30))
    mixture = ExampleSelector(one_token_examples, tmp_path / "examples", passage_sets=2).select({path: 1.0})
    assert len(mixture) == 20
    assert len({int(row_id.split("-")[1]) % 3 for row_id in mixture["row_id"]}) == 2


def test_no_examples_and_bad_weights_are_refused(selector, two_files):
    many, few = two_files
    selector.max_tokens = 0
    with pytest.raises(ValueError, match="No examples"):
        selector.select({many: 1.0}, 8)
    with pytest.raises(ValueError, match="positive weights"):
        selector.select({many: 1.0, few: 0.0}, 8)
