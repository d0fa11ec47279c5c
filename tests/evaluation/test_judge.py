"""Verdicts are those of the judge on the answers as they are, asked for once, and counted where there are none."""

import json
import socket
from functools import partial

import httpx
import openai
import pytest
from answer_rows import write_answers

from arcaligner.evaluation import judge
from arcaligner.evaluation.judge import (
    MAX_NEW_TOKENS,
    RETRIES,
    ask_endpoint,
    judge_answers,
    judge_prompt,
    judged_scores,
    main,
    parse_verdict,
    read_verdicts,
)
from arcaligner.evaluation.metrics import percent_interval
from arcaligner.evaluation.runs import AnswerFile

URL = "http://localhost:8000/v1"
SAYS = {"Paris": "Yes.", "Lyon": "No, it is Paris.", "Rome": "Hmm.", "Nice": None}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No pause between attempts."""
    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", lambda *args: 0.0)


def judge_of(says=SAYS.get, asked=None):
    """A judge that replies by the candidate; `asked` gets the prompts."""

    def replies(prompts):
        for prompt in prompts:
            if asked is not None:
                asked.append(prompt)
            yield says(candidate(prompt))

    return replies


def candidate(prompt: str) -> str:
    return prompt.split("\nCandidate: ")[1].split("\n\n")[0]


def answers(*predictions: str) -> list[dict]:
    return [
        {"id": f"q{number}", "question": f"What is capital {number}", "answers": ["Paris"], "prediction": prediction}
        for number, prediction in enumerate(predictions)
    ]


@pytest.fixture
def file(tmp_path) -> AnswerFile:
    (tmp_path / "task").mkdir()
    return AnswerFile(tmp_path, "task", "method.judge.verdicts")


def test_the_prompt_has_question_golds_and_candidate():
    row = {"id": "1", "question": " who wrote it", "answers": ["Ada", "The", "Ada L."], "prediction": " Ada\nKing "}
    assert judge_prompt(row) == (
        "Question: who wrote it?\nAnswer: Ada or Ada L.\nCandidate: Ada King\n\nIs candidate correct? Answer yes or no."
    )
    assert judge_prompt({**row, "question": "Who wrote it?"}).startswith("Question: Who wrote it?\n")


def test_a_verdict_is_the_first_word():
    replies = ["Yes", "yes, the candidate is correct.", "\n **NO**", '"No."']
    replies += ["", "Not correct", "Yesterday", "The answer is yes"]
    assert list(map(parse_verdict, replies)) == ["yes"] * 2 + ["no"] * 2 + ["unreadable"] * 4


def test_a_killed_judge_goes_on_where_it_was_and_keeps_what_was_said(file):
    rows = answers("Paris", "Rome", "Lyon", "Paris")

    def dies(prediction):
        if prediction == "Lyon":
            raise KeyboardInterrupt
        return SAYS[prediction]

    with pytest.raises(KeyboardInterrupt):
        judge_answers(judge_of(dies), rows, file)
    with open(file.path, "a", encoding="utf-8") as cut:
        cut.write('{"id": "q2", "prompt": "0')
    assert read_verdicts(file, rows) == {"q0": "yes", "q1": "unreadable", "q2": None, "q3": None}
    asked = []
    judge_answers(judge_of({**SAYS, "Lyon": None}.get, asked), rows, file)
    assert asked == [judge_prompt(rows[2]), judge_prompt(rows[3])]
    judge_answers(judge_of(), rows, file)  # what had no reply is asked again
    said = [("yes", "Yes."), ("unreadable", "Hmm."), ("no", "No, it is Paris."), ("yes", "Yes.")]
    lines = sorted((line["id"], line["verdict"], line["reply"]) for line in file.read())
    assert lines == [(f"q{number}", *each) for number, each in enumerate(said)]
    assert list(read_verdicts(file, rows).values()) == [verdict for verdict, _ in said]


@pytest.mark.parametrize("change", [{"prediction": "Lyon"}, {"answers": ["Rome"]}, {"question": "Which is it?"}])
def test_a_verdict_on_another_answer_is_not_taken(file, change):
    before = answers("Paris", "Rome")
    judge_answers(judge_of(), before, file)
    after = [{**before[0], **change}, before[1]]
    assert read_verdicts(file, after) == {"q0": None, "q1": "unreadable"}
    asked = []
    judge_answers(judge_of(lambda prediction: "no", asked), after, file)
    assert asked == [judge_prompt(after[0])]
    assert read_verdicts(file, after) == {"q0": "no", "q1": "unreadable"}


@pytest.fixture
def endpoint(monkeypatch):
    """Has `reply`, from the user's turn to the model's, stand for any endpoint, and gives the requests as they come. A
    reply may be a status, a body (`bytes`), or none in time."""

    def replies_with(reply) -> list[httpx.Request]:
        requests = []

        def handle(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            said = reply(payload(request)["messages"][-1]["content"])
            if said is None:
                raise httpx.ReadTimeout("no reply")
            if isinstance(said, int):
                return httpx.Response(said, json={"error": {"message": "so it is"}})
            if isinstance(said, bytes):
                return httpx.Response(200, content=said, headers={"Content-Type": "application/json"})
            message = {"role": "assistant", "content": said}
            return httpx.Response(200, json={"choices": [{"index": 0, "message": message}]})

        client = httpx.Client(transport=httpx.MockTransport(handle))
        monkeypatch.setattr(openai, "OpenAI", partial(openai.OpenAI, http_client=client))
        return requests

    return replies_with


def payload(request: httpx.Request) -> dict:
    return json.loads(request.content)


def test_the_command_judges_all_answers_and_prints_the_accuracy(tmp_path, endpoint, capsys, caplog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    endpoint(lambda prompt: SAYS[candidate(prompt)])
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon", "Rome"))
    write_answers(tmp_path, "squad", "arcaligner", answers("Paris", "Nice"))
    write_answers(tmp_path, "nq", "naive", [])
    main(tmp_path, "a/judge", URL, timeout=1.0)
    printed = capsys.readouterr()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.out.splitlines() if "squad" in line]
    mean, low, high = percent_interval([1.0, 0.0, 0.0])
    assert cells == [
        ["squad", "arcaligner", "100.0 [100.0, 100.0]", "1", "0", "1"],
        ["squad", "naive", f"{mean:.1f} [{low:.1f}, {high:.1f}]", "3", "1", "0"],
    ]
    assert "stays unjudged: no reply within 1 seconds" in caplog.text
    naive, ours = (AnswerFile(tmp_path, "squad", method) for method in ("naive", "arcaligner"))
    assert judged_scores(naive, "a/judge") == {"q0": 1.0, "q1": 0.0, "q2": 0.0}
    assert judged_scores(ours, "a/judge") == {"q0": 1.0} and judged_scores(naive, "other/judge") == {}
    files = {path.name for path in (tmp_path / "squad").glob("*.verdicts.jsonl")}
    assert files == {"naive.a--judge.verdicts.jsonl", "arcaligner.a--judge.verdicts.jsonl"}


def test_a_judged_run_needs_no_judge(tmp_path, endpoint, capsys):
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon"))
    requests = endpoint(lambda prompt: SAYS[candidate(prompt)])
    main(tmp_path, "a/judge", URL)
    first = capsys.readouterr().out
    main(tmp_path, "a/judge", URL)
    assert capsys.readouterr().out == first
    assert len(requests) == 2


def test_a_run_without_answers_is_refused(tmp_path):
    write_answers(tmp_path, "squad", "naive", [])
    with pytest.raises(ValueError, match="holds no answers.*evaluate"):
        main(tmp_path, "a/judge")


# The endpoint

PROMPTS = ["Is it?", "Who wrote the letter, and did anybody else know of it?", "Was it created in 1924?", "Why?", "No?"]


def test_an_endpoint_is_asked_greedily_for_the_model(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    requests = endpoint(lambda prompt: f"Yes: {prompt}")
    assert list(ask_endpoint(PROMPTS, "some/judge", URL)) == [f"Yes: {prompt}" for prompt in PROMPTS]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    list(ask_endpoint(["Is it?"], "some/judge", URL, timeout=7.0))
    assert [each.headers["Authorization"] for each in requests] == ["Bearer none"] * len(PROMPTS) + ["Bearer sk-own"]
    assert requests[-1].url == f"{URL}/chat/completions" and requests[-1].extensions["timeout"]["read"] == 7.0
    expected = {"model": "some/judge", "temperature": 0.0, "max_tokens": MAX_NEW_TOKENS}
    assert payload(requests[-1]) == {**expected, "messages": [{"role": "user", "content": "Is it?"}]}


@pytest.mark.parametrize(
    ("failure", "problem", "attempts"),
    [
        (500, "status 500", 1 + RETRIES),
        (429, "status 429", 1 + RETRIES),
        (b"<html>", "no chat completion", 1),
        (b'{"choices": []}', "no chat completion", 1),
        (b"[]", "no chat completion", 1),
        (None, "no reply within 60 seconds", 1 + RETRIES),
    ],
)
def test_after_some_attempts_there_is_no_reply_and_others_go_on(failure, problem, attempts, endpoint, caplog):
    requests = endpoint(lambda prompt: failure if prompt == "Is it?" else "Yes")
    assert list(ask_endpoint(["Is it?", "Why?"], "judge", URL)) == [None, "Yes"]
    assert problem in caplog.text and len(requests) == attempts + 1


@pytest.mark.parametrize("status", [401, 404])
def test_a_request_that_is_refused_is_an_error_at_once(status, endpoint, monkeypatch):
    monkeypatch.setattr(judge, "CONCURRENCY", 1)
    requests = endpoint(lambda prompt: status)
    with pytest.raises(ValueError, match=rf"`judge` judge \(status {status}: .*so it is.*OPENAI_API_KEY"):
        list(ask_endpoint(PROMPTS * 100, "judge", URL))
    assert len(requests) < 100  # those that were on their way


def test_an_endpoint_where_nobody_listens_or_that_is_no_address_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # not listening
        with pytest.raises(ConnectionError, match="no endpoint at http://127.0.0.1"):
            list(ask_endpoint(["Is it?"], "judge", f"http://127.0.0.1:{free.getsockname()[1]}/v1"))
    with pytest.raises(ValueError, match="'localhost:8000'; expected an address"):
        list(ask_endpoint(["Is it?"], "judge", "localhost:8000"))
