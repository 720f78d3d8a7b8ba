"""The HTTP server: OpenAI's completions and chat, models, health, metrics, tokenize and detokenize.

A request goes to the front end of its model; a client that goes away aborts its own. Clock, ids and chance are passed
in (serve/api/service.py).
"""

import asyncio
import hmac
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import StarletteHTTPException as HTTPException
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from serve.api import asked as read
from serve.api.answer import Answer, dump, sse
from serve.api.asked import Asked
from serve.api.body import ApiError, Body, parse
from serve.api.connection import EventStream, Gone, while_there
from serve.api.service import Offer, Service
from serve.front import BadField, Busy, Closed, Event, Front, Stream
from serve.metrics import CONTENT_TYPE
from serve.schedule.pages import chain

INLINE_BYTES = 1 << 16  # bodies over it are tokenized and hashed by a thread
OPEN_PATHS = ("/health",)
MAX_SESSION = 256  # characters


# --- requests ---


async def body_of(service: Service, request: Request) -> Body:
    """The body as a JSON object, size and time limited."""
    limit, parts, size = service.max_body_bytes, [], 0
    too_large = ApiError(413, f"the body is larger than {limit} bytes")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and (len(told) > 18 or int(told) > limit):
        raise too_large
    try:
        async with asyncio.timeout(service.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except ClientDisconnect:
        raise Gone from None
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {service.body_timeout_s:g} s") from None
    body = parse(b"".join(parts))
    body.size = size
    return body


def offer_of(service: Service, body: Body) -> Offer:
    """The model that a body names. Raises ApiError if there is none."""
    return service.offer(body.text("model"))


def session_of(request: Request, body: Body) -> str:
    """What a client says that its requests have in common, as plain characters; empty if it says nothing."""
    said = (request.headers.get("x-session-affinity"), body.take("prompt_cache_key"), body.take("user"))
    first = next((s for s in said if isinstance(s, str) and s), "")
    return first[:MAX_SESSION].encode("ascii", "backslashreplace").decode()


async def asked_of(service: Service, offer: Offer, body: Body, chat: bool) -> tuple[Asked, list[list[bytes]]]:
    """What a body asks for, and the page hashes of its prompts; long ones are left to a thread."""
    front, text, seed = offer.front, offer.text, service.ports.seed()

    def work():
        if chat:
            asked = read.chat(body, text, front.bounds, seed, service.chat_tokens)
        else:
            asked = read.completion(body, text, front.bounds, seed)
        return asked, [chain(p, front.bounds.page_size) for p in asked.prompts]

    return await asyncio.to_thread(work) if body.size > INLINE_BYTES else work()


def submit(front: Front, asked: Asked, hashes: list[list[bytes]], session: str) -> Stream:
    """Hand the request on. Raises ApiError where the front end refuses."""
    how = (asked.sampling, asked.stops, asked.n, asked.priority, asked.limit, hashes, session)
    try:
        return front.submit_all(asked.prompts, *how)
    except BadField as error:
        names = {"prompt": "messages" if asked.chat else "prompt", "max_tokens": asked.max_field}
        name = names.get(error.field, error.field)
        raise ApiError(400, name + str(error).removeprefix(error.field), name) from None
    except Busy as error:
        raise ApiError(429, f"the queue is full: {error}", code="queue_full", retry=1) from None
    except Closed as error:
        raise ApiError(503, str(error), code="unavailable", retry=10) from None


def failure(event: Event) -> ApiError:
    """The error of a completion that ended with one: the engine refused it, or is gone."""
    if event.unavailable:
        return ApiError(503, event.message, code="unavailable", retry=10)
    return ApiError(400, event.message)


async def complete(service: Service, request: Request, chat: bool) -> Response:
    body = await body_of(service, request)
    offer, session = offer_of(service, body), session_of(request, body)
    if offer.front.closed is not None:
        raise ApiError(503, offer.front.closed, code="unavailable", retry=10)
    asked, hashes = await asked_of(service, offer, body, chat)
    stream = submit(offer.front, asked, hashes, session)
    kind = "chatcmpl" if chat else "cmpl"
    head = {"id": f"{kind}-{service.ports.new_id()}", "created": int(service.ports.now()), "model": offer.name}
    answer = Answer(asked, offer.text, head)
    if asked.stream:
        return EventStream(chunks(stream, answer), stream.close)
    try:
        events = await while_there(request.receive, collect(stream))
    finally:
        stream.close()
    wrong = next((e for e in events if e.finish == "error"), None)
    if wrong is not None:
        raise failure(wrong)
    return json_response(answer.whole(events))


async def collect(stream: Stream) -> list[Event]:
    return [event async for event in stream]


async def chunks(stream: Stream, answer: Answer) -> AsyncIterator[bytes]:
    """The server-sent events of a completion. An error ends them, as it cannot change the status any more."""
    for chunk in answer.first():
        yield sse(chunk)
    async for event in stream:
        if event.finish == "error":
            yield sse(failure(event).body())
            break
        yield sse(answer.news(event))
    else:
        for chunk in answer.last():
            yield sse(chunk)
    yield sse("[DONE]")


# --- the app ---


def json_response(body: dict, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(body), status, headers, "application/json")


def create_app(service: Service) -> FastAPI:
    app = FastAPI(openapi_url=None)
    add_routes(app, service)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return json_response(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        made = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return json_response(made.body(), made.status, dict(error.headers or {}))

    @app.exception_handler(Gone)
    async def nobody_reads(request: Request, error: Gone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def our_fault(request: Request, error: Exception) -> Response:
        return json_response(ApiError(500, f"internal error: {type(error).__name__}").body(), 500)

    app.add_middleware(Guard, service=service)
    return app


def add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(service, request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await complete(service, request, chat=True)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card(offer) for offer in service.offers]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(model_card(service.offer(name)))

    @app.get("/health")
    async def health() -> Response:
        told = service.health()
        return json_response(told, 200 if told["status"] in ("ok", "degraded") else 503)

    @app.post("/pause")
    async def pause() -> Response:
        return paused(service, True)

    @app.post("/resume")
    async def resume() -> Response:
        return paused(service, False)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render([o.seen() for o in service.offers]), media_type=CONTENT_TYPE)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await body_of(service, request)
        return json_response(await asyncio.to_thread(tokenized, offer_of(service, body), body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await body_of(service, request)
        text = offer_of(service, body).text
        ids = read.tokens(body, text)
        body.done()
        return json_response({"prompt": text.decode(ids.tolist())})


def paused(service: Service, on: bool) -> Response:
    """No engine takes a step until it is resumed; requests are taken, and wait."""
    for offer in service.offers:
        offer.behind.pause(on)
    return json_response({"paused": on})


def model_card(offer: Offer) -> dict:
    card = {"id": offer.name, "object": "model", "created": 0, "owned_by": "racklab"}
    return card | {"max_model_len": offer.front.bounds.context}


def tokenized(offer: Offer, body: Body) -> dict:
    """The answer of /tokenize, for ``prompt`` (with ``add_special_tokens``) or ``messages``."""
    prompt, special = body.text("prompt"), body.flag("add_special_tokens", True)
    if prompt is None:
        ids = read.messages(body, offer.text, offer.front.bounds.context).tolist()
    else:
        prompt = read.short(body, "prompt", prompt, offer.text, offer.front.bounds.context)
        ids = offer.text.prompt(prompt) if special else offer.text.encode(prompt)
    body.done()
    return {"tokens": ids, "count": len(ids), "max_model_len": offer.front.bounds.context}


class Guard:
    """Lets in who has the key, and counts answers by route and status."""

    def __init__(self, app, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message: dict) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._service.metrics.answered(getattr(route, "path", "other"), message["status"])
            await send(message)

        if self._service.key is not None and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            error = ApiError(401, "give the server's API key as `Authorization: Bearer KEY`", code="invalid_api_key")
            response = json_response(error.body(), 401, {"www-authenticate": "Bearer"})
            return await response(scope, receive, counted)
        await self._app(scope, receive, counted)

    def _has_key(self, scope) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + self._service.key.encode())
