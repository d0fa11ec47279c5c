"""Refusals from the answers of a run: shares, the F1 they cost, ranks, and answers without a confidence."""

import json

import pytest
from conftest import processor_with
from tiny_models import random_probe

from arcaligner.evaluation.analyses.refusals import read_answers, refusals, summarize
from arcaligner.evaluation.runs import AnswerFile


def answer(is_answered, is_refused, right=0.0, sure=0.5):
    about = {"is_answered": is_answered, "is_refused": is_refused, "is_wrong": right < 1 if is_answered else True}
    return about | {"f1": right, "confidence": sure}


def test_shares_price_and_curve_are_those_of_the_answers():
    answers = [
        answer(True, False, right=1.0, sure=0.9),
        answer(True, False, right=0.5, sure=0.8),
        answer(True, True, right=0.25, sure=0.3),
        answer(True, False, right=0.0, sure=0.6),
        answer(False, True, sure=0.1),
        answer(False, False, sure=0.7),
    ]
    found = summarize(answers)
    assert found["refused"][0] == 50.0 and found["wrongly_refused"][0] == 25.0
    assert found["refused"][1] <= 50.0 <= found["refused"][2]
    assert found["f1"] == 43.75 and found["f1_lost"] == 6.25
    assert found["auroc"] == pytest.approx(6 / 8)  # in two of 4 x 2 pairs the unanswerable one is surer
    assert found["coverage"] == pytest.approx([100 * each / 6 for each in range(1, 7)], abs=1e-3)
    assert found["risk"] == pytest.approx([0.0, 50.0, 200 / 3, 75.0, 80.0, 500 / 6], abs=1e-3)
    assert found["own"] == pytest.approx([100 * 4 / 6, 75.0])


@pytest.fixture
def checkpoint(model, processor, tmp_path):
    """An aligner whose confidence was fitted."""
    fitted = processor_with(processor, no_answer="not in the text", answer_probe=random_probe(model))
    fitted.save_pretrained(tmp_path / "aligner")
    return tmp_path / "aligner"


def write_answers(run, task, checkpoint, **changes):
    file = AnswerFile(run, task, "arcaligner_x4")
    file.path.parent.mkdir(parents=True)
    file.settings_path.write_text(json.dumps({"checkpoint": str(checkpoint)}))
    file.append([{"prediction": "Ada", "em": 1.0, "f1": 1.0, "confidence": 0.9} | changes])


def test_the_command_writes_a_table_and_a_figure_for_an_aligner_that_can_refuse(checkpoint, tmp_path, capsys):
    write_answers(tmp_path / "run", "squad", checkpoint)
    write_answers(tmp_path / "run", "squad_unanswerable", checkpoint, em=0.0, f1=0.0, confidence=0.2)
    refusals(tmp_path / "run", "arcaligner_x4", "squad,squad_unanswerable", tmp_path)
    row = "| ArcAligner, 4 tokens per slot | 100.0 [100.0, 100.0] | 0.0 [0.0, 0.0] | 100.0 | 0.0 | 1.000 |"
    assert row in capsys.readouterr().out
    written = json.loads((tmp_path / "refusals.json").read_text())["methods"]["ArcAligner, 4 tokens per slot"]
    assert written["auroc"] == 1.0 and (tmp_path / "refusals.svg").stat().st_size > 1000


@pytest.mark.parametrize("tasks", ["squad", "squad_unanswerable"])
def test_both_kinds_of_questions_are_needed(checkpoint, tmp_path, tasks):
    write_answers(tmp_path, tasks, checkpoint)
    with pytest.raises(ValueError, match="expected both. Name them with `--tasks`"):
        summarize(read_answers(tmp_path, [tasks], "arcaligner_x4"))


def test_answers_without_a_confidence_are_refused_with_the_command_that_makes_them(checkpoint_dir, tmp_path):
    write_answers(tmp_path, "squad", checkpoint_dir)
    file = AnswerFile(tmp_path, "squad", "arcaligner_x4")
    file.path.write_text('{"prediction": "Ada"}\n')
    with pytest.raises(ValueError, match="no answers with a confidence. Ask with `python -m"):
        read_answers(tmp_path, ["squad"], "arcaligner_x4")
