"""HTTP application around an [`Engine`]: routes, format of answers, key, limits and metrics.

/v1/chat/completions                OpenAI's API; `chat_request.py` defines the fields of a request
/v1/models, /v1/models/NAME         the one model
/openapi.json                       description of the API
/health, /metrics                   for monitoring; metrics in the format of Prometheus
/                                   a page to ask from
/about, /passages                   for the page: facts about the server; the passages of a file that is dropped into it

In addition to OpenAI's fields, a request has `documents`, `num_passages`, `tokens_per_slot`, `min_confidence`,
`max_passages` and `copy_bonus`; an answer has `arcaligner`, with its sources, answerability, segments, statistics and
seconds.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import prometheus_client
    import uvicorn  # noqa: F401
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from pydantic import ValidationError
    from starlette.exceptions import HTTPException  # also raised for unknown addresses
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise ImportError(
        "The server needs FastAPI, uvicorn and prometheus-client. Run `pip install 'arcaligner[server]'`."
    ) from error

from ...common.files import CASE_STUDIES, read_json_lines
from ...common.passages import Document, no_text, passages_of
from ...common.reading import encoding_of_mark, read_file
from .chat_request import ChatRequest
from .engine import Engine
from .request import Answer, BusyError, RequestCancelledError, UnavailableError
from .request import Request as EngineRequest

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page.html"
# The page is self-contained: nothing is loaded from elsewhere, and no other page may frame it.
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
PAGE_POLICY += "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BODY_BYTES, BODY_SECONDS = 2**20, 30.0  # of a request
# Of a file that is dropped into the page, and of its text: about 1,800 passages of 100 words. Longer files belong in a
# corpus. So many files are converted at a time, each in a process.
MAX_FILE_BYTES, MAX_CHARACTERS, MAX_FILES = 16 * 2**20, 2**20, 2
# OpenAI's error codes, by which clients distinguish errors.
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
# Errors and their status. 499, nginx's code for a client that has disconnected, appears in the metrics only.
STATUSES = ((TimeoutError, 408), (ClientDisconnect, 499), (BusyError, 429), (ValueError, 400), (TypeError, 400))
STATUSES += ((OSError, 503), (RequestCancelledError, 499))


@dataclass(frozen=True)
class ServerSettings:
    """How the server is reached: its model's name, where it listens, the key that clients send."""

    model: str = "arcaligner"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None

    def __post_init__(self):
        if not self.api_key and self.host not in LOOPBACK:
            raise ValueError(
                f"`--host` is {self.host!r} but no API key is set, so anyone could use the server. Set "
                "`ARCALIGNER_API_KEY`, or bind to 127.0.0.1."
            )


# Reading requests


async def read_body(request: Request, kind: str, most: int) -> bytes:
    """Read the body of a request. Refuse it early if it is longer than `most` bytes, too slow, or of another content
    type than `kind`, so that a page of another web site cannot send a form."""
    if (given := request.headers.get("content-type", "").partition(";")[0].strip().lower()) != kind:
        raise HTTPException(
            415, f"Got a body with `Content-Type: {given or 'none'}`; expected `{kind}`. Set this header."
        )
    if (packing := request.headers.get("content-encoding", "identity")) != "identity":
        raise HTTPException(415, f"Got a body with `Content-Encoding: {packing}`; expected one that is not compressed.")
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    text = f"The body is longer than {most} bytes. Pass fewer or shorter documents."
                    raise HTTPException(413, text)
    except TimeoutError as error:
        raise HTTPException(408, f"The body did not arrive within {BODY_SECONDS:g} seconds.") from error
    return body


def read_passages(name: str, data: bytes, passage_tokens: int, processor) -> dict[str, Any]:
    """The passages of a file, as a corpus would cut it. They are not stored. `name` is never used as a path; its suffix
    decides how `data` is converted.

    Returns:
        `dict`: The `name` without folders, `passages` with `title`, `text` and `page` (or `None`), the number of
        `characters` of the text, and how many of them were `read`.
    """
    name = name.replace("\\", "/").rstrip("/").rpartition("/")[2][-255:] or "file"
    title, text, sections = read_file(name, data)
    # Text of a PDF may contain lone surrogates.
    title, text = (each.encode("utf-8", "replace").decode() for each in (title, text))
    if not text.strip():
        raise ValueError(f"{no_text(name)}. Choose another file.")
    document = Document(name, title, text[:MAX_CHARACTERS], sections)
    found = passages_of([document], passage_tokens, processor.spacy_model, processor.tokenizer)
    passages = [{"title": each.title, "text": each.text, "page": each.page} for each in found]
    return {"name": name, "passages": passages, "characters": len(text), "read": min(len(text), MAX_CHARACTERS)}


# Format of answers


def describe_answer(answer: Answer, body: ChatRequest) -> dict[str, Any]:
    """The answer with its usage (a slot counts as one token), sources and statistics. Sources from a request's own
    documents contain the id and metadata that the client sent."""
    read, written = answer.prompt_tokens, answer.completion_tokens
    segments = [] if answer.passages is None else answer.passages.encoded.segments
    names = ("sources", "kept", "answerability", "answer_likelihood", "statistics", "seconds", "batch_size")
    report = {name: getattr(answer, name) for name in names} | {"confidence": answer.answerability}  # its name in 0.2
    if body.documents is not None:
        report["sources"] = [body.documents[each["number"]].origin | each for each in answer.sources]
    report["notes"] = [] if body.note is None else [body.note]
    report["segments"] = [{"document": each.document, "start": each.start, "end": each.end} for each in segments]
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {"usage": usage, "arcaligner": report}


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def describe_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body of an error: 4xx for mistakes of the client, 5xx for ours. An unexpected error is logged, and the
    client gets its type only."""
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    else:
        status, text = next((status for kind, status in STATUSES if isinstance(error, kind)), 500), str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        told = first.get("ctx", {}).get("error")  # the error that we raised
        place = ".".join(map(str, first["loc"])) or "The body"
        text = str(told) if isinstance(told, ValueError) else f"{place}: {first['msg']}"
    if status == 500:
        logger.error("An answer failed.", exc_info=error)
        text = type(error).__name__
    kind, code = "invalid_request_error" if status < 500 else "server_error", CODES.get(status)
    if isinstance(error, UnknownModelError):
        code = "model_not_found"
    return status, {"error": {"message": text, "type": kind, "param": None, "code": code}}


def refuse(request: Request, error: Exception) -> JSONResponse:
    """An error as a response; if the cause is temporary, with `Retry-After`."""
    status, body = describe_error(error)
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, UnavailableError) else None
    return JSONResponse(body, status, headers)


# Addresses


class UnknownModelError(HTTPException):
    """The requested model is not the one of this server."""

    def __init__(self, given: str, expected: str):
        super().__init__(404, f"There is no model {given!r}; expected {expected!r}.")


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
        """Count a completed answer."""
        self.tokens.labels("read").inc(answer.prompt_tokens)
        self.tokens.labels("written").inc(answer.completion_tokens)
        self.slots.inc(answer.statistics["slots"])
        self.batch.observe(answer.batch_size)
        for part, seconds in answer.seconds.items():
            self.seconds.labels(part).observe(seconds)

    def counted(self, app: Callable) -> Callable:
        """Wrap an application to count its responses by status."""

        async def counting(scope, receive, send) -> None:
            async def count(message) -> None:
                if message["type"] == "http.response.start":
                    self.requests.labels(message["status"]).inc()
                await send(message)

            await app(scope, receive, count)

        return counting


class Routes:
    """The handlers of the routes."""

    def __init__(self, engine: Engine, settings: ServerSettings):
        self.engine, self.settings, self.metrics = engine, settings, Metrics(engine)
        self.started, self.files = int(time.time()), asyncio.Semaphore(MAX_FILES)

    def check_key(self, request: Request) -> None:
        """Reject a request without the key, if one is set. Headers are bytes: clients encode non-ASCII letters in UTF-8
        or in Latin-1."""
        if not self.settings.api_key:
            return
        header = request.headers.get("authorization", "").strip()
        scheme, _, rest = header.partition(" ")
        given = (rest.strip() if scheme.lower() == "bearer" else header).encode("latin-1")
        key = self.settings.api_key
        known = [key.encode()] + ([key.encode("latin-1")] if max(key) <= "\xff" else [])
        if not any([secrets.compare_digest(given, each) for each in known]):
            raise HTTPException(401, "The API key is missing or wrong; expected `Authorization: Bearer KEY`.")

    async def page(self) -> FileResponse:
        return FileResponse(PAGE, media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    async def about(self) -> dict[str, Any]:
        engine, corpus, examples = self.engine, None, []
        if engine.retriever is not None:
            opened = engine.retriever.corpus
            documents = await asyncio.to_thread(opened.documents)
            corpus = {"name": opened.path.name, "documents": len(documents), "passages": len(opened)}
        else:
            studies = read_json_lines(CASE_STUDIES)
            examples = [{"question": each["question"], "text": each["passages"][0]["text"]} for each in studies]
        return {
            "model": self.settings.model,
            "corpus": corpus,
            "rates": engine.processor.trained_tokens_per_slot or [],
            "top_k": engine.top_k,
            "limits": {"documents": engine.limits.max_documents, "file_bytes": MAX_FILE_BYTES},
            "examples": examples,
        }

    async def passages(self, request: Request, name: str = "") -> dict[str, Any]:
        if self.files.locked():
            raise BusyError("Too many files are being converted. Try again later.")
        async with self.files:
            corpus = self.engine.retriever and self.engine.retriever.corpus
            processor = self.engine.processor
            most = processor.passage_tokens if corpus is None else corpus.settings["passage_tokens"]
            data = await read_body(request, "application/octet-stream", MAX_FILE_BYTES)
            return await asyncio.to_thread(read_passages, name, data, most, processor)

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "model": self.settings.model, "corpus": self.engine.retriever is not None}

    async def show_metrics(self) -> Response:
        text = prometheus_client.generate_latest(self.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def model(self, name: str) -> dict[str, Any]:
        if name != self.settings.model:
            raise UnknownModelError(name, self.settings.model)
        return {"id": name, "object": "model", "created": self.started, "owned_by": "arcaligner"}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.settings.model)]}

    async def in_time(self, result: Awaitable[Any], asked: EngineRequest) -> Any:
        """Wait for a result of the engine, at most as long as an answer may take."""
        seconds = self.engine.limits.seconds
        try:
            return await asyncio.wait_for(result, max(0, asked.arrived + seconds - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"The answer was not finished within {seconds:g} seconds.") from error

    async def chat(self, request: Request) -> Response:
        data = await read_body(request, "application/json", MAX_BODY_BYTES)
        if encoding := encoding_of_mark(data):  # PowerShell and .NET write byte order marks
            data = data.decode(encoding, "replace").encode()
        limits, loop, pieces = self.engine.limits, asyncio.get_running_loop(), asyncio.Queue()
        body = await asyncio.to_thread(ChatRequest.model_validate_json, data, context={"limits": limits})
        await self.model(body.model)

        def put(piece: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        asked = body.engine_request(put, limits)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        try:
            future = self.engine.submit(asked)
            if not body.stream:
                answer = await while_connected(request, self.in_time(asyncio.wrap_future(future), asked))
                self.metrics.count(answer)
                message = {"role": "assistant", "content": answer.text}
                choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
                head |= {"object": "chat.completion", "choices": [choice]}
                return JSONResponse(head | describe_answer(answer, body))
            future.add_done_callback(lambda future: put(None))
            first = await while_connected(request, self.in_time(pieces.get(), asked))
            if first is None:
                future.result()  # raises if the request failed before its answer began
        except BaseException as error:
            asked.cancel()
            if isinstance(error, Exception):
                return refuse(request, error)
            raise
        head["object"] = "chat.completion.chunk"
        events = self._events(head, body, asked, first, pieces)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, head: dict[str, Any], body: ChatRequest, asked: EngineRequest, piece: str | None, pieces: asyncio.Queue
    ) -> AsyncIterator[str]:
        """Events of a stream: the parts of the answer, and at the end the report and, on request, the usage."""

        def new(delta: dict[str, str], finish_reason: str | None = None, **report: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            return event({**head, "choices": [choice], **report})

        try:
            yield new({"role": "assistant", "content": ""})
            while piece is not None:
                yield new({"content": piece})
                piece = await self.in_time(pieces.get(), asked)
            answer = asked.future.result()
            self.metrics.count(answer)
            report = describe_answer(answer, body)
            if body.stream_options.get("include_usage"):
                yield new({}, answer.finish_reason)
                yield event({**head, "choices": [], **report})
            else:
                yield new({}, answer.finish_reason, arcaligner=report["arcaligner"])
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(describe_error(error)[1])
        finally:
            asked.cancel()  # the client has disconnected


async def while_connected(request: Request, result: Awaitable[Any]) -> Any:
    """Waits for a result as long as the client does."""

    async def client_leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting = [asyncio.ensure_future(result), asyncio.ensure_future(client_leaves())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not waiting[0].done():
            raise ClientDisconnect("The client disconnected.")
        return waiting[0].result()
    finally:
        for each in waiting:
            each.cancel()


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The application around an engine; closing it closes the engine."""
    routes = Routes(engine, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="ArcAligner", lifespan=lifespan, docs_url=None, redoc_url=None)
    # A foreign host name means DNS rebinding: a web page that sends requests from a user's browser.
    if not settings.api_key:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=(*LOOPBACK, "[::1]"), www_redirect=False)
    app.add_middleware(routes.metrics.counted)
    for kind in (HTTPException, *(kind for kind, _ in STATUSES), Exception):
        app.add_exception_handler(kind, refuse)
    keyed: dict[str, Any] = {"dependencies": [Depends(routes.check_key)]}
    for path, answer, settings_of in (
        ("/", routes.page, {}),
        ("/health", routes.health, {}),
        ("/about", routes.about, keyed),
        ("/metrics", routes.show_metrics, keyed),
        ("/v1/models", routes.models, keyed),
        ("/v1/models/{name:path}", routes.model, keyed),
    ):
        app.get(path, **settings_of)(answer)
        app.head(path, **settings_of, include_in_schema=False)(answer)  # used by load balancers
    app.post("/passages", **keyed)(routes.passages)
    schema = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    parts, content = schema.pop("$defs"), {"application/json": {"schema": schema}}
    described = {"requestBody": {"required": True, "content": content}}
    app.post("/v1/chat/completions", **keyed, openapi_extra=described)(routes.chat)

    def openapi() -> dict[str, Any]:
        found = FastAPI.openapi(app)
        found["components"]["schemas"] |= parts
        return found

    app.openapi = openapi
    return app
