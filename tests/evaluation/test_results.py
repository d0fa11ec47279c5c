"""Tables say what the answers say: means, intervals, paired differences, the paper's numbers beside them."""

import json

import pytest
from answer_rows import write_answers

from arcaligner.evaluation.metrics import percent_interval
from arcaligner.evaluation.results import compare, interval_table, results_page, summarize, write_results
from arcaligner.share.hub import write_model_card


def write(run, method: str, f1s: list[float], task: str = "hotpotqa", context: int = 2, **settings) -> None:
    """Writes answers of a method with these scores."""
    write_answers(run, task, method, ({"f1": f1, "context_tokens": context} for f1 in f1s), **settings)


@pytest.fixture
def run(tmp_path):
    """ArcAligner and Naive on four questions of HotpotQA, StandardRAG on three of them."""
    write(tmp_path, "arcaligner", [1.0, 0.5, 0.0, 0.5], context=2)
    write(tmp_path, "naive", [0.0, 0.5, 0.0, 0.0], context=0, passages="gold", about="gold: two of ten")
    write(tmp_path, "standard_rag", [1.0, 1.0, 0.5], context=60)
    return tmp_path


def test_numbers_are_those_of_the_answers_with_differences_over_questions_that_both_answered(run):
    entry = summarize(run)["sets"]["HotpotQA"]
    numbers, differences = entry["methods"]["arcaligner"], entry["differences"]
    assert numbers["f1"] == percent_interval([1.0, 0.5, 0.0, 0.5])
    assert (numbers["questions"], numbers["context_tokens"]) == (4, 2) and entry["passages"] == "gold: two of ten"
    assert numbers["compression_rate"] == 30.0 and entry["questions"] == 4
    assert "compression_rate" not in entry["methods"]["naive"] | entry["methods"]["standard_rag"]
    assert set(differences) == {"naive", "standard_rag"}
    assert differences["naive"]["f1"] == percent_interval([1.0, 0.0, 0.0, 0.5])
    assert differences["standard_rag"]["questions"] == 3
    assert differences["standard_rag"]["f1"][0] == pytest.approx(-100 / 3)
    assert compare({"a": {}}, {"b": {}}) == {"questions": 0}


def test_answers_to_other_passages_are_not_paired(run):
    write_answers(run, "hotpotqa", "max_loop", [{"row": "other"}])
    with pytest.raises(ValueError, match="max_loop answered question 0 with other passages"):
        summarize(run)


def test_a_page_has_no_heading_without_anything_below_and_no_set_of_questions_without_an_answer(tmp_path):
    with pytest.raises(ValueError, match="holds no answers"):
        summarize(tmp_path)
    write(tmp_path, "arcaligner", [0.0], task="squad_unanswerable")
    assert write_results(tmp_path)["sets"] == {}
    write(tmp_path, "naive", [0.5], task="adversarialqa")
    page = results_page(results := summarize(tmp_path))
    assert {name: entry["passages"] for name, entry in results["sets"].items()} == {"AdversarialQA": "given"}
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["## Positions"] and "\n\n\n" not in page


def test_results_are_written_for_machines_people_and_the_model_card(run, model):
    results = write_results(run)
    assert json.loads((run / "results.json").read_text("utf-8")) == results
    page = (run / "results.md").read_text("utf-8")
    assert page == results_page(results)
    assert "| **ArcAligner** | 50.0 [12.5, 87.5] |" in page and "| StandardRAG | 83.3 [50.0, 100.0] of 3 |" in page
    _, low, high = percent_interval([1.0, 0.0, 0.0, 0.5])
    assert f"| Naive | +37.5 [{low:+.1f}, {high:+.1f}] |" in page
    assert "| StandardRAG | 60.0 |" in page and "| **ArcAligner** | 2.0, x30.0 |" in page
    assert "## The paper's numbers" in page and "| **ArcAligner** | 26.6 / 34.9 / 33.4 |" in page
    assert "Questions: HotpotQA 4." in page and "A gold stands in the passages read: HotpotQA 100 %." in page
    write_model_card(model.config, run)
    card = (run / "README.md").read_text("utf-8")
    assert "| **slots** | - | 50.0 |" in card and "| with an expected answer in them |  | 100 % |" in card


def test_a_table_leaves_out_methods_without_a_number_and_marks_single_gaps():
    sets = {
        "A": {"questions": 5, "methods": {"naive": {"questions": 5, "f1": [1.0, 0.0, 2.0]}}},
        "B": {"questions": 5, "methods": {"standard_rag": {"questions": 5, "f1": [3, 2, 4]}}},
    }
    rows = ["| Naive | 1.0 [0.0, 2.0] | - |", "| StandardRAG | - | 3.0 [2.0, 4.0] |"]
    assert interval_table("F1", sets, "methods", "f1") == ["| F1 | A | B |", "|---|---|---|", *rows, ""]
    assert interval_table("EM", sets, "methods", "em") == []
