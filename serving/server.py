"""The HTTP server: routes, guard rails, and the way from a request to the engine and back.

A handler reads the body, checks it and encodes its prompts in a thread, asks the engine, and writes what it hears,
piece by piece or folded into one reply. A client that leaves ends its handler, which ends its generations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import attrs
from aiohttp import web

from ..model.fingerprint import fingerprint
from ..model.model import Model
from ..state.errors import ConfigError
from .address import address_error
from .asks import Ask
from .chat import ChatModel, chat_model
from .connection import Connection
from .engine import EngineStatus
from .metrics import MeasuredEngine, Metrics
from .openapi import describe
from .page import PAGE, live_record
from .protocol import ApiError, bad_request, check_body, parse_body, without_nulls
from .protocol_chat import chat_pieces, fold_chat, read_chat
from .protocol_completions import CompletionRequest, completion_pieces, fold_completion, read_completion
from .protocol_events import EventRequest, EventStream, read_message, read_response
from .protocol_fields import DETOKENIZE, TOKENIZE
from .protocol_guard import (
    HEADER_BYTES,
    HEADER_COUNT,
    answered,
    api_error,
    error_name,
    event_bytes,
    guarded,
    json_response,
    logged,
    note_error,
    raw_body,
    shaped,
)
from .protocol_run import TokenStream, submit_all, usage
from .protocol_site import SERVED, VISIT, RunsGenerations, Served, Settings, Visit
from .text import read_vocabulary

__all__ = ["build_app", "serve"]

Pieces = AsyncGenerator[dict[str, Any], None]
_T = TypeVar("_T")

_ALWAYS_READ: Final = 1 << 16
"""Bytes of text that are put into tokens whatever the context is."""

LIVE_SECONDS: Final = 0.5
"""Between the records that the page draws."""


def build_app(model: Model, engine: RunsGenerations, settings: Settings) -> web.Application:
    """Put the routes of one model together.

    Args:
        model: the model, with a tokenizer.
        engine: that runs it; started by whoever runs the app.
        settings: of the server.
    Raises:
        ConfigError: the checkpoint came without a tokenizer.
    """
    if model.tokenizer is None:
        raise ConfigError("model: expected a tokenizer.json in the checkpoint's folder, got none", field="tokenizer")
    app = web.Application(middlewares=[logged, answered, guarded], client_max_size=settings.body_bytes)
    app[SERVED] = Served(
        model=model,
        engine=engine,
        settings=settings,
        vocabulary=read_vocabulary(model.tokenizer, model.config.vocab_size),
        chat=chat_model(model, name=settings.name, context=settings.context, thinking=settings.thinking),
        fingerprint=f"purestep-{fingerprint(model)[:16]}",
        created=int(time.time()),
        draining=asyncio.Event(),
        metrics=Metrics(engine),
        visits={},
    )
    app.add_routes(
        [
            web.post("/v1/completions", _completions),
            web.post("/v1/chat/completions", _chat),
            web.post("/v1/responses", _responses),
            web.post("/v1/messages", _messages),
            web.get("/v1/models", _models),
            web.get("/v1/models/{name}", _model),
            web.post("/tokenize", _tokenize),
            web.post("/detokenize", _detokenize),
            web.get("/health", _health),
            web.get("/ready", _ready),
            web.get("/metrics", _metrics),
            web.get("/openapi.json", _openapi),
            web.get("/", _page),
            web.get("/live", _live, allow_head=False),
        ]
    )
    return app


async def serve(
    app: web.Application, *, host: str, port: int, until: asyncio.Event, ready: Callable[[str], None]
) -> None:
    """Serve an app until told to stop, then let running requests end.

    Args:
        app: from ``build_app``.
        host: address to listen on.
        port: 0 takes a free one.
        until: set when to stop.
        ready: called with the server's address when it listens.
    Raises:
        ConfigError: the address cannot be listened on.
    """
    served = app[SERVED]
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=served.settings.drain_seconds)
    await runner.setup()
    assert runner.server is not None, "the runner is set up"
    # aiohttp answers headers beyond its own limits with 400, so its limits lie above ours.
    connect = partial(
        Connection,
        runner.server,
        served,
        access_log=None,
        max_line_size=4 * HEADER_BYTES,
        max_field_size=4 * HEADER_BYTES,
        max_headers=4 * HEADER_COUNT,
        lingering_time=1.0,
        keepalive_timeout=served.settings.idle_seconds,
    )
    await served.engine.start()
    listener: asyncio.Server | None = None
    try:
        listener = await _listen(connect, host, port)
        address = listener.sockets[0].getsockname()
        ready(f"http://{address[0]}:{address[1]}" if ":" not in address[0] else f"http://[{address[0]}]:{address[1]}")
        await until.wait()
    finally:
        served.draining.set()
        await served.engine.stop(served.settings.drain_seconds)
        if listener is not None:
            listener.close()
        await runner.cleanup()


async def _listen(connect: Callable[[], Connection], host: str, port: int) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(connect, host, port, backlog=128)
    except OSError as error:
        raise address_error(host, port, error) from error


async def _completions(request: web.Request) -> web.StreamResponse:
    served = request.app[SERVED]

    def read(body: dict[str, Any]) -> CompletionRequest:
        return read_completion(body, served.vocabulary, served.model.config, served.settings.context)

    body, asked = await _read(request, read)
    with _asked(request, asked.asks) as streams:
        pieces = completion_pieces(streams, asked, served.vocabulary, request[VISIT].tally)
        head = _head(request, "cmpl", "text_completion")
        if body.get("stream"):
            return await _send(request, _chunks(request, body, pieces, head), body)
        return await _reply(request, pieces, head, fold_completion)


async def _chat(request: web.Request) -> web.StreamResponse:
    model = _chat_model(request)
    body, asked = await _read(request, lambda found: read_chat(found, model))
    with _asked(request, asked.asks) as streams:
        pieces = chat_pieces(streams, asked, model, request[VISIT].tally)
        if body.get("stream"):
            head = _head(request, "chatcmpl", "chat.completion.chunk")
            return await _send(request, _chunks(request, body, pieces, head), body)
        return await _reply(request, pieces, _head(request, "chatcmpl", "chat.completion"), fold_chat)


async def _responses(request: web.Request) -> web.StreamResponse:
    return await _eventful(request, read_response, "resp")


async def _messages(request: web.Request) -> web.StreamResponse:
    return await _eventful(request, read_message, "msg")


async def _eventful(
    request: web.Request, read: Callable[[dict[str, Any], ChatModel], EventRequest], prefix: str
) -> web.StreamResponse:
    """Answer in a protocol of named events."""
    model = _chat_model(request)
    body, asked = await _read(request, lambda found: read(found, model))
    reply = EventStream(
        asked,
        model,
        request[VISIT].tally,
        reply_id=f"{prefix}_{request[VISIT].id}",
        now=int(time.time()),
        about={"system_fingerprint": request.app[SERVED].fingerprint},
    )
    with _asked(request, [asked.ask]) as streams:
        events = reply.events(streams)
        if body.get("stream"):
            return await _send(request, _named(events), body)
        async with aclosing(events):
            async for _ in events:
                pass
        return json_response(reply.whole())


def _chat_model(request: web.Request) -> ChatModel:
    model = request.app[SERVED].chat
    if model is None:
        raise ApiError("this model's tokenizer has no tokens for chats; use /v1/completions", status=404)
    return model


async def _read(request: web.Request, read: Callable[[dict[str, Any]], _T]) -> tuple[dict[str, Any], _T]:
    """Read and check a body; everything that takes long happens in a thread."""
    served = request.app[SERVED]
    if served.draining.is_set():
        raise ApiError("the server is shutting down; ask again later", status=503, code="shutting_down", retry_after=5)
    _living(served)
    raw = await raw_body(request)

    def work() -> tuple[dict[str, Any], _T]:
        body = without_nulls(parse_body(raw))
        _check_model(body.get("model"), served.settings.name)
        if request.path.startswith("/v1/"):
            _check_length(body, served)
        return body, read(body)

    return await asyncio.to_thread(work)


def _check_model(asked: Any, name: str) -> None:
    # What is no text is refused by the description of the body.
    if isinstance(asked, str) and asked != name:
        raise ApiError(
            f"The model {asked[:200]!r} does not exist; this server has {name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _check_length(body: Mapping[str, Any], served: Served) -> None:
    """Refuse texts that cannot fit whatever their tokens are, before they are put into tokens."""
    prompts = body.get("prompt", ())
    one = max(map(_text_bytes, prompts), default=0) if isinstance(prompts, list) else _text_bytes(prompts)
    n_bytes = one + sum(_text_bytes(body[name]) for name in ("messages", "input", "system") if name in body)
    most = served.settings.context * served.vocabulary.longest
    if n_bytes > max(most, _ALWAYS_READ):
        bad_request(
            f"This model's maximum context length is {served.settings.context} tokens, which are at most {most} bytes "
            f"of text, but the request has {n_bytes}; shorten it",
            next(name for name in ("prompt", "messages", "input", "system") if name in body),
            "context_length_exceeded",
        )


def _text_bytes(found: Any) -> int:
    if isinstance(found, str):
        return len(found.encode("utf-8", "surrogatepass"))
    if isinstance(found, Mapping):
        return sum(map(_text_bytes, found.values()))
    return sum(map(_text_bytes, found)) if isinstance(found, list) else 0


@contextmanager
def _asked(request: web.Request, asks: Sequence[Ask]) -> Iterator[Sequence[TokenStream]]:
    """Ask the engine; whatever ends the handler before its time ends the generations."""
    served, visit = request.app[SERVED], request[VISIT]
    most = served.settings.most_generations
    if most is not None and len(asks) > most:
        bad_request(
            f"n: expected at most {most} replies of all prompts together, which is what this server runs and queues, "
            f"got {len(asks)}",
            "n",
            "invalid_value",
        )
    if served.settings.log_prompts:
        prompts = dict.fromkeys(ask.prompt_ids for ask in asks)
        visit.notes["prompts"] = [served.vocabulary.decode(ids) for ids in prompts]
    streams = submit_all(MeasuredEngine(served.engine, served.metrics), asks)
    served.visits[visit.id] = visit
    try:
        yield streams
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise


def _head(request: web.Request, prefix: str, kind: str) -> dict[str, Any]:
    served = request.app[SERVED]
    return {
        "id": f"{prefix}-{request[VISIT].id}",
        "object": kind,
        "created": int(time.time()),
        "model": served.settings.name,
        "system_fingerprint": served.fingerprint,
    }


async def _reply(
    request: web.Request,
    pieces: Pieces,
    head: Mapping[str, Any],
    fold: Callable[[Iterable[dict[str, Any]]], list[dict[str, Any]]],
) -> web.Response:
    """Wait for everything and send it as one reply."""
    async with aclosing(pieces) as heard:
        choices = fold([piece async for piece in heard])
    return json_response({**head, "choices": choices, "usage": usage(request[VISIT].tally)})


async def _chunks(
    request: web.Request, body: Mapping[str, Any], pieces: Pieces, head: Mapping[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Write pieces of choices as OpenAI's streams have them."""
    has_usage = body.get("stream_options", {}).get("include_usage", False)
    counts = {"usage": None} if has_usage else {}
    async with aclosing(pieces):
        async for piece in pieces:
            yield event_bytes({**head, "choices": [piece], **counts})
    if has_usage:
        yield event_bytes({**head, "choices": [], "usage": usage(request[VISIT].tally)})
    yield b"data: [DONE]\n\n"


async def _named(events: AsyncGenerator[tuple[str, dict[str, Any]], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for name, event in events:
            yield event_bytes(event, name)


async def _send(
    request: web.Request, messages: AsyncGenerator[bytes, None], body: Mapping[str, Any]
) -> web.StreamResponse:
    """Send every message when it comes, as server-sent events; after a failure, that and nothing more."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    async with aclosing(messages):
        try:
            async for message in _unsilent(messages, body.get("stream_options", {}).get("keep_alive")):
                await response.write(message)
        except ConnectionError:
            raise
        except Exception as error:
            failure = api_error(error)
            note_error(request, failure)
            await response.write(event_bytes(shaped(request, failure), error_name(request)))
            response.force_close()
    return response


async def _unsilent(messages: AsyncGenerator[bytes, None], seconds: float | None) -> AsyncIterator[bytes]:
    """Pass messages on, with a comment whenever none came for some seconds."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(messages))
            done, _ = await asyncio.wait([pending], timeout=seconds)
            if not done:
                yield b": keep-alive\n\n"
                continue
            finished, pending = pending, None
            try:
                message = finished.result()
            except StopAsyncIteration:
                return
            yield message
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait([pending])


async def _models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model_card(request.app[SERVED])]})


async def _model(request: web.Request) -> web.Response:
    served = request.app[SERVED]
    _check_model(request.match_info["name"], served.settings.name)
    return json_response(_model_card(served))


def _model_card(served: Served) -> dict[str, Any]:
    """Say what runs: with a reply's seed this is what it takes to make the reply again."""
    return {
        "id": served.settings.name,
        "object": "model",
        "created": served.created,
        "owned_by": "purestep",
        "max_model_len": served.settings.context,
        "system_fingerprint": served.fingerprint,
        "dtype": str(served.model.dtype).removeprefix("torch."),
        "kernels": served.model.ops.name,
        "numerics": attrs.asdict(served.model.numerics),
    }


async def _tokenize(request: web.Request) -> web.Response:
    served = request.app[SERVED]

    def read(body: dict[str, Any]) -> list[int]:
        check_body(TOKENIZE, body)
        bos = served.model.config.bos_token_id
        first = [] if bos is None or not body.get("add_special_tokens", True) else [bos]
        return first + served.vocabulary.encode(body["prompt"])

    _, ids = await _read(request, read)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": served.settings.context})


async def _detokenize(request: web.Request) -> web.Response:
    served = request.app[SERVED]

    def read(body: dict[str, Any]) -> str:
        check_body(DETOKENIZE, body)
        size = len(served.vocabulary.pieces)
        for token_id in body["tokens"]:
            if token_id >= size:
                bad_request(f"tokens: expected token ids below {size}, got {token_id}", "tokens", "invalid_value")
        return served.vocabulary.decode(body["tokens"])

    _, text = await _read(request, read)
    return json_response({"prompt": text})


async def _health(request: web.Request) -> web.Response:
    """Say whether the engine gets on: it has nothing to do, or did something lately."""
    served = request.app[SERVED]
    silent = _living(served).seconds_since_progress
    if silent is not None and silent > served.settings.stall_seconds:
        raise ApiError(
            f"the engine has work and made no progress for {silent:.1f} seconds", status=503, code="engine_stalled"
        )
    return json_response({"status": "ok", "seconds_since_progress": silent})


def _living(served: Served) -> EngineStatus:
    """Return the engine's status, or raise where it is gone."""
    status = served.engine.status()
    if status.failure is not None:
        raise ApiError(f"the engine has ended: {status.failure}", status=503, code="engine_dead")
    return status


async def _ready(request: web.Request) -> web.Response:
    """Say whether new requests are taken."""
    served = request.app[SERVED]
    if served.draining.is_set() or not served.engine.status().is_ready:
        raise ApiError("the server takes no requests now", status=503, code="not_ready", retry_after=1)
    return json_response({"status": "ready"})


async def _metrics(request: web.Request) -> web.Response:
    text = request.app[SERVED].metrics.text()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _openapi(request: web.Request) -> web.Response:
    settings = request.app[SERVED].settings
    return json_response(describe(model=settings.name, has_key=settings.api_key is not None))


async def _page(request: web.Request) -> web.Response:
    headers = {"Content-Security-Policy": "default-src 'self' 'unsafe-inline' data:", "Cache-Control": "no-store"}
    return web.Response(text=PAGE, content_type="text/html", charset="utf-8", headers=headers)


async def _live(request: web.Request) -> web.StreamResponse:
    """Send what the page draws, until somebody leaves."""
    served = request.app[SERVED]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    while not served.draining.is_set():
        found = live_record(served.settings.name, served.engine.status(), map(_live_request, served.visits.values()))
        await response.write(event_bytes(found))
        with suppress(TimeoutError):
            await asyncio.wait_for(served.draining.wait(), LIVE_SECONDS)
    return response


def _live_request(visit: Visit) -> dict[str, Any]:
    return {
        "id": visit.id[:8],
        "path": visit.path,
        "prompt_tokens": visit.tally.n_prompt,
        "cached_tokens": visit.tally.n_cached,
        "completion_tokens": visit.tally.n_reply,
        "seconds": round(time.monotonic() - visit.began, 1),
    }
