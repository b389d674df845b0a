"""The real engine behind the server: health while it works, hangs or is gone; sampling, reuse and ids end to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import purestep as ps
import pytest
from kit.http import Reply, Server, running
from kit.serving import Gate
from purestep.serving.engine import Engine, EngineLimits

PLAIN = ps.load_model("tiny")
# Row-independent arithmetic, so that a reply does not depend on what it was batched with; it takes its time.
MODEL = ps.load_model("tiny", dtype="float32", numerics=ps.Numerics(invariant=True))
PATH = "/v1/completions"
HELLO = {"model": "tiny", "prompt": "And God said", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
LIMITS = EngineLimits(running=6, waiting=32, tokens=4096, context=1024)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(MODEL, lambda: Engine(MODEL, LIMITS), context=1024) as found:
        yield found


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Server]:
    with running(PLAIN, lambda: Engine(PLAIN, attrs.evolve(LIMITS, points=0)), context=1024) as found:
        yield found


def complete(server: Server, **fields: Any) -> Any:
    """Ask for a completion that must succeed."""
    reply = server.post(PATH, HELLO | fields)
    assert reply.status == 200, reply.text
    return reply.json


def ids_of(reply: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in reply["choices"]]


def cached(reply: Any) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def health_when(server: Server, status: int) -> Reply:
    """Ask for the health until it has this status."""
    for _ in range(1000):
        if (reply := server.get("/health")).status == status:
            return reply
        time.sleep(0.02)
    raise AssertionError(f"/health never became {status}: {reply.text}")


def test_health_is_answered_during_one_long_step() -> None:
    """Between the beginning and the end of a single step over a long prompt /health is answered many times."""
    began, ended, engines = threading.Event(), threading.Event(), []

    def make() -> Engine:
        engine = Engine(PLAIN, EngineLimits(running=1, tokens=4096, context=2048, budget=4096, points=0))
        step = engine._step

        def marked(*arguments: Any) -> Any:
            began.set()
            try:
                return step(*arguments)
            finally:
                ended.set()

        engine._step = marked
        engines.append(engine)
        return engine

    with running(PLAIN, make, context=2048) as server, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(complete, server, prompt=[5] * 1900, max_tokens=1)
        assert began.wait(30)
        n_during = 0
        while not ended.is_set():
            assert server.get("/health").status == 200
            n_during += not ended.is_set()
        assert busy.result()["usage"]["prompt_tokens"] == 1900
        assert engines[0].status().counters["steps"] == 1
    assert n_during >= 5


def test_health_is_answered_however_long_a_step_is() -> None:
    """Twenty answers come before a held step ends; it is called stalled after a while, and healthy when it goes on."""
    gates: list[Gate] = []

    def make() -> Engine:
        engine = Engine(PLAIN, LIMITS)
        gates.append(Gate(engine))
        return engine

    with running(PLAIN, make, context=1024, stall_seconds=0.5) as server, ThreadPoolExecutor(1) as pool:
        assert server.get("/health").status == 200
        busy = pool.submit(complete, server)
        assert gates[0].entered.wait(30)
        answers = [server.get("/health").status for _ in range(20)]
        assert set(answers) <= {200, 503}
        stalled = health_when(server, 503)
        assert stalled.json["error"]["code"] == "engine_stalled"
        assert "no progress for" in stalled.json["error"]["message"]
        assert not busy.done()
        gates[0].opened.set()
        assert len(ids_of(busy.result())[0]) == 8
        assert health_when(server, 200).json["seconds_since_progress"] is None


def test_health_fails_when_the_engine_is_gone() -> None:
    """OBS-01: after the loop has failed, /health and new requests say why at once, and what ran ends with an error."""
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(Engine(PLAIN, LIMITS))
        return engines[-1]

    with running(PLAIN, make, context=1024) as server:
        complete(server)

        def broken(*_: Any) -> None:
            raise RuntimeError("the device is lost")

        engines[0]._turn = broken
        assert server.post(PATH, HELLO).status == 500
        for reply in (server.get("/health"), server.post(PATH, HELLO)):
            assert (reply.status, reply.json["error"]["code"]) == (503, "engine_dead")
            assert "the device is lost" in reply.json["error"]["message"]
        assert server.get("/ready").status == 503


def test_choices_are_streams_of_their_own(server: Server) -> None:
    """SMP-03: four choices differ, come back the same, begin with the only choice of n=1, and are all counted."""
    fields = {"n": 4, "seed": 7, "temperature": 1.0}
    first, again, one = complete(server, **fields), complete(server, **fields), complete(server, **fields | {"n": 1})
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert ids_of(first) == ids_of(again)
    assert ids_of(one) == ids_of(first)[:1]
    assert len({tuple(ids) for ids in ids_of(first)}) == 4
    assert first["usage"]["completion_tokens"] == sum(map(len, ids_of(first))) == 32


TEMPERATURES = (0, 1e-8, 1e-7, 1e-5, 1e-4, 0.3, 2, 100)
WAYS: Sequence[dict[str, Any]] = [
    *({"temperature": temperature, "logit_bias": {"300": -100}, "logprobs": 3} for temperature in TEMPERATURES),
    *({"top_k": top_k, "seed": 5} for top_k in (10**9, 0, -1)),
    {"top_k": 5, "seed": 3, "repetition_penalty": 1.4},
    {"top_p": 0.4, "min_p": 0.05, "seed": 3},
    {"temperature": 0, "logit_bias": {"7": 100}},
    {"temperature": 0, "frequency_penalty": 2.0, "presence_penalty": -2.0},
    {"temperature": 0},
]


def test_ways_to_sample_do_not_disturb_each_other(server: Server) -> None:
    """SMP-05, 07, 11: every reply is in company what it is alone; tiny temperatures are greedy, all numbers finite."""
    ways = [{"seed": 1, "max_tokens": 4} | way for way in WAYS]
    alone = [complete(server, **way) for way in ways]
    with ThreadPoolExecutor(len(WAYS)) as pool:
        together = list(pool.map(lambda way: complete(server, **way), ways))
    assert [ids_of(reply) for reply in together] == [ids_of(reply) for reply in alone]
    greedy = ids_of(alone[0])
    assert [ids_of(reply) for reply in alone[:3]] == [greedy] * 3
    assert len({str(ids_of(reply)) for reply in alone[8:11]}) == 1
    assert ids_of(alone[-3]) == [[7] * 4]
    assert all(300 not in ids for reply in alone[:8] for ids in ids_of(reply))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": wrong} for wrong in (-1, "hot")),
        {"top_k": -2},
        *({"logit_bias": {key: 1}} for key in ("191222", "-1", "AI", "1.5")),
        *({"logit_bias": {"5": wrong}} for wrong in ("x", 10**9)),
        {"min_tokens": 1, "stop_token_ids": [i for i in range(MODEL.config.vocab_size) if i != 1]},
    ],
    ids=str,
)
def test_the_engine_survives_wrong_parameters(plain_server: Server, wrong: dict[str, Any]) -> None:
    """SMP-09: what cannot be sampled is a 400 with the field's name, and the engine is alive and well."""
    reply = plain_server.post(PATH, HELLO | wrong)
    assert reply.status == 400, reply.text
    assert reply.json["error"]["param"].split(".")[0] in wrong
    assert plain_server.get("/health").status == 200
    assert len(ids_of(complete(plain_server))[0]) == 8


def test_tokens_alone_decide_what_is_reused(server: Server) -> None:
    """PFX-01, 15: three times 800 tokens say the same, two cached; text or ids are one key, another id is another."""
    text = "Now the children of Israel " * 300
    ids = server.post("/tokenize", {"prompt": text}).json["tokens"][:800]
    replies = [complete(server, prompt=ids, temperature=0, max_tokens=3) for _ in range(3)]
    assert [cached(reply) for reply in replies] == [0, 768, 768]
    assert ids_of(replies[0]) == ids_of(replies[1]) == ids_of(replies[2])
    assert cached(complete(server, prompt=[ids[0] + 1, *ids[1:200]], max_tokens=1)) == 0
    short = text[:800]
    spelled = server.post("/tokenize", {"prompt": short}).json["tokens"]
    assert len(spelled) > 128
    first, second = (complete(server, prompt=one, temperature=0, max_tokens=3) for one in (short, spelled))
    assert cached(second) == (len(spelled) - 1) // 128 * 128
    assert first["usage"]["prompt_tokens"] == len(spelled)
    assert ids_of(first) == ids_of(second)


SHAPE = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TALKS: Sequence[dict[str, Any]] = [
    {},
    {"stop": ["e", "th"], "max_tokens": 40},
    {"thinking": {"type": "enabled"}, "max_tokens": 30},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SHAPE}}, "max_tokens": 60},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SHAPE}}],
        "tool_choice": "required",
        "max_tokens": 150,
    },
]


@pytest.mark.parametrize("fields", TALKS, ids=["plain", "stops", "thinking", "format", "tools"])
def test_ids_of_a_stream_joined_are_those_of_the_plain_reply(plain_server: Server, fields: dict[str, Any]) -> None:
    """RES-05: whatever is held back, cut or turned into a call, joined id deltas are the reply's ids, all counted."""
    talk = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "return_token_ids": True}
    body = talk | {"temperature": 0, "max_tokens": 12} | fields
    plain = plain_server.post("/v1/chat/completions", body).json
    streamed = plain_server.post("/v1/chat/completions", body | {"stream": True})
    pieces = [piece for event in streamed.events[:-1] for piece in event["choices"]]
    ids = plain["choices"][0]["token_ids"]
    assert [token_id for piece in pieces for token_id in piece.get("token_ids", ())] == ids
    assert plain["usage"]["completion_tokens"] == len(ids) > 0
    prompts = [piece["prompt_token_ids"] for piece in pieces if "prompt_token_ids" in piece]
    assert prompts == [plain["choices"][0]["prompt_token_ids"]]
    assert len(prompts[0]) == plain["usage"]["prompt_tokens"]
