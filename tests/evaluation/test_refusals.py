"""Refusals from the answers of a run: shares, the F1 they cost, ranks, and answers without a confidence."""

import pytest
from answer_rows import write_answers
from conftest import processor_with
from tiny_models import random_probe

from arcaligner.evaluation.analyses.refusals import TASKS, read_answers, refusals, summarize


def answer(is_refused, f1, sure):
    return {"is_refused": is_refused, "f1": f1, "confidence": sure}


def test_shares_price_and_ranks_are_those_of_the_answers():
    answered = [answer(False, 1.0, 0.9), answer(False, 0.5, 0.8), answer(True, 0.25, 0.3), answer(False, 0.0, 0.6)]
    refused, wrongly, *others = summarize(answered, [answer(True, 0.0, 0.1), answer(False, 0.0, 0.7)])
    assert refused == "50.0 [0.0, 100.0]" and wrongly.startswith("25.0 [0.0, ")
    assert others == ["43.8", "6.2", "0.750"]  # in two of 4 x 2 pairs the unanswerable one is surer


def write(run, task, checkpoint, *answers):
    rows = ({"prediction": "Ada", "f1": 1.0} | each for each in answers)
    write_answers(run, task, "arcaligner_x4", rows, checkpoint=str(checkpoint))


def test_the_command_prints_a_table_of_what_is_below_the_threshold_or_said_to_be_refused(
    model, processor, tmp_path, capsys
):
    fitted = processor_with(processor, no_answer="not in the text", answer_probe=random_probe(model))
    fitted.save_pretrained(checkpoint := tmp_path / "aligner")
    write(tmp_path, TASKS[0], checkpoint, {"confidence": 0.9})
    write(tmp_path, TASKS[1], checkpoint, {"confidence": 0.2}, {"prediction": "not in the text", "confidence": 0.8})
    refusals(tmp_path, "arcaligner_x4")
    row = "| ArcAligner, 4 tokens per slot | 100.0 [100.0, 100.0] | 0.0 [0.0, 0.0] | 100.0 | 0.0 | 1.000 |"
    assert row in capsys.readouterr().out


def test_answers_without_a_confidence_are_refused_with_the_command_that_makes_them(checkpoint_dir, tmp_path):
    write(tmp_path, "squad", checkpoint_dir, {})
    with pytest.raises(ValueError, match="no answers with a confidence. Ask with `python -m"):
        read_answers(tmp_path, "squad", "arcaligner_x4")
    write(tmp_path, "nq", checkpoint_dir, {"confidence": 0.9})
    with pytest.raises(ValueError, match="has no `answer_probe` any more"):
        read_answers(tmp_path, "nq", "arcaligner_x4")
