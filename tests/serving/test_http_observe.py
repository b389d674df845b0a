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

import attrs
import purestep as ps
import pytest
import torch
from kit.http import Server, running
from prometheus_client.parser import text_string_to_metric_families
from purestep.serving.engine import Engine, EngineLimits

MODEL = ps.load_model("tiny")
POISON = MODEL.config.vocab_size - 1
"""A token whose embedding is NaN, so that requests with it fail."""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMITS = EngineLimits(running=3, waiting=32, tokens=2048, context=256, budget=259)
ENGINES: list[Engine] = []


def make() -> Engine:
    embed = MODEL.params.embed.clone()
    embed[POISON] = torch.nan
    ENGINES.append(Engine(attrs.evolve(MODEL, params=attrs.evolve(MODEL.params, embed=embed)), LIMITS))
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
    """One of the kinds of requests: plain, streamed, refused, failing, and one whose client leaves."""
    kind = number % 5
    body: dict[str, Any] = {"model": "tiny", "prompt": f"{number} And", "max_tokens": 6, "stream": number % 2 == 0}
    body |= {"top_k": -7} if kind == 1 else {"prompt": [5, POISON, 6]} if kind == 2 else {}
    if kind != 3:
        return server.post("/v1/completions", body)
    raw = json.dumps(body | {"max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + raw)
        return connection.recv(1000)


def test_gauges_come_back_to_nothing(server: Server) -> None:
    """OBS-03: after 50 plain, streamed, refused, failing and abandoned requests gauges are zero, and counts agree."""
    before = measured(server)
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda number: ask(server, number), range(50)))
    deadline = time.monotonic() + 20
    while (now := measured(server))[("purestep_num_requests_running",)] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert now[("purestep_num_requests_running",)] == now[("purestep_num_requests_waiting",)] == 0
    assert now[("purestep_seconds_since_progress",)] == 0

    def grown(*name: str) -> float:
        return now.get(name, 0) - before.get(name, 0)

    ended = {name[1]: grown(*name) for name in now if name[0] == "purestep_request_success_total"}
    assert grown("purestep_http_requests_total", "/v1/completions", "400") == 10
    assert (ended["error"], ended["abort"]) == (10, 10)
    assert sum(ended.values()) == 40
    assert grown("purestep_request_aborts_total") == 10
    assert grown("purestep_e2e_request_latency_seconds_count") == 30
    assert 20 <= grown("purestep_time_to_first_token_seconds_count") <= 30
    assert now[("purestep_pool_pages_used", "rows")] <= LIMITS.points
    for number in range(2, 50, 5):
        failed = replies[number]
        message = failed.events[-1] if number % 2 == 0 else failed.json
        assert "NaN" in message["error"]["message"]
        assert failed.status == (200 if number % 2 == 0 else 500)


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
