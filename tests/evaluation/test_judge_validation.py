"""A judge is compared with people on the same answers as the string metrics and the judges of the data set."""

import csv
import json
from pathlib import Path

import huggingface_hub.constants
import pytest
from chat_server import running_chat_server

from arcaligner.evaluation.judge import Judged
from arcaligner.evaluation.judge_validation import agreement, compare, main, other_verdicts, read_judgements
from arcaligner.evaluation.metrics import bootstrap_interval

# Question, golds, model answer, and whether people, BEM, GPT-4 and text-davinci-003 accept it.
ANSWERS = [
    ("who wrote it", "Ada | Ada Lovelace", "ada lovelace", "Yes", "Yes", "Yes", "No"),
    ("who wrote it", "Ada | Ada Lovelace", 'It was "Ada", they say', "Yes", "No", "Yes", "Yes"),
    ("who wrote it", "Ada | Ada Lovelace", "Ada's father Byron", "No", "No", "No", "Yes"),
    ("when was it", "25 December 2003", "2003", "Yes", "Yes", "", "Yes"),
    ("when was it", "25 December 2003", "25 January 2003", "No", "Yes", "Yes", "No"),
    ("where is it", "Rome", "Paris", "No", "No", "No", "No"),
]
HUMAN = [True, True, False, True, False, False]


def write_table(path: Path, header: list[str], lines: list[list[str]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([header, *lines])


@pytest.fixture
def folder(tmp_path) -> Path:
    """The files of OpenQA-eval with six judgements; one has question and answer in one column, as the real one."""
    folder = tmp_path / "data"
    folder.mkdir()
    header = ["id", "Question", "Model answer", "Acceptable?"]
    human = [["1", question, answer, people, people, "", ""] for question, _, answer, people, *_ in ANSWERS]
    write_table(folder / "NQ301_human.tsv", [*header, "annotator1", "annotator2", "annotator3"], human)
    bem = [["1", question, golds, answer, bem, "[[0.1]]"] for question, golds, answer, _, bem, *_ in ANSWERS]
    bem_header = ["id", "Question", "Gold answers", "Model answer", "Acceptable?", "BEM probs per gold answer"]
    write_table(folder / "NQ301_BEM.tsv", bem_header, bem)
    gpt4 = [["1", row[0], row[2], row[5], f"{row[5]}, the candidate"] for row in ANSWERS]
    write_table(folder / "NQ301_gpt-4.tsv", [*header, "gpt-4"], gpt4)
    davinci = [["1", row[0] + row[2], row[6], f"{row[6]}."] for row in ANSWERS]
    write_table(folder / "NQ301_text-davinci-003.tsv", [*header, "text-davinci-003"], davinci)
    return folder


def test_answers_come_with_their_golds_and_what_people_say(folder):
    rows, human = read_judgements(folder)
    expected = [(question, golds.split(" | "), answer) for question, golds, answer, *_ in ANSWERS]
    assert [(row["question"], row["answers"], row["prediction"]) for row in rows] == expected
    assert human == HUMAN
    assert len({row["id"] for row in rows}) == len(ANSWERS)


def test_other_judges_say_yes_where_they_do_in_their_files(folder):
    questions = [row["question"] for row in read_judgements(folder)[0]]
    verdicts = other_verdicts(folder, questions)
    columns = {"BEM": 4, "GPT-4": 5, "text-davinci-003": 6}
    assert verdicts == {name: [row[column] == "Yes" for row in ANSWERS] for name, column in columns.items()}
    (folder / "NQ301_gpt-4.tsv").unlink()
    assert other_verdicts(folder, questions).keys() == {"BEM", "text-davinci-003"}


def test_string_metrics_agree_where_they_accept_what_people_accept(folder):
    rows, human = read_judgements(folder)
    found = compare(rows, human, Judged({row["id"]: None for row in rows}), {})
    # Contained: 1, 2 and 3. Letter for letter: 2 and 3. F1 of at least 0.5: 1, 4 (exactly 0.5) and 5.
    accepted = {
        "EM": [True, True, True, False, False, False],
        "EM, raw": [False, True, True, False, False, False],
        "F1 >= 0.5": [True, False, False, True, True, False],
    }
    assert {name: found[name] for name in accepted} == {
        name: agreement(verdicts, human) for name, verdicts in accepted.items()
    }
    assert found["EM"]["agreement"][0] == pytest.approx(100 * 4 / 6)
    assert found["judge"] == {"judgements": 0, "agreement": None, "kappa": None, "unreadable": 0, "unjudged": 6}


def test_agreement_is_a_share_with_its_interval_and_kappa_corrects_for_chance():
    verdicts = [True, True, False, False, True, False]
    found = agreement(verdicts, HUMAN)
    assert found["judgements"] == 6
    hits = [100.0, 100.0, 100.0, 0.0, 0.0, 100.0]
    assert found["agreement"] == pytest.approx([400 / 6, *bootstrap_interval(hits)])
    assert found["kappa"] == pytest.approx((4 / 6 - 0.5) / (1 - 0.5))  # both say yes half of the time
    assert agreement([False, True, True], [False, True, True])["kappa"] == pytest.approx(1.0)
    assert agreement([True, True], [False, True])["kappa"] == pytest.approx(0.0)
    assert agreement([True, True], [True, True])["kappa"] is None


def test_a_judge_is_compared_where_it_judged_and_an_unreadable_verdict_is_a_no(folder):
    rows, human = read_judgements(folder)
    judged = Judged(dict(zip("012345", ["yes", "unreadable", "no", None, "yes", "unreadable"], strict=True)))
    found = compare(rows, human, judged, {})["judge"]
    expected = agreement([True, False, False, True, False], [True, True, False, False, False])
    assert found == expected | {"unreadable": 2, "unjudged": 1}


@pytest.fixture
def endpoint(monkeypatch):
    """A judge that accepts whatever names Ada."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with running_chat_server(lambda prompt: "Yes" if "ada" in prompt.split("Candidate: ")[1].lower() else "No") as chat:
        yield chat


def test_the_command_prints_and_writes_the_agreement_of_all(folder, tmp_path, endpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(folder, "a/judge", tmp_path / "out", endpoint=endpoint.url)
    printed = capsys.readouterr().out
    rows, human = read_judgements(folder)
    judged = Judged({row["id"]: "yes" if "ada" in row["prediction"].lower() else "no" for row in rows})
    expected = compare(rows, human, judged, other_verdicts(folder, [row["question"] for row in rows]))
    assert json.loads((tmp_path / "out" / "NQ301.a--judge.json").read_text("utf-8")) == expected
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    names = ["a/judge", "GPT-4", "BEM", "text-davinci-003", "EM", "EM, raw", "F1 >= 0.5"]
    assert [row[0] for row in table] == names
    share = "{:.1f} [{:.1f}, {:.1f}]".format(*expected["judge"]["agreement"])
    assert table[0][1:] == ["6", share, f"{expected['judge']['kappa']:.2f}", "0", "0"]
    main(folder, "a/judge", tmp_path / "out")  # all verdicts are there: the model is not needed
    assert capsys.readouterr().out == printed


def test_the_first_judgements_alone_leave_the_verdicts_on_all_as_they_are(folder, tmp_path, endpoint):
    main(folder, "a/judge", tmp_path / "out", endpoint=endpoint.url)
    before = (tmp_path / "out" / "NQ301.a--judge.verdicts.jsonl").read_bytes()
    main(folder, "a/judge", tmp_path / "out", num_judgements=2, endpoint=endpoint.url)
    found = json.loads((tmp_path / "out" / "NQ301-2.a--judge.json").read_text("utf-8"))
    assert {numbers["judgements"] for numbers in found.values()} == {2}
    assert (tmp_path / "out" / "NQ301.a--judge.verdicts.jsonl").read_bytes() == before


def test_a_folder_without_the_judgements_is_refused(tmp_path):
    with pytest.raises(ValueError, match="There is no .*NQ301_human.tsv.*OpenQA-eval"):
        read_judgements(tmp_path)


def test_a_file_about_other_questions_or_of_other_columns_is_refused(folder):
    path = folder / "NQ301_BEM.tsv"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match="5 lines of .*BEM.tsv are not about the questions"):
        read_judgements(folder)
    path.write_text("".join([*lines[:1], *lines[:0:-1]]), encoding="utf-8")
    with pytest.raises(ValueError, match="not about the questions"):
        read_judgements(folder)
    path.write_text("".join(lines).replace("Gold answers", "Golds"), encoding="utf-8")
    with pytest.raises(ValueError, match="'Gold answers' is needed"):
        read_judgements(folder)
