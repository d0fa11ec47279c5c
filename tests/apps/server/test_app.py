"""The official client of OpenAI asks, with passages or without; mistakes are told, and are nobody else's."""

import json

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from arcaligner.apps.server import app
from arcaligner.apps.server.app import ServerSettings, create_app, refuse

QUESTION = "What sport does he play?"
RADIK = "Radik Zhaparov is a Kazakh ski jumper. He has competed since 2003."
DOCUMENTS = [RADIK, {"title": "Ada", "text": "She wrote."}]
AUTHORIZED = {"Authorization": "Bearer a key", "Content-Type": "application/json"}


def ask_server(client, question=QUESTION, stream=False, **extra):
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    settings = {"model": "tiny", "max_tokens": 8, "stream": stream}
    return client.chat.completions.create(messages=messages, **settings, extra_body=extra)


def text_of(answer) -> str:
    return answer.choices[0].message.content


def report_of(answer):
    return answer.model_extra["arcaligner"]


def said(pieces) -> str:
    return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


@pytest.mark.parametrize("rate", [None, 3, "segment"])
def test_documents_of_a_request_are_read_as_the_pipeline_reads_them(client, ask, rate):
    answer, again = (ask_server(client, documents=DOCUMENTS, tokens_per_slot=rate) for _ in range(2))
    settings, report = {} if rate is None else {"tokens_per_slot": rate}, report_of(answer)
    row = {"question": QUESTION, "documents": DOCUMENTS}
    expected = ask(row, return_slots=True, max_new_tokens=8, **settings)[0]
    assert text_of(answer) == expected["generated_text"].lstrip() and report["statistics"] == expected["statistics"]
    places = [{key: each[key] for key in ("document", "start", "end")} for each in expected["segments"]]
    assert report["segments"] == places
    sources = [{"title": "", "text": RADIK, "number": 0}, DOCUMENTS[1] | {"number": 1}]
    assert report["sources"] == [each | {"answer": None, "read": True} for each in sources]
    assert (text_of(again), again.usage, report_of(again)["kept"]) == (text_of(answer), answer.usage, 2)
    seconds = report["seconds"]
    parts = sum(seconds[name] for name in ("waiting", "retrieval", "slots", "choosing", "model"))
    assert parts == pytest.approx(seconds["first_token"]) and seconds["first_token"] <= seconds["total"]


def test_the_corpus_is_read_where_a_request_has_no_documents(client, retriever, ask):
    for top_k, rate in ((1, None), (2, 3)):  # as they are stored, and encoded again
        answer, found = ask_server(client, top_k=top_k, tokens_per_slot=rate), retriever(QUESTION, top_k)
        assert report_of(answer)["sources"] == [each | {"answer": None, "read": True} for each in found.documents]
        row = {"question": QUESTION, "documents": found.documents}
        expected = ask(row, return_slots=True, max_new_tokens=8, tokens_per_slot=rate or "segment")[0]
        assert text_of(answer) == expected["generated_text"].lstrip()
        assert report_of(answer)["statistics"] == expected["statistics"]
    steering = f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    plain = ask([{"role": "user", "content": steering}], max_new_tokens=8, return_full_text=False)[0]["generated_text"]
    without = ask_server(client, steering, top_k=0)
    assert text_of(without) == plain.lstrip() and report_of(without)["statistics"]["slots"] == 0
    nothing = report_of(ask_server(client, documents=[]))
    assert nothing["sources"] == [] and nothing["statistics"]["slots"] == 1


def test_a_stream_says_the_same_piece_by_piece(client):
    whole = ask_server(client, documents=DOCUMENTS)
    options = {"documents": DOCUMENTS, "stream_options": {"include_usage": True}}
    pieces = list(ask_server(client, stream=True, **options))
    assert pieces[0].choices[0].delta.role == "assistant" and said(pieces) == text_of(whole)
    *others, end, last = pieces
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason and last.usage == whole.usage
    assert {piece.usage for piece in (*others, end)} == {None} and len({piece.id for piece in pieces}) == 1
    assert report_of(last)["statistics"] == report_of(whole)["statistics"]
    *_, last = ask_server(client, stream=True, documents=DOCUMENTS)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason and report_of(last)


def test_a_stop_ends_the_answer_before_it_and_no_piece_shows_its_beginning(client):
    whole = text_of(ask_server(client, documents=DOCUMENTS))
    stop = whole[3:6]
    expected = whole[: whole.find(stop)]
    answer = ask_server(client, documents=DOCUMENTS, stop=["never said", stop])
    assert (text_of(answer), answer.choices[0].finish_reason) == (expected, "stop")
    assert said(ask_server(client, stream=True, documents=DOCUMENTS, stop=stop)) == expected
    tail = f"{whole[-2:]}?"  # what looked like its beginning is said at the end
    assert text_of(ask_server(client, documents=DOCUMENTS, stop=tail)) == whole


def test_fields_that_ask_for_nothing_are_taken_and_an_answer_can_be_sent_back(client):
    expected = ask_server(client, documents=DOCUMENTS)
    neutral = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": False, "tools": [], "seed": 3}
    neutral |= {"response_format": {"type": "text"}, "tool_choice": "none", "audio": None, "stop": None, "top_k": None}
    neutral |= {"user": "somebody", "store": True, "metadata": {"a": "b"}, "stream_options": None}
    neutral |= {"temperature": 5e-324}  # next to nothing
    assert ask_server(client, documents=DOCUMENTS, **neutral).choices[0].message == expected.choices[0].message
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    turns += [expected.choices[0].message.model_dump(), {"role": "user", "content": "Why?"}]
    answer = text_of(ask_server(client, turns))
    turns[0]["role"] = "system"
    assert text_of(ask_server(client, turns)) == answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": " "}]}, "question"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "0.type: Input should be 'text'"),
        ({"messages": [{"role": "user", "content": "Who \ud800?"}]}, "The body: Invalid JSON"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "question"),
        ({"max_tokens": 257}, "`max_tokens` is 257; expected 1 to 256"),
        ({"documents": ["a"] * 5}, "Got 5 documents; expected at most 4"),
        ({"documents": [{"body": "a"}]}, "documents.0.text: Field required"),
        ({"documents": [{"title": "T" * 1001, "text": "a"}]}, "documents.0.title: String should have at most 1000"),
        ({"response_format": {"type": "json_object"}}, '`response_format` is not supported; leave it out, or pass {"'),
        ({"topk": 3}, "Unknown key `topk` in the request. Did you mean `top_k`?"),
        ({"tokens_per_slot": "word"}, "`tokens_per_slot` is 'word'; expected a whole number"),
        ({"seed": 2**63}, "seed: "),
        ({"copy_bonus": -1}, "`copy_bonus` is -1.0; expected a number from 0"),
        ({"messages": [{"role": "user", "content": "Too long " * 600}]}, "positions but the backbone"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(url, change, message):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2} | change
    response = httpx.post(f"{url}/v1/chat/completions", content=json.dumps(body), headers=AUTHORIZED)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_what_is_no_request_at_all_is_refused(url, client, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 20_000)
    post = f"{url}/v1/chat/completions"
    parts = (b"x" * 9_000 for _ in range(3))
    for content, status in ((b"{", 400), (b"\xff", 400), (b"[" * 15_000, 400), (b"x" * 20_001, 413), (parts, 413)):
        refused = httpx.post(post, content=content, headers=AUTHORIZED)
        assert refused.status_code == status and refused.json()["error"]["message"]
    for wrong in ({}, {"Authorization": b"Bearer \xff"}):
        for path in ("/v1/models", "/metrics", "/about"):
            assert httpx.get(url + path, headers=wrong).status_code == 401
        assert httpx.post(post, content=b"{", headers=wrong).status_code == 401
    form = AUTHORIZED | {"Content-Type": "text/plain"}  # what another page may send
    assert httpx.post(post, content=b"{}", headers=form).status_code == 415
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


def test_an_error_within_a_stream_is_its_last_piece(client, held, engine, monkeypatch):
    pieces = iter(ask_server(client, stream=True))
    next(pieces)
    assert held.begun.wait(30)
    monkeypatch.setattr(engine, "limits", engine.limits.__class__(seconds=0.0))
    held.go_on.set()
    with pytest.raises(openai.APIError, match="The answer was not done within 0 seconds"):
        list(pieces)


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
    assert text_of(ask_server(client))


def test_the_server_says_how_it_does_and_what_there_is(url, client, engine, monkeypatch):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "model": "tiny", "corpus": True}
    page = httpx.get(url)
    assert page.headers["content-type"].startswith("text/html") and "://" not in page.text  # nothing from elsewhere
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    ask_server(client)
    metrics = httpx.get(f"{url}/metrics", headers=AUTHORIZED).text
    names = ('requests_total{status="200"}', "tokens_total", "prefix_bytes", 'seconds_count{part="total"}')
    assert all(f"arcaligner_{name}" in metrics for name in names) and "process_resident_memory_bytes" in metrics
    about = httpx.get(f"{url}/about", headers=AUTHORIZED).json()
    assert about == {
        "model": "tiny",
        "corpus": {"name": "corpus", "documents": 2, "passages": 2},
        "rates": [],
        "top_k": 5,
        "limits": {"documents": 4, "file_bytes": 16 * 2**20},
        "examples": [],
    }
    monkeypatch.setattr(engine, "retriever", None)
    about = httpx.get(f"{url}/about", headers=AUTHORIZED).json()
    assert about["corpus"] is None and [each["text"] != "" for each in about["examples"]] == [True] * 3


def test_without_a_key_only_this_machine_may_ask(engine):
    client = TestClient(create_app(engine, ServerSettings()))  # without a lifespan, which would close the engine
    for host, status in (("evil.example:8000", 400), ("[::1]:8000", 200), ("localhost", 200)):
        assert client.get("/health", headers={"Host": host}).status_code == status
    assert ServerSettings().host == "127.0.0.1"
    ServerSettings(host="0.0.0.0", api_key="key")
    with pytest.raises(ValueError, match="there is no API key, so that anybody could ask"):
        ServerSettings(host="0.0.0.0", api_key="")
