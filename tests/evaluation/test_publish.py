"""Published pages and figures show exactly the numbers of runs and timings."""

import shutil
from pathlib import Path

import pytest
from answer_rows import write_answers

from arcaligner.common.files import DEFAULT_CHECKPOINT
from arcaligner.evaluation import publish
from arcaligner.evaluation.analyses.figures import draw_compressions, speed_curves
from arcaligner.evaluation.analyses.speed import find_size
from arcaligner.evaluation.publish import (
    MARKS,
    answers_page,
    check_weights,
    fewer_questions,
    with_published,
    write_part,
    write_reproduced,
    zoom_table,
)
from arcaligner.evaluation.results import read_results
from arcaligner.evaluation.runs import FLOOR
from arcaligner.share.hub import RESULTS_FILE

ROOT = Path(__file__).parents[2]
PARTS = {
    "README.md": ["comparison", "quality", "speed"],
    "docs/extensions.md": ["zoom"],
    "docs/results.md": ["results"],
    "docs/speed.md": ["first token", "known passages"],
    "docs/paper.md": ["table 1", "table 2", "backbones", "ratios"],
}


def test_published_pages_are_current(tmp_path, monkeypatch):
    """Pages and the README's table are those of the shipped results and timings."""
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "DOCS", docs)
    for page, names in PARTS.items():
        for name in names:
            write_part(tmp_path / page, name, ["nothing"])
    timed = shutil.copytree(docs / "figures", tmp_path / "timed")
    drawn = (
        docs / "figures" / name
        for name in ("latency.json", "rates.svg", "f1_of_speed.svg", "backbones.svg", "ratios.svg")
    )
    for path in (*drawn, timed / "kept.json"):
        path.unlink()  # what was not measured again stays
    publish.publish(figures=timed)
    for page in PARTS:
        assert (tmp_path / page).read_text("utf-8") == (ROOT / page).read_text("utf-8")
    assert {path.name for path in docs.rglob("figures/*")} == {path.name for path in ROOT.rglob("docs/figures/*")}


def test_wrong_marks_are_refused(tmp_path, checkpoint_dir):
    """A page without both marks of a part, and a run of other weights, are refused."""
    for text in ("none", "{1}{0}", "{0}{0}{1}"):
        (page := tmp_path / "page.md").write_text(text.format(*(mark.format("a") for mark in MARKS)))
        with pytest.raises(ValueError, match=r"expected each once and in this order"):
            write_part(page, "a", ["new"])
    write_answers(tmp_path, "squad", "naive", [{}])
    check_weights(tmp_path, checkpoint_dir)
    write_answers(tmp_path, "squad", "arcaligner", [{}], weights="other")
    with pytest.raises(ValueError, match=r"arcaligner\.jsonl are of an aligner whose weights have the digest other"):
        check_weights(tmp_path, checkpoint_dir)
    write_answers(tmp_path / "other" / FLOOR, "squad", "arcaligner", [{}], weights="other")
    with pytest.raises(ValueError, match=rf"{FLOOR}.*are of an aligner whose weights have the digest other"):
        check_weights(tmp_path / "other", checkpoint_dir)


def test_other_methods_keep_numbers():
    """After a run of another aligner, rows that do not depend on its weights stay; the others are those of the run."""
    opponents = {"naive": {"f1": 1}, "full_text_lora": {"f1": 4}, "truncated_x4": {"f1": 7}, "llmlingua_x4": {"f1": 8}}
    old = opponents | {"arcaligner": {"f1": 2}, "arcaligner_x4": {"f1": 3}, "no_copying_x4": {"f1": 9}}
    entry = {"questions": 4, "methods": old}
    published = {"machine": "a; b", "weights": "old", "sets": {"SQuAD": entry, "MuSiQue": entry}}
    methods = {"arcaligner": {"f1": 5}, "naive": {"f1": 6}}
    run = {"machine": "b; c", "weights": "new", "sets": {"SQuAD": {"questions": 3, "methods": methods}}}
    merged = with_published(run, published)
    merged_methods = opponents | {"naive": {"f1": 6}, "arcaligner": {"f1": 5}}
    assert merged == {
        "machine": "a; b; c",
        "questions": 3,
        "weights": "new",
        "sets": {"SQuAD": {"questions": 3, "methods": merged_methods, "differences": {}}},
    }
    assert list(merged["sets"]["SQuAD"]["methods"]) == list(merged_methods)


def test_same_weights_are_added():
    """A run with the published weights adds its methods and sets, and replaces only what it measured."""
    entry = {"questions": 4, "methods": {"naive": 1, "arcaligner": 2, "arcaligner_x4": 3}}
    published = {"machine": "a", "weights": "same", "sets": {"SQuAD": entry}}
    methods = {"naive": 5, "arcaligner_x4": 6, "arcaligner_xsegment": 7}
    sets = {"SQuAD": {"questions": 3, "methods": methods}, "HotpotQA": {"questions": 3, "methods": {"arcaligner": 8}}}
    merged = with_published({"machine": "a", "weights": "same", "sets": sets}, published)
    assert merged["weights"] == "same" and merged["sets"] == {
        "HotpotQA": sets["HotpotQA"] | {"differences": {}},
        "SQuAD": {"questions": 4, "methods": {"naive": 5, "arcaligner": 2} | methods, "differences": {}},
    }


def test_new_opponents_are_added():
    """A run without answers of an aligner keeps all published numbers and the descriptions of larger sets."""
    differences = {"naive": {"f1": 7}}
    old = {"questions": 5, "passages": "gold", "methods": {"arcaligner": 1, "naive": 2}, "differences": differences}
    run = {
        "Natural Questions": {"questions": 3, "passages": "new", "methods": {"cocom_x4": 3}},
        "SQuAD": {"questions": 3, "passages": "new", "methods": {"cocom_x4": 4}},
    }
    published = {"machine": "a", "weights": "old", "sets": {"SQuAD": old, "MuSiQue": old}}
    merged = with_published({"machine": "a", "weights": "other", "sets": run}, published)
    assert merged["weights"] == "old" and merged["sets"] == {
        "Natural Questions": run["Natural Questions"] | {"differences": {}},
        "SQuAD": old | {"methods": {"naive": 2, "cocom_x4": 4, "arcaligner": 1}},
        "MuSiQue": old,
    }
    assert merged["questions"] == 3 and list(merged["sets"]) == ["Natural Questions", "SQuAD", "MuSiQue"]


def test_differences_of_changed_methods_are_dropped():
    """A difference needs the answers of both methods: it goes if a run without the other method changes one of them."""
    old = {
        "questions": 5,
        "methods": {"arcaligner": 1, "naive": 2, "cocom_x4": 3, "xrag": 4},
        "differences": {"naive": -1, "cocom_x4": -2, "xrag": -3},
    }
    published = {"machine": "a", "weights": "old", "sets": {"SQuAD": old}}

    def differences_with(**entry):
        run = {"machine": "a", "weights": "old", "sets": {"SQuAD": {"questions": 5} | entry}}
        return with_published(run, published)["sets"]["SQuAD"]["differences"]

    assert differences_with(methods={"naive": 2, "cocom_x4": 5}) == {"naive": -1, "xrag": -3}
    assert differences_with(methods={"arcaligner": 6}) == {}
    both = differences_with(methods={"arcaligner": 6, "naive": 2}, differences={"naive": 4})
    assert both == {"naive": 4}


def test_published_differences_agree():
    """Published differences are those of the published numbers, where both methods answered the same questions."""
    num_compared = 0
    for entry in read_results(DEFAULT_CHECKPOINT / RESULTS_FILE)["sets"].values():
        ours, methods = entry["methods"].get("arcaligner"), entry["methods"]
        for name, difference in entry.get("differences", {}).items():
            if ours["questions"] == methods[name]["questions"] == difference["questions"]:
                for metric in ("em", "f1"):
                    assert difference[metric][0] == pytest.approx(ours[metric][0] - methods[name][metric][0], abs=0.01)
                    num_compared += 1
    assert num_compared > 20


def test_reproduced_pages_are_copied(tmp_path, monkeypatch):
    """A page of `reproduce` is copied into its part of the page, with its pictures but no heading; other parts stay."""
    monkeypatch.setattr(publish, "DOCS", tmp_path / "docs")
    (folder := tmp_path / "docs" / "figures").mkdir(parents=True)
    parts = ("\n".join(mark.format(name) for mark in MARKS) for name in ("cases", "gates"))
    (page := tmp_path / "docs" / "paper.md").write_text("\n".join(parts))
    with pytest.raises(ValueError, match="contains no page of `arcaligner reproduce`"):
        write_reproduced(tmp_path)
    long = "word " * 40
    written = ("# Cases", long, "## Case 1", "![Who?](case_1.svg)", f"2. {long}", f"| {long} |\n")
    (tmp_path / "cases.md").write_text("\n\n".join(written))
    (tmp_path / "case_1.svg").write_text("<svg/>")
    write_reproduced(tmp_path)
    lines = page.read_text().splitlines()
    assert lines[1:3] == ["word " * 23 + "word", "word " * 15 + "word"]
    assert lines[3:8] == ["", "### Case 1", "", "![Who?](figures/case_1.svg)", ""]
    assert lines[8:11] == ["2. " + "word " * 22 + "word", "   " + "word " * 16 + "word", ""]
    assert lines[11] == f"| {long} |" and lines[13:] == [mark.format("gates") for mark in MARKS]
    assert (folder / "case_1.svg").read_text() == "<svg/>"


def test_fewer_questions_are_noted():
    """The README says so if its default row was measured on fewer questions of a set."""
    few = {"questions": 500, "methods": {"arcaligner": {"questions": 500}, "as_needed": {"questions": 250}}}
    all_questions = {"questions": 500, "methods": {"arcaligner": {"questions": 500}}}
    assert (
        fewer_questions({"SQuAD": all_questions, "HotpotQA": few, "PopQA_longtail": few})
        == " (default: 250 of HotpotQA and PopQA)"
    )
    assert fewer_questions({"SQuAD": all_questions}) == ""


def test_answers_page_shows_abstentions(tmp_path):
    """The page of answers shows the first answers by id, and marks abstentions."""
    row = {"question": "Who | what?", "answers": ["an\x1b[1m answer"], "prediction": "a\nb", "f1": 0.5}
    known = (row | {"id": f"q{number:02}", "answerability": 1 - number / 50} for number in reversed(range(20)))
    write_answers(tmp_path, "squad", "arcaligner", known)
    unknown = (row | {"answers": [], "f1": 0.0, "confidence": answerability} for answerability in (0.25, 0.75))
    write_answers(tmp_path, "squad_unanswerable", "arcaligner", unknown)  # as written by 0.2
    page = answers_page(tmp_path, 0.5, "not in the text")
    lines = [line for line in page.splitlines() if line.startswith("| Who")]
    cells = r"| Who \| what? | an\\x1b\[1m answer | a b | 50 | "
    assert lines[:13] == [f"{cells}{1 - number / 50:.2f} | no |" for number in range(13)]
    start = r"| Who \| what? | (not in the passages) | a b | - | "
    assert lines[13:] == [f"{start}0.25 | yes |", f"{start}0.75 | no |"]
    assert 'with `min_confidence=0.5` the answer would be "not in the text"' in " ".join(page.split())


# Figures


def numbers(f1: float, **more: float) -> dict:
    return {"f1": [f1, f1 - 5, f1 + 10]} | more


def test_lines_connect_compressions():
    """A line connects the points of one method, from fine to coarse compressions."""
    compressions = {"arcaligner_x4": 4.0, "arcaligner_x16": 12.0, "arcaligner": 16.0, "arcaligner_xsegment": 24.0}
    others = {"truncated_x4": 4.0, "truncated_x16": 12.0, "llmlingua_x16": 12.0}  # a single one is no line
    measured = (others | compressions).items()
    methods = {name: numbers(64 - compression, compression_rate=compression) for name, compression in measured}
    methods |= {"naive": numbers(10.0), "full_text_lora": numbers(90.0)}
    sets = {"Naive only": {"methods": {"naive": numbers(10.0)}}, "SQuAD": {"methods": methods}}
    (axes,) = (figure := draw_compressions(sets)).axes
    line, (lower, upper), _ = axes.containers[1]
    assert axes.get_title() == "SQuAD" and axes.get_xscale() == "log"
    assert list(line.get_xdata()) == list(compressions.values())
    for drawn, number in ((line, 0), (lower, 1), (upper, 2)):
        assert list(drawn.get_ydata()) == pytest.approx([methods[name]["f1"][number] for name in compressions])
    assert [line.get_ydata()[0] for line in axes.lines if len(line.get_xdata()) == 2][-2:] == [10.0, 90.0]  # bounds
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["truncated text", "ArcAligner"]


def test_f1_and_time_share_compression():
    """A point of the figure has F1 and time at the same compression."""

    def size(tokens_per_slot, first, k=20):
        seconds = {"standard_rag": 1.0, "standard_rag_cached": 0.1, "off": first, "slots_cached": first / 8}
        arms = {name: {"first_token": {"median": median}} for name, median in seconds.items()}
        return {"k": k, "tokens_per_slot": tokens_per_slot, "arms": arms}

    report = {"sizes": [size(4, 0.5), size(8, 9.0, k=1), size(8, 0.25)], "own_tokens_per_slot": 4}
    f1 = {"arcaligner": 40.0, "arcaligner_x8": 20.0, "full_text_lora": 60.0}
    sets = {add: {"methods": {name: {"f1": [score + add]} for name, score in f1.items()}} for add in (0.0, 2.0)}
    assert speed_curves(report, sets) == {
        "slots, encoded beforehand": [(500.0, 41.0, 4), (250.0, 21.0, 8)],
        "slots, cached": [(62.5, 41.0, 4), (31.25, 21.0, 8)],
        "text, fine-tuned": [(1000.0, 61.0, "text")],
        "text, fine-tuned, cached": [(100.0, 61.0, "text")],
    }
    del sets[2.0]["methods"]["arcaligner_x8"]
    assert [tokens_per_slot for *_, tokens_per_slot in speed_curves(report, sets)["slots, cached"]] == [4]
    with pytest.raises(ValueError, match="has no measurement of 20 passages with `tokens_per_slot` 16"):
        find_size(report, 20, 16)


def test_zoom_table_shows_what_was_measured():
    """F1, and the number of slots that it is from; a dash where a method was not asked."""
    measured = {"zoomed": {"f1": [64.14, 60, 68], "context_tokens": 28.6}}
    sets = {name: {"methods": measured if name == "SQuAD" else {}} for name in publish.README_SETS}
    lines = zoom_table({"sets": sets})
    assert lines[0].startswith("| Slots | SQuAD: F1 (number of slots) | Natural Questions: F1 (number of slots) |")
    (row,) = [line for line in lines if line.startswith("| **zoom**: eight tokens each")]
    assert row.endswith("| 64.1 (29) | - | - | - |") and lines[2].endswith("| - | - | - | - |")
