"""A server on loopback with a tiny aligner and a small corpus."""

import threading
import time

import pytest

import arcaligner.apps.corpus  # noqa: F401 (quiets lancedb, which reads its settings when it is imported)

pytest.importorskip("lancedb")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import uvicorn
from conftest import pipeline_of
from openai import OpenAI

from arcaligner import ArcAlignerForCausalLM
from arcaligner.apps.corpus.build import build_corpus
from arcaligner.apps.corpus.retrieve import Retriever
from arcaligner.apps.corpus.table import Corpus
from arcaligner.apps.server.app import ServerSettings, create_app
from arcaligner.apps.server.engine import Engine
from arcaligner.apps.server.listen import TimedConnection
from arcaligner.apps.server.request import Limits

KEY = "a key"


@pytest.fixture(scope="session")
def ask(checkpoint_dir, processor):
    return pipeline_of(ArcAlignerForCausalLM.from_pretrained(str(checkpoint_dir)).eval(), processor)


@pytest.fixture(scope="session")
def retriever(tmp_path_factory, processor):
    folder = tmp_path_factory.mktemp("served")
    (folder / "ada.txt").write_text("Ada wrote the letter in 1843. It was long.")
    (folder / "ski.md").write_text("# Zhaparov\n\nHe is a Kazakh ski jumper. He has competed since 2003.")
    corpus = Corpus.create(folder / "corpus", processor)
    build_corpus([str(folder / "ada.txt"), str(folder / "ski.md")], corpus, processor)
    return Retriever(corpus, processor)


@pytest.fixture(scope="session")
def engine(ask, retriever):
    return Engine(ask, retriever, batch_seconds=0.05, limits=Limits(max_documents=4, max_slots=40, max_new_tokens=256))


class HeldRequests:
    """Requests to an engine, each of which stops at its first piece of text until `go_on` is set."""

    def __init__(self, submit):
        self.engine_submit, self.requests = submit, []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def submit(self, request):
        put = request.on_text or (lambda text: None)  # whether the client streams or not
        request.on_text = lambda text: (put(text), self.begun.set(), self.go_on.wait(30))
        self.requests.append(request)
        return self.engine_submit(request)

    def end_of_the_first(self) -> BaseException | None:
        """The error of the first request after it was cancelled."""
        end = time.monotonic() + 10
        while not self.requests[0].is_cancelled and time.monotonic() < end:
            pass
        self.go_on.set()
        return self.requests[0].future.exception()


@pytest.fixture
def held(engine, monkeypatch) -> HeldRequests:
    requests = HeldRequests(engine.submit)
    monkeypatch.setattr(engine, "submit", requests.submit)
    return requests


@pytest.fixture(scope="session")
def url(engine):
    """The address of the server."""
    app = create_app(engine, ServerSettings(model="tiny", api_key=KEY))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", http=TimedConnection))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    assert not engine.is_running


@pytest.fixture
def client(url):
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client
