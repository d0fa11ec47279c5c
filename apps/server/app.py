"""HTTP application around an [`Engine`]: routes, format of answers, key, limits and metrics.

/v1/chat/completions                OpenAI's API; `chat_request.py` defines the fields of a request
/v1/models, /v1/models/NAME         the one model
/openapi.json                       description of the API
/health, /metrics                   for monitoring; metrics in the format of Prometheus
/                                   a page to ask from
/about, /passages                   for the page: facts about the server; the passages of a file that a user chooses

In addition to OpenAI's fields, a request may have `documents`, `num_passages`, `tokens_per_slot`, `min_confidence`,
`max_passages` and `copy_bonus`. An answer has `arcaligner`, with its sources, answerability, segments, statistics and
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
from .request import Answer, BusyError, RequestCancelledError, UnavailableError, timeout_error
from .request import Request as EngineRequest

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page.html"
# The page is self-contained: nothing is loaded from elsewhere, and no other page may frame it.
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
PAGE_POLICY += "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BODY_BYTES, BODY_SECONDS = 2**20, 30.0  # of a request
# Bytes of a file that a user of the page chooses, and characters of its text, which are about 1,800 passages of 100
# words. Longer files belong in a corpus. Number of files that are converted at a time, each in a process.
MAX_FILE_BYTES, MAX_CHARACTERS, MAX_FILES = 16 * 2**20, 2**20, 2
# OpenAI's error codes, by which clients distinguish errors.
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
# Errors and their status. 499, nginx's code for a client that has disconnected, appears in the metrics only.
STATUSES = ((TimeoutError, 408), (ClientDisconnect, 499), (BusyError, 429), (ValueError, 400), (TypeError, 400))
STATUSES += ((OSError, 503), (RequestCancelledError, 499))


@dataclass(frozen=True)
class ServerSettings:
    """The name of the model, the address to listen on, and the API key that clients have to send."""

    model: str = "arcaligner"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None

    def __post_init__(self):
        if not self.api_key and self.host not in LOOPBACK:
            raise ValueError(
                f"`--host` is {self.host!r} but no API key is set, so anyone could use the server. Set the environment "
                "variable ARCALIGNER_API_KEY to a key of your choice, or pass `--host 127.0.0.1`."
            )


# Reading requests


async def read_body(request: Request, kind: str, max_bytes: int) -> bytes:
    """Read the body of a request. Refuse a body early if it is longer than `max_bytes` bytes, if it arrives too slowly,
    or if its content type is not `kind`: so a page of another web site cannot send a form."""
    if (content_type := request.headers.get("content-type", "").partition(";")[0].strip().lower()) != kind:
        got = f"with `Content-Type: {content_type}`" if content_type else "without a `Content-Type` header"
        raise HTTPException(415, f"Got a body {got}; expected `Content-Type: {kind}`. Set this header.")
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise HTTPException(
            415,
            f"Got a body with `Content-Encoding: {encoding}`; expected an uncompressed body. Send the body "
            "uncompressed, without this header.",
        )
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    text = f"The body is longer than the limit of {max_bytes} bytes. Send less text, or a smaller file."
                    raise HTTPException(413, text)
    except TimeoutError as error:
        raise HTTPException(408, f"The body did not arrive within {BODY_SECONDS:g} seconds. Try again.") from error
    return body


def passages_of_file(name: str, data: bytes, passage_tokens: int, processor) -> dict[str, Any]:
    """Cut a file into passages, as for a corpus, and store nothing. `name` is never used as a path; its suffix decides
    how `data` is converted.

    Returns:
        `dict`: The `name` without folders, `passages` with `title`, `text` and `page` (or `None`), the number of
        `characters` of the text, and how many of them were `read`.
    """
    name = name.replace("\\", "/").rstrip("/").rpartition("/")[2][-255:] or "file"
    title, text, sections = read_file(name, data)
    # Text of a PDF may contain lone surrogates.
    title, text = (string.encode("utf-8", "replace").decode() for string in (title, text))
    if not text.strip():
        raise ValueError(f"{no_text(name)}. Choose another file.")
    document = Document(name, title, text[:MAX_CHARACTERS], sections)
    cut = passages_of([document], passage_tokens, processor.spacy_model, processor.tokenizer)
    passages = [{"title": passage.title, "text": passage.text, "page": passage.page} for passage in cut]
    return {"name": name, "passages": passages, "characters": len(text), "read": min(len(text), MAX_CHARACTERS)}


# Format of answers


def describe_answer(answer: Answer, body: ChatRequest) -> dict[str, Any]:
    """The usage of an answer (a slot counts as one token), its sources and its statistics. If the request had
    documents, the sources contain the ids and metadata that the client sent with them."""
    num_prompt, num_generated = answer.prompt_tokens, answer.completion_tokens
    segments = [] if answer.passages is None else answer.passages.encoded.segments
    names = ("sources", "num_cached", "answerability", "answer_likelihood", "statistics", "seconds", "batch_size")
    report = {name: getattr(answer, name) for name in names}
    if body.documents is not None:
        report["sources"] = [body.documents[source["number"]].origin | source for source in answer.sources]
    # Names of fields in version 0.2.
    report |= {"kept": answer.num_cached, "confidence": answer.answerability}
    report["seconds"] = with_old_names(answer.seconds)
    report["sources"] = [source | {"read": source["used"]} for source in report["sources"]]
    report["notes"] = [] if body.note is None else [body.note]
    report["segments"] = [
        {name: getattr(segment, name) for name in ("document", "start", "end")} for segment in segments
    ]
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_generated}
    usage["total_tokens"] = num_prompt + num_generated
    return {"usage": usage, "arcaligner": report}


def with_old_names(seconds: dict[str, float]) -> dict[str, float]:
    """The seconds of an answer's parts, with the name of *scoring* in version 0.2 as well."""
    return seconds | ({"choosing": seconds["scoring"]} if "scoring" in seconds else {})


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def describe_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body of an error: 4xx for mistakes of the client, 5xx for ours. An unexpected error is logged, and the
    client gets only its type."""
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    else:
        status, text = next((status for kind, status in STATUSES if isinstance(error, kind)), 500), str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        cause = first.get("ctx", {}).get("error")  # a `ValueError` that a validator of ours raised
        place = ".".join(map(str, first["loc"])) or "The body"
        text = str(cause) if isinstance(cause, ValueError) else f"{place}: {first['msg']}"
    if status == 500:
        logger.error("A request failed with an unexpected error.", exc_info=error)
        text = f"This request caused an error in the server ({type(error).__name__}). The server's log has the details."
    kind, code = "invalid_request_error" if status < 500 else "server_error", CODES.get(status)
    if isinstance(error, UnknownModelError):
        code = "model_not_found"
    return status, {"error": {"message": text, "type": kind, "param": None, "code": code}}


def refuse(request: Request, error: Exception) -> JSONResponse:
    """An error as a response; if the cause is temporary, with `Retry-After`."""
    status, body = describe_error(error)
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, UnavailableError) else None
    return JSONResponse(body, status, headers)


# Routes


class UnknownModelError(HTTPException):
    """The requested model is not the one of this server."""

    def __init__(self, name: str, expected: str):
        super().__init__(404, f"This server has no model {name!r}; expected the model {expected!r}.")


class Metrics:
    """Counters of one server, for Prometheus."""

    def __init__(self, engine: Engine):
        self.registry = prometheus_client.CollectorRegistry()
        ours = {"registry": self.registry, "namespace": "arcaligner"}
        prometheus_client.ProcessCollector(registry=self.registry)  # memory, open files
        self.requests = prometheus_client.Counter("requests", "Requests, by HTTP status.", ["status"], **ours)
        self.prompt_tokens = prometheus_client.Counter("prompt_tokens", "Tokens and slots of prompts.", **ours)
        self.completion_tokens = prometheus_client.Counter("completion_tokens", "Tokens of answers.", **ours)
        # Version 0.2 had one counter for both.
        old_text = (
            "Deprecated: use arcaligner_prompt_tokens and arcaligner_completion_tokens. Tokens of prompts (read) and "
            "of answers (written)."
        )
        self.tokens = prometheus_client.Counter("tokens", old_text, ["kind"], **ours)
        self.slots = prometheus_client.Counter("slots", "Slots of prompts.", **ours)
        self.seconds = prometheus_client.Histogram("seconds", "Seconds per part of an answer.", ["part"], **ours)
        self.batch = prometheus_client.Histogram("batch_size", "Requests per batch.", buckets=(1, 2, 4, 8, 16), **ours)
        for name, text, value in (
            ("waiting", "Requests that are waiting.", lambda: engine.num_waiting),
            ("prefix_bytes", "Bytes of the cached keys and values of passages in memory.", lambda: engine.store.bytes),
            ("prefix_hits", "Passages whose keys and values were cached in memory.", lambda: engine.store.hits),
            ("prefix_misses", "Passages whose keys and values had to be computed.", lambda: engine.store.misses),
        ):
            prometheus_client.Gauge(name, text, **ours).set_function(value)

    def count(self, answer: Answer) -> None:
        """Count a completed answer."""
        self.prompt_tokens.inc(answer.prompt_tokens)
        self.completion_tokens.inc(answer.completion_tokens)
        self.tokens.labels("read").inc(answer.prompt_tokens)
        self.tokens.labels("written").inc(answer.completion_tokens)
        self.slots.inc(answer.statistics["slots"])
        self.batch.observe(answer.batch_size)
        for part, seconds in with_old_names(answer.seconds).items():
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
        """Reject a request without the API key, if one is set. Headers are bytes: clients encode letters outside ASCII
        in UTF-8 or in Latin-1."""
        if not self.settings.api_key:
            return
        header = request.headers.get("authorization", "").strip()
        scheme, _, rest = header.partition(" ")
        sent = (rest.strip() if scheme.lower() == "bearer" else header).encode("latin-1")
        key = self.settings.api_key
        keys = [key.encode()] + ([key.encode("latin-1")] if max(key) <= "\xff" else [])
        if not any([secrets.compare_digest(sent, encoded) for encoded in keys]):
            raise HTTPException(
                401,
                "The API key is missing or wrong; expected the header `Authorization: Bearer KEY` with a valid key.",
            )

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
            examples = [{"question": row["question"], "text": row["passages"][0]["text"]} for row in studies]
        return {
            "model": self.settings.model,
            "corpus": corpus,
            "tokens_per_slot": engine.processor.trained_tokens_per_slot or [],
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
            passage_tokens = processor.passage_tokens if corpus is None else corpus.settings["passage_tokens"]
            data = await read_body(request, "application/octet-stream", MAX_FILE_BYTES)
            return await asyncio.to_thread(passages_of_file, name, data, passage_tokens, processor)

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

    async def in_time(self, result: Awaitable[Any], submitted: EngineRequest) -> Any:
        """Wait for a result of a request of the engine, at most as long as an answer may take."""
        seconds = self.engine.limits.seconds
        try:
            return await asyncio.wait_for(result, max(0, submitted.arrived + seconds - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(str(error) or str(timeout_error(seconds))) from error

    async def chat(self, request: Request) -> Response:
        data = await read_body(request, "application/json", MAX_BODY_BYTES)
        if encoding := encoding_of_mark(data):  # PowerShell and .NET write byte order marks
            data = data.decode(encoding, "replace").encode()
        limits, loop, chunks = self.engine.limits, asyncio.get_running_loop(), asyncio.Queue()
        body = await asyncio.to_thread(ChatRequest.model_validate_json, data, context={"limits": limits})
        await self.model(body.model)

        def put(chunk: str | None) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        submitted = body.engine_request(put, limits)
        envelope = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        try:
            future = self.engine.submit(submitted)
            if not body.stream:
                answer = await while_connected(request, self.in_time(asyncio.wrap_future(future), submitted))
                self.metrics.count(answer)
                message = {"role": "assistant", "content": answer.text}
                choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
                envelope |= {"object": "chat.completion", "choices": [choice]}
                return JSONResponse(envelope | describe_answer(answer, body))
            future.add_done_callback(lambda future: put(None))
            first = await while_connected(request, self.in_time(chunks.get(), submitted))
            if first is None:
                future.result()  # raises if the request failed before its answer began
        except BaseException as error:
            submitted.cancel()
            if isinstance(error, Exception):
                return refuse(request, error)
            raise
        envelope["object"] = "chat.completion.chunk"
        events = self._events(envelope, body, submitted, first, chunks)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self,
        envelope: dict[str, Any],
        body: ChatRequest,
        submitted: EngineRequest,
        chunk: str | None,
        chunks: asyncio.Queue,
    ) -> AsyncIterator[str]:
        """Events of a stream: the chunks of the answer, and at the end the report and, on request, the usage."""

        def new(delta: dict[str, str], finish_reason: str | None = None, **report: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            return event({**envelope, "choices": [choice], **report})

        try:
            yield new({"role": "assistant", "content": ""})
            while chunk is not None:
                yield new({"content": chunk})
                chunk = await self.in_time(chunks.get(), submitted)
            answer = submitted.future.result()
            self.metrics.count(answer)
            report = describe_answer(answer, body)
            if body.stream_options.get("include_usage"):
                yield new({}, answer.finish_reason)
                yield event({**envelope, "choices": [], **report})
            else:
                yield new({}, answer.finish_reason, arcaligner=report["arcaligner"])
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(describe_error(error)[1])
        finally:
            submitted.cancel()  # the client has disconnected


async def while_connected(request: Request, result: Awaitable[Any]) -> Any:
    """Wait for a result as long as the client is connected."""

    async def client_leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(result), asyncio.ensure_future(client_leaves())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect("The client disconnected.")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


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
        description = FastAPI.openapi(app)
        description["components"]["schemas"] |= parts
        return description

    app.openapi = openapi
    return app
