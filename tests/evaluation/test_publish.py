"""What readers see comes from a run and from nothing else."""

import shutil
from pathlib import Path

import pytest
from answer_rows import write_answers

from arcaligner.evaluation import publish
from arcaligner.evaluation.analyses.speed import find_size, tradeoff
from arcaligner.evaluation.publish import answers_page, with_block, write_part

ROOT = Path(__file__).parents[2]


def test_pages_the_readmes_table_and_figures_are_those_of_the_shipped_results_and_of_the_timings(tmp_path, monkeypatch):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    readme = (ROOT / "README.md").read_text("utf-8")
    (tmp_path / "README.md").write_text(readme, "utf-8")
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "DOCS", docs)
    parts = {"README.md": ["results"], "docs/results.md": ["results"]}
    for page, names in (parts | {"docs/speed.md": ["first token", "known passages"]}).items():
        for name in names:
            write_part(tmp_path / page, name, ["nothing"])
    for name in ("rates.json", "f1_of_speed.json"):
        (docs / "figures" / name).unlink()
    publish.publish(figures=docs / "figures")
    assert (tmp_path / "README.md").read_text("utf-8") == readme
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".md", ".json"):
            assert (docs / path.relative_to(ROOT / "docs")).read_bytes() == path.read_bytes(), path.name


def test_f1_stands_over_the_time_at_the_same_rate():
    def size(rate, first, k=20):
        seconds = {"standard_rag": 1.0, "standard_rag_cached": 0.1, "off": first, "slots_cached": first / 8}
        arms = {name: {"first_token": {"median": each}} for name, each in seconds.items()}
        return {"k": k, "tokens_per_slot": rate, "arms": arms}

    sizes = [size(4, 0.5), size(8, 9.0, k=1), size(8, 0.25), size(2, 0.7)]
    methods = {"arcaligner": 40.0, "arcaligner_x8": 20.0, "full_text_lora": 60.0}
    sets = {
        name: {"methods": {method: {"f1": [f1 + add]} for method, f1 in methods.items()}}
        for name, add in (("A", 0.0), ("B", 2.0))
    }
    report = {"sizes": sizes, "own_tokens_per_slot": 4}
    assert tradeoff(report, sets) == {  # nothing at the rate that has no F1
        "slots, encoded before": [{"rate": 4, "ms": 500.0, "f1": 41.0}, {"rate": 8, "ms": 250.0, "f1": 21.0}],
        "slots, kept": [{"rate": 4, "ms": 62.5, "f1": 41.0}, {"rate": 8, "ms": 31.25, "f1": 21.0}],
        "text, fine-tuned": [{"rate": "text", "ms": 1000.0, "f1": 61.0}],
        "text, fine-tuned, kept": [{"rate": "text", "ms": 100.0, "f1": 61.0}],
    }
    with pytest.raises(ValueError, match="has no 20 passages at the rate 16"):
        find_size(report, 20, 16)


def test_a_block_is_replaced_between_its_marks_alone():
    start, end = marks = "<!-- a -->", "<!-- end -->"
    assert with_block(f"a\n{start}\nold\n{end}\nb", "new", marks) == f"a\n{start}\nnew\n{end}\nb"
    for text in ("none", f"{end}{start}", f"{start}{start}{end}"):
        with pytest.raises(ValueError, match="each once"):
            with_block(text, "new", marks)


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_the_page_of_answers_shows_the_first_by_id_and_what_is_refused(tmp_path, processor, threshold, monkeypatch):
    row = {"question": "Who | what?", "answers": ["an\x1b[1m answer"], "prediction": "a\nb", "f1": 0.5}
    write_answers(tmp_path, "squad", "arcaligner", (row | {"id": f"q{number:02}"} for number in reversed(range(20))))
    unknown = row | {"answers": [], "f1": 0.0}
    sure = ({"confidence": each} for each in (0.25, 0.75))
    write_answers(tmp_path, "squad_unanswerable", "arcaligner", (unknown | each for each in sure))
    if threshold is not None:
        monkeypatch.setattr(processor, "no_answer", "not in the text")
        monkeypatch.setattr(processor, "answer_probe", {"layers": [0], "weight": [0.5], "bias": 0.0, "threshold": 0.5})
    page = answers_page(tmp_path, processor)
    lines = [line for line in page.splitlines() if line.startswith("| Who")]
    assert lines[:13] == [r"| Who \| what? | an\\x1b\[1m answer | a b | 50 | - |"] * 13
    refused = "" if threshold is None else "refused, "
    start = r"| Who \| what? | (not in the passages) | a b | - | "
    assert lines[13:] == [f"{start}{refused}0.25 |", f"{start}0.75 |"]
    assert ('`min_confidence=0.5`, those marked as refused become "not in the text".' in page) == bool(refused)
