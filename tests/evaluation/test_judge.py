"""Verdicts are those of the judge on the answers as they are, asked for once, and counted where there are none."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from chat_server import running_chat_server
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from arcaligner.evaluation import judge as module
from arcaligner.evaluation.judge import (
    ATTEMPTS,
    MAX_NEW_TOKENS,
    EndpointJudge,
    LocalJudge,
    judge_answers,
    judge_prompt,
    judged_scores,
    main,
    parse_verdict,
    read_verdicts,
)
from arcaligner.evaluation.metrics import bootstrap_interval
from arcaligner.evaluation.runs import AnswerFile

SAYS = {"Paris": "Yes.", "Lyon": "No, it is Paris.", "Rome": "Hmm.", "Nice": None}


class FakeJudge:
    """Replies by the candidate, the last prompt first; `None` is no reply. `prompts` are those it was asked."""

    def __init__(self, says: Callable[[str], str | None] = SAYS.get):
        self.says, self.prompts = says, []

    def replies(self, prompts):
        for index in reversed(range(len(prompts))):
            self.prompts.append(prompts[index])
            text = self.says(candidate(prompts[index]))
            yield index, text


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
    assert read_verdicts(path, rows) == {"q0": "yes", "q1": "no", "q2": "unreadable", "q3": None}


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
    assert read_verdicts(path, rows) == {"q0": None, "q1": None, "q2": "unreadable", "q3": "yes"}
    judge = FakeJudge({**SAYS, "Lyon": None}.get)
    judge_answers(judge, rows, path, "")
    assert [candidate(prompt) for prompt in judge.prompts] == ["Lyon", "Paris"]
    judge_answers(FakeJudge(), rows, path, "")  # what had no reply is asked again
    assert [line["verdict"] for line in read_lines(path)] == ["yes", "no", "unreadable", "yes"]


@pytest.mark.parametrize("change", [{"prediction": "Lyon"}, {"answers": ["Rome"]}, {"question": "Which is it?"}])
def test_a_verdict_on_another_answer_is_not_taken(path, change):
    before = answers("Paris", "Rome")
    judge_answers(FakeJudge(), before, path, "")
    after = [{**before[0], **change}, before[1]]
    assert read_verdicts(path, after) == {"q0": None, "q1": "unreadable"}
    judge = FakeJudge(lambda prediction: "no")
    judge_answers(judge, after, path, "")
    assert judge.prompts == [judge_prompt(after[0])]
    assert [(line["id"], line["verdict"]) for line in read_lines(path)] == [("q0", "no"), ("q1", "unreadable")]


@pytest.fixture
def endpoint():
    """A server that judges like `FakeJudge`; for `None` it keeps its client waiting."""
    with running_chat_server(lambda prompt: SAYS[candidate(prompt)]) as chat:
        yield chat


def test_the_command_judges_all_answers_and_prints_the_accuracy(tmp_path, endpoint, capsys, caplog, monkeypatch):
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
    assert "stays unjudged: no reply within 0.2 seconds" in caplog.text
    naive, ours = (AnswerFile(tmp_path, "squad", method) for method in ("naive", "arcaligner"))
    assert judged_scores(naive, "a/judge") == {"q0": 1.0, "q1": 0.0, "q2": 0.0}
    assert judged_scores(ours, "a/judge") == {"q0": 1.0} and judged_scores(naive, "other/judge") == {}
    files = {path.name for path in (tmp_path / "squad").glob("*.verdicts.jsonl")}
    assert files == {"naive.a--judge.verdicts.jsonl", "arcaligner.a--judge.verdicts.jsonl"}


def test_a_judged_run_needs_no_judge(tmp_path, endpoint, capsys):
    write_answers(tmp_path, "squad", "naive", answers("Paris", "Lyon"))
    main(tmp_path, "a/judge", endpoint.url)
    first = capsys.readouterr().out
    main(tmp_path, "a/judge")  # neither folder nor Hub id: it would not load
    assert capsys.readouterr().out == first
    assert len(endpoint.requests) == 2


def test_a_run_without_answers_is_refused(tmp_path):
    write_answers(tmp_path, "squad", "naive", [])
    with pytest.raises(ValueError, match="holds no answers.*evaluate"):
        main(tmp_path, "a/judge")


# The models that judge

PROMPTS = ["Is it?", "Who wrote the letter, and did anybody else know of it?", "Was it created in 1924?", "Why?", "No?"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No pause between attempts, and requests to this machine although the tests are offline."""
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def greedy_reply(folder: Path, prompt: str) -> str:
    """The most likely token after token, without `generate`."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    length = ids.shape[1]
    for _ in range(MAX_NEW_TOKENS):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0, length:], skip_special_tokens=True)


def texts(judge, prompts: list[str]) -> list[str | None]:
    """The replies in the prompts' order."""
    replies = dict(judge.replies(prompts))
    assert len(replies) == len(prompts)
    return [replies[index] for index in range(len(prompts))]


def test_a_local_judge_replies_greedily_in_batches_of_any_size(base_model_dir):
    expected = [greedy_reply(base_model_dir, prompt) for prompt in PROMPTS]
    assert len(set(expected)) > 1
    assert texts(LocalJudge(str(base_model_dir), batch_size=2), PROMPTS) == expected
    assert texts(LocalJudge(str(base_model_dir), batch_size=5), PROMPTS) == expected


def test_the_way_a_judge_samples_by_itself_does_not_matter(base_model_dir, tmp_path):
    folder = shutil.copytree(base_model_dir, tmp_path / "judge")
    own = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=9.0, eos_token_id=2, pad_token_id=2)
    own.save_pretrained(folder)
    assert texts(LocalJudge(str(folder)), PROMPTS) == texts(LocalJudge(str(base_model_dir)), PROMPTS)


def test_a_model_without_a_chat_template_is_refused(encoder_dir):
    with pytest.raises(ValueError, match="is no chat model .* chat template"):
        LocalJudge(str(encoder_dir))


def test_a_judge_that_is_not_there_is_named_with_how_to_get_it(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="judge `nobody/nothing` .*hf download nobody/nothing"):
        LocalJudge("nobody/nothing")


def test_an_endpoint_is_asked_greedily_for_the_model(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with running_chat_server(lambda prompt: f"Yes: {prompt}") as chat:
        assert texts(EndpointJudge("some/judge", chat.url), PROMPTS) == [f"Yes: {prompt}" for prompt in PROMPTS]
        assert chat.keys == {"Bearer none"}  # the Hub's token goes to the Hub alone
        monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
        texts(EndpointJudge("some/judge", chat.url), ["Is it?"])
    assert chat.keys == {"Bearer none", "Bearer sk-own"}
    assert len(chat.requests) == len(PROMPTS) + 1
    expected = {"model": "some/judge", "temperature": 0.0, "max_tokens": MAX_NEW_TOKENS, "stream": False}
    assert chat.requests[-1] == {**expected, "messages": [{"role": "user", "content": "Is it?"}]}


@pytest.mark.parametrize("failure", [500, 429, b"<html>", b'{"choices": []}', b"[]"])
def test_a_failure_of_the_server_is_asked_again(failure):
    replies = [failure, "No."]
    with running_chat_server(lambda prompt: replies.pop(0)) as chat:
        assert list(EndpointJudge("judge", chat.url).replies(["Is it?"])) == [(0, "No.")]
    assert len(chat.requests) == 2


@pytest.mark.parametrize(
    ("failure", "problem"),
    [(500, "status 500"), (b"<html>", "no chat completion"), (None, "no reply within 0.2 seconds")],
)
def test_after_some_attempts_there_is_no_reply_and_others_go_on(failure, problem, caplog):
    with running_chat_server(lambda prompt: failure if prompt == "Is it?" else "Yes") as chat:
        assert texts(EndpointJudge("judge", chat.url, timeout=0.2), ["Is it?", "Why?"]) == [None, "Yes"]
    assert problem in caplog.text and len(chat.requests) == ATTEMPTS + 1


@pytest.mark.parametrize("status", [401, 404])
def test_a_request_that_is_refused_is_an_error_at_once(status):
    with running_chat_server(lambda prompt: status) as chat:
        with pytest.raises(ValueError, match=rf"`judge` judge \(status {status}: .*so it is.*OPENAI_API_KEY"):
            list(EndpointJudge("judge", chat.url, concurrency=1).replies(PROMPTS))
    assert len(chat.requests) < len(PROMPTS)


def test_an_endpoint_where_nobody_listens_or_that_is_no_address_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # not listening
        judge = EndpointJudge("judge", f"http://127.0.0.1:{free.getsockname()[1]}/v1")
        with pytest.raises(ConnectionError, match="no endpoint at http://127.0.0.1"):
            list(judge.replies(["Is it?"]))
    with pytest.raises(ValueError, match="'localhost:8000'; expected an address"):
        EndpointJudge("judge", "localhost:8000")
