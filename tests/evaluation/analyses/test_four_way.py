"""Questions are partitioned by Naive and StandardRAG, and compressors counted in each part."""

import pytest
from answer_rows import write_answers

from arcaligner.evaluation.analyses.__main__ import main
from arcaligner.evaluation.analyses.four_way import analyze
from arcaligner.evaluation.judge import judge_answers, verdict_file
from arcaligner.evaluation.metrics import bootstrap_interval
from arcaligner.evaluation.runs import AnswerFile

# Right (1) or wrong (0), question by question: two are TT, one is TF, three are FT, and none is FF.
NAIVE = "111000"
STANDARD_RAG = "110111"
ARCALIGNER = "101100"
XRAG = "01"  # cut short


def write(run, task, method, right: str):
    answers = ({"prediction": "Ada" if mark == "1" else "Ben", "em": float(mark)} for mark in right)
    write_answers(run, task, method, answers)


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    scores = {"naive": NAIVE, "standard_rag": STANDARD_RAG, "arcaligner": ARCALIGNER, "arcaligner_x4": "111111"}
    scores |= {"xrag": XRAG, "truncated": "111111"}  # the last compresses nothing
    for method, right in scores.items():
        write(run, "squad", method, right)
    return run


def test_each_part_counts_its_questions_and_the_right_answers_of_each_compressor(run):
    half, whole, fine = [50.0, *bootstrap_interval([0.0, 100.0])], [100.0] * 3, "ArcAligner, 4 tokens per slot"
    third = [pytest.approx(100 / 3), *bootstrap_interval([100.0, 0.0, 0.0])]
    assert analyze(run)["SQuAD"] == {
        "TT": {"questions": 2, "methods": {"xRAG (our training)": half, "ArcAligner": half, fine: whole}},
        "TF": {"questions": 1, "methods": {"ArcAligner": whole, fine: whole}},
        "FT": {"questions": 3, "methods": {"ArcAligner": third, fine: whole}},
        "FF": {"questions": 0, "methods": {}},
    }


def test_a_question_that_one_of_both_did_not_answer_is_in_no_part(run):
    write(run, "nq", "naive", "1111")
    write(run, "nq", "standard_rag", "00")
    write(run, "nq", "arcaligner", "0110")
    found = analyze(run)["NaturalQA"]
    assert {name: part["questions"] for name, part in found.items()} == {"TT": 0, "TF": 2, "FT": 0, "FF": 0}
    assert found["TF"]["methods"]["ArcAligner"][0] == 50.0


def test_a_judge_decides_instead_of_a_match(run):
    def contrary(prompts):
        return ("no" if "Candidate: Ada" in prompt else "yes" for prompt in prompts)

    for method in ("naive", "standard_rag", "arcaligner"):
        file = AnswerFile(run, "squad", method)
        judge_answers(contrary, file.read(), verdict_file(file, "org/judge"))
    parts = analyze(run, judge="org/judge")["SQuAD"]
    assert {name: part["questions"] for name, part in parts.items()} == {"TT": 0, "TF": 3, "FT": 1, "FF": 2}
    assert parts["TF"]["methods"]["ArcAligner"][0] == pytest.approx(200 / 3)
    assert set(parts["FF"]["methods"]) == {"ArcAligner"}  # nobody judged xRAG


def test_the_command_prints_a_table_of_each_set(run, capsys):
    with pytest.raises(SystemExit) as end:
        main(["four-way", "--run", str(run)])
    assert end.value.code == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| SQuAD | TT, n = 2 | TF, n = 1 | FT, n = 3 | FF, n = 0 |"
    assert rows[0] == "| xRAG (our training) | 50.0 [0.0, 100.0] | - | - | - |"
    assert rows[1].startswith("| ArcAligner | 50.0 [0.0, 100.0] | 100.0 [100.0, 100.0] | 33.3 [")


def test_missing_answers_and_verdicts_are_named_with_the_commands_that_make_them(run):
    for missing, judge in ((run / "elsewhere", None), (run, "org/judge")):
        with pytest.raises(ValueError, match=r"has no set .*evaluate --methods naive,standard_rag.*judge --run"):
            analyze(missing, judge)
