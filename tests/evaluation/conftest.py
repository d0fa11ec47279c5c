"""A real server on loopback, whose base model judges answers and orders passages."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from conftest import pipeline_of

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.apps.server.app import ServerSettings, create_app
from arcaligner.apps.server.engine import Engine


@contextlib.contextmanager
def serving(checkpoint) -> Iterator[str]:
    """The address of a server with an aligner; chats without documents are answered by its base model."""
    model = ArcAlignerForCausalLM.from_pretrained(str(checkpoint)).eval()
    engine = Engine(pipeline_of(model, ArcAlignerProcessor.from_pretrained(str(checkpoint))), None)
    app = create_app(engine, ServerSettings(model="base"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def serve():
    """The function `serving`."""
    return serving


@pytest.fixture(scope="session")
def tiny_server(checkpoint_dir) -> Iterator[str]:
    """The address of a server with a random model, which writes random text."""
    with serving(checkpoint_dir) as url:
        yield url
