"""A verdict is that of the judge on an answer as written; each is asked for once, and missing ones are counted."""

import csv
import json
import socket

import httpx
import openai
import pytest
from answer_rows import write_answers

from arcaligner.common.files import DEFAULT_CHECKPOINT
from arcaligner.evaluation import chat_endpoint
from arcaligner.evaluation.chat_endpoint import RETRIES, ChatEndpoint
from arcaligner.evaluation.judge import (
    UNREADABLE,
    agreement,
    judge_answers,
    judge_people,
    judge_prompt,
    judge_run,
    judged_scores,
    main,
    parse_verdict,
    read_verdicts,
    verdict_file,
)
from arcaligner.evaluation.metrics import percent_interval
from arcaligner.evaluation.paper import right_by
from arcaligner.evaluation.results import results_page, summarize
from arcaligner.evaluation.runs import AnswerFile

URL = "http://localhost:8000/v1"
SAYS = {"Paris": "Yes.", "Lyon": "No, it is Paris.", "Rome": "Hmm.", "Nice": None}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Removes the pause between attempts."""
    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", lambda *args: 0.0)


def judge_of(says=SAYS.get, seen=None):
    """A judge whose reply depends on the candidate answer; the prompts are appended to `seen`."""

    def replies(prompts):
        for prompt in prompts:
            if seen is not None:
                seen.append(prompt)
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


def test_prompt_has_golds_and_candidate():
    row = {"id": "1", "question": " who wrote it", "answers": ["Ada", "The", "Ada L."], "prediction": " Ada\nKing "}
    assert judge_prompt(row) == (
        "Question: who wrote it?\nAnswer: Ada or Ada L.\nCandidate: Ada King\n\nIs candidate correct? Answer yes or no."
    )
    assert judge_prompt({**row, "question": "Who wrote it?"}).startswith("Question: Who wrote it?\n")


def test_verdict_is_first_word():
    replies = ["Yes", "yes, the candidate is correct.", "\n **NO**", '"No."']
    replies += ["", "Not correct", "Yesterday", "The answer is yes"]
    assert list(map(parse_verdict, replies)) == ["yes"] * 2 + ["no"] * 2 + ["unreadable"] * 4


def test_killed_judge_continues(file):
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
    seen = []
    judge_answers(judge_of({**SAYS, "Lyon": None}.get, seen), rows, file)
    assert seen == [judge_prompt(rows[2]), judge_prompt(rows[3])]
    judge_answers(judge_of(), rows, file)  # prompts without a reply are sent again
    replies = [("yes", "Yes."), ("unreadable", "Hmm."), ("no", "No, it is Paris."), ("yes", "Yes.")]
    lines = sorted((line["id"], line["verdict"], line["reply"]) for line in file.read())
    assert lines == [(f"q{number}", *pair) for number, pair in enumerate(replies)]
    assert list(read_verdicts(file, rows).values()) == [verdict for verdict, _ in replies]


@pytest.mark.parametrize("change", [{"prediction": "Lyon"}, {"answers": ["Rome"]}, {"question": "Which is it?"}])
def test_changed_answer_is_judged_again(file, change):
    before = answers("Paris", "Rome")
    judge_answers(judge_of(), before, file)
    after = [{**before[0], **change}, before[1]]
    assert read_verdicts(file, after) == {"q0": None, "q1": "unreadable"}
    seen = []
    judge_answers(judge_of(lambda prediction: "no", seen), after, file)
    assert seen == [judge_prompt(after[0])]
    assert read_verdicts(file, after) == {"q0": "no", "q1": "unreadable"}


@pytest.fixture
def endpoint(monkeypatch):
    """Replaces every endpoint by the function `reply`, from the user's turn to the model's, and returns the list of
    requests. A reply is a text, a status, a body (`bytes`), or None for no reply in time."""

    def replies_with(reply) -> list[httpx.Request]:
        requests = []

        def handle(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            content = reply(payload(request)["messages"][-1]["content"])
            if content is None:
                raise httpx.ReadTimeout("no reply")
            if isinstance(content, int):
                return httpx.Response(content, json={"error": {"message": "so it is"}})
            if isinstance(content, bytes):
                return httpx.Response(200, content=content, headers={"Content-Type": "application/json"})
            message = {"role": "assistant", "content": content}
            return httpx.Response(200, json={"choices": [{"index": 0, "message": message}]})

        def client(**options) -> openai.OpenAI:
            return real(http_client=httpx.Client(transport=httpx.MockTransport(handle)), **options)

        real = openai.OpenAI
        monkeypatch.setattr(openai, "OpenAI", client)
        return requests

    return replies_with


def payload(request: httpx.Request) -> dict:
    return json.loads(request.content)


def test_run_is_judged_once(tmp_path, endpoint, caplog):
    """All answers with golds are judged, counted by kind, and asked about once."""
    requests = endpoint(lambda prompt: SAYS[candidate(prompt)])
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon", "Rome"))
    write_answers(tmp_path, "squad", "arcaligner", answers("Paris", "Nice"))
    write_answers(tmp_path, "squad_unanswerable", "naive", [row | {"answers": []} for row in answers("Paris")])
    lines = judge_run(tmp_path, judge := ChatEndpoint("a/judge", URL, timeout=1.0))
    mean, low, high = percent_interval([1.0, 0.0, 0.0])
    assert lines[2:] == [
        "| squad | arcaligner | 100.0 [100.0, 100.0] | 1 | 0 | 1 |",
        f"| squad | naive | {mean:.1f} [{low:.1f}, {high:.1f}] | 3 | 1 | 0 |",
    ]
    assert "A request to a/judge failed: no reply within 1 seconds" in caplog.text
    assert "naive.a--judge.verdicts.jsonl: the judge replied neither yes nor no about 1 of 3 answers." in caplog.text
    naive, ours = (AnswerFile(tmp_path, "squad", method) for method in ("naive", "arcaligner"))
    assert judged_scores(naive, "a/judge") == {"q0": 1.0, "q1": 0.0, "q2": 0.0}
    assert judged_scores(ours, "a/judge") == {"q0": 1.0} and judged_scores(naive, "other/judge") == {}
    assert right_by("acc")(naive) == {"q0": True, "q1": False, "q2": False}
    num_requests = len(requests)
    # Prompts without a reply are sent again.
    assert judge_run(tmp_path, judge) == lines and len(requests) == num_requests + 1 + RETRIES
    with pytest.raises(ValueError, match="contains no answers.*evaluate"):
        judge_run(tmp_path / "none", judge)


def test_again_asks_unreadable_ones(file):
    rows = answers("Paris", "Rome")
    judge_answers(judge_of(), rows, file)
    judge_answers(judge_of({"Rome": "No."}.get, seen := []), rows, file, again=True)
    assert seen == [judge_prompt(rows[1])] and read_verdicts(file, rows) == {"q0": "yes", "q1": "no"}


def test_results_have_acc(tmp_path):
    """Judged answers have an accuracy in the results and on the page; other answers have none."""
    write_answers(tmp_path, "hotpotqa", "arcaligner", answers("Paris", "Lyon", "Rome", "Nice"))
    write_answers(tmp_path, "hotpotqa", "naive", answers("Paris"))
    file = AnswerFile(tmp_path, "hotpotqa", "arcaligner")
    before = results_page(summarize(tmp_path))
    judge_answers(judge_of(), file.read(), verdict_file(file, "org/judge"))
    results = summarize(tmp_path)
    methods = results["sets"]["HotpotQA"]["methods"]
    assert methods["arcaligner"]["acc"] == {"org--judge": percent_interval([1.0, 0.0, 0.0])}
    assert "acc" not in methods["naive"]
    page = results_page(results)
    assert "| Acc, judged by org--judge | HotpotQA |" in page and "| **ArcAligner** | 33.3 [" in page
    assert "Acc, judged" not in before and set(before.splitlines()) <= set(page.splitlines())


# Agreement with people


@pytest.fixture
def people(tmp_path):
    """Three answers that people judged, and the verdicts of GPT-4."""
    (folder := tmp_path / "people").mkdir()
    judged = [("Paris", "Yes"), ("Lyon", "No"), ("Rome", "Yes")]

    def write(name: str, columns: str, rows: list) -> None:
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter="\t").writerows([columns.split(","), *rows])

    rows = [[number, "what is it", text, ok] for number, (text, ok) in enumerate(judged)]
    write("NQ301_human.tsv", "id,Question,Model answer,Acceptable?", rows)
    golds = [[number, "what is it", "Paris | City", text, ok, "[]"] for number, (text, ok) in enumerate(judged)]
    write("NQ301_BEM.tsv", "id,Question,Gold answers,Model answer,Acceptable?,BEM", golds)
    gpt = [[number, "what is it", text, "Yes", "Yes, it is."] for number, (text, _) in enumerate(judged)]
    write("NQ301_gpt-4.tsv", "id,Question,Model answer,Acceptable?,gpt-4", gpt)
    return folder


def test_agreement_with_people(people, tmp_path):
    """Agreement with people is as counted by hand, for the judge, other judges and string metrics; verdicts are
    kept."""
    seen = []
    lines = judge_people(people, tmp_path / "kept", judge_of(seen=seen), "a/judge")
    cells = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines[2:]}
    share = "{:.1f} [{:.1f}, {:.1f}]".format(*percent_interval([1.0, 1.0, 0.0]))
    assert cells["| a/judge"] == [share, "0.40", "3", "1", "0 |"]  # "Hmm." counts as a no
    assert len(lines) == 7  # no better than EM, no worse
    assert cells["| GPT-4"][0] == share and cells["| BEM"][0] == "100.0 [100.0, 100.0]" and cells["| EM"][0] == share
    assert judge_people(people, tmp_path / "kept", judge_of(seen=seen), "a/judge") == lines and len(seen) == 3
    says_no = judge_people(people, tmp_path / "no", judge_of(lambda text: "No"), "a/judge")
    assert says_no[-1] == "a/judge agrees less with people than EM does: do not use it as a judge."
    assert (
        "| a/judge | 100.0 [100.0, 100.0] | 1.00 | 2 |" in judge_people(people, tmp_path, judge_of(), "a/judge", 2)[2]
    )


def test_agreement_without_verdicts(people, tmp_path):
    lines = judge_people(people, tmp_path, lambda prompts: iter([None] * len(prompts)), "judge")
    assert lines[2] == "| judge | - | - | 0 | 0 | 3 |" and agreement([True], [True])["kappa"] is None


@pytest.mark.parametrize(
    "broken, message", [("human", "There is no .*human.tsv. Pass the folder"), ("BEM", "has no column 'Gold answers'")]
)
def test_other_files_are_refused(people, tmp_path, broken, message):
    path = people / f"NQ301_{broken}.tsv"
    path.unlink() if broken == "human" else path.write_text("id\tQuestion\n1\twhat\n")
    with pytest.raises(ValueError, match=message):
        judge_people(people, tmp_path, judge_of(), "judge")


def test_number_needs_agreement(tmp_path):
    """A limit on human judgements is refused where none are read."""
    with pytest.raises(ValueError, match="`-n` works with `--agreement` only"):
        main(run=tmp_path, number=1)


# The endpoint

PROMPTS = ["Is it?", "Who wrote the letter, and did anybody else know of it?", "Was it created in 1924?", "Why?", "No?"]


def test_endpoint_is_asked_greedily(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    requests = endpoint(lambda prompt: f"Yes: {prompt}")
    assert list(ChatEndpoint("some/judge", URL)(PROMPTS)) == [f"Yes: {prompt}" for prompt in PROMPTS]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    list(ChatEndpoint("some/judge", URL, timeout=7.0)(["Is it?"]))
    keys = [request.headers["Authorization"] for request in requests]
    assert keys == ["Bearer none"] * len(PROMPTS) + ["Bearer sk-own"]
    assert requests[-1].url == f"{URL}/chat/completions" and requests[-1].extensions["timeout"]["read"] == 7.0
    expected = {"model": "some/judge", "temperature": 0.0, "max_tokens": 8}
    assert payload(requests[-1]) == {**expected, "messages": [{"role": "user", "content": "Is it?"}]}


@pytest.mark.parametrize(
    ("failure", "problem", "attempts"),
    [
        (500, "status 500", 1 + RETRIES),
        (429, "status 429", 1 + RETRIES),
        (b"<html>", "not a chat completion", 1),
        (b'{"choices": []}', "not a chat completion", 1),
        (b"[]", "not a chat completion", 1),
        (None, "no reply within 60 seconds", 1 + RETRIES),
    ],
)
def test_failed_reply_leaves_others(failure, problem, attempts, endpoint, caplog):
    requests = endpoint(lambda prompt: failure if prompt == "Is it?" else "Yes")
    assert list(ChatEndpoint("judge", URL)(["Is it?", "Why?"])) == [None, "Yes"]
    assert problem in caplog.text and len(requests) == attempts + 1


@pytest.mark.parametrize("status", [401, 404])
def test_refused_request_is_an_error(status, endpoint, monkeypatch):
    monkeypatch.setattr(chat_endpoint, "CONCURRENCY", 1)
    requests = endpoint(lambda prompt: status)
    with pytest.raises(ValueError, match=rf"rejects requests to `judge` \(status {status}: .*so it is.*OPENAI_API_KEY"):
        list(ChatEndpoint("judge", URL)(PROMPTS * 100))
    assert len(requests) < 100  # requests that had been sent


def test_unreachable_endpoint_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # not listening
        with pytest.raises(ConnectionError, match="The endpoint http://127.0.0.1.* cannot be reached"):
            list(ChatEndpoint("judge", f"http://127.0.0.1:{free.getsockname()[1]}/v1")(PROMPTS * 100))
    with pytest.raises(ValueError, match="'localhost:8000'; expected an address"):
        list(ChatEndpoint("judge", "localhost:8000")(["Is it?"]))


# A real server


def test_real_server_judges(tiny_server, tmp_path):
    """The project's server answers the judge; the random text of its model is counted as unreadable, and kept."""
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon"))
    (line,) = judge_run(tmp_path, ChatEndpoint("base", tiny_server, max_tokens=4))[2:]
    (verdicts,) = tmp_path.glob("squad/*.verdicts.jsonl")
    replies = [json.loads(line) for line in verdicts.read_text("utf-8").splitlines()]
    assert [reply["verdict"] for reply in replies] == [UNREADABLE] * 2 and all("reply" in reply for reply in replies)
    assert line == "| squad | naive | 0.0 [0.0, 0.0] | 2 | 2 | 0 |"


@pytest.mark.default_backbone
def test_base_model_judges(serve, tmp_path, capsys):
    """The default base model behind the project's server gives each real answer a verdict."""
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon", "I do not know."))
    with serve(DEFAULT_CHECKPOINT) as url:
        main(run=tmp_path, model="base", endpoint=url)
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert cells[1] == "naive" and cells[3] == "3" and cells[5] == "0 |"
