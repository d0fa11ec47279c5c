"""Metrics equal the reference; tables have means, intervals, paired differences, abstentions, and the paper's
numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from answer_rows import write_answers
from conftest import processor_with
from tiny_models import random_head

from arcaligner.common.rows import contains_match, token_f1
from arcaligner.evaluation.analyses.abstentions import TASKS, abstentions
from arcaligner.evaluation.metrics import percent_interval
from arcaligner.evaluation.results import compare, read_results, results_page, summarize, write_results
from arcaligner.evaluation.runs import FLOOR, AnswerFile
from arcaligner.share.hub import write_model_card

CASES = [json.loads(line) for line in Path(__file__).with_name("metric_cases.jsonl").read_text("utf-8").splitlines()]


def test_metrics_equal_the_reference():
    assert len(CASES) == 38
    for case in CASES:
        prediction, golds = case["prediction"], case["golds"]
        assert contains_match(prediction, golds) == case["em"], case["case"]
        assert token_f1(prediction, golds) == pytest.approx(case["f1"], abs=1e-4), case["case"]


@pytest.mark.parametrize("gold", ["The", "?", ""])
def test_empty_gold_is_dropped(gold):
    assert contains_match("anything at all", [gold]) == token_f1("", [gold]) == 0.0
    assert contains_match("in Paris", [gold, "Paris"]) == 1.0


def test_interval_equals_normal_approximation():
    scores = np.random.default_rng(1).normal(size=400)
    mean, half = 100 * scores.mean(), 100 * 1.96 * scores.std() / 20
    np.testing.assert_allclose(percent_interval(scores), [mean, mean - half, mean + half], atol=0.8)
    with pytest.raises(ValueError, match="at least one"):
        percent_interval([])


# Tables


@pytest.fixture
def run(tmp_path):
    """ArcAligner and Naive on four questions of HotpotQA, StandardRAG on three of them."""

    def write(method: str, f1s: list[float], context: int, task: str = "hotpotqa", **settings) -> None:
        answers = ({"f1": f1, "context_tokens": context} for f1 in f1s)
        write_answers(tmp_path, task, method, answers, **settings)

    write("arcaligner", [1.0, 0.5, 0.0, 0.5], 2)
    write("naive", [0.0, 0.5, 0.0, 0.0], 0, passages="gold", about="gold: two of ten")
    write("standard_rag", [1.0, 1.0, 0.5], 60)
    return tmp_path


def test_numbers_match_the_answers(run):
    """Numbers are computed from the answers; differences are over questions that both methods answered."""
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
    write_answers(run, "hotpotqa", "max_loop", [{"row": "other"}])
    with pytest.raises(ValueError, match="max_loop cannot be compared, because question 0 had different passages"):
        summarize(run)


def test_pages_have_no_empty_parts(tmp_path):
    """A page has no heading without content and no set without answers."""
    with pytest.raises(ValueError, match="contains no answers"):
        summarize(tmp_path)
    write_answers(tmp_path, "squad_unanswerable", "arcaligner", [{}])
    assert write_results(tmp_path)["sets"] == {}
    write_answers(tmp_path, "adversarialqa", "naive", [{}])
    AnswerFile(tmp_path, "nq", "naive").open({"machine": "there"}, [{"id": "0"}])  # nothing answered yet
    page = results_page(results := summarize(tmp_path))
    assert {name: entry["passages"] for name, entry in results["sets"].items()} == {"AdversarialQA": "given"}
    assert results["machine"] == "here"
    folded = [line for line in page.splitlines() if line.startswith("<details>")]
    assert folded == ["<details><summary>Positions of the prompt</summary>"] and "\n\n\n" not in page


def test_renamed_sets_are_read(tmp_path):
    """Results of version 0.2 have former titles of sets and former names of methods."""
    sets = {"NaturalQA": {"questions": 2}, "SQuAD": {"questions": 1, "methods": {"naive": 2, "text_apart": 3}}}
    (path := tmp_path / "results.json").write_text(json.dumps({"questions": 1, "sets": sets}))
    renamed = {"Natural Questions": {"questions": 2}}
    renamed["SQuAD"] = {"questions": 1, "methods": {"naive": 2, "text_independent": 3}}
    results = read_results(path)
    assert results == {"questions": 1, "sets": renamed} and list(results["sets"]) == list(renamed)


def test_renamed_methods_are_summarized(tmp_path):
    """Files of answers from version 0.2 are summarized with their floor, by the new name of their method."""
    for folder, f1 in ((tmp_path, 0.5), (tmp_path / FLOOR, 0.25)):
        write_answers(folder, "squad", "text_apart", [{"f1": f1}])
    (numbers,) = summarize(tmp_path)["sets"].values()
    assert list(numbers["methods"]) == ["text_independent"]
    assert numbers["methods"]["text_independent"]["f1"][0] == 50.0
    assert numbers["methods"]["text_independent"]["floor"]["f1"][0] == 25.0


def test_results_in_three_forms(run, model):
    """Results are written for machines, people and the model card."""
    results = write_results(run)
    assert json.loads((run / "results.json").read_text("utf-8")) == results
    page = (run / "results.md").read_text("utf-8")
    assert page == results_page(results)
    assert "| **ArcAligner** | 50.0 [12.5, 87.5] |" in page and "| StandardRAG | 83.3 [50.0, 100.0] of 3 |" in page
    _, low, high = percent_interval([1.0, 0.0, 0.0, 0.5])
    assert f"| Naive | +37.5 [{low:+.1f}, {high:+.1f}] |" in page
    assert "| StandardRAG | 60.0 |" in page and "| **ArcAligner** | 2.0, x30.0 |" in page
    assert "<summary>The paper's numbers</summary>" in page and "| **ArcAligner** | 26.6 / 34.9 / 33.4 |" in page
    assert "| HotpotQA | 4 | gold: two of ten | 100 |" in page
    write_model_card(model.config, run)
    card = (run / "README.md").read_text("utf-8")
    assert "| **slots** | - | 50.0 |" in card
    assert "| *questions whose passages contain a gold answer* |  | 100 % |" in card


# Abstentions


def test_abstentions_below_the_threshold(model, processor, tmp_path, capsys):
    """The table counts answers below the threshold and answers that are abstentions."""
    random_head(model, threshold=0.5)
    for part in (model, processor_with(processor, no_answer="not in the text")):
        part.save_pretrained(checkpoint := tmp_path / "aligner")
    known = [
        {"f1": f1, "answerability": answerability}
        for f1, answerability in ((1.0, 0.9), (0.5, 0.8), (0.25, 0.3), (0.0, 0.6))
    ]
    unknown = [{"prediction": "not in the text", "answerability": 0.85}, {"answerability": 0.7}, {"answerability": 0.1}]
    for task, answers in zip(TASKS, (known, unknown), strict=True):
        write_answers(tmp_path, task, "arcaligner_x4", answers, checkpoint=str(checkpoint))
    abstentions(tmp_path, "arcaligner_x4")
    *_, row = capsys.readouterr().out.splitlines()
    title, abstained, wrongly, *others = row.strip("| ").split(" | ")
    assert title == "ArcAligner, 4 tokens per slot"
    assert abstained == "66.7 [0.0, 100.0]" and wrongly.startswith("25.0 [0.0, ")
    # In five of 4 x 3 pairs the unanswerable question has the higher answerability.
    assert others == ["43.8", "6.2", "0.583"]
    write_answers(tmp_path, TASKS[0], "naive", [{}])
    with pytest.raises(ValueError, match="naive.* have no answerability; .*Choose other `--methods`"):
        abstentions(tmp_path, "naive")
    with pytest.raises(ValueError, match="There are no answers in .*arcaligner_x8.* Run `arcaligner evaluate"):
        abstentions(tmp_path, "arcaligner_x8")
