"""Runs the HTTP server on a free loopback port beside a test, and talks to it plainly."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import attrs
import purestep as ps
from purestep.serving.protocol_site import Settings
from purestep.serving.server import build_app, serve

__all__ = ["Reply", "Server", "running"]


@attrs.frozen
class Reply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        """The body, by a parser that takes no infinities."""

        def refuse(name: str) -> None:
            raise ValueError(name)

        return json.loads(self.text, parse_constant=refuse)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; "[DONE]" as it is."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@attrs.frozen
class Server:
    """A running server.

    Attributes:
        port: on the loopback address.
        log: the records of its requests.
    """

    port: int
    log: list[Mapping[str, Any]] = attrs.field(repr=False)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Send a request; what is not bytes goes as JSON."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, raw, {"Content-Type": "application/json"} | dict(headers or {}))
            answer = connection.getresponse()
            return Reply(answer.status, dict(answer.getheaders()), answer.read().decode())

    def post(self, path: str, body: Any) -> Reply:
        """Send a body."""
        return self.ask("POST", path, body)

    def get(self, path: str) -> Reply:
        """Ask for a page."""
        return self.ask("GET", path)

    def raw(self, sent: bytes, *, seconds: float = 5.0) -> bytes:
        """Send bytes and return whatever comes until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(sent)
            heard = b""
            while part := connection.recv(65536):
                heard += part
            return heard


@contextmanager
def running(model: ps.Model, engine: Any | Callable[[], Any], **settings: Any) -> Iterator[Server]:
    """Serve an engine, or what a function makes in the server's thread, while a block runs."""
    listening, found, stops, failures = threading.Event(), [], [], []
    log: list[Mapping[str, Any]] = []
    options = {"name": "tiny", "context": 512, "drain_seconds": 2.0, "log": log.append} | settings

    async def main() -> None:
        until, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(until.set))

        def ready(address: str) -> None:
            found.append(Server(int(address.rpartition(":")[2]), log))
            listening.set()

        made = engine() if callable(engine) else engine
        app = build_app(model, made, Settings(**options))
        await serve(app, host="127.0.0.1", port=0, until=until, ready=ready)

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            listening.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert listening.wait(30)
    if found:
        try:
            yield found[0]
        finally:
            stops[0]()
            thread.join(30)
    if failures:
        raise failures[0]
