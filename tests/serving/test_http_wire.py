"""What comes over the wire and is no request: refused in the shape of all errors, with one line in the log."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator

import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import Server, running
from kit.stand_in import StandIn, prefer
from kit.steps import examples

MODEL = ps.load_model("tiny")
SECRET = b"sk-secret"
HOST = b"Host: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
MALFORMED = {
    "garbage": b"GARBAGE\r\n\r\n",
    "another method": b"get /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another version": b"GET / HTTP/9.9x\r\n\r\n",
    "a space in the path": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "no URL": b"GET http://[::1 HTTP/1.1\r\n" + HOST + b"\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\n" + HOST + SECRET + b" x\r\n\r\n",
    "a zero in a header": b"GET /health HTTP/1.1\r\n" + HOST + b"Authorization: " + SECRET + b"\x00\r\n\r\n",
    "a long path": b"GET /" + SECRET + b"a" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % at for at in range(2000)) + b"\r\n",
    "a length below zero": POST + b"Content-Length: -1\r\n\r\n",
    "a chunk without a size": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk that is too long": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n" + SECRET + b"\r\n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(MODEL, StandIn(prefer(lambda *_: 300, pause=0.01)), context=400, idle_seconds=2.0) as found:
        yield found


@pytest.fixture
def complaints() -> Iterator[list[logging.LogRecord]]:
    """What aiohttp logs meanwhile."""
    found: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("aiohttp")
    handler.emit = found.append
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)


def lines_after(server: Server, n_before: int, n: int) -> list:
    """The records that came after the first so many, when there are n of them."""
    deadline = time.monotonic() + 5
    while len(server.log) < n_before + n and time.monotonic() < deadline:
        time.sleep(0.01)
    return server.log[n_before:]


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_requests(server: Server, complaints: list[logging.LogRecord], kind: str) -> None:
    """What is no HTTP gets 400 in the shape of all errors, a line in the log that quotes nothing, and no traceback."""
    n_before = len(server.log)
    head, _, body = server.raw(MALFORMED[kind]).partition(b"\r\n\r\n")
    assert head[8:13] == b" 400 ", head
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert error["message"].startswith("request: expected HTTP, got: ")
    (record,) = lines_after(server, n_before, 1)
    assert (record["status"], record["error"], record["client"]) == (400, "invalid_http", "127.0.0.1")
    assert SECRET.decode() not in json.dumps(record)
    assert complaints == []
    assert 'http_requests_total{path="none",status="400"}' in server.get("/metrics").text


@examples(60)
@given(st.binary(min_size=1, max_size=40), st.sampled_from([b"", b"GET /health HTTP/1.1\r\n", POST]))
def test_arbitrary_bytes_on_the_wire(server: Server, raw: bytes, first: bytes) -> None:
    """Whatever bytes come, the answer is none, 200 or a refusal in the shape of all errors; the server goes on."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(first + raw + b"\r\n\r\n")
        connection.settimeout(0.02)
        try:
            heard = connection.recv(65536)
        except TimeoutError:
            heard = b""
    if heard:
        head, _, body = heard.partition(b"\r\n\r\n")
        assert head[9:12] in (b"200", b"400", b"404", b"405", b"417"), heard
        assert head[9:12] == b"200" or json.loads(body)["error"]["message"]
    assert server.get("/health").status == 200


def test_a_broken_body_leaves_no_traceback(server: Server, complaints: list[logging.LogRecord]) -> None:
    """A body that is not encoded as its header says is refused, and nothing else is said of it."""
    reply = server.ask("POST", "/v1/completions", b"xx", {"Content-Encoding": "gzip"})
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_body")
    server.get("/health")
    assert complaints == []


def test_unknown_expectations_are_refused_in_shape(server: Server) -> None:
    """An Expect that nobody knows is 417 in the shape of all errors, with a line in the log."""
    n_before = len(server.log)
    reply = server.ask("POST", "/v1/completions", b"{}", {"Expect": "foo"})
    assert (reply.status, reply.json["error"]["type"]) == (417, "invalid_request_error")
    assert lines_after(server, n_before, 1)[0]["status"] == 417


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_sending_side_is_leaving(server: Server, stream: bool) -> None:
    """A client that says it sends no more counts as gone: its request ends, and the connection closes."""
    n_before = len(server.log)
    body = json.dumps(
        {"model": "tiny", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": stream}
    ).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        while connection.recv(65536):
            pass
        assert time.monotonic() - began < 1
    assert lines_after(server, n_before, 1)[0]["status"] == 499
