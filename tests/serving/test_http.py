"""The HTTP layer over a scripted engine: completions, errors, limits, and clients that leave or dawdle."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import Server, running
from kit.stand_in import StandIn, prefer, say
from kit.steps import examples
from purestep.serving.asks import Ended, Sampled
from purestep.serving.text import cut_at_stop, read_vocabulary

MODEL = ps.load_model("tiny")
WORDS = read_vocabulary(MODEL.tokenizer, MODEL.config.vocab_size)
VOCAB = MODEL.config.vocab_size
CONTEXT = 64
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "prompt": "Hello"}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


@attrs.define
class Site:
    """A server and the engine behind it, whose script tests exchange."""

    server: Server
    engine: StandIn

    def complete(self, **fields: Any) -> Any:
        """Ask for a completion that must succeed."""
        reply = self.server.post(COMPLETION, HELLO | fields)
        assert reply.status == 200, reply.text
        return reply.json


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    with running(MODEL, engine, context=CONTEXT, body_bytes=100_000, read_seconds=0.5, stall_seconds=5.0) as server:
        yield Site(server, engine)


def ids_of_text(text: str) -> list[int]:
    return WORDS.encode(text)


def streamed(site: Site, path: str, body: dict[str, Any]) -> list[Any]:
    """Ask for a stream that must succeed; its events without the last word."""
    reply = site.server.post(path, body | {"stream": True})
    assert reply.status == 200, reply.text
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    *events, last = reply.events
    assert last == "[DONE]"
    return events


def text_of(events: list[Any], index: int = 0) -> str:
    """Join one choice's text, of either endpoint."""
    pieces = [piece for event in events for piece in event["choices"] if piece["index"] == index]
    return "".join(piece["text"] if "text" in piece else piece["delta"].get("content") or "" for piece in pieces)


@examples(25)
@given(
    st.lists(st.text("ab é😀", min_size=1, max_size=3), max_size=3),  # 36 bytes, at most as many tokens
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(1, 3),
)
def test_streams_say_what_plain_replies_say(site: Site, parts: list[str], stops: list[str], n: int) -> None:
    """Text, reasons, token ids and counts are the same streamed and plain, on both endpoints; a stop ends it."""
    text = "x" + "".join(parts)
    site.engine.source = say([token_id for part in ["x", *parts] for token_id in ids_of_text(part)])
    at = cut_at_stop(text, stops)
    fields = {"stop": stops, "n": n, "max_tokens": 40, "return_token_ids": True, "seed": 5}
    for path, body in ((COMPLETION, HELLO | fields), (CHAT, TALK | fields)):
        plain = site.server.post(path, body).json
        events = streamed(site, path, body | {"stream_options": {"include_usage": True}})
        assert events[-1]["usage"] == plain["usage"]
        assert events[-1]["choices"] == []
        assert all(event["usage"] is None for event in events[:-1])
        for choice in plain["choices"]:
            pieces = [piece for event in events for piece in event["choices"] if piece["index"] == choice["index"]]
            said = choice["text"] if "text" in choice else choice["message"]["content"]
            assert said == text_of(events, choice["index"]) == text[:at]
            assert choice["finish_reason"] == pieces[-1]["finish_reason"] == "stop"
            assert choice["token_ids"] == [token_id for piece in pieces for token_id in piece["token_ids"]]
            assert choice["seed"] == pieces[-1]["seed"]


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_stops_that_end_together(site: Site, stops: list[str]) -> None:
    """Of stop strings that end at the same place the longest counts, on both endpoints, in any order."""
    site.engine.source = say(ids_of_text("xab"))
    assert site.complete(stop=stops)["choices"][0]["text"] == "x"
    assert site.server.post(CHAT, TALK | {"stop": stops}).json["choices"][0]["message"]["content"] == "x"


def test_a_reply_that_ends_at_once(site: Site) -> None:
    """A first token that ends the reply gives an empty text, one last piece, and counts as the one token it is."""
    site.engine.source = say([])
    for path, body in ((COMPLETION, HELLO), (CHAT, TALK)):
        plain = site.server.post(path, body).json
        assert plain["choices"][0]["finish_reason"] == "stop"
        assert plain["usage"]["completion_tokens"] == 1
        events = streamed(site, path, body)
        assert text_of(events) == ""
        assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"


def test_choices_have_their_own_streams(site: Site) -> None:
    """n choices of each prompt come with their indices; the first keeps the seed, the others have their own."""
    site.engine.source = say(ids_of_text("a"))
    site.engine.asks.clear()
    plain = site.complete(prompt=["Hello", "Hi"], n=3, seed=7)
    assert [choice["index"] for choice in plain["choices"]] == list(range(6))
    seeds = [choice["seed"] for choice in plain["choices"]]
    assert seeds[0] == seeds[3] == 7
    assert len(set(seeds)) == 3
    assert [ask.params.seed for ask in site.engine.asks] == seeds
    assert site.complete(prompt="Hello", n=3, seed=7)["choices"][2]["seed"] == seeds[2]
    assert plain["usage"]["completion_tokens"] == 12
    assert plain["usage"]["prompt_tokens"] == sum(len(ids_of_text(text)) + 1 for text in ("Hello", "Hi"))


def test_log_probabilities_without_infinities(site: Site) -> None:
    """Log-probabilities of minus infinity are written as -9999, so that strict parsers take the reply."""
    site.engine.source = say(ids_of_text("a"))
    report = site.complete(logprobs=2)["choices"][0]["logprobs"]
    assert report["token_logprobs"] == [-0.5, -0.5]
    assert -9999.0 in report["top_logprobs"][0].values()
    reply = site.server.post(CHAT, TALK | {"logprobs": True, "top_logprobs": 2}).json
    assert [one["logprob"] for one in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]] == [-0.5, -9999.0]


def test_ids_and_texts_turn_into_each_other(site: Site) -> None:
    """/tokenize and /detokenize are inverses, and spellings of control tokens stay text."""
    text = "Hello </think> 😀"
    found = site.server.post("/tokenize", {"prompt": text}).json
    assert found["count"] == len(found["tokens"])
    assert MODEL.tokenizer.token_to_id("</think>") not in found["tokens"]
    assert site.server.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": text}
    bare = site.server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
    assert found["tokens"] == [0, *bare]


BAD_BODIES = [
    b"{not json", b"", b"[]", b"7", b"null", b'{"model": "tiny"', b"\xff\xfe", b'{"model": "tiny", "prompt": NaN}',
    b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "prompt": "x", "min_p": 1e999}',
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_broken_bodies_are_refused(site: Site, path: str, body: bytes) -> None:
    """Whatever is no sound JSON object gets 400 in the shape of OpenAI's errors."""
    reply = site.server.post(path, body)
    assert reply.status == 400, reply.text
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert reply.json["error"]["type"] == "invalid_request_error"


WRONG_FIELDS: list[tuple[str, Any]] = [
    *(("temperature", wrong) for wrong in (-1, "hot", True, [])),
    *(("top_p", wrong) for wrong in (0, 1.5, -0.1)),
    *(("top_k", wrong) for wrong in (-2, 1.5, "5")),
    *(("min_p", wrong) for wrong in (-0.1, 2)),
    *(("n", wrong) for wrong in (0, -1, 129, 1.5)),
    *(("seed", wrong) for wrong in (-1, 2**64, "7")),
    *(("max_tokens", wrong) for wrong in (-1, "all")),
    *(("stop", wrong) for wrong in ("", ["a", ""], 7, [3], ["x"] * 17)),
    *(("logit_bias", {key: 1}) for key in ("191222", "-1", "AI", "1.5", "")),
    *(("logit_bias", {"5": wrong}) for wrong in ("x", 10**9, True, -101)),
    *(("stop_token_ids", wrong) for wrong in ([VOCAB], [-1], "a")),
    *(("frequency_penalty", wrong) for wrong in (3, "x")),
    *(("presence_penalty", wrong) for wrong in (-3,)),
    *(("repetition_penalty", wrong) for wrong in (0, -1)),
    ("min_tokens", 30),
    ("stream", "yes"),
    ("stream_options", {"include_usage": 1}),
]


@pytest.mark.parametrize(("field", "wrong"), WRONG_FIELDS)
def test_wrong_fields_are_named(site: Site, field: str, wrong: Any) -> None:
    """A field with a wrong type or range gets 400 with its name, on both endpoints, streamed or not."""
    for path, body in ((COMPLETION, HELLO), (CHAT, TALK)):
        for stream in (False, True):
            reply = site.server.post(path, body | {"max_tokens": 20, "stream": stream} | {field: wrong})
            assert reply.status == 400, reply.text
            assert reply.json["error"]["param"].split(".")[0].split("[")[0] == field


def test_every_fine_field_is_taken(site: Site) -> None:
    """Temperatures of any size, switched-off truncations and the largest biases are legal; unknown fields do nought."""
    site.engine.source = say(ids_of_text("a"))
    for temperature in (0, 1e-8, 1e-4, 0.3, 2, 100):
        site.complete(temperature=temperature)
    for top_k in (10**9, 0, -1):
        site.complete(top_k=top_k)
    site.complete(logit_bias={"5": 100, "6": -100}, frobnicate={"a": 1}, user="me", seed=None, best_of=1)


PROMPTS = [
    ("", 200), ([""], 200), ("a", 200), ([5, 6], 200), ([[5], [6, 7]], 200), (["a", ""], 200), ([], 400), ([[]], 400),
    ([[5], []], 400), (["a", 5], 400), (7, 400), (None, 400), ([VOCAB], 400), ([-1], 400), ({"a": 1}, 400),
    ([None], 400),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "status"), PROMPTS, ids=map(str, range(len(PROMPTS))))
def test_prompts_of_all_kinds(site: Site, prompt: Any, status: int) -> None:
    """Texts, ids and lists of them are prompts, an empty text is the token that begins one; nothing else is."""
    site.engine.source = say(ids_of_text("a"))
    reply = site.server.post(COMPLETION, HELLO | {"prompt": prompt})
    assert reply.status == status, reply.text
    if status == 400:
        assert reply.json["error"]["param"].startswith("prompt")


@pytest.mark.parametrize("messages", [[], None, "x", [7], [{}], [{"role": "me", "content": "x"}], [{"role": "user"}]])
def test_messages_must_be_messages(site: Site, messages: Any) -> None:
    """Conversations without messages, and messages without role or content, get 400."""
    reply = site.server.post(CHAT, TALK | {"messages": messages})
    assert reply.status == 400, reply.text
    assert reply.json["error"]["param"].startswith("messages")


def test_the_context_is_a_limit_with_a_number(site: Site) -> None:
    """A prompt one token below the context gets one token; a longer one gets 400 with both numbers."""
    site.engine.source = prefer(lambda ask, outputs, allowed: 5)
    reply = site.complete(prompt=[5] * (CONTEXT - 1), max_tokens=None)
    assert reply["usage"]["completion_tokens"] == 1
    assert reply["choices"][0]["finish_reason"] == "length"
    for length, fields in ((CONTEXT, {}), (CONTEXT + 1, {"max_tokens": 3}), (CONTEXT - 1, {"max_tokens": 2})):
        reply = site.server.post(COMPLETION, HELLO | {"prompt": [5] * length, **fields})
        assert reply.status == 400
        assert reply.json["error"]["code"] == "context_length_exceeded"
        assert str(length) in reply.json["error"]["message"]
        assert str(CONTEXT) in reply.json["error"]["message"]


def test_other_paths_methods_and_models(site: Site) -> None:
    """Unknown paths and models get 404 and wrong methods 405, in the same shape."""
    assert site.server.get("/v1/nothing").status == 404
    assert site.server.get(COMPLETION).json["error"]["type"] == "invalid_request_error"
    assert site.server.get(COMPLETION).headers["Allow"] == "POST"
    for path, body in ((COMPLETION, HELLO), (CHAT, TALK)):
        reply = site.server.post(path, body | {"model": "gpt"})
        assert reply.status == 404
        assert reply.json["error"]["code"] == "model_not_found"
    card = site.server.get("/v1/models/tiny").json
    assert card == site.server.get("/v1/models").json["data"][0]
    assert card["numerics"] == attrs.asdict(MODEL.numerics)
    assert site.server.get("/v1/models/gpt").status == 404
    reply = site.server.ask("POST", COMPLETION, b"prompt=x", {"Content-Type": "application/x-www-form-urlencoded"})
    assert reply.status == 400


def test_large_bodies_and_headers_are_refused(site: Site) -> None:
    """Bodies over the limit get 413 without being read, announced or chunked; large headers get 431."""
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    assert b" 413 " in site.server.raw(head + b"Content-Length: 99999999\r\n\r\n")
    chunk = b"20000\r\n" + b"x" * 0x20000 + b"\r\n"
    assert b" 413 " in site.server.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
    assert site.server.ask("GET", "/health", headers={"X-Large": "x" * 20_000}).status == 431
    assert site.server.ask("GET", "/health", headers={f"X-{n}": "x" for n in range(150)}).status == 431
    for wrong in (b"Content-Length: -5\r\n\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"):
        assert b" 400 " in site.server.raw(head + wrong)
    assert site.server.get("/health").status == 200


def test_slow_senders_are_let_go(site: Site) -> None:
    """A body that does not arrive in time gets 408 and the connection is closed; others are served meanwhile."""
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(site.server.raw, head.encode() + part) for part in (b"", b'{"mod')]
        site.engine.source = say(ids_of_text("a"))
        site.complete()
        assert all(b" 408 " in one.result() for one in slow)


def written(path: str, body: dict[str, Any]) -> bytes:
    """A request as it goes over the wire."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def leave(site: Site, path: str, body: dict[str, Any], *, after: bytes | None) -> None:
    """Send a request and close the connection, at once or when something was heard."""
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=5) as connection:
        connection.sendall(written(path, body))
        heard = b""
        while after is not None and after not in heard:
            heard += connection.recv(4096)
        if after is None:
            time.sleep(0.15)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_requests_of_clients_that_leave_stop(site: Site, path: str, stream: bool) -> None:
    """When a client leaves, before or while it is answered, its generations stop within two steps."""
    site.engine.source = prefer(lambda ask, outputs, allowed: 300, pause=0.05)
    body = (HELLO if path == COMPLETION else TALK) | {"max_tokens": 40, "n": 2, "stream": stream}
    before, aborts = site.engine.n_steps, site.engine.n_aborts
    leave(site, path, body, after=b"that" if stream else None)
    steps = site.engine.n_steps
    deadline = time.monotonic() + 5
    while site.engine.status().running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert site.engine.status().running == 0
    assert site.engine.n_aborts == aborts + 2
    # Two generations at two steps each, and one step more that had begun.
    assert before < site.engine.n_steps <= steps + 6
    assert site.server.log[-1]["status"] == 499


def test_slow_readers_slow_nobody(site: Site) -> None:
    """A client that asks for a stream and never reads it holds up nobody else."""
    site.engine.source = say(ids_of_text("a") * 30)
    raw = json.dumps(HELLO | {"max_tokens": 40, "n": 100, "stream": True}).encode()
    head = (
        f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", site.server.port)) as connection:
        connection.sendall(head.encode() + raw)
        began = time.monotonic()
        site.complete()
        assert site.server.get("/health").status == 200
        assert time.monotonic() - began < 10


def test_a_generation_that_fails(site: Site) -> None:
    """An engine's failure is a 500, or in a stream one error event after which the connection closes without an end."""

    def broken(ask: Any) -> Iterator[Any]:
        yield Sampled(token_id=300)
        yield Ended(reason="error", error="a row of NaN")

    site.engine.source = broken
    reply = site.server.post(COMPLETION, HELLO)
    assert reply.status == 500
    assert "a row of NaN" in reply.json["error"]["message"]
    for path, body in ((COMPLETION, HELLO), (CHAT, TALK)):
        reply = site.server.post(path, body | {"stream": True})
        *events, last = reply.events
        assert last["error"]["code"] == "engine_error"
        assert all(piece["finish_reason"] is None for event in events for piece in event["choices"])


def test_a_full_queue_says_so(site: Site) -> None:
    """Requests beyond the queue get 429 with Retry-After at once, the others are served, and later ones again."""
    site.engine.source = say(ids_of_text("a"), pause=0.1)
    site.engine.queue = 4
    try:
        with ThreadPoolExecutor(12) as pool:
            replies = list(pool.map(lambda _: site.server.post(COMPLETION, HELLO), range(12)))
        assert site.server.post(COMPLETION, HELLO | {"n": 5}).status == 429
        refused = [reply for reply in replies if reply.status == 429]
        assert {reply.status for reply in replies} == {200, 429}
        assert len(refused) >= 4
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)
        assert all(reply.json["error"]["code"] == "queue_full" for reply in refused)
        while site.engine.status().running:
            time.sleep(0.02)
        assert site.server.post(COMPLETION, HELLO).status == 200
    finally:
        site.engine.queue = 1000


def test_silence_is_filled_on_request(site: Site) -> None:
    """A stream that asks for it gets comments while nothing comes; another gets none."""
    site.engine.source = say(ids_of_text("a"), pause=0.3)
    filled = site.server.post(COMPLETION, HELLO | {"stream": True, "stream_options": {"keep_alive": 0.05}})
    assert ": keep-alive\n\n" in filled.text
    assert text_of(filled.events[:-1]) == "a"
    assert "keep-alive" not in site.server.post(COMPLETION, HELLO | {"stream": True}).text


def test_health_follows_the_engine(site: Site) -> None:
    """/health fails when the engine has work and does not get on, and says for how long; idle is healthy."""
    assert site.server.get("/health").status == 200
    site.engine.silent = 4.0
    assert site.server.get("/health").status == 200
    site.engine.silent = 6.0
    reply = site.server.get("/health")
    site.engine.silent = None
    assert reply.status == 503
    assert "6.0 seconds" in reply.json["error"]["message"]
    assert site.server.get("/ready").status == 200


def test_the_log_has_a_line_for_every_request_and_no_prompt(site: Site) -> None:
    """Every request leaves one record with its counts, without the text of prompts."""
    site.engine.source = say(ids_of_text("a"))
    n = len(site.server.log)
    site.complete(prompt="a secret")
    site.server.get("/health")
    assert len(site.server.log) == n + 2
    record = site.server.log[n]
    assert (record["path"], record["status"], record["completion_tokens"]) == (COMPLETION, 200, 2)
    assert "secret" not in json.dumps(site.server.log)


def test_keys_and_prompts_in_the_log() -> None:
    """With a key, requests without it get 401, probes excepted; prompts are logged where that was asked for."""
    with running(MODEL, StandIn(say([])), api_key="k€y", log_prompts=True) as server:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "k"}, {"x-api-key": "\xff"}):
            assert server.ask("POST", COMPLETION, HELLO, headers).status == 401
        assert server.get("/health").status == server.get("/ready").status == 200
        assert server.get("/v1/models").status == 401
        for headers in ({"Authorization": "Bearer k€y".encode()}, {"x-api-key": "k€y".encode()}):
            assert server.ask("POST", COMPLETION, HELLO, headers).status == 200
        assert server.log[-1]["prompts"] == ["Hello"]


def test_stopping_lets_running_requests_end() -> None:
    """Told to stop, the server answers what runs; it is not ready meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        with running(MODEL, StandIn(say(ids_of_text("a") * 5, pause=0.1))) as server:
            reply = pool.submit(server.post, COMPLETION, HELLO)
            time.sleep(0.2)
        assert reply.result().json["choices"][0]["text"] == "aaaaa"
