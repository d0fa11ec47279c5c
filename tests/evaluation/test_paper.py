"""The paper's tables, figures and case studies are made from an evaluation's answers, beside the paper's numbers."""

import json

import pytest
from conftest import random_aligner
from training_rows import question_rows, write_rows

from arcaligner.evaluation import paper
from arcaligner.evaluation.analyses import gates, perplexity
from arcaligner.evaluation.analyses.categories import categorize
from arcaligner.evaluation.analyses.figures import draw_ratios
from arcaligner.evaluation.answering import load_aligner
from arcaligner.evaluation.paper import PARTS, TASKS_OF_PAPER, Reproduction, comparison, costs, reproduce
from arcaligner.evaluation.results import PAPER, evidence, retention
from arcaligner.evaluation.runs import FLOOR, AnswerFile
from arcaligner.evaluation.settings import read_settings
from arcaligner.evaluation.tasks import wrong_passages

pytestmark = pytest.mark.usefixtures("few_tokens")


@pytest.fixture
def data(tmp_path):
    """Four questions of each of the paper's sets except WebQuestions, and texts to reconstruct."""
    (folder := tmp_path / "data").mkdir()
    for name in TASKS_OF_PAPER[:-1]:
        write_rows(folder / f"{name}.jsonl", question_rows(4))
    write_rows(folder / "recon_heldout.jsonl.gz", question_rows(3))
    return folder


@pytest.fixture
def make(tmp_path, data, checkpoint_dir):
    """Makes a reproduction from some changed keys of the recipe."""

    def made(num_questions=None, **changes) -> Reproduction:
        keys = {"checkpoint": str(checkpoint_dir), "data": data, "output": tmp_path / "run", "batch_size": 2}
        keys |= {"tasks": list(TASKS_OF_PAPER)}
        return Reproduction(read_settings(None, keys | changes, {"num_questions": num_questions}), num_questions)

    return made


def test_main_table_has_both(make, caplog):
    """Each number of the paper stands beside the measured one; missing methods are named, and floors are measured."""
    (page,) = reproduce("table1", make(floor=True))
    text = page.read_text(encoding="utf-8")
    paper_row = "31.80 / 36.00 / 33.40"
    (line,) = (line for line in text.splitlines() if paper_row in line)
    assert line.startswith("| ArcAligner | ArcAligner, x24 |")
    for named in PAPER["sets"]["HotpotQA"].keys() - paper.ABLATION_NAMES:
        assert any(f"| {named}{rate} |" in text for rate in ("", f", x{PAPER['rates'].get(named)}")), named
    assert "w/o Recursion" not in text and "Skipped xRAG" in caplog.text
    assert "- xRAG (our training): No checkpoint was given. Pass one as `xrag` in the recipe" in text
    assert "| StandardRAG, fine-tuned |" not in text  # no number from the paper and none measured
    assert "*Text* is the row StandardRAG, the base model without fine-tuning" in " ".join(text.split())
    assert "| 2WikiMultiHopQA | 4 |" in text
    wrong = AnswerFile(make().settings.output / FLOOR, "nq", "arcaligner").read()
    assert len(wrong) == 4 and "floor" in text
    assert not AnswerFile(make().settings.output / FLOOR, "nq", "naive").read()


def test_missing_floor_is_named(make, data):
    """A set without passages of other questions has scores but no floor; other sets have both."""
    write_rows(data / "hotpotqa.jsonl", question_rows(1))
    (page,) = reproduce("table1", make(floor=True, methods=["arcaligner"]))
    answers = [AnswerFile(make().settings.output / FLOOR, name, "arcaligner").read() for name in ("hotpotqa", "nq")]
    assert [len(rows) for rows in answers] == [0, 4]
    assert len(AnswerFile(make().settings.output, "hotpotqa", "arcaligner").read()) == 1
    assert "HotpotQA, floor: The floor of HotpotQA cannot be measured" in page.read_text(encoding="utf-8")


def test_second_run_asks_nothing(make, monkeypatch):
    reproduce("ablation", make())
    monkeypatch.setattr("arcaligner.evaluation.evaluate.in_batches", None)
    (page,) = reproduce("ablation", make())
    assert "| w/o Gate (Max Loop) | 27.20 / 31.69 / 31.00 |" in page.read_text(encoding="utf-8")


def test_floor_names_its_questions():
    """A floor on fewer questions than the F1 beside it is shown with its number of questions."""
    scores = {"f1": [40.0] * 3, "questions": 5}
    entry = {"methods": {"arcaligner": scores | {"floor": {"questions": 2, "f1": [3.0] * 3}}}}
    assert evidence(entry, "arcaligner") == "40.0 (floor 3.0 of 2)"
    lines = " ".join(" ".join(costs({"HotpotQA": entry})).split())
    assert '"of N" means that it was measured on only N questions.' in lines
    entry["methods"]["arcaligner"]["floor"]["questions"] = 5
    assert evidence(entry, "arcaligner") == "40.0 (floor 3.0)"
    assert '"of N"' not in " ".join(costs({"HotpotQA": entry}))


def test_wrong_passages_hold_no_answer():
    """Wrong passages are those of the nearest row without the answer, first before, then after; later rows do not
    matter."""
    rows = [
        {"id": str(number), "question": "?", "answers": [answer], "passages": [{"title": "", "text": text}]}
        for number, (answer, text) in enumerate([("a1", "a1 b2"), ("b2", "b2"), ("c3", "c3"), ("no", "north")])
    ]
    texts = [row["passages"][0]["text"] for row in wrong_passages(rows, "SQuAD")]
    assert texts == ["b2", "c3", "b2", "c3"]
    assert wrong_passages(rows[:3], "SQuAD") == wrong_passages(rows, "SQuAD")[:3]
    with pytest.raises(ValueError, match="The floor of SQuAD cannot be measured.*leave out `--floor`"):
        wrong_passages(rows[:1], "SQuAD")


def test_retention_is_between_bounds():
    numbers = {"naive": 10.0, "standard_rag": 20.0, "full_text_lora": 50.0, "arcaligner": 30.0}
    entry = {"methods": {name: {"f1": [f1, f1, f1]} for name, f1 in numbers.items()}}
    assert retention(entry, "arcaligner") == 50.0 and retention(entry, "standard_rag") is None
    entry["methods"]["cocom_x4"] = {"f1": [30.0] * 3, "questions": 2}  # on other questions than the bounds
    assert retention(entry, "cocom_x4") is None
    entry["methods"]["full_text_lora"]["f1"] = [50.0, 9.0, 90.0]  # the interval includes no gain
    assert retention(entry, "arcaligner") is None
    del entry["methods"]["full_text_lora"]
    assert retention(entry, "arcaligner") == 200.0
    del entry["methods"]["naive"]
    assert retention(entry, "arcaligner") is None


def test_judged_answers_show_acc():
    """A cell has EM, F1 and the first judge's Acc, and, of few questions, the interval of F1."""
    numbers = {"em": [1.0] * 3, "f1": [2.0, 0.5, 3.5], "questions": 60}
    methods = {"naive": numbers | {"acc": {"judge": [3.0, 0, 9]}}, "arcaligner": numbers | {"questions": 49}}
    sets = {"HotpotQA": {"questions": 60, "methods": methods}}
    lines = comparison(sets, ["naive", "arcaligner"])
    assert "| Naive | Naive | 21.20 / 13.39 / 23.20 | 1.0 / 2.0 / 3.0 |" in lines
    assert "| ArcAligner | ArcAligner, x24 | 26.60 / 34.92 / 33.40 | 1.0 / 2.0 [0.5, 3.5] / - of 49 |" in lines
    assert "| - | COCOM x4 | 25.20 / 32.45 / 31.18 | - |" in lines


# Figures


def test_ratios_show_all_points():
    """The panels share an axis, which includes the highest point of each panel."""
    sets = {
        title: {"one": {"compression_rate": 2.0, "em": [high], "f1": [high]}} for title, high in (("a", 20), ("b", 60))
    }
    assert [axes.get_ylim()[1] > 60 for axes in draw_ratios(sets).axes] == [True, True]


def test_gates_are_counted(make, checkpoint_dir, monkeypatch):
    """Loops are counted in a forward pass over each question alone, and not again in a second run."""
    made = make()
    (page,) = reproduce("gates", made)
    model, processor = load_aligner(str(checkpoint_dir), "cpu")
    counts = sum(
        gates.count_loops(model, processor, [row], 1, "one", "segment").sum(axis=0) for row in question_rows(4)
    )
    stored = json.loads((made.folder / "gates_nq.json").read_text())["numbers"]
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert stored["shares"] == pytest.approx(shares) and stored["slots"] == counts[0].sum()
    assert stored["loops"] == pytest.approx([1 * a + 2 * b + 3 * c for a, b, c in shares]) and max(stored["loops"]) > 1
    monkeypatch.setattr(gates, "count_loops", None)
    assert reproduce("gates", made) == [page] and (made.folder / "gates.svg").exists()


def test_closed_gates_are_refused(make, base_model_dir, processor, tmp_path):
    random_aligner(base_model_dir, processor, seed=4, gate_mode="off").save_pretrained(tmp_path / "off")
    processor.save_pretrained(tmp_path / "off")
    with pytest.raises(ValueError, match="gates: .*off has no active gates: its `gate_mode` is 'off'"):
        reproduce("gates", make(checkpoint=str(tmp_path / "off")))
    pages = reproduce("gates", make(checkpoint=str(tmp_path / "off"), reproduce={"gated": make().settings.checkpoint}))
    assert [page.name for page in pages] == ["gates.md"]


def test_categories_partition_questions(tmp_path):
    """Each question is in one category, by which baselines are right, and counts in it for each method."""
    right = {
        "naive": {"1": True, "2": True, "3": False, "4": False},
        "standard_rag": {"1": True, "2": False, "3": True, "4": False},
        "arcaligner": {"1": True, "2": False, "3": True},
    }
    sets = categorize(
        tmp_path, ["nq", "webq"], ["arcaligner"], lambda file: right[file.method] if file.task == "nq" else {}
    )
    (parts,) = sets.values()
    assert [parts[category]["questions"] for category in ("TT", "TF", "FT", "FF")] == [1, 1, 1, 1]
    shares = {category: part["methods"].get("ArcAligner", [None])[0] for category, part in parts.items()}
    assert shares == {"TT": 100.0, "TF": 0.0, "FT": 100.0, "FF": None}


def test_perplexity_of_text_and_slots(make, checkpoint_dir):
    """Perplexity is that of the NLL per token; Base reads the text itself, and a missing checkpoint is named."""
    stages = {"ours": str(checkpoint_dir), "xRAG": "runs/nowhere"}
    made = make(reproduce={"stage_one": stages})
    (page,) = reproduce("perplexity", made)
    text = page.read_text(encoding="utf-8")
    assert "| Base |" in text and "| ours |" in text and "| xRAG |" not in text
    command = "`python -m arcaligner train --recipe RECIPE --stage 1`"
    assert f"- xRAG: There is no folder runs/nowhere. To train this aligner, run {command}." in text
    model, processor = load_aligner(str(checkpoint_dir), "cpu")
    losses = perplexity.slot_losses(model, processor, question_rows(3), "segment")
    numbers = perplexity.summarize_losses(losses)
    assert json.loads((made.folder / "perplexity_ours.json").read_text())["numbers"] == numbers
    assert numbers["passages"] == 3 and numbers["perplexity"][1] < numbers["perplexity"][0] < numbers["perplexity"][2]
    with pytest.raises(ValueError, match="This machine has no checkpoint of stage I. Train one"):
        reproduce("perplexity", make(reproduce={"stage_one": {"xRAG": "runs/nowhere"}}))


def test_all_leaves_out_by_name(make, caplog):
    """All parts are made except those with missing requirements, which are named."""
    pages = reproduce("all", make(num_questions=1))
    assert [page.stem for page in pages] == [name for name in PARTS if name not in ("recall", "perplexity")]
    assert "Left out recall: The recipe has no `retrieval`" in caplog.text
    assert "Left out perplexity: This machine has no checkpoint of stage I" in caplog.text
    folder = pages[0].parent
    pictures = {path.stem for path in folder.glob("*.svg")}
    assert pictures == {"backbones", "gates", "categories", "ratios", "case_1", "case_2", "case_3"}
    cases = (folder / "cases.md").read_text(encoding="utf-8")
    assert "In what country is Toronto Northwest?" in cases and "`traj = [" in cases and "LL" in cases
    assert "The evidence, the fact that the answer needs, is in sentence 2" in cases.split("## Case 2")[0]
    assert "interval of F1" not in (folder / "categories.md").read_text(encoding="utf-8")  # it shows no F1
    with pytest.raises(ValueError, match="part to reproduce is 'table4'; expected one of table1"):
        reproduce("table4", make())
