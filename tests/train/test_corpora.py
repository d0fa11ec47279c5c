"""Sources of rows: files and Hub data sets of three kinds become rows of one schema."""

import pytest
from training_rows import question_rows, write_rows

from arcaligner.train.corpora import read_rows


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_are_read_plain_and_gzipped(tmp_path, name):
    rows = question_rows(2)
    assert read_rows(write_rows(tmp_path / name, rows)) == rows


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is not a JSON object"),
        ("7", "line 2"),
        ('{"id": "1"}', "has no question, answers"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    write_rows(path, question_rows(1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_rows(path)
