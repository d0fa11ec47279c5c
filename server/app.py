"""The server: routes, limits, key and metrics around an [`Engine`].

/v1/chat/completions, /v1/models    as the clients of OpenAI speak them
/health, /metrics                   for whoever watches it; metrics in the format of Prometheus
/                                   a page to ask from
/about, /passages                   what the page shows of the server; the passages of a file that is dropped into it
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

try:
    import prometheus_client
    import uvicorn
    from fastapi import Depends, FastAPI, Query, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException  # also of an unknown address and of a body that is no JSON
    from starlette.middleware.trustedhost import TrustedHostMiddleware
except ImportError as error:
    raise ImportError(
        "The server needs FastAPI, uvicorn and prometheus-client: `pip install 'arcaligner[server]'`."
    ) from error

from ..common.files import CASE_STUDIES, read_json_lines
from .answers import Answer
from .answers import Request as EngineRequest
from .engine import BusyError, Engine
from .files import MAX_FILE_BYTES, read_passages
from .limits import BodyLimit, TimedConnection
from .protocol import ChatRequest, Completion, error_body, event

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page.html"
# The page is whole: nothing is loaded from elsewhere, and no other page may frame it.
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
PAGE_POLICY += "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
# Files that are read at a time, each by a process.
MAX_FILES = 2
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ClientLeftError(Exception):
    """The client has left before its answer."""


# What goes wrong, and the status that says so. 499, which only the metrics show, is nginx's of a client that has left.
STATUSES = ((TimeoutError, 408), (ClientLeftError, 499), (BusyError, 429), (ValueError, 400), (TypeError, 400))
STATUSES += ((RequestValidationError, 400), (OSError, 503))
# Where a field takes one of several kinds, pydantic names the kind as it does a field.
UNION_KINDS = ("constrained-", "literal[")


@dataclass(frozen=True)
class ServerSettings:
    """How the server is reached: its model's name, where it listens, the key that clients send, the longest request."""

    model: str = "arcaligner"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = 2**20

    def __post_init__(self):
        if not self.api_key and self.host not in LOOPBACK:
            raise ValueError(
                f"`--host` is {self.host!r} and there is no API key, so that anybody could ask. Set "
                "`ARCALIGNER_API_KEY`, or bind to 127.0.0.1."
            )


class Metrics:
    """Counters of one server, for Prometheus."""

    def __init__(self, engine: Engine):
        self.registry = prometheus_client.CollectorRegistry()
        own = {"registry": self.registry, "namespace": "arcaligner"}
        prometheus_client.ProcessCollector(registry=self.registry)  # memory, open files
        self.requests = prometheus_client.Counter("requests", "Requests by status.", ["status"], **own)
        self.tokens = prometheus_client.Counter("tokens", "Tokens read and written.", ["kind"], **own)
        self.slots = prometheus_client.Counter("slots", "Slots read.", **own)
        self.seconds = prometheus_client.Histogram("seconds", "Seconds of an answer, by part.", ["part"], **own)
        self.batch = prometheus_client.Histogram("batch_size", "Requests per batch.", buckets=(1, 2, 4, 8, 16), **own)
        for name, text, value in (
            ("waiting", "Requests that wait.", lambda: engine.num_waiting),
            ("prefix_bytes", "Bytes of slot prefixes in memory.", lambda: engine.store.bytes),
            ("prefix_hits", "Slot prefixes found.", lambda: engine.store.hits),
            ("prefix_misses", "Slot prefixes read.", lambda: engine.store.misses),
        ):
            prometheus_client.Gauge(name, text, **own).set_function(value)

    def count(self, answer: Answer) -> None:
        """Counts an answer that was given."""
        self.tokens.labels("read").inc(answer.prompt_tokens)
        self.tokens.labels("written").inc(answer.completion_tokens)
        self.slots.inc(answer.statistics["slots"])
        self.batch.observe(answer.batch_size)
        for part in ("waiting", "retrieval", "slots", "choosing", "model", "first_token", "total"):
            self.seconds.labels(part).observe(answer.seconds[part])


def describe_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body of an error: of the client's mistakes 4xx, of ours 5xx. What is not expected is logged, and the
    client is told its kind only."""
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    else:
        status, text = next((status for kind, status in STATUSES if isinstance(error, kind)), 500), str(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"] if part != "body"]
        place = ".".join(part for part in parts if not part.startswith(UNION_KINDS))
        told = first.get("ctx", {}).get("error")  # as it was raised by us
        text = str(told) if isinstance(told, ValueError) else f"{place or 'The body'}: {first['msg']}"
    if status == 500:
        logger.error("An answer failed.", exc_info=error)
        text = type(error).__name__
    return status, error_body(text, "invalid_request_error" if status < 500 else "server_error")


def refuse(request: Request, error: Exception) -> JSONResponse:
    """An error as an answer."""
    status, body = describe_error(error)
    return JSONResponse(body, status)


async def while_connected(request: Request, result: Awaitable[Any]) -> Any:
    """Waits for a result as long as the client does."""

    async def client_leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting = [asyncio.ensure_future(result), asyncio.ensure_future(client_leaves())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not waiting[0].done():
            raise ClientLeftError("The client has left.")
        return waiting[0].result()
    finally:
        for each in waiting:
            each.cancel()


class Routes:
    """What the server answers at each address."""

    # Without a corpus, questions to begin with; each brings its text.
    examples = [
        {"question": each["question"], "text": each["passages"][0]["text"]} for each in read_json_lines(CASE_STUDIES)
    ]

    def __init__(self, engine: Engine, settings: ServerSettings):
        self.engine, self.settings, self.metrics = engine, settings, Metrics(engine)
        self.started, self.files = int(time.time()), 0

    def check_key(self, request: Request) -> None:
        """Refuses a request without the key, if there is one."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.settings.api_key and not secrets.compare_digest(given.encode(), self.settings.api_key.encode()):
            raise HTTPException(401, "The API key is missing or wrong; expected `Authorization: Bearer KEY`.")

    async def page(self) -> FileResponse:
        return FileResponse(PAGE, media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    async def about(self) -> dict[str, Any]:
        engine, corpus, rate, examples = self.engine, None, self.engine.tokens_per_slot, self.examples
        if engine.retriever is not None:
            opened = engine.retriever.corpus
            size = {"documents": len(await asyncio.to_thread(opened.documents)), "passages": len(opened)}
            corpus, rate = {"name": opened.path.name, **size}, rate or opened.settings["tokens_per_slot"]
            examples = []
        return {
            "model": self.settings.model,
            "corpus": corpus,
            "tokens_per_slot": rate or engine.processor.tokens_per_slot,
            "rates": engine.processor.trained_tokens_per_slot or [],
            "top_k": engine.top_k,
            "limits": {"documents": engine.limits.max_documents, "file_bytes": MAX_FILE_BYTES},
            "examples": examples,
        }

    async def passages(self, name: Annotated[str, Query(max_length=1000)], request: Request) -> dict[str, Any]:
        if request.headers.get("content-type") != "application/octet-stream":  # which no form of another page sends
            raise HTTPException(415, "Send the file as it is, with `Content-Type: application/octet-stream`.")
        if self.files >= MAX_FILES:
            raise BusyError("Too many files are being read. Try again later.")
        self.files += 1
        try:
            corpus = self.engine.retriever and self.engine.retriever.corpus
            words = 100 if corpus is None else corpus.settings["passage_words"]
            data, spacy_model = await request.body(), self.engine.processor.spacy_model
            return await asyncio.to_thread(read_passages, name, data, words, spacy_model)
        finally:
            self.files -= 1

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "model": self.settings.model, "corpus": self.engine.retriever is not None}

    async def show_metrics(self) -> Response:
        text = prometheus_client.generate_latest(self.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def model(self, name: str) -> Any:
        if name != self.settings.model:
            text = f"There is no model {name!r}; expected {self.settings.model!r}."
            return JSONResponse(error_body(text, code="model_not_found"), 404)
        return {"id": name, "object": "model", "created": self.started, "owned_by": "arcaligner"}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.settings.model)]}

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        if body.model != self.settings.model:
            return await self.model(body.model)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

        def put(piece: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        asked = body.engine_request(put)
        try:
            future = self.engine.submit(asked)
            if not body.stream:
                answer = await while_connected(request, asyncio.wrap_future(future))
                self.metrics.count(answer)
                return JSONResponse(Completion(self.settings.model).whole(answer))
            future.add_done_callback(lambda future: put(None))
            first = await while_connected(request, pieces.get())
            if first is None:
                future.result()  # or what was wrong, before an answer begins
        except BaseException as error:
            asked.cancelled = True
            if isinstance(error, Exception):
                return refuse(request, error)
            raise
        return StreamingResponse(self._events(body, asked, first, pieces), media_type="text/event-stream")

    async def _events(
        self, body: ChatRequest, asked: EngineRequest, piece: str | None, pieces: asyncio.Queue
    ) -> AsyncIterator[str]:
        completion = Completion(self.settings.model, bool(body.stream_options and body.stream_options.include_usage))
        try:
            yield completion.begin()
            while piece is not None:
                yield completion.piece(piece)
                piece = await pieces.get()
            answer = asked.future.result()
            self.metrics.count(answer)
            yield completion.end(answer)
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(describe_error(error)[1])
        finally:
            asked.cancelled = True  # where the client has left


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The application of an engine, which is closed with it."""
    routes = Routes(engine, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    def count(status: int) -> None:
        routes.metrics.requests.labels(status).inc()

    app = FastAPI(title="ArcAligner", lifespan=lifespan, docs_url=None, redoc_url=None)
    if not settings.api_key:  # a name that was pointed here is a page that asks from somebody's browser
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=(*LOOPBACK, "[::1]"), www_redirect=False)
    limits = {"max_body_bytes": settings.max_body_bytes, "others": {"/passages": MAX_FILE_BYTES}}
    app.add_middleware(BodyLimit, count=count, **limits)
    for kind in (HTTPException, *(kind for kind, _ in STATUSES), Exception):
        app.add_exception_handler(kind, refuse)
    app.get("/")(routes.page)
    app.get("/health")(routes.health)
    keyed = [Depends(routes.check_key)]
    app.get("/about", dependencies=keyed)(routes.about)
    app.post("/passages", dependencies=keyed)(routes.passages)
    app.get("/metrics", dependencies=keyed)(routes.show_metrics)
    app.get("/v1/models", dependencies=keyed)(routes.models)
    app.get("/v1/models/{name:path}", dependencies=keyed)(routes.model)
    app.post("/v1/chat/completions", dependencies=keyed)(routes.chat)
    return app


class Server(uvicorn.Server):
    """Says that it listens, and that it stops."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[int], None]):
        super().__init__(config)
        self.on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_listening(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.should_exit:
            print("Stopping: answers that were begun are finished, another Ctrl-C ends at once.", file=sys.stderr)
        super().handle_exit(sig, frame)


def serve(engine: Engine, settings: ServerSettings, on_listening: Callable[[int], None]) -> None:
    """Serves until it is asked to end; then what was begun is answered first. `on_listening` is called once, with the
    port, when clients can connect."""
    app, timeout = create_app(engine, settings), int(engine.limits.seconds)
    limits = {"http": TimedConnection, "ws": "none", "timeout_graceful_shutdown": timeout}
    config = uvicorn.Config(app, host=settings.host, port=settings.port, log_level="warning", **limits)
    server = Server(config, on_listening)
    with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        server.run()
