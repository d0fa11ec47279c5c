"""Clients that people have ask the server unchanged. Some need other versions of libraries than we do: all are run by
the Python of `ARCALIGNER_CLIENTS`, an environment of their own (CONTRIBUTING.md), or by this one."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from call_clients import DOCUMENTS, EXTRAS, MAX_TOKENS, QUESTION

FOLDER = Path(__file__).parents[2]
RECORDED = sorted((Path(__file__).parent / "requests").glob("*.json"))
CORPUS_DOCUMENT = FOLDER.parent / "docs" / "corpus.md"
PYTHON = os.environ.get("ARCALIGNER_CLIENTS", sys.executable)
PACKAGES = {"langchain": "langchain_openai", "llama_index": "llama_index.llms.openai_like", "litellm": "litellm"}


def run(*command):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([PYTHON, *command], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("name", PACKAGES)
def test_clients_get_answers(name, url, client):
    """A client gets answers from documents and corpus, whole and streamed."""
    if run("-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({PACKAGES[name]!r}) is None)").returncode:
        pytest.skip(f"{PYTHON} has no {PACKAGES[name]}")
    called = run(FOLDER / "call_clients.py", name, f"{url}/v1", client.api_key)
    assert called.returncode == 0, called.stderr

    chat = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": MAX_TOKENS}
    expected = [client.chat.completions.create(**chat, extra_body=extra) for extra in EXTRAS]
    expected = [answer.choices[0].message.content for answer in expected]
    assert json.loads(called.stdout.splitlines()[-1]) == 2 * expected and len(set(expected)) == 2


def test_documented_langchain_retriever(retriever):
    """The retriever of LangChain in the documentation finds the passages that `Retriever` finds."""
    pytest.importorskip("langchain_core")
    code = r"```python\n(from typing import Any\n\nfrom langchain.*?)```"
    (block,) = re.findall(code, CORPUS_DOCUMENT.read_text("utf-8"), flags=re.DOTALL)
    assert len(block.splitlines()) <= 20
    names = {"retriever": retriever}
    exec(compile(block, str(CORPUS_DOCUMENT), "exec"), names)  # noqa: S102
    documents = names["CorpusRetriever"](retriever=retriever, top_k=2).invoke(DOCUMENTS[0])
    expected = retriever(DOCUMENTS[0], 2).documents
    assert [document.page_content for document in documents] == [document["text"] for document in expected]
    assert [document.metadata["source"] for document in documents] == [document["document"] for document in expected]
    assert names["passages"]


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_recorded_requests_answered(file, url, engine, monkeypatch):
    """The recorded requests of clients are answered; none of their settings changes the number of retrieved
    passages."""
    recorded, requests, submit = json.loads(file.read_text("utf-8")), [], engine.submit
    monkeypatch.setattr(engine, "limits", dataclasses.replace(engine.limits, max_new_tokens=8))
    monkeypatch.setattr(engine, "submit", lambda request: requests.append(request) or submit(request))
    headers = recorded["headers"]
    for body in recorded["requests"]:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        *_, last = answer.text.split("data: ") if body.get("stream") else ['{"choices"']
        assert last.strip() in ("[DONE]", '{"choices"') and '"arcaligner"' in answer.text
        request = requests[-1]
        assert request.max_new_tokens == 8
        assert request.top_k == body.get("num_passages", engine.top_k)
        assert (request.documents is None) == ("documents" not in body)
        assert all("Kazakh ski jumper" in document["text"] for document in request.documents or [])
        assert len(request.documents or []) == len(body.get("documents", []))
        turns = request.messages
        assert {turn["role"] for turn in turns} <= {"system", "user", "assistant"} and turns[-1]["role"] == "user"
        called = any(message.get("tool_calls") for message in body["messages"])
        assert called == any("since 2003\n\n" in turn["content"] for turn in turns)
