"""OpenAI's official client gets answers with and without passages; a mistake gives an error to its request alone."""

import asyncio
import codecs
import dataclasses
import gzip
import json
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from arcaligner.apps.server import app, chat_request
from arcaligner.apps.server.app import Routes, ServerSettings, create_app, refuse
from arcaligner.apps.server.chat_request import ChatRequest
from arcaligner.apps.server.request import Limits, RequestCancelledError

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


def text_of_stream(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("tokens_per_slot", [None, 3, "segment"])
def test_documents_as_for_the_pipeline(client, ask, tokens_per_slot):
    """Documents of a request give the same prompt as in the pipeline."""
    answer, again = (ask_server(client, documents=DOCUMENTS, tokens_per_slot=tokens_per_slot) for _ in range(2))
    settings, report = {} if tokens_per_slot is None else {"tokens_per_slot": tokens_per_slot}, report_of(answer)
    row = {"question": QUESTION, "documents": DOCUMENTS}
    expected = ask(row, return_slots=True, max_new_tokens=8, **settings)[0]
    assert text_of(answer) == expected["generated_text"].lstrip() and report["statistics"] == expected["statistics"]
    places = [{key: segment[key] for key in ("document", "start", "end")} for segment in expected["segments"]]
    assert report["segments"] == places
    sources = [{"title": "", "text": RADIK, "number": 0}, DOCUMENTS[1] | {"number": 1}]
    assert report["sources"] == [source | {"answer": None, "used": True, "read": True} for source in sources]
    assert (text_of(again), again.usage, report_of(again)["num_cached"]) == (text_of(answer), answer.usage, 2)
    seconds = report["seconds"]
    parts = sum(seconds[name] for name in ("waiting", "retrieval", "slots", "scoring", "model"))
    assert parts == pytest.approx(seconds["first_token"]) and seconds["first_token"] <= seconds["total"]


def test_old_names_have_same_values(client, url):
    """Fields of version 0.2 are sent for one release more, in answers and in metrics."""
    report = report_of(ask_server(client, documents=DOCUMENTS))
    assert (report["kept"], report["confidence"]) == (report["num_cached"], report["answerability"])
    assert report["seconds"]["choosing"] == report["seconds"]["scoring"]
    assert [source["read"] for source in report["sources"]] == [source["used"] for source in report["sources"]]
    metrics = httpx.get(f"{url}/metrics", headers=AUTHORIZED).text
    values = dict(line.split(" ") for line in metrics.splitlines() if line.startswith("arcaligner_"))
    for old, new in {
        'tokens_total{kind="read"}': "prompt_tokens_total",
        'tokens_total{kind="written"}': "completion_tokens_total",
        'seconds_sum{part="choosing"}': 'seconds_sum{part="scoring"}',
    }.items():
        assert float(values[f"arcaligner_{old}"]) == float(values[f"arcaligner_{new}"]) >= 0


def test_corpus_serves_requests_without_documents(client, retriever, ask):
    """The corpus is used if a request has no documents."""
    for number, tokens_per_slot in ((1, None), (2, 3)):  # as they are stored, and encoded again
        answer, retrieved = (
            ask_server(client, num_passages=number, tokens_per_slot=tokens_per_slot),
            retriever(QUESTION, number),
        )
        sources = [document | {"answer": None, "used": True, "read": True} for document in retrieved.documents]
        assert report_of(answer)["sources"] == sources
        row = {"question": QUESTION, "documents": retrieved.documents}
        expected = ask(row, return_slots=True, max_new_tokens=8, tokens_per_slot=tokens_per_slot or "segment")[0]
        assert text_of(answer) == expected["generated_text"].lstrip()
        assert report_of(answer)["statistics"] == expected["statistics"]
    steering = f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    plain = ask([{"role": "user", "content": steering}], max_new_tokens=8, return_full_text=False)[0]["generated_text"]
    without = ask_server(client, steering, num_passages=0)
    assert text_of(without) == plain.lstrip() and report_of(without)["statistics"]["slots"] == 0
    nothing = report_of(ask_server(client, documents=[]))
    assert nothing["sources"] == [] and nothing["statistics"]["slots"] == 1


def test_stream_equals_whole_answer(client):
    whole = ask_server(client, documents=DOCUMENTS)
    options = {"documents": DOCUMENTS, "stream_options": {"include_usage": True}}
    chunks = list(ask_server(client, stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant" and text_of_stream(chunks) == text_of(whole)
    *others, end, last = chunks
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason and last.usage == whole.usage
    assert {chunk.usage for chunk in (*others, end)} == {None} and len({chunk.id for chunk in chunks}) == 1
    assert report_of(last)["statistics"] == report_of(whole)["statistics"]
    *_, last = ask_server(client, stream=True, documents=DOCUMENTS)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason and report_of(last)


def test_stop_ends_before_its_text(client):
    """A stop string ends the answer before it, and no streamed chunk shows its beginning."""
    whole = text_of(ask_server(client, documents=DOCUMENTS))
    stop = whole[3:6]
    expected = whole[: whole.find(stop)]
    answer = ask_server(client, documents=DOCUMENTS, stop=["never said", stop])
    assert (text_of(answer), answer.choices[0].finish_reason) == (expected, "stop")
    assert text_of_stream(ask_server(client, stream=True, documents=DOCUMENTS, stop=stop)) == expected
    tail = f"{whole[-2:]}?"  # text that could begin `stop` is sent at the end
    assert text_of(ask_server(client, documents=DOCUMENTS, stop=tail)) == whole


def test_fields_without_effect(client):
    """Fields that have no effect are accepted, and an answer can be sent back as a message."""
    expected = ask_server(client, documents=DOCUMENTS)
    neutral = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": False, "tools": [], "seed": 3}
    neutral |= {"response_format": {"type": "text"}, "tool_choice": "none", "audio": None, "stop": None, "top_k": None}
    neutral |= {"user": "somebody", "store": True, "metadata": {"a": "b"}, "stream_options": None}
    neutral |= {"temperature": 5e-324}  # almost zero
    neutral |= {"logit_bias": {}, "modalities": ["text"], "top_logprobs": 0, "reasoning_effort": "none"}
    neutral |= {"parallel_tool_calls": True, "functions": [], "function_call": "auto", "min_p": 0.0, "verbosity": "low"}
    neutral |= {"repetition_penalty": 1.0, "repeat_penalty": 1.0, "prompt_cache_retention": "in_memory", "mirostat": 0}
    neutral |= {"chat_template_kwargs": {"enable_thinking": False}, "keep_alive": "5m", "reasoning": {"effort": "low"}}
    neutral |= {"return_slots": True, "return_full_text": False, "full_text": False, "num_return_sequences": 1}
    assert ask_server(client, documents=DOCUMENTS, **neutral).choices[0].message == expected.choices[0].message
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    turns += [expected.choices[0].message.model_dump(), {"role": "user", "content": "Why?"}]
    answer = text_of(ask_server(client, turns))
    turns[0]["role"] = "system"
    turns[2] |= {"annotations": [], "tool_calls": [], "reasoning_content": "Hm.", "id": "msg_1", "refusal": None}
    turns[3]["content"] = [{"type": "text", "text": "Why?", "cache_control": {"type": "ephemeral"}}]
    assert text_of(ask_server(client, turns)) == answer


def test_fields_of_openai_known():
    """Each request field of the installed client is either accepted or refused by name."""
    fields = {**CompletionCreateParamsBase.__annotations__, "stream": bool}
    known = {
        *ChatRequest.model_fields,
        *chat_request.HINTS,
        *chat_request.UNSUPPORTED,
        *chat_request.UNSUPPORTED_SAMPLING,
    }
    assert fields.keys() <= known


def test_number_of_tokens_cut(client, engine, monkeypatch):
    """A number of tokens above the limit becomes the limit, and so does -1."""
    submit, numbers = engine.submit, []
    monkeypatch.setattr(engine, "submit", lambda request: numbers.append(request.max_new_tokens) or submit(request))
    monkeypatch.setattr(engine, "limits", dataclasses.replace(engine.limits, max_new_tokens=4))
    for number in (1, 4096, -1):
        ask_server(client, max_tokens=number)
    ask_server(client, max_tokens=2, max_completion_tokens=3)
    assert numbers == [1, 4, 4, 3]


def test_draws_are_limited(client, engine, monkeypatch):
    """With a temperature, `top_k` and `min_p` reach the sampler."""
    requests, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (requests.append(request), submit(request))[1])
    ask_server(client, top_k=40, min_p=0.1, temperature=1)
    ask_server(client, top_k=-1, temperature=1)
    ask_server(client, top_k=40, min_p=0.1)
    settings = [(request.sampling_top_k, request.min_p, request.top_k) for request in requests]
    assert settings == [(40, 0.1, 5), (0, 0, 5), (0, 0.1, 5)]


def test_sampling_top_k_finds_nothing(client, engine, monkeypatch):
    """A `top_k` for sampling sets no number of passages; one that can only be the old name of `num_passages` does."""
    submit, requests = engine.submit, []
    monkeypatch.setattr(engine, "submit", lambda request: requests.append(request) or submit(request))
    for settings in ({"top_k": 0}, {"top_k": -1}, {"top_k": 1, "temperature": 0.7}, {"top_k": 40, "num_passages": 1}):
        ask_server(client, **settings)
    assert [(request.top_k, request.temperature) for request in requests] == [(5, 0), (5, 0), (5, 0), (1, 0)]
    with pytest.warns(FutureWarning, match="pass `num_passages`"):
        answer = ask_server(client, top_k=2)
    assert requests[-1].top_k == 2 and "pass `num_passages`" in report_of(answer)["notes"][0]
    assert report_of(ask_server(client, top_k=40))["notes"] and requests[-1].top_k == 5
    assert report_of(ask_server(client, num_passages=2))["notes"] == []


def test_tool_calls_of_a_history():
    """A turn that calls tools is left out, and the tools' results stand before the next question."""
    calls = [{"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]
    result = {"role": "tool", "tool_call_id": "1", "content": "since 2003"}
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When?"}]
    turns += [{"role": "assistant", "content": None, "tool_calls": calls}, result, result | {"content": "or 2004"}]
    turns += [{"role": "assistant", "content": "2003.", "tool_calls": []}, {"role": "user", "content": "Why?"}]
    turns += [{"role": "assistant", "content": "I look.", "function_call": calls[0]["function"]}]
    turns += [{"role": "function", "name": "look_up", "content": "unknown"}]
    messages = ChatRequest.model_validate({"model": "tiny", "messages": turns}).engine_request(print, Limits()).messages
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "since 2003\n\nor 2004\n\nWhen?"},
        {"role": "assistant", "content": "2003."},
        {"role": "user", "content": "unknown\n\nWhy?"},
    ]


def test_documents_of_libraries(client):
    """Documents in the formats of libraries are accepted as passages; id and metadata are returned."""
    plain = [{"title": "Radik", "text": RADIK}] * 2
    origin = {"title": "Radik", "page": 3}
    langchain = {"id": "7", "page_content": RADIK, "metadata": origin, "type": "Document"}
    dumped = {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "Document"], "kwargs": langchain}
    node = {"id_": "7", "embedding": None, "metadata": origin, "relationships": {}, "text": RADIK}
    resource = {"id_": "7", "metadata": origin, "text_resource": {"text": RADIK, "url": None}}
    scored = {"node": node, "score": 0.7, "class_name": "NodeWithScore"}
    haystack = {"id": "7", "content": RADIK, "meta": origin, "score": 0.1}
    cohere = {"id": "7", "data": {"text": RADIK, "title": "Radik"}}
    searched = {"id": "7", "title": "Radik", "content": [{"type": "text", "text": RADIK}], "attributes": origin}
    expected = ask_server(client, documents=plain)
    sources = [
        {"title": "Radik", "text": RADIK, "number": number, "answer": None, "used": True, "read": True}
        for number in (0, 1)
    ]
    assert report_of(expected)["sources"] == sources
    for pair in ((langchain, dumped), (node, resource), (scored, haystack), (cohere, searched)):
        answer = ask_server(client, documents=pair)
        assert text_of(answer) == text_of(expected)
        fields = [{"id": "7"} | ({} if document is cohere else {"metadata": origin}) for document in pair]
        assert report_of(answer)["sources"] == [one | two for one, two in zip(fields, sources, strict=True)]
    assert text_of(ask_server(client, extra_body={"documents": plain})) == text_of(expected)  # as JavaScript sends it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": " "}]}, "question"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "0.type: Input should be 'text'"),
        ({"messages": [{"role": "user", "content": "Who \ud800?"}]}, "The body: Invalid JSON"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "question"),
        ({"max_tokens": 0}, "`max_tokens` is 0; expected at least 1, or -1"),
        ({"max_completion_tokens": 0, "max_tokens": 1}, "`max_completion_tokens` is 0; expected"),
        ({"documents": ["a"] * 5}, "Got 5 documents; expected at most 4"),
        ({"documents": [{"body": "a"}]}, "documents.0.text: Field required"),
        ({"documents": [{"title": "T" * 1001, "text": "a"}]}, "documents.0.title: String should have at most 1000"),
        (
            {"response_format": {"type": "json_object"}},
            '`response_format` is {"type": "json_object"}, which is not supported. Leave out',
        ),
        ({"numpassages": 3}, "Unknown key `numpassages` in the request. Did you mean `num_passages`?"),
        ({"tools": [{"type": "function"}]}, "Tools are not supported. Leave out `tools`, or also pass"),
        (
            {"tool_choice": "required"},
            '`tool_choice` is "required", which is not supported. Leave out `tool_choice`, or pass "none".',
        ),
        (
            {"logit_bias": {"5": 1}},
            '`logit_bias` is {"5": 1}, which is not supported. Leave out `logit_bias`, or pass {}.',
        ),
        (
            {"repetition_penalty": 1.1},
            "`repetition_penalty` is 1.1, which is not supported. Leave out `repetition_penalty`, or pass 1.",
        ),
        (
            {"typical_p": 0.1, "temperature": 1},
            "`typical_p` is 0.1, which is not supported. Leave out `typical_p`, or pass 1.",
        ),
        ({"moderation": {"model": 90 * "m"}}, f'`moderation` is {{"model": "{69 * "m"}..., which is not supported.'),
        (
            {"messages": [{"role": "user", "content": "Who?", "images": ["x"]}]},
            "A message has the field `images`, which is not supported",
        ),
        ({"messages": [{"role": "tool", "content": "It."}]}, "`messages.0` is the result of a tool"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content: Field required"),
        ({"messages": [{"role": "user", "content": "Who?"}] * 1001}, "messages: List should have at most 1000"),
        ({"stop": ["a"] * 17}, "stop: List should have at most 16"),
        ({"stop": "a" * 257}, "stop.0: String should have at most 256"),
        ({"tokens_per_slot": "word"}, "`tokens_per_slot` is 'word'; expected a whole number"),
        ({"seed": 2**63}, "seed: "),
        ({"copy_bonus": -1}, "`copy_bonus` is -1.0; expected a finite number of at least 0"),
        ({"messages": [{"role": "user", "content": "Too long " * 600}]}, "positions, but the base model"),
    ],
)
def test_bad_request_names_reason(url, change, message):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2} | change
    response = httpx.post(f"{url}/v1/chat/completions", content=json.dumps(body), headers=AUTHORIZED)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_non_requests_are_refused(url, client, monkeypatch):
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
    with pytest.raises(openai.NotFoundError, match="This server has no model 'gpt'; expected the model 'tiny'"):
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "?"}])
    for path, status in (("/none", 404), ("/v1/chat/completions", 405)):
        refused = httpx.get(url + path)
        assert refused.status_code == status and refused.json()["error"]["message"]


def test_byte_order_mark_is_ignored(url):
    """Bodies in the encodings of PowerShell and .NET, with a byte order mark, are accepted."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
    text, post = json.dumps(body), f"{url}/v1/chat/completions"
    contents = [codecs.BOM_UTF8 + text.encode(), text.encode("utf-16"), codecs.BOM_UTF16_BE + text.encode("utf-16-be")]
    for content in (*contents, text.encode("utf-32")):
        assert httpx.post(post, content=content, headers=AUTHORIZED).status_code == 200


def test_a_packed_body_is_refused(url):
    """A compressed body is refused by the name of its compression, not as broken JSON."""
    packed = AUTHORIZED | {"Content-Encoding": "gzip"}
    refused = httpx.post(f"{url}/v1/chat/completions", content=gzip.compress(b"{}"), headers=packed)
    assert refused.status_code == 415 and "`Content-Encoding: gzip`" in refused.json()["error"]["message"]


def test_key_in_any_form(engine):
    """The scheme may be in any case, and letters beyond ASCII in UTF-8 or Latin-1; any other key is refused."""
    client = TestClient(create_app(engine, ServerSettings(api_key="Schlüssel")))
    right = ["Bearer Schlüssel", "bearer  Schlüssel ", "BEARER Schlüssel", "Schlüssel"]
    wrong = ["", "Bearer", "Bearer ", "Bearer Schl", "Basic Schlüssel", "Bearer Schlüssel2"]
    for encoding in ("utf-8", "latin-1"):
        responses = [
            client.get("/v1/models", headers={b"authorization": key.encode(encoding)}) for key in right + wrong
        ]
        assert [response.status_code for response in responses] == [200] * 4 + [401] * 6
        assert responses[-1].json()["error"]["code"] == "invalid_api_key"
    cyrillic = TestClient(create_app(engine, ServerSettings(api_key="ключ")))
    responses = [
        cyrillic.get("/v1/models", headers={b"authorization": key.encode()}) for key in ("Bearer ключ", "Bearer ")
    ]
    assert [response.status_code for response in responses] == [200, 401]


def test_model_by_its_name(url, client):
    """The server answers `models.retrieve`, `HEAD` without a body on each path, and has an OpenAPI description."""
    assert client.models.retrieve("tiny") == client.models.list().data[0]
    with pytest.raises(
        openai.NotFoundError, match="This server has no model 'user/gpt'; expected the model 'tiny'"
    ) as caught:
        client.models.retrieve("user/gpt")
    assert caught.value.code == "model_not_found"
    for path in ("/", "/health", "/about", "/metrics", "/v1/models", "/v1/models/tiny"):
        head = httpx.head(url + path, headers=AUTHORIZED)
        assert head.status_code == 200 and head.content == b""
    described = httpx.get(f"{url}/openapi.json").json()
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"].keys() == ChatRequest.model_fields.keys()
    assert {"Message", "Passage", "Text"} <= described["components"]["schemas"].keys()


def test_answer_time_is_limited(engine):
    """The server does not wait for an answer longer than the limit."""
    routes = Routes(SimpleNamespace(limits=Limits(seconds=0.05)), ServerSettings())
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="The answer was not finished within 0.05 seconds"):
        asyncio.run(routes.in_time(asyncio.sleep(30), SimpleNamespace(arrived=began)))
    assert time.monotonic() - began < 5


def test_unexpected_error_stays_private(caplog):
    """An unexpected error is logged, and its text is not sent to the client."""
    response = refuse(None, RuntimeError("a secret"))
    error = json.loads(response.body)["error"]
    assert (response.status_code, error["type"]) == (500, "server_error")
    assert (
        error["message"]
        == "This request caused an error in the server (RuntimeError). The server's log has the details."
    )
    assert "a secret" in caplog.text


def test_stream_ends_with_its_error(client, held, engine, monkeypatch):
    """An error during a stream is the last chunk of the stream."""
    chunks = iter(ask_server(client, stream=True))
    next(chunks)
    assert held.begun.wait(30)
    monkeypatch.setattr(engine, "limits", engine.limits.__class__(seconds=0.0))
    held.go_on.set()
    with pytest.raises(openai.APIError, match="The answer was not finished within 0 seconds"):
        list(chunks)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_stops_answer(client, held, stream):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    if stream:
        answer = client.chat.completions.create(**chat, stream=True)
        next(iter(answer))
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).chat.completions.create(**chat)
        assert held.begun.wait(30)
    assert isinstance(held.end_of_the_first(), RequestCancelledError)
    assert text_of(ask_server(client))


def test_health_metrics_and_models(url, client, engine, monkeypatch):
    """The server reports its health, its metrics and its model."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "model": "tiny", "corpus": True}
    page = httpx.get(url)
    # Nothing is loaded from another server.
    assert page.headers["content-type"].startswith("text/html") and "://" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    ask_server(client)
    metrics = httpx.get(f"{url}/metrics", headers=AUTHORIZED).text
    names = (
        'requests_total{status="200"}',
        "tokens_total",
        "prompt_tokens_total",
        "prefix_bytes",
        'seconds_count{part="total"}',
    )
    names += ("slots_total", "batch_size_count")
    assert all(f"arcaligner_{name}" in metrics for name in names) and "process_resident_memory_bytes" in metrics
    about = httpx.get(f"{url}/about", headers=AUTHORIZED).json()
    assert about == {
        "model": "tiny",
        "corpus": {"name": "corpus", "documents": 2, "passages": 2},
        "tokens_per_slot": [],
        "top_k": 5,
        "limits": {"documents": 4, "file_bytes": 16 * 2**20},
        "examples": [],
    }
    monkeypatch.setattr(engine, "retriever", None)
    about = httpx.get(f"{url}/about", headers=AUTHORIZED).json()
    assert about["corpus"] is None and [example["text"] != "" for example in about["examples"]] == [True] * 3


def test_keyless_server_refuses_foreign_hosts(engine):
    client = TestClient(create_app(engine, ServerSettings()))  # without a lifespan, which would close the engine
    for host, status in (("evil.example:8000", 400), ("[::1]:8000", 200), ("localhost", 200)):
        assert client.get("/health", headers={"Host": host}).status_code == status
    assert ServerSettings().host == "127.0.0.1"
    ServerSettings(host="0.0.0.0", api_key="key")
    with pytest.raises(ValueError, match="no API key is set"):
        ServerSettings(host="0.0.0.0", api_key="")
