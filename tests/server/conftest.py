"""A server on loopback with a tiny aligner and a small corpus."""

import threading
import time

import pytest

import arcaligner.corpus  # noqa: F401 (quiets lancedb, which reads its settings when it is imported)

pytest.importorskip("lancedb")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import uvicorn
from openai import OpenAI

from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline
from arcaligner.corpus.build import build_corpus
from arcaligner.corpus.retrieve import Retriever
from arcaligner.corpus.table import Corpus
from arcaligner.server.answers import Limits
from arcaligner.server.app import ServerSettings, create_app
from arcaligner.server.engine import Engine
from arcaligner.server.limits import TimedConnection

KEY = "a key"


@pytest.fixture(scope="session")
def ask(checkpoint_dir, processor):
    model = ArcAlignerForCausalLM.from_pretrained(str(checkpoint_dir)).eval()
    return ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")


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


@pytest.fixture(scope="session")
def url(engine):
    """Where the server listens."""
    settings = ServerSettings(model="tiny", api_key=KEY, max_body_bytes=20_000)
    server = uvicorn.Server(
        uvicorn.Config(create_app(engine, settings), port=0, log_level="warning", http=TimedConnection)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    assert not engine._thread.is_alive()


@pytest.fixture
def client(url):
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client
