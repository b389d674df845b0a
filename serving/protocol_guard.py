"""What every request passes on its way in and out: a line in the log, limits, the key, and errors in a shape."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web

from ..state.errors import CapacityError, RequestError
from .asks import QueueFullError
from .protocol import ApiError, bad_request, error_body
from .protocol_events import message_error
from .protocol_site import SERVED, VISIT, Visit

__all__ = [
    "HEADER_BYTES",
    "HEADER_COUNT",
    "answered",
    "api_error",
    "error_name",
    "event_bytes",
    "guarded",
    "json_response",
    "logged",
    "note_error",
    "raw_body",
    "shaped",
]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADER_BYTES: Final = 16 * 1024
HEADER_COUNT: Final = 100
"""Of a request; more is answered with 431."""

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/"})
"""What needs no API key: probes, and the page, which has no number in it before it asks for ``/live``."""

INTERNAL: Final = "internal_error"
"""Code of what should not happen; the log has the traceback."""

CLIENT_LEFT: Final = 499
"""Status in the log of a request whose client did not wait for the reply."""


@web.middleware
async def logged(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id and, once it is over, a line in the log."""
    served = request.app[SERVED]
    visit = request[VISIT] = Visit(secrets.token_hex(12), request.path, time.monotonic())
    status = CLIENT_LEFT
    try:
        response = await handler(request)
        status = CLIENT_LEFT if visit.has_left else response.status
        return response
    finally:
        served.visits.pop(visit.id, None)
        resource = request.match_info.route.resource
        path = "none" if resource is None else resource.canonical
        served.metrics.answered.labels(path=path, status=str(status)).inc()
        if served.settings.log is not None:
            served.settings.log(_record(request, status))


def _record(request: web.Request, status: int) -> dict[str, Any]:
    visit = request[VISIT]
    tally = visit.tally
    record: dict[str, Any] = {
        "time": round(time.time(), 3),
        "id": visit.id,
        "client": request.remote,
        "method": request.method,
        "path": visit.path,
        "status": status,
        "seconds": round(time.monotonic() - visit.began, 4),
    }
    if tally.n_prompt:
        record |= {
            "prompt_tokens": tally.n_prompt,
            "cached_tokens": tally.n_cached,
            "completion_tokens": tally.n_reply,
            "finish_reasons": tally.reasons,
        }
    return record | visit.notes


@web.middleware
async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into a reply that clients understand."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refusal(request, ApiError(error.reason, status=error.status), error.headers)
    except ConnectionError:
        # The client left while its reply was written.
        request[VISIT].has_left = True
        raise
    except Exception as error:
        return _refusal(request, api_error(error))


def api_error(error: Exception) -> ApiError:
    """Say what an error means to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, code="queue_full", retry_after=1)
    if isinstance(error, RequestError | CapacityError):
        return ApiError(str(error), param=error.field, code="impossible_request")
    failure = ApiError(f"the server failed: {type(error).__name__}: {error}", status=500, code=INTERNAL)
    failure.__cause__ = error
    return failure


def shaped(request: web.Request, error: ApiError) -> dict[str, Any]:
    """Write an error as the clients of the request's protocol read it."""
    return message_error(error) if request.path == "/v1/messages" else error_body(error)


def note_error(request: web.Request, error: ApiError) -> None:
    """Keep an error for the request's line in the log."""
    notes = {"error": error.code or error.status, "message": str(error)[:500]}
    if error.code == INTERNAL and error.__cause__ is not None:
        notes["traceback"] = "".join(traceback.format_exception(error.__cause__))
    request[VISIT].notes |= notes


def _refusal(request: web.Request, error: ApiError, headers: Mapping[str, str] | None = None) -> web.Response:
    note_error(request, error)
    response = json_response(shaped(request, error), status=error.status)
    if headers and "Allow" in headers:
        response.headers["Allow"] = headers["Allow"]
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    # A body that was not read to its end would be taken for the next request.
    if not request.content.at_eof():
        response.force_close()
    return response


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in whoever has the key and modest headers."""
    served = request.app[SERVED]
    size = sum(len(name) + len(found) for name, found in request.raw_headers) + len(request.raw_path)
    if size > HEADER_BYTES or len(request.raw_headers) > HEADER_COUNT:
        raise ApiError(
            f"headers: expected at most {HEADER_COUNT} of together {HEADER_BYTES} bytes, got "
            f"{len(request.raw_headers)} of {size}",
            status=431,
            code="headers_too_large",
        )
    key = served.settings.api_key
    if key is not None and request.path not in OPEN_PATHS and not _has_key(request, key):
        raise ApiError(
            "expected the API key as a bearer token, got none or another", status=401, code="invalid_api_key"
        )
    return await handler(request)


def _has_key(request: web.Request, key: str) -> bool:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
    # surrogateescape: headers may hold any byte.
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())


async def raw_body(request: web.Request) -> bytes:
    settings = request.app[SERVED].settings
    if request.content_type not in ("application/json", "application/octet-stream"):
        bad_request(
            f"Content-Type: expected application/json, got {request.content_type}", None, "invalid_content_type"
        )
    if (request.content_length or 0) > settings.body_bytes:
        raise ApiError(f"body: expected at most {settings.body_bytes} bytes", status=413, code="body_too_large")
    try:
        async with asyncio.timeout(settings.read_seconds):
            return await request.read()
    except TimeoutError:
        raise ApiError("body: expected all of it by now", status=408, code="slow_body") from None
    except web.RequestPayloadError as error:
        bad_request(f"body: expected what its headers say, got {error}", None, "invalid_body")
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(
            f"body: expected at most {settings.body_bytes} bytes", status=413, code="body_too_large"
        ) from None


def event_bytes(found: Mapping[str, Any], name: str | None = None) -> bytes:
    """Write a server-sent event."""
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + _json_bytes(found) + b"\n\n"


def error_name(request: web.Request) -> str | None:
    """Return the name of an error event in the request's protocol; None where events have no names."""
    return "error" if request.path in ("/v1/messages", "/v1/responses") else None


def _json_bytes(found: Mapping[str, Any]) -> bytes:
    return json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_response(found: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=_json_bytes(found), status=status, content_type="application/json")
