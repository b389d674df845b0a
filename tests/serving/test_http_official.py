"""The official clients' own helpers on every endpoint: calls, parsed formats, choices, log-probabilities, counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import anthropic
import attrs
import openai
import purestep as ps
import pydantic
import pytest
from kit.http import Server, running
from kit.stand_in import StandIn, prefer, say

MODEL = ps.load_model("tiny")
TOKENIZER = MODEL.tokenizer
USER = {"role": "user", "content": "Hello"}
CALL = (
    'Let me see.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" string="true">'
    'Ur</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" string="true">Nod</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">4</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
GIVEN = [{"place": "Ur", "days": 3}, {"place": "Nod", "days": 4}]


class Look(pydantic.BaseModel):
    """What a tool takes, and what a formatted reply is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    place: Literal["Ur", "Nod"]
    days: int


PARAMETERS = Look.model_json_schema()


@attrs.define
class Site:
    """A server, the engine behind it, whose script tests exchange, and the clients."""

    server: Server
    engine: StandIn
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    with (
        running(MODEL, engine, context=3000) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other,
    ):
        yield Site(server, engine, one, other)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def speak(text: str) -> Any:
    """A model that says a text token by token where it may, and else the first token that it may."""
    ids = ids_of(text)

    def choose(ask: Any, outputs: tuple[int, ...], allowed: list[int] | None) -> int:
        wanted = ids[len(outputs)] if len(outputs) < len(ids) else 1
        return wanted if allowed is None or wanted in allowed else allowed[0]

    return prefer(choose)


def test_models(site: Site) -> None:
    """Both clients list the model and find it by its name."""
    assert [one.id for one in site.openai.models.list()] == ["tiny"]
    assert site.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        site.openai.models.retrieve("other")


def test_completions_with_choices(site: Site) -> None:
    """Choices, log-probabilities, token counts and reasons come through, streamed and plain."""
    site.engine.source = say(ids_of("God said"))
    fields: dict[str, Any] = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "logprobs": 1, "max_tokens": 9}
    plain = site.openai.completions.create(**fields)
    assert [choice.text for choice in plain.choices] == ["God said"] * 4
    assert [choice.finish_reason for choice in plain.choices] == ["stop"] * 4
    n_tokens = len(ids_of("God said")) + 1
    assert plain.usage.completion_tokens == 4 * n_tokens
    assert all(len(choice.logprobs.token_logprobs) == n_tokens for choice in plain.choices)
    texts, reasons, usage = [""] * 4, [None] * 4, None
    for event in site.openai.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        usage = event.usage
        for piece in event.choices:
            texts[piece.index] += piece.text
            reasons[piece.index] = piece.finish_reason
    assert (texts, reasons, usage) == (["God said"] * 4, ["stop"] * 4, plain.usage)


def test_chat_tools(site: Site) -> None:
    """Calls come whole, in pieces, and through the client's own way of joining pieces; each can be answered."""
    site.engine.source = speak(CALL)
    tool: Mapping[str, Any] = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
    fields: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": [tool]}
    plain = site.openai.chat.completions.create(**fields).choices[0]
    assert (plain.message.content, plain.finish_reason) == ("Let me see.", "tool_calls")
    assert [json.loads(call.function.arguments) for call in plain.message.tool_calls] == GIVEN
    with site.openai.chat.completions.stream(**fields) as stream:
        final = stream.until_done().get_final_completion().choices[0]
    assert final.message.content == "Let me see."
    assert [json.loads(call.function.arguments) for call in final.message.tool_calls] == GIVEN
    assert len({call.id for call in final.message.tool_calls}) == 2
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "dry"} for call in reversed(plain.message.tool_calls)
    ]
    site.engine.source = say(ids_of("dry"))
    again = [USER, plain.message.model_dump(exclude_none=True), *results]
    assert site.openai.chat.completions.create(**fields | {"messages": again}).choices[0].message.content == "dry"


def test_chat_formats(site: Site) -> None:
    """The client parses a formatted reply into its class, plainly and streamed, several choices at once."""
    site.engine.source = speak('{"place": "Nod", "days": 7}')
    fields: dict[str, Any] = {"model": "tiny", "messages": [USER], "response_format": Look, "n": 2}
    plain = site.openai.chat.completions.parse(**fields)
    assert [choice.message.parsed for choice in plain.choices] == [Look(place="Nod", days=7)] * 2
    with site.openai.chat.completions.stream(**fields) as stream:
        final = stream.until_done().get_final_completion()
    assert [choice.message.parsed for choice in final.choices] == [Look(place="Nod", days=7)] * 2


def test_chat_log_probabilities_and_counts(site: Site) -> None:
    """Log-probabilities of every token of the content, and equal counts streamed and plain."""
    site.engine.source = say(ids_of("God said"))
    fields: dict[str, Any] = {"model": "tiny", "messages": [USER], "logprobs": True, "top_logprobs": 2, "n": 2}
    plain = site.openai.chat.completions.create(**fields)
    for choice in plain.choices:
        assert "".join(one.token for one in choice.logprobs.content) == "God said"
        assert all(one.logprob == -0.5 and len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    options = {"include_usage": True}
    events = list(site.openai.chat.completions.create(**fields, stream=True, stream_options=options))
    assert events[-1].usage == plain.usage
    for choice in plain.choices:
        pieces = [piece for event in events for piece in event.choices if piece.index == choice.index]
        tokens = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content]
        assert tokens == choice.logprobs.content


def test_responses(site: Site) -> None:
    """Thinking, calls, their answers, parsed formats and log-probabilities, streamed and plain."""
    site.engine.source = speak("why</think>" + CALL)
    tool: dict[str, Any] = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}
    fields: dict[str, Any] = {"model": "tiny", "input": "Hello", "tools": [tool], "reasoning": {"effort": "high"}}
    plain = site.openai.responses.create(**fields)
    with site.openai.responses.stream(**fields) as stream:
        final = stream.until_done().get_final_response()
    for found in (plain, final):
        calls = [item for item in found.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == GIVEN
        assert found.output_text == "Let me see."
        assert found.output[0].content[0].text == "why"
        assert found.status == "completed"
    assert plain.usage == final.usage
    assert plain.usage.output_tokens_details.reasoning_tokens == len(ids_of("why"))
    site.engine.source = say(ids_of("dry</think>dry"))
    answers = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "dry"}
        for item in plain.output
        if item.type == "function_call"
    ]
    earlier = [item.model_dump(exclude_none=True) for item in plain.output]
    again = site.openai.responses.create(**fields | {"input": [USER, *earlier, *answers]})
    assert again.output_text == "dry"
    site.engine.source = speak('{"place": "Nod", "days": 7}')
    assert site.openai.responses.parse(model="tiny", input="x", text_format=Look).output_parsed == Look(
        place="Nod", days=7
    )
    site.engine.source = say(ids_of("God said"))
    scored = site.openai.responses.create(
        model="tiny", input="x", include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = scored.output[0].content[0].logprobs
    assert "".join(one.token for one in logprobs) == "God said"
    assert all(len(one.top_logprobs) == 2 for one in logprobs)


def test_messages(site: Site) -> None:
    """Thinking, calls, their answers and parsed formats, streamed and plain."""
    site.engine.source = speak("why</think>" + CALL)
    tool: dict[str, Any] = {"name": "look", "input_schema": PARAMETERS}
    fields: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 300, "tools": [tool]}
    fields |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    plain = site.anthropic.messages.create(**fields)
    with site.anthropic.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    for found in (plain, final):
        assert [block.input for block in found.content if block.type == "tool_use"] == GIVEN
        assert [block.thinking for block in found.content if block.type == "thinking"] == ["why"]
        assert [block.text for block in found.content if block.type == "text"] == ["Let me see."]
        assert found.stop_reason == "tool_use"
    for name in ("input_tokens", "cache_read_input_tokens", "output_tokens"):
        assert getattr(plain.usage, name) == getattr(final.usage, name) > 0
    site.engine.source = say(ids_of("dry</think>dry"))
    uses = [block for block in plain.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "dry"} for use in reversed(uses)]
    earlier = [block.model_dump(exclude_none=True) for block in plain.content]
    talk = [USER, {"role": "assistant", "content": earlier}, {"role": "user", "content": results}]
    again = site.anthropic.messages.create(**fields | {"messages": talk})
    assert again.content[-1].text == "dry"
    site.engine.source = speak('{"place": "Nod", "days": 7}')
    parsed = site.anthropic.messages.parse(model="tiny", messages=[USER], max_tokens=99, output_format=Look)
    assert parsed.parsed_output == Look(place="Nod", days=7)


def test_errors_are_the_clients_own(site: Site) -> None:
    """Refusals, full queues and failures are the exceptions that the clients have for them."""
    talk: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 4}
    with pytest.raises(openai.BadRequestError) as refused:
        site.openai.chat.completions.create(**talk, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(anthropic.BadRequestError):
        site.anthropic.messages.create(**talk, stop_sequences=[""])
    with pytest.raises(anthropic.NotFoundError):
        site.anthropic.messages.create(**talk | {"model": "other"})
    site.engine.queue = 0
    try:
        with pytest.raises(openai.RateLimitError):
            site.openai.responses.create(model="tiny", input="x")
        with pytest.raises(anthropic.RateLimitError):
            site.anthropic.messages.create(**talk)
    finally:
        site.engine.queue = 1000
