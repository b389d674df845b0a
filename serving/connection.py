"""One client's connection: what is no HTTP is answered in the shape of all errors, and logged in one line.

Source: none; the hooks are the public methods of aiohttp's ``web.RequestHandler``.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Any, Final

from aiohttp import web

from .protocol import ApiError, error_body
from .protocol_guard import json_response
from .protocol_site import Served

__all__ = ["Connection"]

_QUOTED: Final = re.compile(r":?\s*(?:bytearray\()?b['\"]")
"""Where aiohttp begins to quote what it read; keys and prompts have no place in a log."""


class Connection(web.RequestHandler):
    """A connection as aiohttp serves it, but for requests that reach no handler.

    A client that closes its sending side counts as one that left: asyncio then closes the transport unless told
    otherwise, and to keep it would hide clients that are gone, whose generations would run to their end for nobody.

    Args:
        manager: of all connections.
        served: what handlers share.
        **options: of ``web.RequestHandler``.
    """

    __slots__ = ("_served",)

    def __init__(self, manager: web.Server, served: Served, **options: Any) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop(), **options)
        self._served = served

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be read as a request, and close the connection."""
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        said = " ".join(_QUOTED.split(message or "something else")[0].split())[:200]
        return self._refuse(
            request, ApiError(f"request: expected HTTP, got: {said}", status=status, code="invalid_http")
        )

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a reply; what aiohttp refuses before any handler has its shape changed."""
        if isinstance(resp, web.HTTPException):
            resp = self._refuse(request, ApiError(f"request: {resp.text or resp.reason}", status=resp.status))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what should not happen; a body that breaks off after its request was refused is no such thing."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def _refuse(self, request: web.BaseRequest, error: ApiError) -> web.Response:
        self._served.metrics.answered.labels(path="none", status=str(error.status)).inc()
        if self._served.settings.log is not None:
            self._served.settings.log(
                {
                    "time": round(time.time(), 3),
                    "id": secrets.token_hex(12),
                    "client": request.remote,
                    "status": error.status,
                    "error": error.code or error.status,
                    "message": str(error),
                }
            )
        response = json_response(error_body(error), status=error.status)
        response.force_close()
        return response
