"""What readers see comes from a run and from nothing else."""

import shutil
from pathlib import Path

import pytest
from answer_rows import write_answers

from arcaligner.evaluation import publish
from arcaligner.evaluation.publish import MARKS, answers_page, check_weights, write_part

ROOT = Path(__file__).parents[2]
PARTS = {"README.md": ["results"], "docs/results.md": ["results"], "docs/speed.md": ["first token", "known passages"]}


def test_pages_and_the_readmes_table_are_those_of_the_shipped_results_and_of_the_timings(tmp_path, monkeypatch):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "DOCS", docs)
    for page, names in PARTS.items():
        for name in names:
            write_part(tmp_path / page, name, ["nothing"])
    timed = shutil.copytree(docs / "figures", tmp_path / "timed")
    for path in (docs / "figures" / "latency.json", *docs.rglob("*.svg"), timed / "kept.json"):
        path.unlink()  # what was not measured again stays
    publish.publish(figures=timed)
    for page in PARTS:
        assert (tmp_path / page).read_text("utf-8") == (ROOT / page).read_text("utf-8")
    assert {path.name for path in docs.rglob("figures/*")} == {path.name for path in ROOT.rglob("docs/figures/*")}


@pytest.mark.parametrize("text", ["none", "{1}{0}", "{0}{0}{1}"])
def test_a_page_without_both_marks_of_a_part_is_refused(tmp_path, text):
    (page := tmp_path / "page.md").write_text(text.format(*(mark.format("a") for mark in MARKS)))
    with pytest.raises(ValueError, match="each once"):
        write_part(page, "a", ["new"])


def test_a_run_of_other_weights_is_refused(tmp_path, checkpoint_dir):
    write_answers(tmp_path, "squad", "naive", [{}])
    check_weights(tmp_path, checkpoint_dir)
    write_answers(tmp_path, "squad", "arcaligner", [{}], weights="other")
    with pytest.raises(ValueError, match=r"arcaligner\.jsonl was answered by weights other"):
        check_weights(tmp_path, checkpoint_dir)


def test_the_page_of_answers_shows_the_first_by_id_and_what_is_refused(tmp_path, processor, monkeypatch):
    row = {"question": "Who | what?", "answers": ["an\x1b[1m answer"], "prediction": "a\nb", "f1": 0.5}
    known = (row | {"id": f"q{number:02}", "confidence": 1 - number / 50} for number in reversed(range(20)))
    write_answers(tmp_path, "squad", "arcaligner", known)
    unknown = (row | {"answers": [], "f1": 0.0, "confidence": sure} for sure in (0.25, 0.75))
    write_answers(tmp_path, "squad_unanswerable", "arcaligner", unknown)
    monkeypatch.setattr(processor, "no_answer", "not in the text")
    monkeypatch.setattr(processor, "answer_probe", {"layers": [0], "weight": [0.5], "bias": 0.0, "threshold": 0.5})
    page = answers_page(tmp_path, processor)
    lines = [line for line in page.splitlines() if line.startswith("| Who")]
    said = r"| Who \| what? | an\\x1b\[1m answer | a b | 50 | "
    assert lines[:13] == [f"{said}{1 - number / 50:.2f} |" for number in range(13)]
    start = r"| Who \| what? | (not in the passages) | a b | - | "
    assert lines[13:] == [f"{start}refused, 0.25 |", f"{start}0.75 |"]
    assert '`min_confidence=0.5`, those marked as refused become "not in the text".' in page
