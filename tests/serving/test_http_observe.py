"""What the server shows of itself: metrics, and the page in a browser."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import purestep as ps
import pytest
from kit.http import Server, running
from prometheus_client.parser import text_string_to_metric_families
from purestep.serving.engine import Engine, EngineLimits

MODEL = ps.load_model("tiny")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMITS = EngineLimits(running=3, waiting=8, tokens=2048, context=256, budget=259)
ENGINES: list[Engine] = []


def make() -> Engine:
    ENGINES.append(Engine(MODEL, LIMITS))
    return ENGINES[-1]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(MODEL, make, context=256) as found:
        yield found


def measured(server: Server) -> dict[tuple[str, ...], float]:
    """All samples: (name, label values ...) -> value."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def ask(server: Server, number: int) -> Any:
    """One of several kinds of requests: plain, streamed, refused, and one whose client leaves."""
    body: dict[str, Any] = {"model": "tiny", "prompt": f"{number} And", "max_tokens": 6, "stream": number % 2 == 0}
    if number % 4 == 1:
        body["top_k"] = -7
    if number % 4 != 2:
        return server.post("/v1/completions", body)
    raw = json.dumps(body | {"max_tokens": 200, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + raw)
        return connection.recv(1000)


def test_gauges_come_back_to_nothing(server: Server) -> None:
    """After plain, streamed, refused and abandoned requests nothing runs or waits, and the counts agree."""
    before = measured(server)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: ask(server, number), range(16)))
    deadline = time.monotonic() + 20
    while (now := measured(server))[("purestep_num_requests_running",)] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert now[("purestep_num_requests_running",)] == now[("purestep_num_requests_waiting",)] == 0
    assert now[("purestep_seconds_since_progress",)] == 0

    def grown(*name: str) -> float:
        return now.get(name, 0) - before.get(name, 0)

    assert grown("purestep_http_requests_total", "/v1/completions", "400") == 4
    ended = [grown(*name) for name in now if name[0] == "purestep_request_success_total"]
    taken_in = grown("purestep_time_to_first_token_seconds_count")
    assert grown("purestep_http_requests_total", "/v1/completions", "429") + sum(ended) == 12
    assert taken_in <= sum(ended)
    assert grown("purestep_request_aborts_total") >= 1
    assert now[("purestep_pool_pages_used", "rows")] <= LIMITS.points


def test_pool_bytes_are_those_of_the_buffers(server: Server) -> None:
    """The bytes reported are those of the cache tensors, rings of pooling states included."""
    now = measured(server)
    handle = ENGINES[0]._pool.state.kv.handle
    with handle.read() as buffers:
        sizes = {name: buffer.nbytes for name, buffer in buffers.items()}
    reported = {name[1]: value for name, value in now.items() if name[0] == "purestep_pool_bytes"}
    assert reported == sizes


def shown(address: str, folder: Path) -> str:
    """The page after a browser has run it for a while."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    options += ["--virtual-time-budget=20000", f"--user-data-dir={folder}", address]
    return subprocess.run([BROWSER, *options], capture_output=True, encoding="utf-8", timeout=120, check=True).stdout


def test_the_page_draws_itself(server: Server, tmp_path: Path) -> None:
    """In a browser, with nothing but the server, the page shows the model, running requests and the pools."""
    if BROWSER is None:
        pytest.skip("needs chromium or chrome")
    body = {"model": "tiny", "prompt": "In", "max_tokens": 240, "ignore_eos": True, "n": 3}
    with ThreadPoolExecutor(1) as pool:
        # The browser's clock runs ahead of a busy machine's, so that it may look before anything was heard.
        for attempt in range(4):
            busy = pool.submit(server.post, "/v1/completions", body)
            page = shown(f"{server.url}/", tmp_path / str(attempt))
            assert busy.result().status == 200
            if "<td>/v1/completions</td>" in page:
                break
    assert '<span id="model">tiny</span>' in page
    assert "<td>/v1/completions</td>" in page
    assert "<td>window</td>" in page
    assert 'role="status">working' in page
    assert "http" not in server.get("/").text


def test_what_needs_the_key() -> None:
    """With a key the page itself is open, but not the numbers that it draws nor the metrics."""
    with running(MODEL, make, api_key="k", context=256) as server:
        assert server.get("/").status == 200
        for path in ("/live", "/metrics", "/openapi.json"):
            assert server.get(path).status == 401
        key = {"Authorization": "Bearer k"}
        assert server.ask("GET", "/metrics", headers=key).status == 200
        assert server.ask("GET", "/openapi.json", headers=key).json["security"] == [{"key": []}]
