"""The server: routes, limits, key and metrics around an [`Engine`].

/v1/chat/completions, /v1/models    as the clients of OpenAI speak them
/health, /metrics                   for whoever watches it; metrics in the format of Prometheus
/                                   a page to ask from
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import prometheus_client
    import uvicorn
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
except ImportError as error:
    raise ImportError(
        "The server needs FastAPI, uvicorn and prometheus-client: `pip install 'arcaligner[server]'`."
    ) from error

from .engine import Answer, BusyError, Engine
from .protocol import ChatRequest, Completion, error_body, event

PAGE = Path(__file__).parent / "page.html"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# What goes wrong, the status that says so, and whose mistake it is.
STATUSES = ((TimeoutError, 408), (BusyError, 429), (ValueError, 400), (TypeError, 400), (OSError, 503))


@dataclass(frozen=True)
class ServerSettings:
    """
    How the server is reached.

    Args:
        model (`str`): The name it answers to.
        host (`str`), port (`int`): Where it listens.
        api_key (`str`, *optional*): That clients have to send.
        max_body_bytes (`int`): The longest request.

    Raises:
        `ValueError`: an address that others can reach, without a key.
    """

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


class Gate:
    """Refuses a request with a body that is too long, before it is read whole, and counts answers by status."""

    def __init__(self, app: Callable, max_body_bytes: int, count: Callable[[int], Any]):
        self.app, self.max_body_bytes, self.count = app, max_body_bytes, count

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        seen = 0

        async def limited():
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body_bytes:  # sent in chunks, without a length
                raise HTTPException(413, too_long)
            return message

        async def counted(message):
            if message["type"] == "http.response.start":
                self.count(message["status"])
            await send(message)

        too_long = f"The body is longer than {self.max_body_bytes} bytes. Pass fewer or shorter documents."
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_body_bytes:
            return await JSONResponse(error_body(too_long), 413)(scope, receive, counted)
        await self.app(scope, limited, counted)


class Metrics:
    """Counters of one server, for Prometheus."""

    def __init__(self, engine: Engine):
        self.registry = prometheus_client.CollectorRegistry()
        own = {"registry": self.registry, "namespace": "arcaligner"}
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
        for part in ("waiting", "retrieval", "slots", "model", "first_token", "total"):
            self.seconds.labels(part).observe(answer.seconds[part])


def status_of(error: BaseException) -> int:
    """The status of an error: of the client's mistakes 4xx, of ours 5xx."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


def error_response(error: BaseException) -> JSONResponse:
    """An error as an answer; of one that is not expected only the kind is told."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(error_body(str(error) if status != 500 else type(error).__name__, kind), status)


def create_app(engine: Engine, settings: ServerSettings | None = None) -> FastAPI:
    """The application of an engine, which is closed with it."""
    settings = settings or ServerSettings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="ArcAligner", lifespan=lifespan, docs_url=None, redoc_url=None)
    metrics = Metrics(engine)
    app.add_middleware(
        Gate, max_body_bytes=settings.max_body_bytes, count=lambda status: metrics.requests.labels(status).inc()
    )
    started = int(time.time())

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(error_body(f"{place or 'The body'}: {first['msg']}"), 400)

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(error.detail), error.status_code)

    def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if settings.api_key and not secrets.compare_digest(given.encode(), settings.api_key.encode()):
            raise HTTPException(401, "The API key is missing or wrong; expected `Authorization: Bearer KEY`.")

    keyed = [Depends(check_key)]

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "model": settings.model, "corpus": engine.retriever is not None}

    @app.get("/metrics", dependencies=keyed)
    async def show_metrics() -> Response:
        text = prometheus_client.generate_latest(metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.get("/v1/models", dependencies=keyed)
    async def models() -> dict[str, Any]:
        model = {"id": settings.model, "object": "model", "created": started, "owned_by": "arcaligner"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions", dependencies=keyed)
    async def chat(body: ChatRequest) -> Response:
        if body.model != settings.model:
            text = f"There is no model {body.model!r}; expected {settings.model!r}."
            return JSONResponse(error_body(text, code="model_not_found"), 404)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

        def put(piece: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        request = body.engine_request(on_text=put)
        completion = Completion(settings.model)
        try:
            future = engine.submit(request)
            future.add_done_callback(lambda future: put(None))
            first = await pieces.get()
            if first is None or not body.stream:
                answer = await asyncio.wrap_future(future)
                metrics.count(answer)
                if not body.stream:
                    return JSONResponse(completion.whole(answer))
        except asyncio.CancelledError:  # the client has left
            request.cancelled = True
            raise
        except Exception as error:
            return error_response(error)

        async def events() -> AsyncIterator[str]:
            piece = first
            try:
                yield completion.piece()
                while piece is not None:
                    yield completion.piece(piece)
                    piece = await pieces.get()
                answer = future.result()
                metrics.count(answer)
                yield completion.piece(answer=answer)
                if body.stream_options and body.stream_options.include_usage:
                    yield completion.usage_piece(answer)
                yield "data: [DONE]\n\n"
            except Exception as error:
                yield event(error_body(str(error), "server_error"))
            finally:
                request.cancelled = True  # where the client has left

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def serve(engine: Engine, settings: ServerSettings) -> None:
    """Serves until it is asked to end; then what was begun is answered first."""
    app, timeout = create_app(engine, settings), int(engine.limits.seconds)
    uvicorn.run(app, host=settings.host, port=settings.port, log_level="warning", timeout_graceful_shutdown=timeout)


def serve_on_ray(make_engine: Callable[[], Engine], settings: ServerSettings, replicas: int) -> None:
    """Deploys the same application on Ray Serve, an engine per replica; Ray starts one again that dies."""
    try:
        from ray import serve as ray_serve
    except ImportError as error:
        raise ImportError("`--ray` needs Ray Serve: `pip install 'arcaligner[ray]'`.") from error

    def build_app() -> FastAPI:
        return create_app(make_engine(), settings)

    ray_serve.start(http_options={"host": settings.host, "port": settings.port})
    deployment = ray_serve.deployment(ray_serve.ingress(build_app)(), name="arcaligner", num_replicas=replicas)
    ray_serve.run(deployment.bind(), name="arcaligner", route_prefix="/")
