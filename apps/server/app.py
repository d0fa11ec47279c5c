"""The server around an [`Engine`]: what a request may hold, what an answer looks like, key, limits and metrics.

/v1/chat/completions, /v1/models    as the clients of OpenAI speak them
/health, /metrics                   for whoever watches it; metrics in the format of Prometheus
/                                   a page to ask from
/about, /passages                   what the page shows of the server; the passages of a file that is dropped into it

Beyond OpenAI's fields a request has `documents`, `top_k`, `tokens_per_slot`, `min_confidence`, `max_passages` and
`copy_bonus`; an answer has `arcaligner`, with its sources, confidence, segments, statistics and seconds.
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
from typing import Annotated, Any, Literal

try:
    import prometheus_client
    import uvicorn  # noqa: F401
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
    from starlette.exceptions import HTTPException  # also of an unknown address
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise ImportError(
        "The server needs FastAPI, uvicorn and prometheus-client: `pip install 'arcaligner[server]'`."
    ) from error

from ...common.files import CASE_STUDIES, read_json_lines, refuse_unknown
from ...common.passages import Document, no_text, passages_of
from ...common.reading import LONGEST_TITLE, read_file
from .engine import Answer, BusyError, Engine
from .engine import Request as EngineRequest

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page.html"
# The page is whole: nothing is loaded from elsewhere, and no other page may frame it.
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
PAGE_POLICY += "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BODY_BYTES, BODY_SECONDS = 2**20, 30.0  # of a request
# Of a file that is dropped into the page, and of its text: about 1,800 passages of 100 words. A corpus has room for
# more. So many files are read at a time, each by a process.
MAX_FILE_BYTES, MAX_CHARACTERS, MAX_FILES = 16 * 2**20, 2**20, 2
# Of an answer, where a client names no number.
MAX_TOKENS = 256
# Fields of OpenAI that change no answer.
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Fields that would change it, and cannot be done here, with the value that asks for nothing.
NOT_DONE = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logprobs": False, "tools": []}
NOT_DONE |= {"tool_choice": "none", "response_format": {"type": "text"}}
# What goes wrong, and the status that says so. 499, which only the metrics show, is nginx's of a client that has left.
STATUSES = ((TimeoutError, 408), (ClientDisconnect, 499), (BusyError, 429), (ValueError, 400), (TypeError, 400))
STATUSES += ((OSError, 503),)


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
                f"`--host` is {self.host!r} and there is no API key, so that anybody could ask. Set "
                "`ARCALIGNER_API_KEY`, or bind to 127.0.0.1."
            )


# What a request may hold


def without_nulls(given: Any) -> Any:
    """What is null is as if it were left out."""
    return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given


def as_text(given: Any) -> Any:
    """A string is read as a text."""
    return {"text": given} if isinstance(given, str) else given


def as_list(given: Any) -> Any:
    """A string is read as a list of one."""
    return [given] if isinstance(given, str) else given


class Body(BaseModel):
    """Part of a request; an unknown field is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")


class Text(Body):
    """A part of a message; images and sound are refused."""

    type: Literal["text"] = "text"
    text: str


class Message(Body):
    """A turn of the chat. An answer of this server can be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Annotated[Text, BeforeValidator(as_text)]], BeforeValidator(as_list)]
    name: str | None = None

    @property
    def turn(self) -> dict[str, str]:
        """As a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class Passage(Body):
    """A passage that comes with the request, also as a string."""

    title: Annotated[str, Field(max_length=LONGEST_TITLE)] = ""
    text: str


class ChatRequest(Body):
    """The body of `/v1/chat/completions`. What the engine checks is not checked here."""

    model: str
    messages: list[Annotated[Message, BeforeValidator(without_nulls)]] = Field(min_length=1)
    documents: list[Annotated[Passage, BeforeValidator(as_text)]] | None = None
    top_k: Annotated[int, Field(ge=0, le=100)] | None = None
    tokens_per_slot: Any = None
    min_confidence: float | None = None
    max_passages: int | None = None
    copy_bonus: Annotated[float, Field(le=100)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list), Field(max_length=16)] = []
    stream: bool = False
    stream_options: dict[str, Any] = {}  # `include_usage`: whether the last piece of a stream has it

    @model_validator(mode="before")
    @classmethod
    def without_what_changes_nothing(cls, given: Any) -> Any:
        given = without_nulls(given)
        if isinstance(given, dict):
            refuse_unknown("the request", given, [*cls.model_fields, *WITHOUT_EFFECT, *NOT_DONE])
            for name in NOT_DONE.keys() & given.keys():
                if given[name] != NOT_DONE[name]:
                    raise ValueError(f"`{name}` is not supported; leave it out, or pass {json.dumps(NOT_DONE[name])}.")
            given = {name: each for name, each in given.items() if name in cls.model_fields}
        return given

    def engine_request(self, on_text: Callable[[str], Any]) -> EngineRequest:
        """For the engine, which has most fields by the same names."""
        own = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "stream", "stream_options"}
        return EngineRequest(
            messages=[message.turn for message in self.messages],
            max_new_tokens=self.max_completion_tokens or self.max_tokens or MAX_TOKENS,
            temperature=round(self.temperature, 4),  # logits divided by less than that may overflow
            on_text=on_text,
            **self.model_dump(exclude=own),
        )


async def read_body(request: Request, kind: str, most: int) -> bytes:
    """The body of a request. It is refused before it is read whole where it is longer than `most` bytes, slow, or of
    another `kind`: a form of another page, which a browser sends without asking, is neither JSON nor a plain file."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HTTPException(415, f"Expected a body with `Content-Type: {kind}`.")
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
    """The passages of a file, as a corpus would cut it. They are not kept; `name` is data, never a path, but its suffix
    says how `data` is read.

    Returns:
        `dict`: The `name` without folders, `passages` with `title`, `text` and `page` (or `None`), the `characters` of
        the text, and how many of these were `read`.
    """
    name = name.replace("\\", "/").rstrip("/").rpartition("/")[2][-255:] or "file"
    title, text, sections = read_file(name, data)
    title, text = (each.encode("utf-8", "replace").decode() for each in (title, text))  # a PDF may have halves
    if not text.strip():
        raise ValueError(f"{no_text(name)}.")
    document = Document(name, title, text[:MAX_CHARACTERS], sections)
    found = passages_of([document], passage_tokens, processor.spacy_model, processor.tokenizer)
    passages = [{"title": each.title, "text": each.text, "page": each.page} for each in found]
    return {"name": name, "passages": passages, "characters": len(text), "read": min(len(text), MAX_CHARACTERS)}


# What an answer looks like


def describe_answer(answer: Answer) -> dict[str, Any]:
    """Tokens read, a slot counts as one, and written; where the answer comes from, and what reading it has cost."""
    read, written = answer.prompt_tokens, answer.completion_tokens
    segments = [] if answer.passages is None else answer.passages.encoded.segments
    names = ("sources", "kept", "confidence", "statistics", "seconds", "batch_size")
    report = {name: getattr(answer, name) for name in names}
    report["segments"] = [{"document": each.document, "start": each.start, "end": each.end} for each in segments]
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {"usage": usage, "arcaligner": report}


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def describe_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body of an error: of the client's mistakes 4xx, of ours 5xx. What is not expected is logged, and the
    client is told its kind only."""
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    else:
        status, text = next((status for kind, status in STATUSES if isinstance(error, kind)), 500), str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        told = first.get("ctx", {}).get("error")  # as it was raised by us
        place = ".".join(map(str, first["loc"])) or "The body"
        text = str(told) if isinstance(told, ValueError) else f"{place}: {first['msg']}"
    if status == 500:
        logger.error("An answer failed.", exc_info=error)
        text = type(error).__name__
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": text, "type": kind, "param": None, "code": None}}


def refuse(request: Request, error: Exception) -> JSONResponse:
    """An error as an answer."""
    status, body = describe_error(error)
    return JSONResponse(body, status)


# Addresses


class Metrics:
    """Counters of one server, for Prometheus."""

    def __init__(self, engine: Engine):
        self.registry = prometheus_client.CollectorRegistry()
        own = {"registry": self.registry, "namespace": "arcaligner"}
        prometheus_client.ProcessCollector(registry=self.registry)  # memory, open files
        self.requests = prometheus_client.Counter("requests", "Requests by status.", ["status"], **own)
        self.tokens = prometheus_client.Counter("tokens", "Tokens read and written.", ["kind"], **own)
        self.seconds = prometheus_client.Histogram("seconds", "Seconds of an answer, by part.", ["part"], **own)
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
        for part, seconds in answer.seconds.items():
            self.seconds.labels(part).observe(seconds)

    def counted(self, app: Callable) -> Callable:
        """An application that counts its answers by status."""

        async def counting(scope, receive, send) -> None:
            async def count(message) -> None:
                if message["type"] == "http.response.start":
                    self.requests.labels(message["status"]).inc()
                await send(message)

            await app(scope, receive, count)

        return counting


class Routes:
    """What the server answers at each address."""

    def __init__(self, engine: Engine, settings: ServerSettings):
        self.engine, self.settings, self.metrics = engine, settings, Metrics(engine)
        self.started, self.files = int(time.time()), asyncio.Semaphore(MAX_FILES)

    def check_key(self, request: Request) -> None:
        """Refuses a request without the key, if there is one."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.settings.api_key and not secrets.compare_digest(given.encode(), self.settings.api_key.encode()):
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
            raise BusyError("Too many files are being read. Try again later.")
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

    async def models(self) -> dict[str, Any]:
        model = {"id": self.settings.model, "object": "model", "created": self.started, "owned_by": "arcaligner"}
        return {"object": "list", "data": [model]}

    async def chat(self, request: Request) -> Response:
        body = ChatRequest.model_validate_json(await read_body(request, "application/json", MAX_BODY_BYTES))
        if body.model != self.settings.model:
            raise HTTPException(404, f"There is no model {body.model!r}; expected {self.settings.model!r}.")
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

        def put(piece: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        asked = body.engine_request(put)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        try:
            future = self.engine.submit(asked)
            if not body.stream:
                answer = await while_connected(request, asyncio.wrap_future(future))
                self.metrics.count(answer)
                message = {"role": "assistant", "content": answer.text}
                choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
                head |= {"object": "chat.completion", "choices": [choice]}
                return JSONResponse(head | describe_answer(answer))
            future.add_done_callback(lambda future: put(None))
            first = await while_connected(request, pieces.get())
            if first is None:
                future.result()  # or what was wrong, before an answer begins
        except BaseException as error:
            asked.cancelled = True
            if isinstance(error, Exception):
                return refuse(request, error)
            raise
        head["object"] = "chat.completion.chunk"
        events = self._events(head, bool(body.stream_options.get("include_usage")), asked, first, pieces)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, head: dict[str, Any], has_usage: bool, asked: EngineRequest, piece: str | None, pieces: asyncio.Queue
    ) -> AsyncIterator[str]:
        """A stream: the pieces of an answer; its last event has the report, and the usage where that is asked for."""

        def new(delta: dict[str, str], finish_reason: str | None = None, **report: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            return event({**head, "choices": [choice], **report})

        try:
            yield new({"role": "assistant", "content": ""})
            while piece is not None:
                yield new({"content": piece})
                piece = await pieces.get()
            answer = asked.future.result()
            self.metrics.count(answer)
            report = describe_answer(answer)
            if has_usage:
                yield new({}, answer.finish_reason)
                yield event({**head, "choices": [], **report})
            else:
                yield new({}, answer.finish_reason, arcaligner=report["arcaligner"])
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(describe_error(error)[1])
        finally:
            asked.cancelled = True  # where the client has left


async def while_connected(request: Request, result: Awaitable[Any]) -> Any:
    """Waits for a result as long as the client does."""

    async def client_leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting = [asyncio.ensure_future(result), asyncio.ensure_future(client_leaves())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not waiting[0].done():
            raise ClientDisconnect("The client has left.")
        return waiting[0].result()
    finally:
        for each in waiting:
            each.cancel()


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The application of an engine, which is closed with it."""
    routes = Routes(engine, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    if not settings.api_key:  # a name that was pointed here is a page that asks from somebody's browser
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=(*LOOPBACK, "[::1]"), www_redirect=False)
    app.add_middleware(routes.metrics.counted)
    for kind in (HTTPException, *(kind for kind, _ in STATUSES), Exception):
        app.add_exception_handler(kind, refuse)
    app.get("/")(routes.page)
    app.get("/health")(routes.health)
    keyed = [Depends(routes.check_key)]
    app.get("/about", dependencies=keyed)(routes.about)
    app.post("/passages", dependencies=keyed)(routes.passages)
    app.get("/metrics", dependencies=keyed)(routes.show_metrics)
    app.get("/v1/models", dependencies=keyed)(routes.models)
    app.post("/v1/chat/completions", dependencies=keyed)(routes.chat)
    return app
