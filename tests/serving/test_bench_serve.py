"""``purestep bench-serve``: what it sends, what it counts, and how it takes servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import running
from kit.stand_in import StandIn, say
from kit.steps import examples
from purestep.serving.asks import Ask
from purestep.serving.cli import app
from purestep.serving.load_client import LoadError, Target, first_model, run_load
from purestep.serving.load_plan import Endpoint, Prompt, draw_arrivals, draw_prompts, read_prompts
from purestep.serving.load_run import own_server, run_bench
from purestep.serving.load_stats import Outcome, load_tables, percentile, summarise
from rich.console import Console
from typer.testing import CliRunner, Result

MODEL = ps.load_model("tiny")
IDS = MODEL.tokenizer.encode("In the beginning God created", add_special_tokens=False).ids
TIMES = st.integers(0, 10**7).map(lambda ms: ms / 1e3)
PROMPTS = [Prompt("And God", 16)] * 4


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    """Draw how a request went."""
    began, *texts, ended = sorted(draw(st.lists(TIMES, min_size=2, max_size=8)))
    failure = draw(st.sampled_from([None, None, None, "http_429", "timeout"]))
    counts = st.none() | st.integers(0, 999)
    tokens = draw(st.integers(0, 99))
    return Outcome(
        began=began,
        ended=ended,
        texts=tuple(texts),
        input_tokens=draw(counts),
        cached_tokens=draw(counts),
        output_tokens=tokens,
        failure=failure,
        detail="[it] broke" if failure else "",
    )


@examples(200)
@given(st.lists(TIMES, min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    """A percentile lies on the straight line between its neighbours, as numpy's default has it."""
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


@examples(100)
@given(st.lists(outcomes(), max_size=8))
def test_figures_are_those_of_the_requests_that_succeeded(found: list[Outcome]) -> None:
    """Counts, rates and latencies follow from the outcomes, failures counted by kind and left out of the rest."""
    figures = summarise(found)
    done = [one for one in found if one.failure is None]
    assert figures["completed_requests"] == len(done)
    assert figures["failed_requests"] == len(found) - len(done)
    assert figures["failures_by_kind"] == Counter(one.failure for one in found if one.failure)
    assert figures["output_tokens"] == sum(one.output_tokens for one in done)
    inputs = [one.input_tokens for one in done]
    assert figures["input_tokens"] == (None if None in inputs else sum(inputs))
    seconds = max([one.ended for one in found], default=0) - min([one.began for one in found], default=0)
    assert figures["duration_s"] == pytest.approx(seconds)
    if seconds:
        assert figures["requests_per_s"] * seconds == pytest.approx(len(done))
        assert figures["output_tokens_per_s"] * seconds == pytest.approx(figures["output_tokens"])
    latencies = {
        "ttft": [one.texts[0] - one.began for one in done if one.texts],
        "itl": [gap for one in done for gap in np.diff(one.texts)],
        "tpot": [
            (one.texts[-1] - one.texts[0]) / (one.output_tokens - 1)
            for one in done
            if len(one.texts) > 1 and one.output_tokens > 1
        ],
        "e2el": [one.ended - one.began for one in done],
    }
    for name, values in latencies.items():
        for figure, take in {"mean": np.mean, "p50": np.median, "p99": lambda v: np.percentile(v, 99)}.items():
            said = figures[f"{figure}_{name}_ms"]
            assert (said is None) if not values else said == pytest.approx(take(values) * 1e3, abs=1e-6)
    json.dumps(figures, allow_nan=False)


def test_tables_show_every_figure() -> None:
    """The tables hold counts, latencies, and every kind of failure with its words as they are."""
    found = [
        Outcome(began=0.0, ended=2.0, texts=(0.5, 1.5), output_tokens=3, input_tokens=7),
        Outcome(began=0.0, ended=1.0, failure="http_429", detail="[red]full"),
    ]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        for table in load_tables(summarise(found), found):
            console.print(table)
    text = console.export_text()
    for shown in ("500.00", "1,000.00", "2,000.00", "http_429", "[red]full", "1.50", "0.50"):
        assert shown in text


@examples(10)
@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 2**32))
def test_drawn_prompts_have_the_lengths_asked_for(own: int, shared: int, seed: int) -> None:
    """Prompts have exactly as many tokens as asked for, share their beginning, and repeat with their seed."""
    options = {"input_len": own, "output_len": 9, "shared_prefix_len": shared, "seed": seed}
    found = draw_prompts(MODEL.tokenizer, 3, **options)
    ids = [MODEL.tokenizer.encode(one.text, add_special_tokens=False).ids for one in found]
    assert {len(one) for one in ids} == {own + shared}
    assert len({tuple(one[:shared]) for one in ids}) == 1
    assert own < 8 or len({one.text for one in found}) == 3
    assert {one.max_tokens for one in found} == {9}
    assert draw_prompts(MODEL.tokenizer, 3, **options) == found
    assert draw_prompts(MODEL.tokenizer, 3, **options | {"seed": seed + 1}) != found or own == 1


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps between arrivals have the mean and the spread of an exponential law, and repeat with their seed."""
    times = draw_arrivals(20001, rate=4.0, seed=7)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps > 0).all()
    # Within five standard errors of the law's 1/4.
    assert gaps.mean() == pytest.approx(0.25, rel=5 / 20000**0.5)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)
    assert draw_arrivals(20001, rate=4.0, seed=7) == times != draw_arrivals(20001, rate=4.0, seed=8)


def test_datasets_are_read_in_order(tmp_path: Path) -> None:
    """Lines are taken from the first on, whatever characters they hold, with their own lengths where they have them."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b", "max_tokens": 3}\n\n{"prompt": "c", "more": 1}\n', encoding="utf-8")
    assert read_prompts(path, None, output_len=5) == (Prompt("a\u2028b", 3), Prompt("c", 5))
    assert read_prompts(path, 1, output_len=5) == (Prompt("a\u2028b", 3),)


@pytest.mark.parametrize(
    ("line", "count", "named"),
    [
        ("{", None, "line 1"),
        ("3", None, "line 1"),
        ('{"prompt": ""}', None, "line 1"),
        ('{"prompt": "a", "max_tokens": 0}', None, "line 1"),
        ('{"prompt": "a", "max_tokens": true}', None, "line 1"),
        ("", None, "at least one"),
        ('{"prompt": "a"}', 2, "2 prompts"),
    ],
)
def test_bad_datasets_are_refused(tmp_path: Path, line: str, count: int | None, named: str) -> None:
    """A file without prompts, or a line that is none, is refused with its place."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ps.RequestError, match=named):
        read_prompts(path, count, output_len=5)
    with pytest.raises(ps.RequestError, match="nowhere"):
        read_prompts(tmp_path / "nowhere", count, output_len=5)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_load_counts_what_the_server_counts(endpoint: Endpoint) -> None:
    """Every reply is whole, and its tokens, text and cached tokens are those of the server."""
    with running(MODEL, StandIn(say(IDS))) as server:
        target = Target(base_url=server.url, model="tiny", endpoint=endpoint)
        seen: list[tuple[int, int]] = []
        found = asyncio.run(run_load(target, PROMPTS, concurrency=3, progress=lambda *at: seen.append(at)))
    assert seen == [(n, 4) for n in range(1, 5)]
    for outcome in found:
        assert outcome.failure is None, outcome.detail
        assert (outcome.text, outcome.cached_tokens) == ("In the beginning God created", 3)
        assert outcome.output_tokens == len(IDS) + 1
        assert len(outcome.texts) == len(IDS)
        assert outcome.began <= outcome.texts[0] <= outcome.texts[-1] <= outcome.ended
    assert asyncio.run(first_model_of(target.base_url)) == "connect"


async def first_model_of(url: str) -> str:
    """Ask a server that is gone."""
    with pytest.raises(LoadError) as told:
        await first_model(url)
    return told.value.kind


def test_ignored_ends_make_full_replies() -> None:
    """With ``ignore_eos`` the request says so, and the reply has its full length."""
    with running(MODEL, StandIn(say(IDS[:2]))) as server:
        target = Target(base_url=server.url, model="tiny", ignore_eos=True)
        (found,) = asyncio.run(run_load(target, PROMPTS[:1]))
    assert found.output_tokens == 16


def test_a_closed_loop_has_so_many_requests_at_once() -> None:
    """As many requests as clients are under way, and never more."""
    lock, running_now, most = threading.Lock(), [0], [0]

    def source(ask: Ask) -> Iterator[Any]:
        with lock:
            running_now[0] += 1
            most[0] = max(most[0], running_now[0])
        for event in say(IDS, pause=0.01)(ask):
            if type(event).__name__ == "Ended":
                with lock:
                    running_now[0] -= 1
            yield event

    with running(MODEL, StandIn(source)) as server:
        found = asyncio.run(run_load(Target(base_url=server.url, model="tiny"), PROMPTS * 3, concurrency=3))
    assert len(found) == 12
    assert most[0] == 3


def test_an_open_loop_waits_for_nobody() -> None:
    """Requests are sent when it is their time: here none is answered before all have come."""
    barrier = threading.Barrier(4)

    def source(ask: Ask) -> Iterator[Any]:
        barrier.wait(30)
        yield from say(IDS)(ask)

    with running(MODEL, StandIn(source)) as server:
        target = Target(base_url=server.url, model="tiny")
        found = asyncio.run(run_load(target, PROMPTS, arrivals=(0.0, 0.02, 0.04, 0.06)))
    assert [one.failure for one in found] == [None] * 4
    for outcome, start in zip(found, (0.0, 0.02, 0.04, 0.06), strict=True):
        assert outcome.began >= start


def chunk(text: str, reason: str | None = None, **more: Any) -> str:
    """Write an event of a stream of completions."""
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': reason}], **more})}\r\n\r\n"


@contextmanager
def canned(body: bytes, *, head: str = "200 OK", piece: int = 1 << 20, keeps: bool = False) -> Iterator[str]:
    """Answer every connection with these bytes in pieces, and close it unless it is to be kept."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            kept = []
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    break
                kept.append(connection)
                connection.recv(65536)
                told = (
                    f"HTTP/1.1 {head}\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n".encode() + body
                )
                for at in range(0, len(told), piece):
                    connection.sendall(told[at : at + piece])
                if not keeps:
                    kept.pop().close()
            for connection in kept:
                connection.close()

        thread = threading.Thread(target=work)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def ask(url: str, **options: Any) -> Outcome:
    """Send one request."""
    (found,) = asyncio.run(run_load(Target(base_url=url, model="m", **options), PROMPTS[:1]))
    return found


@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 20])
def test_streams_may_be_cut_anywhere(piece: int) -> None:
    """However a stream is cut on its way, with or without a last mark or counts, it says the same."""
    stream = (
        ": comment\n\n" + chunk("né✓", usage=None) + chunk("🙂", "length") + chunk("") + 'data: {"choices": []}\n\n'
    )
    with canned(stream.encode(), piece=piece) as url:
        found = ask(url)
    assert (found.failure, found.text, found.output_tokens, found.input_tokens) == (None, "né✓🙂", 2, None)
    counts = chunk("", "stop", usage={"prompt_tokens": 5, "completion_tokens": 9, "prompt_tokens_details": None})
    with canned((chunk("x") + counts).encode(), piece=piece) as url:
        found = ask(url)
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (5, 9, None)


FAILURES: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "http_429": (b"busy", {"head": "429 Too Many Requests"}, "busy"),
    "truncated": (chunk("x").encode(), {}, "before the reply did"),
    "error_event": (b'data: {"error": {"message": "broken"}}\n\n', {}, "broken"),
    "invalid_stream": (b"data: {\n\n", {}, "not one of OpenAI"),
    "disconnect": (b"", {"head": "200 OK\r\nContent-Length: 99"}, ""),
    "timeout": (chunk("x").encode(), {"keeps": True}, "0.3 seconds"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_have_kinds(kind: str) -> None:
    """Whatever a server does, its request ends with the kind of what went wrong, and nothing raises."""
    body, options, named = FAILURES[kind]
    with canned(body, **options) as url:
        found = ask(url, timeout_s=0.3 if kind == "timeout" else 30.0)
    assert found.failure == kind, found
    assert named in found.detail


def test_nobody_there_is_a_kind_of_failure() -> None:
    """Requests to an address where nobody listens fail as such; as a warm-up that ends the test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert ask(url).failure == "connect"
    with pytest.raises(LoadError, match="first request failed"):
        run_bench(Target(base_url=url, model="m"), PROMPTS, PROMPTS[:1])


def run(*args: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["bench-serve", *map(str, args)], prog_name="purestep")


def test_the_command_starts_its_own_server_and_writes_one_line() -> None:
    """Without an address a server is started for the test; with ``--json`` standard output is one line of figures."""
    flags = "--num-prompts 4 --max-concurrency 2 --input-len 20 --output-len 4 --shared-prefix-len 140 --json"
    result = run(*flags.split())
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert (found["completed_requests"], found["failures_by_kind"]) == (4, {})
    assert found["output_tokens"] == 16
    assert found["input_tokens"] == 4 * 161
    assert found["cached_tokens"] == 4 * 128
    assert (found["model"], found["concurrency"], found["request_rate_per_s"]) == ("tiny", 2, None)
    assert "time to first token" in result.stderr


@pytest.mark.parametrize("as_chat", [True, False])
def test_the_command_loads_a_server(tmp_path: Path, as_chat: bool) -> None:
    """With an address that server is asked, by its first model, open loop and all; the tables go to standard output."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n' * 3)
    engine = StandIn(say(IDS))
    with running(MODEL, engine) as server:
        flags = ("--base-url", f"{server.url}/v1/", "--dataset", path, "--request-rate", 100, "--num-warmups", 0)
        result = run(*flags, *(("--endpoint", "chat") if as_chat else ()))
    assert result.exit_code == 0, result.stderr
    assert "requests completed" in result.stdout
    assert len(engine.asks) == 3
    paths = {record["path"] for record in server.log if record["path"] != "/v1/models"}
    assert paths == {"/v1/chat/completions" if as_chat else "/v1/completions"}


def test_a_load_without_any_success_fails() -> None:
    """Where every request fails the failures are shown and the exit code is 1."""
    with running(MODEL, StandIn(say(IDS), queue=0)) as server:
        result = run("--base-url", server.url, "--num-prompts", 3, "--num-warmups", 0)
    assert result.exit_code == 1
    assert "http_429" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--concurrency", 2, "--request-rate", 3), 2, "request_rate"),
        (("--num-prompts", 0), 2, "--num-prompts"),
        (("--endpoint", "pigeon"), 2, "--endpoint"),
        (("--tokenizer", "nowhere"), 2, "tokenizer"),
        (("--model", "nowhere"), 1, "nowhere"),
        (("--base-url", "http://127.0.0.1:1"), 1, "is it running"),
    ],
)
def test_what_cannot_be_tested_is_said(arguments: tuple[object, ...], code: int, named: str) -> None:
    """Mistakes and servers that are not there are one message and an exit code."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert named in result.stderr


def test_own_servers_end_with_the_test() -> None:
    """The process of an own server is gone after the block, also where the block raises."""
    code = "import sys, time; print('serving x at http://127.0.0.1:1', file=sys.stderr, flush=True); time.sleep(600)"
    started: list[asyncio.subprocess.Process] = []
    original = asyncio.create_subprocess_exec

    async def work(create: Callable[..., Any]) -> None:
        async def noted(*args: Any, **options: Any) -> Any:
            started.append(await create(*args, **options))
            return started[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", noted)
            async with own_server([sys.executable, "-c", code]) as url:
                assert url == "http://127.0.0.1:1"
                raise KeyError("the test broke")

    with pytest.raises(KeyError):
        asyncio.run(work(original))
    assert started[0].returncode == -signal.SIGTERM
