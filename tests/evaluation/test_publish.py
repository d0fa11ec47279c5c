"""What readers see comes from a run and from nothing else."""

import json
from pathlib import Path

import pytest
from answer_rows import write_answers

from arcaligner.benchmarks import report as speed
from arcaligner.evaluation.publish import INTRODUCTION, MARKS, answers_page, readme_table, with_block
from arcaligner.evaluation.results import results_page

ROOT = Path(__file__).parents[2]
SHIPPED = json.loads((ROOT / "checkpoints/arcaligner-smollm2-135m/results.json").read_text("utf-8"))


def test_the_readmes_tables_are_those_of_the_shipped_results():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert with_block(readme, readme_table(SHIPPED), MARKS) == readme


def test_the_results_page_is_that_of_the_shipped_results():
    page = (ROOT / "docs/results.md").read_text("utf-8")
    assert page.startswith("\n".join([INTRODUCTION, results_page(SHIPPED)]).rstrip())


def test_figures_are_shown_on_one_of_the_pages_with_their_reading_help():
    pages = (ROOT / "docs/results.md").read_text("utf-8") + (ROOT / "docs/speed.md").read_text("utf-8")
    for data in (ROOT / "docs/figures").glob("*.json"):
        shown = f"(figures/{data.with_suffix('.svg').name})\n\n{json.loads(data.read_text('utf-8'))['reading']}"
        assert pages.count(shown) == 1
        assert data.with_suffix(".svg").exists()


def test_the_readme_and_the_page_of_speed_are_those_of_the_latency_report():
    report = json.loads((ROOT / "docs/figures/latency.json").read_text("utf-8"))
    readme = (ROOT / "README.md").read_text("utf-8")
    assert with_block(readme, "\n".join(speed.first_token_table(report)), speed.MARKS) == readme
    page = (ROOT / "docs/speed.md").read_text("utf-8")
    figures = page[page.index("![") : page.index("## All numbers")].splitlines()
    assert page == speed.speed_page(report, figures)


def test_f1_stands_over_the_speed_of_the_same_rate():
    def size(rate, first, **other):
        arms = {
            name: {"first_token": {"median": seconds}, "speed_up": {"median": 1.0 / seconds}}
            for name, seconds in (("standard_rag", 1.0), ("off", first), ("slots_cached", first / 2))
        }
        encoder = {"segmenting": {"median": 0.05}, "encoding": {"median": 0.2}}
        return {
            **{"k": 5, "batch_size": 1, "dtype": "float32", "tokens_per_slot": rate},
            **{"arms": arms, "encoder": encoder, **other},
        }

    sizes = [size(4, 0.5), size(8, 0.25), size(8, 9.0, k=1), size(8, 9.0, batch_size=8)]
    methods = {"ArcAligner": 40.0, "ArcAligner, 8 tokens per slot": 20.0, "StandardRAG": 10.0}
    sets = {
        name: {"methods": {method: {"f1": [f1 + add]} for method, f1 in methods.items()}}
        for name, add in (("A", 0.0), ("B", 2.0))
    }
    curves = speed.tradeoff({"sizes": [*sizes, size(2, 0.7)], "own_tokens_per_slot": 4}, sets)
    assert curves["slots, encoded before"] == [
        {"rate": 4, "speed_up": 2.0, "f1": 41.0},
        {"rate": 8, "speed_up": 4.0, "f1": 21.0},
    ]
    assert [point["speed_up"] for point in curves["slots, encoded first"]] == [1 / 0.75, 2.0]
    assert [point["speed_up"] for point in curves["slots, cached"]] == [4.0, 8.0]
    assert curves["text"] == [{"rate": "text", "speed_up": 1.0, "f1": 11.0}] and "text, fine-tuned" not in curves


def test_a_block_is_replaced_between_its_marks_alone():
    start, end = MARKS
    assert with_block(f"a\n{start}\nold\n{end}\nb", "new", MARKS) == f"a\n{start}\nnew\n{end}\nb"
    for text in ("none", f"{end}{start}", f"{start}{start}{end}"):
        with pytest.raises(ValueError, match="each once"):
            with_block(text, "new", MARKS)


def test_the_page_of_answers_shows_the_first_by_id_and_keeps_its_table_whole(tmp_path):
    row = {"question": "Who | what?", "answers": ["an\x1b[1m answer"], "prediction": "a\nb", "f1": 0.5}
    write_answers(tmp_path, "squad", "arcaligner", (row | {"id": f"q{number:02}"} for number in reversed(range(20))))
    lines = [line for line in answers_page(tmp_path).splitlines() if line.startswith("| Who")]
    assert lines == [r"| Who \| what? | an\\x1b\[1m answer | a b | 50 |"] * 13
