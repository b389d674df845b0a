"""Constraints on every chat endpoint: enforced after the thinking, bounded in time and space, each request its own."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import running
from kit.protocols import CHATS, PATHS, Site, Tool, body_of
from kit.stand_in import StandIn, prefer, say
from kit.steps import examples

MODEL = ps.load_model("tiny")
TOKENIZER = MODEL.tokenizer
END_THINK = TOKENIZER.token_to_id("</think>")
SPACES = [TOKENIZER.token_to_id(piece) for piece in ("Ġ", "Ċ")]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    with running(MODEL, engine, context=4000) as server:
        yield Site(server, engine)


def wishing(ids: list[int], *, draws: int | None = None) -> Any:
    """A model that always wants some token of these; where it may have none, the first that it may, or one drawn."""

    def choose(ask: Any, outputs: tuple[int, ...], allowed: list[int] | None) -> int:
        if allowed is None:
            return ids[len(outputs) % len(ids)]
        turned = (ids[(len(outputs) + at) % len(ids)] for at in range(len(ids)))
        fallback = allowed[0] if draws is None else Random(hash((draws, outputs))).choice(allowed)
        return next((one for one in turned if one in allowed), fallback)

    return prefer(choose)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def formatted(kind: str, found: Any) -> dict[str, Any]:
    """A format that only /v1/chat/completions has."""
    return {"response_format": {"type": kind, kind: found}}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("wish", [SPACES, SPACES[:1], SPACES[1:], [1], [1, *SPACES]])
@pytest.mark.parametrize("protocol", CHATS)
def test_spaces_and_ends_lead_nowhere(site: Site, protocol: str, wish: list[int], thinking: bool) -> None:
    """A model that always wants white space or the end gives JSON of the schema with little white space, and stops."""
    site.engine.source = wishing([*wish, END_THINK] if thinking else wish)
    said = site.says(protocol, schema=SCHEMA, thinks=thinking, limit=300)
    assert said.reason == "stop"
    assert set(json.loads(said.text)) == {"name", "n"}
    assert not re.search(r"\s{10}", re.sub(r'"[^"]*"', "s", said.text))


def test_spaces_in_any_json_and_in_calls(site: Site) -> None:
    """Neither a format without a schema nor the arguments of a call let a model go round in white space."""
    site.engine.source = wishing([*SPACES, *ids_of("}")])
    said = site.says("chat", content="json", limit=300, response_format={"type": "json_object"})
    assert (json.loads(said.text), said.reason) == ({}, "stop")
    tool = Tool("f", {"type": "object", "properties": {"a": SCHEMA}, "required": ["a"]})
    site.engine.source = wishing(SPACES)
    for protocol in CHATS:
        said = site.says(protocol, tools=[tool], choice="required", limit=400)
        assert said.reason == "tool_calls"
        assert set(json.loads(said.calls[0][1])["a"]) == {"name", "n"}


LEAVES = st.sampled_from(
    [
        *({"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": "number", "minimum": 0, "maximum": 9}),
        *({"enum": ["a", 2, None]}, {"const": "é<"}, {"type": "string", "pattern": "^[ab]{2}$"}),
        *({"type": "string", "maxLength": 3}, {"type": "integer", "multipleOf": 5}),
    ]
)


def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(st.sampled_from(["a", "b", "ü x"]), inner, min_size=1, max_size=3)
    objects = fields.map(
        lambda found: {
            "type": "object",
            "properties": found,
            "required": sorted(found)[:2],
            "additionalProperties": False,
        }
    )
    arrays = inner.map(lambda found: {"type": "array", "items": found, "maxItems": 3})
    return objects | arrays | st.lists(inner, min_size=1, max_size=2).map(lambda found: {"anyOf": found})


@examples(12)
@given(wider(st.recursive(LEAVES, wider, max_leaves=4)), st.integers(0, 2**30), st.sampled_from(CHATS))
def test_drawn_replies_fit_their_schema(site: Site, schema: Mapping[str, Any], seed: int, protocol: str) -> None:
    """Whatever a model draws, a reply that ended fits its schema, and one that was cut says so."""
    if schema.get("type") != "object":
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    site.engine.source = wishing([1], draws=seed)
    said = site.says(protocol, schema=schema, limit=250)
    assert said.reason in ("stop", "length")
    if said.reason == "stop":
        require_fit(json.loads(said.text), schema)


def require_fit(found: Any, schema: Mapping[str, Any]) -> None:
    """The few keywords above, by hand."""
    if "anyOf" in schema:
        assert any(fits(found, one) for one in schema["anyOf"])
    elif "enum" in schema or "const" in schema:
        assert found in schema.get("enum", [schema.get("const")])
    elif schema["type"] == "object":
        assert set(schema["required"]) <= set(found) <= set(schema["properties"])
        for name, inner in found.items():
            require_fit(inner, schema["properties"][name])
    elif schema["type"] == "array":
        assert len(found) <= 3
        for inner in found:
            require_fit(inner, schema["items"])
    elif schema["type"] == "string":
        assert re.fullmatch(schema.get("pattern", ".{0,3}"), found, flags=re.DOTALL)
    elif schema["type"] in ("integer", "number"):
        assert isinstance(found, int | float)
        assert found % schema.get("multipleOf", 1e-9 if schema["type"] == "number" else 1) < 1e-6 or "minimum" in schema
        assert schema.get("minimum", found) <= found <= schema.get("maximum", found)
    else:
        assert found is None if schema["type"] == "null" else isinstance(found, bool)


def fits(found: Any, schema: Mapping[str, Any]) -> bool:
    try:
        require_fit(found, schema)
    except (AssertionError, TypeError):
        return False
    return True


@pytest.mark.parametrize("protocol", CHATS)
def test_thinking_is_free_and_then_over(site: Site, protocol: str) -> None:
    """Thinking is free and may spell its end; after it the constraint holds; if it never ends, nothing is content."""
    spelled = [token_id for letter in "{} </think> no" for token_id in ids_of(letter)]
    site.engine.source = wishing([*spelled, END_THINK, *ids_of("God")])
    said = site.says(protocol, schema=SCHEMA, thinks=True, limit=200)
    assert (said.reasoning, said.reason) == ("{} </think> no", "stop")
    assert set(json.loads(said.text)) == {"name", "n"}
    site.engine.source = wishing(ids_of("why not, God said"))
    said = site.says(protocol, schema=SCHEMA, thinks=True, limit=30)
    assert (said.text, said.reason) == ("", "length")
    assert said.reasoning.startswith("why not, God said")


PATTERNS = {"[0-9]+": "0", "[a-z]+": "a", "(ab){2}": "abab", "x|y": "x", "é{3}": "ééé"}


def test_every_request_obeys_its_own(site: Site) -> None:
    """Patterns one after another, of several choices, and at the same time: each reply matches its own."""
    site.engine.source = wishing([1])

    def match(pattern: str) -> bool:
        body = body_of("chat", limit=30, n=3, **formatted("regex", pattern))
        choices = site.server.post(PATHS["chat"], body).json["choices"]
        return len(choices) == 3 and all(re.fullmatch(pattern, one["message"]["content"]) for one in choices)

    assert all(map(match, PATTERNS))
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(match, [*PATTERNS] * 4))


HEAVY: list[tuple[str, Any]] = [
    ("regex", "a{1000000}"), ("regex", "(a?){5000}a{5000}"), ("regex", "(a"), ("regex", "(?=a)b"), ("regex", "(a)\\1"),
    ("regex", "(" * 5000 + ")" * 5000), ("regex", "a" * 200_000), ("choice", ["x" * 200] * 1000),
    ("schema", {"type": "integer", "multipleOf": 9_999_991}), ("schema", {"type": "number", "multipleOf": 0.0012347}),
    ("schema", {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}),
    ("schema", {"properties": {f"p{n}": {"type": "string", "maxLength": n} for n in range(20_000)}}),
    ("schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ("schema", {"type": "string", "pattern": "^a{1000000}$"}), ("schema", {"$ref": "http://127.0.0.1:9/a.json"}),
    ("schema", {"type": "objekt"}), ("schema", {"not": {}}), ("schema", {"type": "array", "uniqueItems": True}),
    ("schema", {"type": "string", "pattern": "(?!a)b"}),
    ("schema", {"oneOf": [{"type": "number"}, {"type": "integer"}]}),
    ("schema", {"allOf": [{"anyOf": [{"properties": {f"p{n}": {"const": m}}} for m in range(4)]} for n in range(8)]}),
    ("schema", {"type": "number", "minimum": 1e-30, "maximum": 1e30}), ("schema", {"format": "zork", "type": "string"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "found"), HEAVY, ids=range(len(HEAVY)))
def test_what_cannot_be_enforced(site: Site, kind: str, found: Any) -> None:
    """What does not compile, or would take for ever, is refused soon, with the field's name; others are served on."""
    asks: dict[str, dict[str, Any]] = {"chat": formatted(kind, found)}
    if kind == "schema":
        asks = {protocol: body_of(protocol, schema=found) for protocol in CHATS}
    fields = {"chat": "response_format", "responses": "text.format"}
    site.engine.source = wishing([1])
    for protocol, fields_of in asks.items():
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            busy = pool.submit(site.server.post, PATHS[protocol], body_of(protocol) | fields_of)
            slowest = 0.0
            while not busy.done():
                asked = time.monotonic()
                assert site.server.get("/health").status == 200
                slowest = max(slowest, time.monotonic() - asked)
        reply = busy.result()
        assert reply.status == 400, reply.text[:300]
        assert time.monotonic() - began < 8
        assert slowest < 1
        if protocol in fields and "maximum context" not in reply.text:
            assert reply.json["error"]["param"].startswith(fields[protocol])


def test_a_constraint_that_grows_too_large_on_the_way() -> None:
    """A grammar that turns out too large while a reply is made is the request's fault, plainly and in a stream."""
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1500)}}
    body = body_of("chat", schema=schema)
    with running(MODEL, StandIn(wishing(ids_of('{"'))), context=100_000) as server:
        plain = server.post(PATHS["chat"], body)
        streamed = server.post(PATHS["chat"], body | {"stream": True})
    assert plain.status == 400, plain.text
    assert plain.json["error"]["code"] == "unsupported_constraint"
    assert streamed.events[-1]["error"] == plain.json["error"]


UNSUPPORTED = {
    "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "a", "structured_outputs": {},
    "regex": "a", "ebnf": "a", "json_schema": "{}", "grammar": "a",
}  # fmt: skip


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_constraints_in_the_words_of_other_servers(site: Site, field: str) -> None:
    """Constraints that other servers' clients ask for in their own words are refused by name, not ignored."""
    for protocol, path in PATHS.items():
        reply = site.server.post(path, body_of(protocol) | {field: UNSUPPORTED[field]})
        assert reply.status == 400, reply.text
        assert field in reply.text
    reply = site.server.post(
        PATHS["completions"], body_of("completions") | {"response_format": {"type": "json_object"}}
    )
    assert reply.status == 400


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("protocol", CHATS)
def test_nesting(site: Site, protocol: str) -> None:
    """Schemas and arguments nested thousands deep are refused in every place where one can stand; rings are refused."""
    ring = {"type": "object", "properties": {"a": {"$ref": "#/$defs/r"}}, "$defs": {"r": {"$ref": "#/$defs/r"}}}
    marker = {"deepest": 1}
    nested = b'{"a":' * 5000 + b"1" + b"}" * 5000
    for wish in ({"schema": marker}, {"tools": [Tool("f", marker)]}, {"metadata": marker}):
        raw = json.dumps(body_of(protocol, **wish)).encode().replace(json.dumps(marker).encode(), nested)
        assert nested in raw
        reply = site.server.ask("POST", PATHS[protocol], raw)
        assert reply.status == 400, reply.text
        assert "levels" in reply.text
    site.engine.source = wishing(ids_of("}"))
    for wish in ({"schema": ring | {"required": ["a"]}}, {"tools": [Tool("f", ring | {"required": ["a"]})]}):
        reply = site.server.post(PATHS[protocol], body_of(protocol, **wish))
        assert reply.status == 400, reply.text
    assert site.server.post(PATHS[protocol], body_of(protocol, schema=deep(100))).status == 400
    site.engine.source = wishing(ids_of("}"))
    assert site.server.post(PATHS[protocol], body_of(protocol, schema=deep(20))).status == 200


def chain(links: int) -> dict[str, Any]:
    """A schema whose definitions lead from one to the next."""
    steps = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}, {"type": "integer"}]} for at in range(links)}
    return {
        "type": "object",
        "$defs": steps | {f"d{links}": {"type": "null"}},
        "properties": {"a": {"$ref": "#/$defs/d0"}},
    }


@pytest.mark.parametrize("protocol", CHATS)
def test_long_chains_of_references(site: Site, protocol: str) -> None:
    """Chains of references that overflow the stack of the grammars' library are refused; short ones are served."""
    for wish in ({"schema": chain(3000)}, {"tools": [Tool("f", chain(3000))]}):
        reply = site.server.post(PATHS[protocol], body_of(protocol, **wish))
        assert (reply.status, "references" in reply.text) == (400, True), reply.text
    site.engine.source = wishing(ids_of("}"))
    assert site.server.post(PATHS[protocol], body_of(protocol, schema=chain(20))).status == 200


CONTROL = ["<｜end▁of▁sentence｜>", "</think>", "<｜User｜>", "｜DSML｜", "x</think>y", "</｜DSML｜parameter>"]


@pytest.mark.parametrize("protocol", CHATS)
def test_spellings_of_control_tokens_are_text(site: Site, protocol: str) -> None:
    """A constraint that spells control tokens is enforced letter by letter, and its text comes back whole."""
    site.engine.source = wishing([1, END_THINK, *ids_of("}")])
    wanted = {f"a{at}": one for at, one in enumerate(CONTROL)}
    texts: list[Any] = [{"const": one} for one in CONTROL], [{"type": "string", "enum": [one]} for one in CONTROL]
    for kinds in texts:
        schema = {"type": "object", "properties": dict(zip(wanted, kinds, strict=True)), "required": [*wanted]}
        said = site.says(protocol, schema=schema, thinks=True, limit=600)
        assert (json.loads(said.text), said.reason) == (wanted, "stop")
        said = site.says(protocol, tools=[Tool("f", schema)], choice="required", limit=600)
        assert (said.reason, json.loads(said.calls[0][1])) == ("tool_calls", wanted)


@pytest.mark.parametrize("spelling", CONTROL)
def test_choices_that_spell_control_tokens_are_text(site: Site, spelling: str) -> None:
    """A choice or pattern that is the spelling of a control token gives a reply of that text."""
    site.engine.source = wishing([1, END_THINK, TOKENIZER.token_to_id("<｜User｜>")])
    for thinks, rule in ((False, formatted("choice", [spelling])), (True, formatted("regex", spelling))):
        said = site.says("chat", thinks=thinks, **rule)
        assert (said.text, said.reason) == (spelling, "stop")


@examples(25)
@given(data=st.data(), spelling=st.sampled_from([*CONTROL, "<|end|>"]), thinks=st.booleans())
def test_disguised_spellings_of_control_tokens_are_text(site: Site, data: Any, spelling: str, thinks: bool) -> None:
    """However a pattern hides the spelling of a control token, the reply is the text that it describes."""
    plain = st.sampled_from(["{}", "[{}]", "({})", "(?:{})", "{}{{1}}"])
    forms = [data.draw(plain).format(re.escape(letter)) for letter in spelling]
    before, after = data.draw(st.sampled_from(["", "a", "[ab]"])), data.draw(st.sampled_from(["", "a", "[ab]"]))
    at = data.draw(st.integers(0, len(forms)))
    pattern = before + "".join(forms[:at]) + "(" + "".join(forms[at:]) + ")" + after
    site.engine.source = wishing([1, END_THINK, TOKENIZER.token_to_id("<｜User｜>")])
    said = site.says("chat", thinks=thinks, limit=100, **formatted("regex", pattern))
    assert re.fullmatch(pattern, said.text), (pattern, said.text)
    assert said.reason == "stop"


def test_references_of_tools_lead_into_definitions(site: Site) -> None:
    """A reference to what does not come along with an argument is refused by name."""
    for reference in ("#", "#/properties/b"):
        found = {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": reference}}}}
        reply = site.server.post(PATHS["chat"], body_of("chat", tools=[Tool("f", found)]))
        assert reply.status == 400, reply.text
