"""The routes: OpenAI's completions and chat completions, models, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

from firesteel.errors import ResourceError
from firesteel.serving.api_types import ChatRequest, CompletionRequest, Request, parse
from firesteel.serving.bodies import ChatShape, CompletionShape, Shape, Tally, event, usage
from firesteel.serving.plan import plan_asks, read_prompts
from firesteel.serving.refusals import Refusal
from firesteel.serving.service import Call, Service

try:
    from fastapi import FastAPI
    from fastapi import Request as Http
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.types import Receive, Scope, Send
except ImportError as e:
    raise ResourceError(f"the server needs FastAPI and uvicorn ({e})", mend='pip install "firesteel[server]"') from None

PAGE = Path(__file__).with_name("page.html")
# The page runs its own script and asks its own server; it can load nothing from elsewhere, and nobody may frame it.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
# A body over the limit is read up to this many times the limit, so that its sender gets to see the answer.
_DRAIN = 8

T = TypeVar("T")


def build_app(service: Service) -> FastAPI:
    """The application; the engine's thread must run before it is asked anything."""
    app = FastAPI(title="Firesteel", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/completions")
    async def completions(request: Http) -> Response:
        return await _answer(service, request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Http) -> Response:
        return await _answer(service, request, ChatRequest)

    @app.get("/v1/models")
    async def models(request: Http) -> Response:
        _authorise(service, request)
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Http, name: str) -> Response:
        _authorise(service, request)
        _check_model(service, name)
        return JSONResponse(_model(service))

    @app.get("/health")
    async def health() -> Response:
        service.check()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.render(service.engine, service.served.name, service.thread.open)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _PAGE_POLICY})

    @app.exception_handler(Refusal)
    async def refuse(request: Http, refusal: Refusal) -> Response:
        return JSONResponse(refusal.body, refusal.status, headers=refusal.headers)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Http, error: HTTPException) -> Response:
        refusal = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(refusal.body, refusal.status, headers={**refusal.headers, **(error.headers or {})})

    @app.exception_handler(Exception)
    async def refuse_bug(request: Http, error: Exception) -> Response:
        refusal = Refusal(500, f"the server has failed at this request ({type(error).__name__}); its log has more")
        return JSONResponse(refusal.body, refusal.status, headers=refusal.headers)

    return app


async def _answer(service: Service, request: Http, kind: type[Request]) -> Response:
    started = time.perf_counter()
    _authorise(service, request)
    service.check()
    call = Call(service, started)
    try:
        asked = parse(kind, await _read(request, service.settings.max_body, service.settings.request_seconds))
        _check_model(service, asked.model)
        prompts = await asyncio.get_running_loop().run_in_executor(service.encoding, read_prompts, service, asked)
        asks = plan_asks(service, asked, prompts)
        service.check()
        call.ask(asks)
        shape = _shape(service, asked)
        prompt_tokens, deltas = sum(map(len, prompts)), call.deltas()
        if asked.stream:
            # The first piece is awaited, so that what goes wrong before it has a status of its own.
            first = await _unless_gone(request, anext(deltas))
            events = _events(service, asked, shape, prompt_tokens, len(asks), first, deltas)
            return _Stream(call, events)
        tallies = [Tally() for _ in asks]
        await _unless_gone(request, _collect(deltas, tallies))
    except _Gone:
        call.close()
        return Response(status_code=499)
    except BaseException:
        call.close()
        raise
    call.close()
    choices = [shape.choice(k, t, 0, stream=False) for k, t in enumerate(tallies)]
    return JSONResponse({**_envelope(service, shape, stream=False), "choices": choices, "usage": usage(prompt_tokens, tallies)})


async def _collect(deltas: AsyncIterator[tuple[int, Any]], tallies: list[Tally]) -> None:
    async for index, delta in deltas:
        tallies[index].add(delta)


async def _events(
    service: Service, asked: Request, shape: Shape, prompt_tokens: int, answers: int, first: tuple[int, Any], rest: AsyncIterator[tuple[int, Any]]
) -> AsyncIterator[str]:
    """The stream: chunks, the usage where it is wanted, the end; an error in place of what is left."""
    envelope, options = _envelope(service, shape, stream=True), asked.stream_options
    told, due = [Tally() for _ in range(answers)], [Tally() for _ in range(answers)]
    sent = [0] * answers
    with_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
    running = options is not None and options.continuous_usage_stats

    def chunk(choices: list[dict[str, Any]], *, last: bool = False) -> str:
        counted = {"usage": usage(prompt_tokens, told) if running or last else None} if with_usage else {}
        return event({**envelope, "choices": choices, **counted})

    for index in range(answers):
        opening = shape.opening(index)
        if opening is not None:
            yield chunk([opening])
    try:
        found: tuple[int, Any] | None = first
        while found is not None:
            index, delta = found
            due[index].add(delta)
            told[index].add(delta)
            told[index].shown.clear()
            if delta.shown or delta.last:
                yield chunk([shape.choice(index, due[index], sent[index], stream=True)])
                sent[index] += len(due[index].text)
                due[index] = Tally()
            found = await anext(rest, None)
    except Refusal as refusal:
        yield event(refusal.body)
        return
    if with_usage:
        yield chunk([], last=True)
    yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """A stream of events that takes its call back however it ends, also where it never began."""

    def __init__(self, call: Call, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


class _Gone(Exception):
    """The client has closed its connection."""


async def _unless_gone(request: Http, work: Awaitable[T]) -> T:
    """What `work` gives, unless the client leaves first. The body must have been read: what else it sends is thrown away."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone
        return task.result()
    finally:
        for other in (task, watch):
            other.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await other


async def _gone(request: Http) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Http, limit: int, seconds: float) -> bytes:
    """The body.

    Raises:
        Refusal: it is longer than the limit, or does not come.
    """
    refusal = Refusal(413, f"the body is longer than {limit} bytes, the server's limit (serve.max_body)", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > _DRAIN * limit:
        raise refusal
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > _DRAIN * limit:
                    break
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {seconds:g} s") from None
    except ClientDisconnect:
        raise _Gone from None
    if size > limit:
        raise refusal
    return b"".join(parts)


def _authorise(service: Service, request: Http) -> None:
    key = service.settings.api_key
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
        raise Refusal(401, "the API key is wrong or missing: send it as Authorization: Bearer KEY", code="invalid_api_key")


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.served.name:
        raise Refusal(404, f"there is no model {name[:200]!r} here, only {service.served.name!r}", code="model_not_found", param="model")


def _shape(service: Service, asked: Request) -> Shape:
    if isinstance(asked, ChatRequest):
        return ChatShape(service.served.token_text, service.served.token_bytes, bool(asked.logprobs), asked.firesteel)
    assert isinstance(asked, CompletionRequest)
    return CompletionShape(service.served.token_text, asked.logprobs is not None, asked.firesteel)


def _envelope(service: Service, shape: Shape, *, stream: bool) -> dict[str, Any]:
    kind = shape.chunk if stream else shape.whole
    return {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": service.served.name}


def _model(service: Service) -> dict[str, Any]:
    served = service.served
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "firesteel", "max_model_len": service.engine.max_length}
