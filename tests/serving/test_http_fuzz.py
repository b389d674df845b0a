"""Requests made from the server's own description, and broken ones: nothing that a client sends is a server's error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import Reply, Server, running
from kit.stand_in import StandIn, prefer
from kit.steps import examples
from purestep.serving.openapi import describe
from purestep.serving.protocol import check_body
from purestep.serving.protocol_replies import ERROR

MODEL = ps.load_model("tiny")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
WORDS = ["</think>", "｜DSML｜", "user", "assistant", "text", "function", "json_schema", "\x00"]
TEXTS = st.text(max_size=8) | st.sampled_from(WORDS)
FLAT = LEAVES | TEXTS
NESTED = st.lists(FLAT, max_size=3) | st.dictionaries(TEXTS, FLAT, max_size=3)
JSON = FLAT | NESTED | st.lists(NESTED, max_size=2) | st.dictionaries(TEXTS, NESTED, max_size=2)
TOOLS = st.builds(
    lambda name, schema, flat: {"type": "function", "name": name, "input_schema": schema, "function": flat},
    TEXTS,
    JSON,
    st.fixed_dictionaries({"name": TEXTS}, optional={"parameters": JSON, "strict": st.booleans()}),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    def choose(ask: Any, outputs: tuple[int, ...], allowed: list[int] | None) -> int:
        free = 300 if len(outputs) < 5 else 1
        return free if allowed is None or free in allowed else allowed[len(outputs) % len(allowed)]

    with running(MODEL, StandIn(prefer(choose)), context=400) as found:
        yield found


def values(schema: Mapping[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """Make values that a description allows."""
    if "anyOf" in schema:
        return st.one_of([values(one, name) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) if schema["enum"] else st.nothing()
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return st.one_of([of_kind(kind, schema, name) for kind in kinds])


def of_kind(kind: str, schema: Mapping[str, Any], name: str) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if kind == "integer":
        # Large counts of tokens or choices are for the tests of limits.
        return st.integers(0 if low is None else low, min(300 if name != "n" else 3, 2**64 if high is None else high))
    if kind == "number":
        ends = {"exclude_min": "exclusiveMinimum" in schema, "allow_nan": False, "allow_infinity": False}
        return st.floats(-1e3 if low is None else low, 1e3 if high is None else high, **ends)
    if kind == "array":
        size = {"min_size": schema.get("minItems", 0), "max_size": min(3, schema.get("maxItems", 3))}
        return st.lists(TOOLS if name == "tools" else values(schema.get("items", {"type": "string"})), **size)
    if kind == "object":
        return of_fields(schema) if "properties" in schema else st.dictionaries(TEXTS, JSON, max_size=3) | TOOLS
    if kind == "string":
        shortest, longest = schema.get("minLength", 0), min(10, schema.get("maxLength", 10))
        if longest == 0:
            return st.just("")
        known = [word for word in WORDS if shortest <= len(word) <= longest]
        return st.text(min_size=shortest, max_size=longest) | (st.sampled_from(known) if known else st.nothing())
    return st.none() if kind == "null" else st.booleans()


def of_fields(schema: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: values(one, name) for name, one in schema["properties"].items() if "not" not in one}
    needed = {name: one for name, one in fields.items() if name in schema.get("required", ())}
    rest = sorted(fields.keys() - needed.keys())
    few = st.lists(st.sampled_from(rest), max_size=4, unique=True) if rest else st.just([])
    return few.flatmap(lambda names: st.fixed_dictionaries(needed | {name: fields[name] for name in names}))


def spots(found: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a body."""
    keys = found.keys() if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ()
    return [spot for key in keys for spot in ((found, key), *spots(found[key]))]


@st.composite
def requests(draw: st.DrawFn, bodies: st.SearchStrategy[Any]) -> tuple[Any, Any]:
    """A body as described, and the same with one part exchanged for anything."""
    body = draw(bodies)
    broken = copy.deepcopy(body)
    places = spots(broken)
    container, key = places[draw(st.integers(0, len(places) - 1))]
    container[key] = draw(JSON)
    return body, broken


DESCRIPTION = describe(model="tiny", has_key=False)
REQUESTS = {
    path: requests(values(DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]))
    for path in PATHS
}


def check(reply: Reply, path: str, method: str = "post") -> None:
    """The status, the kind and the content of a reply are as described, and no failure."""
    assert reply.status < 500, reply.text
    described = DESCRIPTION["paths"][path][method]["responses"][str(reply.status)]["content"]
    kind = reply.headers["Content-Type"].partition(";")[0]
    schema = described[kind].get("schema", {})
    if kind == "application/json":
        check_body(ERROR if "$ref" in schema else schema, reply.json)
    elif kind == "text/event-stream":
        assert all("error" not in event for event in reply.events if event != "[DONE]"), reply.text


@examples(200)
@given(st.one_of([st.tuples(st.just(path), bodies) for path, bodies in REQUESTS.items()]))
def test_described_and_broken_requests(server: Server, case: tuple[str, tuple[Any, Any]]) -> None:
    """Bodies as described, and the same with one part exchanged, get a reply or a refusal, never a failure."""
    path, bodies = case
    for body in bodies:
        check(server.post(path, body), path)


@examples(40)
@given(st.sampled_from(PATHS), st.binary(max_size=60) | JSON.map(lambda found: json.dumps(found).encode()))
def test_arbitrary_bytes(server: Server, path: str, raw: bytes) -> None:
    """Bytes of any kind get a refusal."""
    reply = server.post(path, raw)
    assert reply.status in (400, 404), reply.text
    check(reply, path)


def test_the_description_has_every_route(server: Server) -> None:
    """Every path that is described answers by the methods described, and no other path does."""
    for path, methods in server.get("/openapi.json").json["paths"].items():
        if path == "/live":
            continue
        for method in ("get", "post", "put", "delete", "patch", "options", "trace"):
            reply = server.ask(method.upper(), path.replace("{name}", "tiny"), {})
            assert (reply.status == 405) == (method not in methods), (method, path)
            assert reply.status != 404
            if reply.status == 405:
                assert {one.lower() for one in reply.headers["Allow"].split(",")} - {"head"} == methods.keys()
                check_body(ERROR, reply.json)
            else:
                check(reply, path, method)


def test_paths_that_are_described_by_example(server: Server) -> None:
    """Any name of a model is the one that there is, or 404 in the shape of all errors."""
    for name in ("tiny", "null", "Tiny", "%zz%ff", "%F0%9F%8D%8E", "a" * 3000, "-1e308", "..%2f"):
        reply = server.get(f"/v1/models/{name}")
        assert reply.status == (200 if name == "tiny" else 404), name
        check(reply, "/v1/models/{name}", "get")
