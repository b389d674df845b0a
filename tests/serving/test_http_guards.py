"""Guard rails: slow, greedy, lying and vanishing clients, too long prompts, full queues, and failures on the way."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import purestep as ps
import pytest
from kit.http import Server, running
from kit.protocols import CHATS, PATHS, Site, body_of, read_plain
from kit.stand_in import StandIn, prefer, say
from prometheus_client.parser import text_string_to_metric_families
from purestep.serving.asks import Ended, Sampled
from purestep.serving.engine import Engine, EngineLimits

MODEL = ps.load_model("tiny")
CONTEXT = 64
LIMITS = EngineLimits(running=2, waiting=6, tokens=1024, context=256, points=0)
POSTS = (*PATHS.values(), "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    options = {"context": CONTEXT, "body_bytes": 100_000, "read_seconds": 0.6, "idle_seconds": 0.8}
    with running(MODEL, engine, **options) as server:
        yield Site(server, engine)


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    most = LIMITS.running + LIMITS.waiting
    with running(MODEL, lambda: Engine(MODEL, LIMITS), context=256, most_generations=most) as server:
        yield server


def head_of(path: str, *lines: str) -> bytes:
    fields = ("Host: x", "Content-Type: application/json", *lines)
    return f"POST {path} HTTP/1.1\r\n{''.join(line + chr(13) + chr(10) for line in fields)}\r\n".encode()


def written(path: str, body: Any) -> bytes:
    raw = json.dumps(body).encode()
    return head_of(path, f"Content-Length: {len(raw)}") + raw


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    samples = [one for family in families for one in family.samples if one.name == name]
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_requests(site: Site, path: str) -> None:
    """Whatever is no JSON object, of another type, or without a needed field gets 400 in the endpoint's error shape."""
    broken: list[bytes] = [
        *(b"{not json", b"", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b"{}", b"[" * 100_000, b'{"model": "tiny"}'),
        *(b'{"model": 7, "prompt": 7}', b'{"model": "tiny", "prompt": NaN}', b"{" * 100, b'{"a": 1, "a": 1'),
    ]
    for raw in broken:
        reply = site.server.ask("POST", path, raw)
        assert reply.status == 400, (raw[:50], reply.text)
        error = reply.json["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        if path == PATHS["messages"]:
            assert reply.json["type"] == "error"
        else:
            assert set(error) == {"message", "type", "param", "code"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"):
        reply = site.server.ask("POST", path, b"{}", {"Content-Type": kind})
        assert reply.status == 400, kind


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PATHS)
def test_prompts_around_the_context(site: Site, protocol: str, stream: bool) -> None:
    """A prompt that leaves room for one token gets one; a longer one 400 with both numbers, whatever was asked for."""
    site.engine.source = prefer(lambda ask, outputs, allowed: 300)
    path, fill = PATHS[protocol], " the"

    def body(n: int, limit: int | None) -> dict[str, Any]:
        name = "max_output_tokens" if protocol == "responses" else "max_tokens"
        return body_of(protocol, content=fill * n, stream=stream) | {name: limit}

    assert site.server.post(path, body(1, 1)).status == 200
    extra = len(site.engine.asks[-1].prompt_ids) - 1
    for length, limit, status in [
        (CONTEXT - 1, 1, 200), (CONTEXT - 1, 2, 400), (CONTEXT, 1, 400), (CONTEXT + 1, 1, 400), (CONTEXT - 9, 9, 200),
        (CONTEXT - 9, 10, 400), (CONTEXT - 1, None, 200), (CONTEXT, None, 400), (CONTEXT + 1, None, 400),
        (CONTEXT * 40, None, 400),
    ]:  # fmt: skip
        if limit is None and protocol == "messages":
            continue
        reply = site.server.post(path, body(length - extra, limit))
        assert reply.status == status, (length, limit, reply.text)
        if status == 400:
            message = reply.json["error"]["message"]
            assert str(CONTEXT) in message
            assert str(length) in message
            assert "-" not in message
            assert protocol == "messages" or reply.json["error"]["code"] == "context_length_exceeded"
        elif not stream:
            (said,) = read_plain(protocol, reply)
            assert (said.reason, said.counts[0]) == ("length", length)
            assert said.counts[2] == (limit or CONTEXT - length)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("protocol", PATHS)
def test_failures_on_the_way_close_the_stream(site: Site, protocol: str, n: int) -> None:
    """A stream whose engine fails has one error event and no good end, and its connection is closed within a second."""

    def broken(ask: Any) -> Iterator[Any]:
        yield Sampled(token_id=300)
        yield Ended(reason="error", error="a row of NaN")

    site.engine.source = broken
    body = body_of(protocol, stream=True) | ({"n": n} if protocol in ("completions", "chat") else {})
    began = time.monotonic()
    heard = site.server.raw(written(PATHS[protocol], body)).decode()
    assert time.monotonic() - began < 1
    assert heard.count("a row of NaN") == 1
    assert heard.startswith("HTTP/1.1 200")
    for good in ("[DONE]", '"finish_reason":"stop"', "response.completed", "message_stop", "response.incomplete"):
        assert good not in heard


@pytest.mark.parametrize("protocol", PATHS)
def test_refusals_come_before_the_stream(site: Site, protocol: str) -> None:
    """A streamed request that is refused is refused plainly, as no reply has begun."""
    for field, wrong in (("temperature", -1), ("top_k", -7), ("model", "other"), ("stream", "yes")):
        reply = site.server.post(PATHS[protocol], body_of(protocol, stream=True) | {field: wrong})
        assert reply.status == (404 if field == "model" else 400)
        assert reply.headers["Content-Type"].startswith("application/json")


def trickle(server: Server, parts: Iterator[bytes], *, seconds: float) -> tuple[bytes, float, int]:
    """Send parts until the server has closed: (what it said, after how long, bytes that it took)."""
    began, sent, heard = time.monotonic(), 0, b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as connection:
        while time.monotonic() - began < seconds:
            try:
                with suppress(TimeoutError):
                    part = connection.recv(65536)
                    heard += part
                    if not part:
                        return heard, time.monotonic() - began, sent
                with suppress(TimeoutError):
                    sent += connection.send(next(parts))
            except OSError:
                # Closed while more was on its way.
                return heard, time.monotonic() - began, sent
    raise AssertionError(f"still open after {seconds} seconds")


def repeated(first: bytes, part: bytes) -> Iterator[bytes]:
    yield first
    while True:
        yield part


SLOW = {
    "silence": (head_of(PATHS["chat"], "Content-Length: 50"), b""),
    "a byte at a time": (head_of(PATHS["chat"], "Content-Length: 5000"), b" "),
    "chunks without end": (head_of(PATHS["chat"], "Transfer-Encoding: chunked"), b"1\r\n \r\n"),
    "too little": (head_of(PATHS["chat"], "Content-Length: 50") + b'{"model": ', b""),
}


@pytest.mark.parametrize("kind", SLOW)
def test_slow_senders(site: Site, kind: str) -> None:
    """A body that comes slowly, or never, gets 408 and is closed in time; others are served meanwhile."""
    site.engine.source = say([300])
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(trickle, site.server, repeated(*SLOW[kind]), seconds=6)
        while not slow.done():
            began = time.monotonic()
            assert site.server.post(PATHS["chat"], body_of("chat")).status == 200
            assert time.monotonic() - began < 1
            time.sleep(0.05)
    heard, took, _ = slow.result()
    assert heard.startswith(b"HTTP/1.1 408")
    assert 0.4 < took < 4


@pytest.mark.parametrize("first", [b"", b"POST /v1/chat", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_connections_that_ask_nothing(site: Site, first: bytes) -> None:
    """A connection whose headers do not arrive is closed in time, without a word or with 408."""
    heard, took, _ = trickle(site.server, repeated(first, b"a" if first else b""), seconds=6)
    assert took < 4
    assert heard in (b"",) or b" 408 " in heard or b" 400 " in heard


@pytest.mark.parametrize(
    ("lines", "part", "status"),
    [
        (("Content-Length: 999999999",), b"x" * 50_000, b"413"),
        (("Transfer-Encoding: chunked",), b"c350\r\n" + b"x" * 50_000 + b"\r\n", b"413"),
        (("Content-Length: -5",), b"x", b"400"),
        (("Content-Length: 1e3",), b"x", b"400"),
        (("Content-Length: 5", "Transfer-Encoding: chunked"), b"x", b"400"),
        (("Content-Length: 5", "Content-Length: 6"), b"x", b"400"),
        (("Content-Length:",), b"x", b"400"),
    ],
)
def test_large_and_lying_bodies(site: Site, lines: tuple[str, ...], part: bytes, status: bytes) -> None:
    """Bodies over the limit get 413 and are not taken in; lengths that cannot be get 400; the connection is closed."""
    heard, took, sent = trickle(site.server, repeated(head_of(PATHS["chat"], *lines), part), seconds=6)
    # A connection may break before the words are read, where the server closes it with bytes unread.
    assert heard[9:12] in (status, b""), heard[:200]
    assert took < 4
    # What the kernel's buffers hold and the server throws away while it says goodbye is not kept.
    assert sent < 16_000_000
    assert site.server.get("/health").status == 200


def test_a_length_that_is_too_short(site: Site) -> None:
    """What follows a body that was announced shorter is no second request."""
    raw = json.dumps(body_of("chat")).encode()
    heard = site.server.raw(head_of(PATHS["chat"], f"Content-Length: {len(raw) - 5}") + raw)
    assert heard[9:12] == b"400"


def test_pages_of_other_sites_get_no_permission(site: Site) -> None:
    """By default no answer lets a page of another site read it, nor is one asked beforehand allowed anything."""
    origin = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    for method, path in (("OPTIONS", PATHS["chat"]), ("POST", PATHS["chat"]), ("GET", "/v1/models"), ("GET", "/")):
        reply = site.server.ask(method, path, body_of("chat") if method == "POST" else None, origin)
        assert not any(name.lower().startswith("access-control") for name in reply.headers)
        assert reply.status == (405 if method == "OPTIONS" else 200)


def idle(server: Server) -> bool:
    """Whether nothing runs or waits and every page is free."""
    running = metric(server, "purestep_num_requests_running") + metric(server, "purestep_num_requests_waiting")
    return running == 0 and metric(server, "purestep_pool_pages_used") == 0


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 10
    while not idle(server) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert idle(server)


@pytest.mark.parametrize("when", ["before a reply", "after a chunk"])
@pytest.mark.parametrize("protocol", PATHS)
def test_clients_that_leave(real: Server, protocol: str, when: str) -> None:
    """When a client leaves, its request is gone, its pages are free, and one abort more is counted."""
    wait_until_idle(real)
    aborts = metric(real, "purestep_request_aborts_total")
    body = body_of(protocol, limit=180, logit_bias={"1": -100}, temperature=0, stream=when == "after a chunk")
    with socket.create_connection(("127.0.0.1", real.port), timeout=10) as connection:
        connection.sendall(written(PATHS[protocol], body))
        if when == "after a chunk":
            assert connection.recv(4096)
            assert b"data: " in connection.recv(65536)
        else:
            while not metric(real, "purestep_num_requests_running"):
                time.sleep(0.005)
    wait_until_idle(real)
    assert metric(real, "purestep_request_aborts_total") == aborts + 1


def test_a_client_that_leaves_between_requests(real: Server) -> None:
    """A connection that is closed after a reply, before the next request, costs nothing and is counted as no abort."""
    wait_until_idle(real)
    aborts = metric(real, "purestep_request_aborts_total")
    with socket.create_connection(("127.0.0.1", real.port), timeout=20) as connection:
        for _ in range(2):
            connection.sendall(written(PATHS["completions"], body_of("completions", limit=3)))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    wait_until_idle(real)
    assert metric(real, "purestep_request_aborts_total") == aborts


def test_a_burst_beyond_the_queue(real: Server) -> None:
    """Of a burst what does not fit the queue is refused with Retry-After and counted; the others are served."""
    wait_until_idle(real)
    before = metric(real, "purestep_http_requests_total", status="429")
    body = body_of("completions", limit=40, logit_bias={"1": -100})
    times = []

    def ask(_: int) -> Any:
        began = time.monotonic()
        reply = real.post(PATHS["completions"], body)
        if reply.status == 429:
            times.append(time.monotonic() - began)
        return reply

    n = LIMITS.waiting + LIMITS.running + 20
    with ThreadPoolExecutor(n) as pool:
        replies = list(pool.map(ask, range(n)))
    refused = [reply for reply in replies if reply.status == 429]
    served = [reply for reply in replies if reply.status == 200]
    assert len(refused) + len(served) == n
    assert len(served) >= LIMITS.waiting
    assert len(refused) >= 10
    assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)
    assert all(reply.json["error"]["code"] == "queue_full" for reply in refused)
    assert all(reply.json["usage"]["completion_tokens"] == 40 for reply in served)
    assert metric(real, "purestep_http_requests_total", status="429") == before + len(refused)
    assert real.post(PATHS["completions"], body_of("completions", limit=2)).status == 200


@pytest.mark.parametrize("protocol", CHATS)
def test_a_full_queue_in_every_protocol(site: Site, protocol: str) -> None:
    """A full queue is 429 with Retry-After in the shape of every protocol."""
    site.engine.queue = 0
    try:
        reply = site.server.post(PATHS[protocol], body_of(protocol))
    finally:
        site.engine.queue = 1000
    assert reply.status == 429
    assert reply.headers["Retry-After"] == "1"
    assert reply.json["error"]["type"] == "rate_limit_error"


def test_what_no_reply_can_come_of_is_refused_at_once(site: Site) -> None:
    """Texts far beyond the context, bodies that are not what they say, endless pauses."""
    site.engine.source = say([300])
    for path, body in (
        ("/v1/completions", {"prompt": "a b " * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 20_000}]}),
    ):
        reply = site.server.post(path, {"model": "tiny"} | body)
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    body = {"model": "tiny", "prompt": "x"}
    reply = site.server.ask("POST", "/v1/completions", b"xx", {"Content-Encoding": "gzip"})
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_body")
    for keep_alive in (1e300, 10**400):
        asked = body | {"stream": True, "stream_options": {"keep_alive": keep_alive}}
        assert site.server.post("/v1/completions", asked).status == 400
    assert site.server.ask("HEAD", "/live").status == 405


def test_more_replies_than_are_run_and_queued(real: Server) -> None:
    """One request that alone is more than the queue is refused for good, not asked to come again."""
    body = {"model": "tiny", "prompt": ["x"] * 128, "n": 128}
    reply = real.post("/v1/completions", body)
    assert (reply.status, reply.json["error"]["param"]) == (400, "n"), reply.text
