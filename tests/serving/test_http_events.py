"""Responses and Messages: the official clients over the real engine, and the shapes of replies over a scripted one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import attrs
import openai
import purestep as ps
import pytest
from kit.http import Server, running
from kit.stand_in import StandIn, prefer, say
from purestep.serving.asks import Ended, Sampled
from purestep.serving.engine import Engine, EngineLimits

MODEL = ps.load_model("tiny", dtype="float32", numerics=ps.Numerics(invariant=True))
TOKENIZER = MODEL.tokenizer
USER = {"role": "user", "content": "Who made the heaven and the earth?"}
MESSAGE = {"model": "tiny", "messages": [USER], "max_tokens": 40}
RESPONSE = {"model": "tiny", "input": "Who made the heaven?", "max_output_tokens": 40}
PATHS = (("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE))
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="false">2'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@attrs.define
class Site:
    """A server and the engine behind it, whose script tests exchange."""

    server: Server
    engine: StandIn

    def ask(self, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Ask plainly and streamed; return the reply and the events."""
        plain = self.server.post(path, body)
        assert plain.status == 200, plain.text
        return plain.json, self.server.post(path, body | {"stream": True}).events


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    with running(MODEL, engine, context=1500) as server:
        yield Site(server, engine)


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    limits = EngineLimits(running=2, tokens=2048, context=512, budget=260)
    with running(MODEL, lambda: Engine(MODEL, limits)) as server:
        yield server


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_of(path: str, reply: Any) -> str:
    """The text of a whole reply, of either protocol."""
    if path == "/v1/messages":
        return "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    parts = [part for item in reply["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def streamed_text(events: list[Any]) -> str:
    """The text that a stream says, of either protocol."""
    said = [
        event["delta"] for event in events if event["type"] in ("content_block_delta", "response.output_text.delta")
    ]
    return "".join(one if isinstance(one, str) else one.get("text", "") for one in said)


def test_messages_by_the_official_client(real: Server) -> None:
    """Anthropic's client gets the same message streamed and plain, with counts, thinking and stop strings."""
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0) as client:
        fields = {"model": "tiny", "messages": [USER], "max_tokens": 16, "extra_body": {"temperature": 0}}
        plain = client.messages.create(**fields)
        assert plain.content[0].type == "text"
        assert plain.usage.output_tokens == 16
        assert plain.stop_reason == "max_tokens"
        with client.messages.stream(**fields) as stream:
            assert "".join(stream.text_stream) == plain.content[0].text
            assert stream.get_final_message().usage.output_tokens == 16
        stop = plain.content[0].text[6:9]
        cut = client.messages.create(**fields, stop_sequences=[stop])
        assert cut.stop_reason == "stop_sequence"
        assert cut.stop_sequence == stop
        assert cut.content[0].text == plain.content[0].text.split(stop)[0]
        thought = client.messages.create(**fields, thinking={"type": "enabled", "budget_tokens": 1024})
        assert thought.content[0].type == "thinking"
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        formed = client.messages.create(**fields | {"max_tokens": 80}, output_config=form)
        assert json.loads(formed.content[0].text)["n"] in (1, 2)
        with pytest.raises(anthropic.BadRequestError, match="top_k"):
            client.messages.create(**fields | {"extra_body": {"top_k": -5}})


def test_responses_by_the_official_client(real: Server) -> None:
    """OpenAI's client gets the same response streamed and plain, with counts and formats."""
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        fields = {"model": "tiny", "input": "Who made the heaven?", "max_output_tokens": 16, "temperature": 0}
        plain = client.responses.create(**fields)
        assert plain.status == "incomplete"
        assert plain.usage.output_tokens == 16
        with client.responses.stream(**fields) as stream:
            said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert said == plain.output_text
        formed = client.responses.create(
            **fields | {"max_output_tokens": 80},
            text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
        )
        assert json.loads(formed.output_text)["n"] in (1, 2)
        with pytest.raises(openai.BadRequestError) as found:
            client.responses.create(**fields, previous_response_id="resp_1")
        assert found.value.param == "previous_response_id"


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_plain_and_streamed_are_one(site: Site, path: str, body: dict[str, Any]) -> None:
    """Text, counts, reason and seed are the same streamed and plain; counts are those of the engine."""
    site.engine.source = say(ids_of("God said é 😀"))
    plain, events = site.ask(path, body | {"seed": 9})
    assert text_of(path, plain) == streamed_text(events) == "God said é 😀"
    last = next(event for event in reversed(events) if event.get("usage") or event.get("response"))
    holder = last.get("response", last)
    assert holder["usage"] == plain["usage"]
    assert holder["seed"] == plain["seed"] == 9
    assert plain["usage"]["output_tokens"] == len(ids_of("God said é 😀")) + 1
    cached = plain["usage"].get("cache_read_input_tokens", plain["usage"].get("input_tokens_details"))
    assert cached in (3, {"cached_tokens": 3})


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_forced_calls(site: Site, path: str, body: dict[str, Any], thinking: bool) -> None:
    """A forced call comes with arguments of its schema, thinking or not, whatever the model wants to say."""
    wish = ids_of(("why</think>" if thinking else "") + CALL)

    def choose(ask: Any, outputs: tuple[int, ...], allowed: list[int]) -> int:
        wanted = wish[len(outputs)] if len(outputs) < len(wish) else 1
        return wanted if wanted in allowed else allowed[0]

    site.engine.source = prefer(choose)
    if path == "/v1/messages":
        tool = {"name": "f", "input_schema": SCHEMA}
        asked = {"tools": [tool], "thinking": {"type": "enabled" if thinking else "disabled"}, "max_tokens": 300}
        plain, events = site.ask(path, body | asked | {"tool_choice": {"type": "any"}})
        (call,) = (block for block in plain["content"] if block["type"] == "tool_use")
        assert (call["name"], call["input"], plain["stop_reason"]) == ("f", {"n": 2}, "tool_use")
        deltas = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    else:
        tool = {"type": "function", "name": "f", "parameters": SCHEMA}
        asked = {"tools": [tool], "reasoning": {"effort": "high" if thinking else "none"}, "max_output_tokens": 300}
        plain, events = site.ask(path, body | asked | {"tool_choice": {"type": "function", "name": "f"}})
        (call,) = (item for item in plain["output"] if item["type"] == "function_call")
        assert (call["name"], json.loads(call["arguments"])) == ("f", {"n": 2})
        deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"n": 2}


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_failures(site: Site, path: str, body: dict[str, Any]) -> None:
    """Errors come in the protocol's own shape; one in the middle of a stream is its last event."""
    refused = site.server.post(path, body | {"temperature": -1})
    assert refused.status == 400
    assert "temperature" in refused.json["error"]["message"]
    assert (refused.json.get("type") == "error") == (path == "/v1/messages")

    def broken(ask: Any) -> Iterator[Any]:
        yield Sampled(token_id=300)
        yield Ended(reason="error", error="a row of NaN")

    site.engine.source = broken
    assert site.server.post(path, body).status == 500
    heard = site.server.post(path, body | {"stream": True})
    assert "event: error\n" in heard.text
    assert "a row of NaN" in heard.events[-1]["error"]["message"]
    assert "response.completed" not in heard.text
    assert "message_stop" not in heard.text


BAD = [
    ("/v1/messages", {"max_tokens": None}), ("/v1/messages", {"max_tokens": 0}), ("/v1/messages", {"messages": []}),
    ("/v1/messages", {"tool_choice": {"type": "any"}}), ("/v1/messages", {"tool_choice": {"type": "tool"}}),
    ("/v1/messages", {"stop_sequences": [""]}), ("/v1/messages", {"system": 7}), ("/v1/messages", {"tools": [7]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages", {"output_format": {"type": "json_schema", "schema": {"if": {}}}}),
    ("/v1/messages", {"output_config": {"format": {"type": "poem"}}}),
    ("/v1/responses", {"input": None}), ("/v1/responses", {"input": []}), ("/v1/responses", {"background": True}),
    ("/v1/responses", {"background": 0}),
    ("/v1/responses", {"tool_choice": "required"}), ("/v1/responses", {"tool_choice": {"type": "function"}}),
    ("/v1/responses", {"text": {"format": {"type": "poem"}}}), ("/v1/responses", {"tools": [7]}),
    ("/v1/responses", {"max_output_tokens": 0}), ("/v1/responses", {"input": "x " * 3000}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_done_is_refused(site: Site, path: str, fields: dict[str, Any]) -> None:
    """Wrong, missing and unsupported fields get 400."""
    reply = site.server.post(path, dict(PATHS)[path] | fields)
    assert reply.status == 400, reply.text
