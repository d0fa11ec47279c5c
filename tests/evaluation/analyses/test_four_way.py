"""Questions are partitioned by Naive and StandardRAG, and compressors counted in each part."""

import json

import pytest

from arcaligner.evaluation.analyses.__main__ import main
from arcaligner.evaluation.analyses.four_way import analyze
from arcaligner.evaluation.judge import judge_answers, verdict_file
from arcaligner.evaluation.metrics import bootstrap_interval
from arcaligner.evaluation.runs import AnswerFile

# Right (1) or wrong (0), question by question: 1 and 2 are TT, 3 is TF, 4, 5 and 6 are FT, and none is FF.
NAIVE = "111000"
STANDARD_RAG = "110111"
ARCALIGNER = "101100"
XRAG = "01"  # cut short


def write(run, task, method, right: str):
    file = AnswerFile(run, task, method)
    file.open({"machine": "here"}, [])
    file.append(
        {
            "id": str(number),
            "row": "same",
            "question": f"What is {number}?",
            "answers": ["Ada"],
            "prediction": "Ada" if mark == "1" else "Ben",
            "em": float(mark),
        }
        for number, mark in enumerate(right, start=1)
    )


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    for method, right in {
        "naive": NAIVE,
        "standard_rag": STANDARD_RAG,
        "arcaligner": ARCALIGNER,
        "xrag": XRAG,
        "truncated": "111111",  # compresses nothing
    }.items():
        write(run, "squad", method, right)
    return run


def test_each_part_counts_its_questions_and_the_right_answers_of_each_compressor(run):
    entry = analyze(run)["sets"]["SQuAD"]
    half = [50.0, *bootstrap_interval([0.0, 100.0])]
    assert entry == {
        "questions": 6,
        "categories": {
            "TT": {
                "questions": 2,
                "methods": {
                    "ArcAligner": {"questions": 2, "right": 1, "share": half},
                    "xRAG (our training)": {"questions": 2, "right": 1, "share": half},
                },
            },
            "TF": {
                "questions": 1,
                "methods": {"ArcAligner": {"questions": 1, "right": 1, "share": [100.0, 100.0, 100.0]}},
            },
            "FT": {
                "questions": 3,
                "methods": {
                    "ArcAligner": {
                        "questions": 3,
                        "right": 1,
                        "share": [pytest.approx(100 / 3), *bootstrap_interval([100.0, 0.0, 0.0])],
                    }
                },
            },
            "FF": {"questions": 0, "methods": {}},
        },
    }


def test_a_question_that_one_of_both_did_not_answer_is_in_no_part(run):
    write(run, "nq", "naive", "1111")
    write(run, "nq", "standard_rag", "00")
    write(run, "nq", "arcaligner", "0110")
    entry = analyze(run, ["nq"])["sets"]["NaturalQA"]
    assert entry["questions"] == entry["categories"]["TF"]["questions"] == 2
    assert entry["categories"]["TF"]["methods"]["ArcAligner"]["right"] == 1


def test_compressors_can_be_compared_at_a_rate(run):
    write(run, "squad", "arcaligner_x4", "111111")
    found = analyze(run, rates=[4])["sets"]["SQuAD"]["categories"]["FT"]["methods"]
    assert {title: each["right"] for title, each in found.items()} == {"ArcAligner, 4 tokens per slot": 3}


def test_a_judge_decides_instead_of_a_match(run):
    def contrary(prompts):
        return ("no" if "Candidate: Ada" in prompt else "yes" for prompt in prompts)

    for method in ("naive", "standard_rag", "arcaligner"):
        file = AnswerFile(run, "squad", method)
        judge_answers(contrary, file.read(), verdict_file(file, "org/judge"))
    found = analyze(run, judge="org/judge")
    assert found["right"] == "judged by org/judge"
    parts = found["sets"]["SQuAD"]["categories"]
    assert {name: part["questions"] for name, part in parts.items()} == {"TT": 0, "TF": 3, "FT": 1, "FF": 2}
    assert parts["TF"]["methods"]["ArcAligner"]["right"] == 2
    assert set(parts["FF"]["methods"]) == {"ArcAligner"}  # nobody judged xRAG


def test_the_command_writes_figure_data_and_reading_help(run, tmp_path, capsys):
    write(run, "nq", "naive", "10")
    write(run, "nq", "standard_rag", "10")
    write(run, "nq", "arcaligner", "10")
    with pytest.raises(SystemExit) as end:
        main(["four-way", "--run", str(run), "--output", str(tmp_path / "figures")])
    assert end.value.code == 0
    data = json.loads((tmp_path / "figures" / "four_way.json").read_text())
    assert list(data["sets"]) == ["NaturalQA", "SQuAD"]
    assert data["sets"]["SQuAD"] == analyze(run)["sets"]["SQuAD"]
    assert data["reading"] in capsys.readouterr().out.replace("\n", " ")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "four_way.json",
        "four_way.png",
        "four_way.svg",
    ]


def test_missing_answers_and_verdicts_are_named_with_the_command_that_makes_them(run):
    write(run, "nq", "arcaligner", "10")
    with pytest.raises(ValueError, match=r"evaluate --tasks nq --methods naive,standard_rag --output"):
        analyze(run)
    with pytest.raises(ValueError, match=r"holds no answers"):
        analyze(run / "elsewhere")
    with pytest.raises(ValueError, match=r"no answers to squad of .* that org/judge has judged.*judge --run"):
        analyze(run, ["squad"], judge="org/judge")
