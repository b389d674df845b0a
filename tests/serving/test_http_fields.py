"""Every field that the official clients know, sent once to its endpoint; and the fields that reach the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import purestep as ps
import pytest
from anthropic.types import message_create_params
from hypothesis import given
from hypothesis import strategies as st
from kit.http import running
from kit.protocols import PATHS, Site, body_of
from kit.stand_in import StandIn, say
from kit.steps import examples
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from purestep.serving.openapi import describe

MODEL = ps.load_model("tiny")
PARAMS = {
    "completions": completion_create_params.CompletionCreateParamsBase,
    "chat": chat_create_params.CompletionCreateParamsBase,
    "responses": response_create_params.ResponseCreateParamsBase,
    "messages": message_create_params.MessageCreateParamsBase,
}
KNOWN = [(protocol, field) for protocol, params in PARAMS.items() for field in sorted(params.__annotations__)]
VALUES: list[Any] = [True, False, 0, 1, 0.5, -1, "x", "auto", "", [], ["x"], {}, {"type": "auto"}, {"x": {"y": [1]}}]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([300]))
    with running(MODEL, engine, context=400) as server:
        yield Site(server, engine)


@pytest.mark.parametrize(("protocol", "field"), KNOWN)
def test_every_field_of_the_clients(site: Site, protocol: str, field: str) -> None:
    """A field that a client can send is honoured, ignored or refused by name, whatever its value; null is no value."""
    path = PATHS[protocol]
    described = describe(model="tiny", has_key=False)["paths"][path]["post"]["requestBody"]["content"]
    is_known = field in described["application/json"]["schema"]["properties"]
    for found in VALUES:
        reply = site.server.post(path, body_of(protocol) | {field: found})
        assert reply.status in (200, 400) or (field == "model" and reply.status == 404), reply.text
        assert is_known or reply.status == 200, (field, found, reply.text)
        if reply.status == 400:
            # Errors of a conversation name the place in it.
            assert field in reply.text or field in ("input", "messages", "tools"), reply.text
    plain = site.server.post(path, body_of(protocol) | {field: None})
    required = described["application/json"]["schema"]["required"]
    assert plain.status == (400 if field in required else 200), plain.text


FIELDS = {
    "temperature": st.floats(0.01, 9),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(1, 99),
    "min_p": st.floats(0, 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 9),
    "seed": st.integers(0, 2**64 - 1),
    "logit_bias": st.dictionaries(st.integers(0, 99), st.integers(-100, 100), max_size=3),
}
ONLY_OPENAI = {
    "stop_token_ids": st.lists(st.integers(0, 99), max_size=3, unique=True),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 9),
}


@examples(30)
@given(st.fixed_dictionaries({}, optional=FIELDS), st.fixed_dictionaries({}, optional=ONLY_OPENAI))
def test_fields_reach_the_sampler(site: Site, shared: dict[str, Any], more: dict[str, Any]) -> None:
    """What a request says about sampling is what the engine is asked for, on every endpoint, and nothing else is."""
    for protocol, path in PATHS.items():
        fields = shared | (more if protocol in ("completions", "chat") else {})
        reply = site.server.post(path, body_of(protocol, limit=30) | fields)
        assert reply.status == 200, reply.text
        params = site.engine.asks[-1].params
        expected = dict(fields) | {"max_new_tokens": 30}
        expected["min_new_tokens"] = expected.pop("min_tokens", 0)
        expected.setdefault("seed", params.seed)
        wanted = ps.SamplingParams(**expected)
        assert attrs.asdict(params) == attrs.asdict(wanted)


@pytest.mark.parametrize("protocol", ["completions", "chat"])
def test_token_ids_on_request(site: Site, protocol: str) -> None:
    """With return_token_ids every choice has the ids of its prompt and of its reply, and without it none."""
    site.engine.source = say([300, 301])
    body = body_of(protocol, n=2)
    choices = site.server.post(PATHS[protocol], body | {"return_token_ids": True}).json["choices"]
    assert [choice["token_ids"] for choice in choices] == [[300, 301, 1]] * 2
    assert [choice["prompt_token_ids"] for choice in choices] == [list(site.engine.asks[-1].prompt_ids)] * 2
    assert "token_ids" not in site.server.post(PATHS[protocol], body).text
