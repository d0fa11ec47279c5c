"""Answers are kept line by line: what is there is not asked again, what does not belong is refused."""

import json

import pytest
from training_rows import question_rows

from arcaligner.evaluation.runs import AnswerFile, row_digest

SETTINGS = {"weights": "abc", "passages": "given", "top_k": None, "machine": "here", "checkpoint": "runs/a"}
ROWS = question_rows(4)
LINES = [{"id": row["id"], "prediction": "é", "row": row_digest(row)} for row in ROWS]


@pytest.fixture
def file(tmp_path) -> AnswerFile:
    """Answers to the first two rows."""
    file = AnswerFile(tmp_path, "squad", "naive")
    assert file.open(SETTINGS, ROWS) == ROWS
    file.append(LINES[:2])
    return file


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_line_that_a_kill_cut_off_is_answered_anew(file, kept):
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + json.dumps(LINES[2], ensure_ascii=False).encode()[:kept])
    assert file.read() == LINES[:2] and file.open(SETTINGS, ROWS) == ROWS[2:]
    with file.claim():
        with pytest.raises(ValueError, match=r"Another process answers into .*naive\.jsonl"):
            with AnswerFile(file.run, file.task, file.method).claim():
                pass
        file.append(LINES[2:3])
    assert file.read() == LINES[:3] and file.path.read_bytes().startswith(whole)


def test_another_machine_or_place_of_the_same_weights_goes_on(file):
    moved = SETTINGS | {"machine": "there", "checkpoint": "runs/b"}
    assert file.open(moved, ROWS[:2]) == [] and file.settings()["machine"] == "here"  # nothing was left to answer
    assert file.open(moved, ROWS) == ROWS[2:] and file.settings()["machine"] == "there"


@pytest.mark.parametrize(
    "settings, row, message",
    [
        ({"weights": "other"}, {}, "`weights` was 'abc' and is now 'other'"),
        ({"top_k": 1}, {}, "`top_k` was None and is now 1"),
        ({}, {"question": "Else?"}, "row row-1 has changed"),
        ({}, {"answers": ["x"]}, "row row-1 has changed"),
        ({}, {"passages": []}, "row row-1 has changed"),
    ],
)
def test_answers_made_otherwise_are_refused_and_stay(file, settings, row, message):
    before = file.path.read_bytes()
    with pytest.raises(ValueError, match=f"2 answers made with other settings: {message}"):
        file.open(SETTINGS | settings, [ROWS[0], ROWS[1] | row])
    assert file.path.read_bytes() == before and file.settings() == SETTINGS
