"""Weights of the similarities that rank passages: the table, the simulated selection, and what is saved."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import edit_json, pipeline_of
from training_rows import article_rows, write_rows

from arcaligner import ArcAlignerForCausalLM
from arcaligner.answering_arcaligner import MAX_NEW_TOKENS, Answerer, ScoredPassage, similarities_of, word_matches
from arcaligner.common.rows import token_f1
from arcaligner.train import ranking
from arcaligner.train.ranking import (
    MeasuredPassage,
    compare,
    difference,
    main,
    measure,
    questions_of,
    save_best,
    select_one,
)


@pytest.fixture
def rows():
    """Questions with seven passages each, of which one contains the answer."""
    towns = article_rows(12, questions=1)
    passages = [row["passages"][0] for row in towns]
    return [row | {"passages": passages[number : number + 7]} for number, row in enumerate(towns[:6])]


@pytest.fixture
def answerer(separate):
    return Answerer(*separate)


@pytest.fixture
def folder(separate, tmp_path):
    """The checkpoint of `separate`, whose weights are 0."""
    model, processor = separate
    model.config.base_model_name_or_path, model.config.similarity_weight, model.config.match_weight = None, 0.0, 0.0
    model.save_pretrained(tmp_path / "aligner", save_base_model=True)
    processor.save_pretrained(tmp_path / "aligner")
    return tmp_path / "aligner"


def measured_passage(answerability, similarity, match, f1, has_answer):
    return MeasuredPassage(ScoredPassage(answerability, similarity, False, 1.0, match, 1.0), f1, has_answer)


def test_table_has_computed_numbers(monkeypatch):
    """Of the first question, weights of 10 and 0 score two passages and select the first one, because the third one,
    the nearest, has a low answerability. Weights of 0 and 15 score only the second one."""
    monkeypatch.setattr(ranking, "PAIRS", ((0, 0), (10, 0), (0, 15)))
    first = [(0.5, 0.5, 0.0, 0.0, False), (0.9, 0.4, 0.2, 100.0, True), (0.1, 0.6, 0.0, 0.0, False)]
    second = [(0.9, 0.9, 0.5, 50.0, True), (0.5, 0.1, 0.0, 100.0, False)]
    measured = [
        {number: measured_passage(*values) for number, values in enumerate(question)} for question in (first, second)
    ]
    config = SimpleNamespace(similarity_weight=10.0, match_weight=0.0, scored_share=0.5, most_answerability=0.98)
    lines, differences = compare(measured, config)
    assert lines == [
        "| selected passage | F1, % | difference | contains an answer, % | passages scored |",
        "|---|---|---|---|---|",
        "| the first of the list | 25.0 | +0.0 ± 0.0 | 50.0 |  |",
        "| the highest cosine | 25.0 | +0.0 ± 0.0 | 50.0 |  |",
        "| weights 10 and 0, as configured | 25.0 | +0.0 ± 0.0 | 50.0 | 1.50 |",
        "| weights 0 and 0 | 25.0 | +0.0 ± 0.0 | 50.0 | 2.00 |",
        "| weights 0 and 15 | 75.0 | +50.0 ± 50.0 | 100.0 | 1.00 |",
        "| the best of all passages | 100.0 | +75.0 ± 25.0 | 50.0 |  |",
    ]
    assert differences == {(10, 0): (0, 0), (0, 0): (0, 0), (0, 15): (50, pytest.approx(50))}


def test_simulated_selection_is_real(answerer, rows):
    """For any settings, the selected passage and the number of scored ones are those of `select`."""
    config, counts = answerer.model.config, set()
    measured = measure(answerer, rows)
    for weights in ((0.0, 0.0), (10.0, 0.0), (0.0, 15.0), (30.0, 15.0), (3000.0, 1500.0)):
        for config.scored_share, config.most_answerability in ((0.5, 0.98), (1.0, 0.6)):
            config.similarity_weight, config.match_weight = weights
            questions, documents = [row["question"] for row in rows], [row["passages"] for row in rows]
            selections = answerer.select(questions, documents, max_passages=1)
            expected = [([*selection.numbers], len(selection.scores)) for selection in selections]
            results = [select_one(passages, weights, config) for passages in measured]
            assert [([number], count) for number, count in results] == expected
            counts |= {count for _, count in results}
    assert counts >= {1, 4, 7}


@pytest.mark.parametrize("match_weight", [0.0, 15.0])
def test_each_passage_is_measured(answerer, rows, monkeypatch, match_weight):
    """An answer is that of the pipeline from this passage alone. The late-interaction scores of the five nearest
    passages are computed even if the configuration does not use them."""
    monkeypatch.setattr(ranking, "BATCH", 3)
    model, processor = answerer.model, answerer.processor
    model.config.match_weight = match_weight
    ask = pipeline_of(model, processor, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    row = rows[2]
    texts = [ask(row["question"], documents=[passage])[0]["generated_text"].strip() for passage in row["passages"]]
    row["answers"] = [texts[4], "1805"]
    (passages,) = measure(answerer, [row])
    assert [*passages] == [*range(7)] and model.config.match_weight == match_weight
    assert [passage.f1 for passage in passages.values()] == [100 * token_f1(text, row["answers"]) for text in texts]
    assert passages[4].f1 == 100.0
    assert [passage.has_answer for passage in passages.values()] == [number == 3 for number in range(7)]
    similar = similarities_of(processor.encoder, row["question"], row["passages"])
    matches = word_matches(processor, row["question"], row["passages"]).mean(dim=1).tolist()
    nearest = sorted(range(7), key=similar.__getitem__, reverse=True)[:5]
    found = [passages[number].score.match for number in nearest]
    assert found == pytest.approx([matches[number] for number in nearest], abs=1e-3) and any(found)


def test_long_passages_are_cut(answerer, rows):
    """A long passage counts as several, as it does when a question is asked."""
    text = " ".join(f"Sentence {number} is about word and number {number}." for number in range(100))
    (row,) = questions_of([rows[0] | {"passages": [{"title": "Numbers", "text": text}]}], answerer)
    assert row["passages"] == answerer.cut([{"title": "Numbers", "text": text}])[0] and len(row["passages"]) > 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"passages": [{"title": "", "text": "One."}, {"title": "", "text": " "}]}, "'0-0' has 1 passage with text"),
        ({"answers": ["The"]}, r"'0-0' has 7 passages with text, and the answers \['The'\]; expected at least two"),
    ],
)
def test_unusable_row_is_refused(answerer, rows, change, message):
    with pytest.raises(ValueError, match=message):
        questions_of([rows[1], rows[0] | change], answerer)


def test_no_rows_are_refused(answerer):
    with pytest.raises(ValueError, match="has no rows"):
        questions_of([], answerer)


@pytest.mark.parametrize("error, is_saved", [(2.4, True), (2.5, False)])
def test_only_clear_difference_is_saved(tmp_path, error, is_saved):
    """The difference has to be more than twice its standard error; all other fields stay."""
    before = {"similarity_weight": 30.0, "model_type": "arcaligner", "text_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(before))
    line = save_best(tmp_path, {(30.0, 15.0): (0.0, 0.0), (20, 0): (5.0, error), (10, 5): (4.0, 0.1)}, 30)
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == before | ({"similarity_weight": 20.0, "match_weight": 0.0} if is_saved else {})
    assert line.startswith("Saved in " if is_saved else "Nothing was saved: the difference of the best weights, 20 and")


def test_single_question_saves_nothing(tmp_path):
    mean, error = difference(np.array([100.0]), np.array([0.0]))
    assert mean == 100.0 and save_best(tmp_path, {(30, 0): (mean, error)}, 30).startswith("Nothing was saved")


def test_few_questions_save_nothing(tmp_path):
    """Two questions with the same difference have no error, and still say little."""
    mean, error = difference(np.array([100.0, 100.0]), np.zeros(2))
    assert error == 0.0 and "at least 30" in save_best(tmp_path, {(30, 0): (mean, error)}, 2)


def test_command_saves_better_weights(folder, separate, rows, monkeypatch, tmp_path, capsys):
    """The answer is the text of the nearest passage, so that a large weight of the cosine is best. A second run finds
    nothing better."""
    monkeypatch.setattr(ranking, "PAIRS", ((1e4, 0), (0, 1)))
    monkeypatch.setattr(
        ranking,
        "greedy_answers",
        lambda *args, **options: ([passage["text"] for (passage,) in args[-1]], [None] * len(args[-1])),
    )
    for row in rows:
        similar = similarities_of(separate[1].encoder, row["question"], row["passages"])
        nearest = max(range(7), key=similar.__getitem__)
        row["answers"] = [row["passages"][nearest]["text"]]
    write_rows(tmp_path / "rows.jsonl", [*rows, rows[0] | {"answers": []}])  # of which the first six are used
    before = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(ranking, "MIN_QUESTIONS", 6)
    main(folder, tmp_path / "rows.jsonl", number=6)
    assert "Saved" not in capsys.readouterr().out and json.loads((folder / "config.json").read_text()) == before
    others = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "config.json"}
    main(folder, tmp_path / "rows.jsonl", number=6, save=True)
    printed = capsys.readouterr().out
    assert "6 questions" in printed and "`similarity_weight` 10000 and `match_weight` 0." in printed
    after = json.loads((folder / "config.json").read_text())
    assert after == before | {"similarity_weight": 1e4, "match_weight": 0.0}
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "config.json"} == others
    assert ArcAlignerForCausalLM.from_pretrained(folder).config.similarity_weight == 1e4
    main(folder, tmp_path / "rows.jsonl", number=6, save=True)
    assert "Nothing was saved" in capsys.readouterr().out
    assert json.loads((folder / "config.json").read_text()) == after


def test_command_needs_answerability(checkpoint_dir, rows, tmp_path):
    aligner = shutil.copytree(checkpoint_dir, tmp_path / "aligner")
    edit_json(aligner / "config.json", digests=None)
    write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="Ranking passages needs an answerability head .*train.confidence`\\.$"):
        main(aligner, tmp_path / "rows.jsonl", number=6)
