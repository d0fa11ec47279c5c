"""Verdicts are those of the judge on the answers as they are, asked for once, and counted where there are none."""

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
from chat_server import running_chat_server

from arcaligner.evaluation import judge_models
from arcaligner.evaluation.judge import (
    judge_answers,
    judge_prompt,
    judge_slug,
    judged_scores,
    main,
    parse_verdict,
    read_verdicts,
)
from arcaligner.evaluation.judge_models import Reply
from arcaligner.evaluation.metrics import bootstrap_interval

SAYS = {"Paris": "Yes.", "Lyon": "No, it is Paris.", "Rome": "Hmm.", "Nice": None}


class FakeJudge:
    """Replies by the candidate, the last prompt first; `None` is no reply. `prompts` are those it was asked."""

    def __init__(self, says: Callable[[str], str | None] = SAYS.get):
        self.says, self.prompts = says, []

    def replies(self, prompts):
        for index in reversed(range(len(prompts))):
            self.prompts.append(prompts[index])
            text = self.says(candidate(prompts[index]))
            yield Reply(index, text, None if text is not None else "no reply within 1 seconds")


def candidate(prompt: str) -> str:
    return prompt.split("\nCandidate: ")[1].split("\n\n")[0]


def answers(*predictions: str) -> list[dict]:
    return [
        {"id": f"q{number}", "question": f"What is capital {number}", "answers": ["Paris"], "prediction": prediction}
        for number, prediction in enumerate(predictions)
    ]


def write_answers(run: Path, task: str, method: str, rows: list[dict]) -> None:
    folder = run / task
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{method}.json").write_text("{}")
    (folder / f"{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "task" / "method.judge.verdicts.jsonl"


def test_the_prompt_has_question_golds_and_candidate():
    row = {"id": "1", "question": " who wrote it", "answers": ["Ada", "The", "Ada L."], "prediction": " Ada\nKing "}
    assert judge_prompt(row) == (
        "Question: who wrote it?\nAnswer: Ada or Ada L.\nCandidate: Ada King\n\nIs candidate correct? Answer yes or no."
    )
    assert judge_prompt({**row, "question": "Who wrote it?"}).startswith("Question: Who wrote it?\n")


@pytest.mark.parametrize("golds", [[], ["The", "?"]])
def test_a_question_without_a_gold_is_refused(golds):
    with pytest.raises(ValueError, match="Question 'q0' has no gold"):
        judge_prompt({**answers("Paris")[0], "answers": golds})


def test_an_answer_without_a_prediction_is_refused():
    row = answers("Paris")[0]
    del row["prediction"]
    with pytest.raises(ValueError, match="has no prediction"):
        judge_prompt(row)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Yes", "yes"),
        ("yes, the candidate is correct.", "yes"),
        ("\n **NO**", "no"),
        ('"No."', "no"),
        ("", "unreadable"),
        ("Not correct", "unreadable"),
        ("Yesterday", "unreadable"),
        ("The answer is yes", "unreadable"),
    ],
)
def test_a_verdict_is_the_first_word(reply, verdict):
    assert parse_verdict(reply) == verdict


def test_verdicts_stand_in_the_order_of_the_answers_and_are_scored(path):
    rows = answers("Paris", "Lyon", "Rome", "Nice")
    judge_answers(FakeJudge(), rows, path, "")
    lines = read_lines(path)
    assert [line["id"] for line in lines] == ["q0", "q1", "q2", "q3"]
    assert [line["verdict"] for line in lines] == ["yes", "no", "unreadable", None]
    assert [line["reply"] for line in lines] == ["Yes.", "No, it is Paris.", "Hmm.", None]
    judged = read_verdicts(path, rows)
    assert judged.scores == {"q0": 1.0, "q1": 0.0, "q2": 0.0}
    assert (judged.count("unreadable"), judged.count(None)) == (1, 1)


def test_a_killed_judge_goes_on_where_it_was(path):
    rows = answers("Paris", "Lyon", "Rome", "Paris")

    def dies(prediction):
        if prediction == "Lyon":
            raise KeyboardInterrupt
        return SAYS[prediction]

    with pytest.raises(KeyboardInterrupt):
        judge_answers(FakeJudge(dies), rows, path, "")
    assert [line["id"] for line in read_lines(path)] == ["q3", "q2"]
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"id": "q1", "prompt": "0')  # cut off
    assert read_verdicts(path, rows).scores == {"q2": 0.0, "q3": 1.0}
    judge = FakeJudge()
    judge_answers(judge, rows, path, "")
    assert [candidate(prompt) for prompt in judge.prompts] == ["Lyon", "Paris"]
    assert [line["verdict"] for line in read_lines(path)] == ["yes", "no", "unreadable", "yes"]


@pytest.mark.parametrize("change", [{"prediction": "Lyon"}, {"answers": ["Rome"]}, {"question": "Which is it?"}])
def test_a_verdict_on_another_answer_is_not_taken(path, change):
    before = answers("Paris", "Rome")
    judge_answers(FakeJudge(), before, path, "")
    after = [{**before[0], **change}, before[1]]
    assert read_verdicts(path, after).scores == {"q1": 0.0}
    judge = FakeJudge(lambda prediction: "no")
    judge_answers(judge, after, path, "")
    assert judge.prompts == [judge_prompt(after[0])]
    assert [(line["id"], line["verdict"]) for line in read_lines(path)] == [("q0", "no"), ("q1", "unreadable")]


def test_what_is_unjudged_is_asked_again(path):
    rows = answers("Paris", "Nice")
    judge_answers(FakeJudge(), rows, path, "")
    judge = FakeJudge(lambda prediction: "Yes")
    judge_answers(judge, rows, path, "")
    assert [candidate(prompt) for prompt in judge.prompts] == ["Nice"]
    assert read_verdicts(path, rows).scores == {"q0": 1.0, "q1": 1.0}


def test_names_of_files_are_of_the_judge():
    assert judge_slug("Qwen/Qwen2.5-7B Instruct") == "Qwen--Qwen2.5-7B--Instruct"
    assert judge_slug("/models/judge/") == "models--judge"
    assert judge_slug(judge_slug("a/b")) == judge_slug("a/b")


@pytest.fixture
def endpoint(monkeypatch):
    """A server that judges like `FakeJudge`; for `None` it keeps its client waiting."""
    monkeypatch.setattr(judge_models, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with running_chat_server(lambda prompt: SAYS[candidate(prompt)]) as chat:
        yield chat


def test_the_command_judges_all_answers_and_prints_the_accuracy(tmp_path, endpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon", "Rome"))
    write_answers(tmp_path, "squad", "arcaligner", answers("Paris", "Nice"))
    write_answers(tmp_path, "nq", "naive", [])
    main(tmp_path, "a/judge", endpoint.url, timeout=0.2)
    printed = capsys.readouterr()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.out.splitlines() if "squad" in line]
    low, high = bootstrap_interval([1.0, 0.0, 0.0])
    assert cells == [
        ["squad", "arcaligner", "100.0 [100.0, 100.0]", "1", "0", "1"],
        ["squad", "naive", f"33.3 [{100 * low:.1f}, {100 * high:.1f}]", "3", "1", "0"],
    ]
    assert "1 no reply within 0.2 seconds" in printed.err
    assert judged_scores(tmp_path, "squad", "naive", "a/judge") == {"q0": 1.0, "q1": 0.0, "q2": 0.0}
    assert judged_scores(tmp_path, "squad", "arcaligner", "a/judge") == {"q0": 1.0}
    assert judged_scores(tmp_path, "squad", "naive", "other/judge") == {}
    files = {path.name for path in (tmp_path / "squad").glob("*.verdicts.jsonl")}
    assert files == {"naive.a--judge.verdicts.jsonl", "arcaligner.a--judge.verdicts.jsonl"}


def test_a_judged_run_needs_no_judge(tmp_path, endpoint, capsys):
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon"))
    main(tmp_path, "a/judge", endpoint.url)
    first = capsys.readouterr().out
    main(tmp_path, "a/judge")  # neither folder nor Hub id: it would not load
    assert capsys.readouterr().out == first
    assert len(endpoint.requests) == 2


def test_a_model_of_transformers_judges(tmp_path, base_model_dir, capsys):
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon", "Rome"))
    main(tmp_path, str(base_model_dir), batch_size=2)
    scores = judged_scores(tmp_path, "squad", "naive", str(base_model_dir))
    assert set(scores) == {"q0", "q1", "q2"}


def test_a_run_without_answers_is_refused(tmp_path):
    write_answers(tmp_path, "squad", "naive", [])
    with pytest.raises(ValueError, match="holds no answers.*evaluate"):
        main(tmp_path, "a/judge")
