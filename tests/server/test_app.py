"""The official client of OpenAI asks, with passages or without; mistakes are told, and are nobody else's."""

import json
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from arcaligner.cli import app as cli
from arcaligner.server.app import ServerSettings, create_app, refuse
from arcaligner.server.limits import TimedConnection

QUESTION = "What sport does he play?"
RADIK = "Radik Zhaparov is a Kazakh ski jumper. He has competed since 2003."
DOCUMENTS = [RADIK, {"title": "Ada", "text": "She wrote."}]


def ask_server(client, question=QUESTION, stream=False, **extra):
    messages = [{"role": "user", "content": question}]
    settings = {"model": "tiny", "max_tokens": 8, "stream": stream}
    return client.chat.completions.create(messages=messages, **settings, extra_body=extra)


def test_documents_of_a_request_are_read_as_the_pipeline_reads_them(client, ask):
    answer = ask_server(client, documents=DOCUMENTS)
    row = {"question": QUESTION, "documents": DOCUMENTS}
    expected = ask(row, return_slots=True, max_new_tokens=8)[0]
    assert answer.choices[0].message.content == expected["generated_text"].lstrip()
    report = answer.model_extra["arcaligner"]
    assert report["statistics"] == expected["statistics"]
    places = [{key: each[key] for key in ("document", "start", "end")} for each in expected["segments"]]
    assert report["segments"] == places
    sources = [{"title": "", "text": DOCUMENTS[0]}, DOCUMENTS[1]]
    assert report["sources"] == [each | {"answer": None, "read": True} for each in sources]
    kept = ask_server(client, documents=DOCUMENTS)
    assert kept.choices[0].message.content == answer.choices[0].message.content
    assert kept.usage == answer.usage
    assert [ask_server(client, documents=DOCUMENTS[::-1]).model_extra["arcaligner"]["kept"] for _ in "12"] == [0, 2]
    seconds = report["seconds"]
    parts = sum(seconds[name] for name in ("waiting", "retrieval", "slots", "choosing", "model"))
    assert parts == pytest.approx(seconds["first_token"]) and seconds["first_token"] <= seconds["total"]


def test_the_corpus_is_read_where_a_request_has_no_documents(client, retriever, ask):
    answer = ask_server(client, top_k=1)
    found = retriever(QUESTION, top_k=1)
    assert answer.model_extra["arcaligner"]["sources"] == [
        each | {"answer": None, "read": True} for each in found.documents
    ]
    expected = ask({"question": QUESTION, "documents": found.documents}, max_new_tokens=8)[0]["generated_text"]
    assert answer.choices[0].message.content == expected.lstrip()
    steering = f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    chat = [{"role": "user", "content": steering}]
    plain = ask(chat, max_new_tokens=8, return_full_text=False)[0]["generated_text"]
    without = ask_server(client, steering, top_k=0)
    assert without.choices[0].message.content == plain.lstrip()
    assert without.model_extra["arcaligner"]["statistics"]["slots"] == 0
    nothing = ask_server(client, documents=[]).model_extra["arcaligner"]
    assert nothing["sources"] == [] and nothing["statistics"]["slots"] == 1


def test_a_stream_says_the_same_piece_by_piece(client):
    whole = ask_server(client, documents=DOCUMENTS)
    options = {"documents": DOCUMENTS, "stream_options": {"include_usage": True}}
    pieces = list(ask_server(client, stream=True, **options))
    assert [piece.choices[0].delta.role for piece in pieces[:1]] == ["assistant"]
    texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(texts) == whole.choices[0].message.content
    end, last = pieces[-2:]
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason and last.usage == whole.usage
    assert [piece.usage for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert last.model_extra["arcaligner"]["statistics"] == whole.model_extra["arcaligner"]["statistics"]
    assert len({piece.id for piece in pieces}) == 1
    *_, last = ask_server(client, stream=True, documents=DOCUMENTS)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason and "arcaligner" in last.model_extra


@pytest.mark.parametrize("rate", [3, "segment"])
def test_a_request_chooses_its_rate_and_number_of_passages(client, ask, retriever, rate):
    assert retriever.corpus.settings["tokens_per_slot"] == "segment"
    for extra in ({"documents": DOCUMENTS}, {"top_k": 2}):
        answer = ask_server(client, tokens_per_slot=rate, **extra)
        report = answer.model_extra["arcaligner"]
        row = {"question": QUESTION, "documents": report["sources"]}
        expected = ask(row, return_slots=True, max_new_tokens=8, tokens_per_slot=rate)[0]
        assert answer.choices[0].message.content == expected["generated_text"].lstrip()
        assert report["statistics"] == expected["statistics"] and len(report["sources"]) == 2


def test_a_stop_ends_the_answer_before_it_and_no_piece_shows_its_beginning(client):
    whole = ask_server(client, documents=DOCUMENTS).choices[0].message.content
    stop = whole[3:6]
    expected = whole[: whole.find(stop)]
    answer = ask_server(client, documents=DOCUMENTS, stop=["never said", stop])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
    pieces = list(ask_server(client, stream=True, documents=DOCUMENTS, stop=stop))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    tail = f"{whole[-2:]}?"  # what looked like its beginning is said at the end
    assert ask_server(client, documents=DOCUMENTS, stop=tail).choices[0].message.content == whole


def test_fields_that_ask_for_nothing_are_taken_and_an_answer_can_be_sent_back(client):
    expected = ask_server(client, documents=DOCUMENTS)
    neutral = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": False, "top_logprobs": 0}
    neutral |= {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "logit_bias": {}, "seed": 3}
    neutral |= {"user": "somebody", "store": True, "metadata": {"a": "b"}, "audio": None, "stop": None, "top_k": None}
    found = ask_server(client, documents=DOCUMENTS, **neutral)
    assert found.choices[0].message == expected.choices[0].message
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    turns += [expected.choices[0].message.model_dump(), {"role": "user", "content": "Why?"}]
    answer = client.chat.completions.create(model="tiny", messages=turns, max_tokens=2)
    turns[0]["role"] = "system"
    same = client.chat.completions.create(model="tiny", messages=turns, max_tokens=2)
    assert answer.choices[0].message == same.choices[0].message


@pytest.mark.parametrize("top_k", [0, 1])
def test_requests_that_arrive_together_share_a_batch_and_a_bad_one_fails_alone(client, engine, top_k):
    questions = ["What?", "Who was it that wrote it aloud?", QUESTION, "When?"]
    alone = {each: ask_server(client, each, top_k=top_k).choices[0].message.content for each in questions}
    answers, barrier = {}, threading.Barrier(5)

    def ask_one(question):
        barrier.wait()
        try:
            answers[question] = ask_server(client, question, top_k=top_k)
        except openai.APIStatusError as error:
            answers[question] = error

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(ask_one, [*questions, "Too long " * 600]))
    assert {each: answers[each].choices[0].message.content for each in questions} == alone
    assert max(answers[each].model_extra["arcaligner"]["batch_size"] for each in questions) > 1
    bad = answers["Too long " * 600]
    assert bad.status_code == 400 and "positions but the backbone" in bad.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "wizard", "content": "?"}]}, "messages.0.role: Input should be 'system', 'developer'"),
        ({"messages": [{"role": "user", "content": " "}]}, "question"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "0.type: Input should be 'text'"),
        ({"messages": [{"role": "user", "content": "Who \ud800?"}]}, "surrogates"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "question"),
        ({"temperature": -1}, "temperature: "),
        ({"max_tokens": 257}, "`max_tokens` is 257; expected 1 to 256"),
        ({"documents": ["a"] * 5}, "Got 5 documents; expected at most 4"),
        ({"documents": ["A text. " * 41]}, "are 41 slots, but there is room for 40"),
        ({"documents": [{"body": "a"}]}, "documents.0.text: Field required"),
        ({"documents": [{"title": "T" * 1001, "text": "a"}]}, "documents.0.title: String should have at most 1000"),
        ({"documents": "a"}, "documents: Input should be a valid list"),
        ({"n": 2}, "`n` is not supported; leave it out, or pass 1."),
        ({"presence_penalty": 0.5}, "`presence_penalty` is not supported"),
        ({"response_format": {"type": "json_object"}}, '`response_format` is not supported; leave it out, or pass {"'),
        ({"tools": [{"type": "function"}]}, "`tools` is not supported"),
        ({"topk": 3}, "Unknown key `topk` in the request. Did you mean `top_k`?"),
        ({"stop": [""]}, "stop.0: "),
        ({"tokens_per_slot": "word"}, "tokens_per_slot: Input should be"),
        ({"tokens_per_slot": 0}, "tokens_per_slot: Input should be greater than or equal to 1"),
        ({"seed": 2**63}, "seed: "),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(url, change, message):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2} | change
    response = httpx.post(f"{url}/v1/chat/completions", content=json.dumps(body), headers=AUTHORIZED)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


AUTHORIZED = {"Authorization": "Bearer a key", "Content-Type": "application/json"}


def test_what_is_no_request_at_all_is_refused(url, client):
    post = f"{url}/v1/chat/completions"
    for content, status in ((b"{", 400), (b"\xff", 400), (b"[" * 15_000, 400), (b"x" * 20_001, 413)):
        refused = httpx.post(post, content=content, headers=AUTHORIZED)
        assert refused.status_code == status and refused.json()["error"]["message"]
    parts = (b"x" * 9_000 for _ in range(3))
    assert httpx.post(post, content=parts, headers=AUTHORIZED).status_code == 413
    for wrong in ({}, {"Authorization": b"Bearer \xff"}):
        for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
            assert httpx.get(url + path, headers=wrong).status_code == 401
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt'; expected 'tiny'"):
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "?"}])
    for path, status in (("/none", 404), ("/v1/chat/completions", 405)):
        refused = httpx.get(url + path)
        assert refused.status_code == status and refused.json()["error"]["message"]


def test_an_error_that_is_not_expected_is_logged_and_its_text_is_not_told(caplog):
    response = refuse(None, RuntimeError("a secret"))
    error = json.loads(response.body)["error"]
    assert (response.status_code, error["message"], error["type"]) == (500, "RuntimeError", "server_error")
    assert "a secret" in caplog.text


def test_a_temperature_that_is_next_to_nothing_takes_the_likeliest_token(client):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    likeliest, found = (client.chat.completions.create(**chat, temperature=each) for each in (0, 5e-324))
    assert found.choices[0].message.content == likeliest.choices[0].message.content


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_answer(client, held, stream):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    if stream:
        answer = client.chat.completions.create(**chat, stream=True)
        next(iter(answer))
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).chat.completions.create(**chat)
        assert held.begun.wait(30)
    assert isinstance(held.end_of_the_first(), TimeoutError)
    assert ask_server(client).choices[0].message.content


def test_the_server_says_how_it_does(url, client):
    (model,) = client.models.list()
    assert model.id == "tiny" and client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt/4'; expected 'tiny'"):
        client.models.retrieve("gpt/4")
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "model": "tiny", "corpus": True}
    page = httpx.get(url)
    assert page.headers["content-type"].startswith("text/html") and "://" not in page.text  # nothing from elsewhere
    ask_server(client)
    text = httpx.get(f"{url}/metrics", headers=AUTHORIZED).text
    for name in ('requests_total{status="200"}', "tokens_total", "slots_total", "prefix_bytes", "seconds_bucket"):
        assert f"arcaligner_{name}" in text
    assert "process_resident_memory_bytes" in text


def test_the_command_serves_a_checkpoint_and_a_corpus(capsys, monkeypatch, checkpoint_dir, retriever):
    served = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server: served.append(server.config))
    monkeypatch.setenv("ARCALIGNER_API_KEY", "")
    options = ["serve", "--checkpoint", str(checkpoint_dir), "--corpus", str(retriever.corpus.path), "--port", "8001"]
    with pytest.raises(SystemExit) as end:
        cli.main([*options, "--host", "0.0.0.0"])
    assert end.value.code == 1 and "there is no API key" in capsys.readouterr().err and not served
    with pytest.raises(SystemExit) as end:
        cli.main(options)
    assert end.value.code == 0
    (config,) = served
    assert (config.host, config.port, config.http) == ("127.0.0.1", 8001, TimedConnection)
    with TestClient(config.app, base_url="http://127.0.0.1:8001") as client:
        body = {"model": checkpoint_dir.name, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=body).json()["arcaligner"]["sources"]


def test_the_command_tells_its_address_once_clients_can_connect_there(monkeypatch, checkpoint_dir):
    told = []

    def connect(text, **options):
        if address := re.search(r"http://127\.0\.0\.1:(\d+)/v1", text):
            told.append(text)
            socket.create_connection(("127.0.0.1", int(address[1]))).close()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli.messages, "print", connect)
    command = ["serve", "--checkpoint", str(checkpoint_dir), "--port"]
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "0"])
    assert end.value.code == 0 and len(told) == 1
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit) as end:
        cli.main([*command, str(other.getsockname()[1])])
    assert end.value.code != 0 and len(told) == 1


def test_without_a_key_only_this_machine_may_ask(engine):
    client = TestClient(create_app(engine, ServerSettings()))  # without a lifespan, which would close the engine
    for host, status in (("evil.example:8000", 400), ("[::1]:8000", 200), ("localhost", 200)):
        assert client.get("/health", headers={"Host": host}).status_code == status
    assert ServerSettings().host == "127.0.0.1"
    ServerSettings(host="0.0.0.0", api_key="key")
    with pytest.raises(ValueError, match="there is no API key, so that anybody could ask"):
        ServerSettings(host="0.0.0.0", api_key="")
