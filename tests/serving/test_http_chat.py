"""Chats over a scripted engine: thinking, tool calls, constraints, and the prompts that conversations become."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import deepseek_recipe as recipe
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import Server, running
from kit.stand_in import StandIn, prefer, say
from kit.steps import examples

MODEL = ps.load_model("tiny")
TOKENIZER = MODEL.tokenizer
CHAT = "/v1/chat/completions"
THINK, END_THINK, DSML = (TOKENIZER.token_to_id(token) for token in ("<think>", "</think>", "｜DSML｜"))
USER = {"role": "user", "content": "Hello"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}, "unit": {"enum": ["kg", "m"]}},
            "required": ["a"],
        },
    },
}
CALL = (
    'ok\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">2'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="note" string="true">x <b> >&1<</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
ARGUMENTS = {"a": 2, "note": "x <b> >&1<"}


@attrs.define
class Site:
    """A server and the engine behind it, whose script tests exchange."""

    server: Server
    engine: StandIn

    def chat(self, *, status: int = 200, **fields: Any) -> Any:
        """Ask plainly and streamed; both must agree, and the plain reply is returned."""
        body = {"model": "tiny", "messages": [USER]} | fields
        plain = self.server.post(CHAT, body)
        assert plain.status == status, plain.text
        streamed = self.server.post(CHAT, body | {"stream": True})
        assert streamed.status == status
        if status == 200:
            assert folded(streamed.events[:-1]) == [shape(choice) for choice in plain.json["choices"]]
        return plain.json

    def choice(self, **fields: Any) -> Any:
        """Ask for one choice that must succeed."""
        (choice,) = self.chat(**fields)["choices"]
        return choice


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    with running(MODEL, engine, context=4000) as server:
        yield Site(server, engine)


def ids_of(text: str) -> list[int]:
    """Encode what a model would say, its control tokens included."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def shape(choice: Any) -> tuple[str, str, str, list[tuple[str, str]]]:
    """What a choice says: reasoning, content, reason, and calls."""
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"], choice["finish_reason"], calls


def folded(events: list[Any]) -> list[Any]:
    """Join a stream by hand, as a client would."""
    said: dict[int, list[Any]] = {}
    for piece in (piece for event in events for piece in event["choices"]):
        one = said.setdefault(piece["index"], ["", "", None, []])
        delta = piece["delta"]
        one[0] += delta.get("reasoning_content") or ""
        one[1] += delta.get("content") or ""
        one[2] = piece["finish_reason"] or one[2]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(one[3]):
                assert call["id"]
                one[3].append((call["function"]["name"], ""))
            name, arguments = one[3][call["index"]]
            one[3][call["index"]] = (name, arguments + call["function"]["arguments"])
    return [tuple(said[index]) for index in sorted(said)]


def follow(wish: Sequence[int]) -> Any:
    """A model that says what it wishes where it may, and the first allowed token where it may not."""

    def choose(ask: Any, outputs: tuple[int, ...], allowed: list[int] | None) -> int:
        wanted = wish[len(outputs)] if len(outputs) < len(wish) else 1
        return wanted if allowed is None or wanted in allowed else allowed[0]

    return prefer(choose)


@pytest.mark.parametrize(
    ("fields", "is_thinking"),
    [
        ({}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_the_parser_starts_where_the_prompt_ends(site: Site, fields: dict[str, Any], is_thinking: bool) -> None:
    """However thinking is asked for, the prompt and the split of the reply agree on it."""
    site.engine.source = say(ids_of("why</think>ok"))
    choice = site.choice(**fields)
    assert site.engine.asks[-1].prompt_ids[-1] == (THINK if is_thinking else END_THINK)
    assert shape(choice)[:2] == (("why", "ok") if is_thinking else ("", "whyok"))


def test_thinking_that_never_ends_is_all_reasoning(site: Site) -> None:
    """A reply cut while thinking has its text in the reasoning, no content, and the reason as it was."""
    site.engine.source = say(ids_of("God and man") * 5)
    reply = site.chat(thinking={"type": "enabled"}, max_tokens=4)
    reasoning, content, reason, _ = shape(reply["choices"][0])
    assert reasoning.startswith("God and man")
    assert (content, reason) == ("", "length")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


@examples(15)
@given(st.data())
def test_calls_cut_anywhere_are_never_taken_for_whole(site: Site, data: st.DataObject) -> None:
    """A call cut by the limit is reported with "length"; a whole one with its arguments as JSON of the right types."""
    ids = ids_of(CALL)
    limit = data.draw(st.integers(1, len(ids) + 1))
    site.engine.source = say(ids)
    _, content, reason, calls = shape(site.choice(tools=[TOOL], max_tokens=limit))
    assert "DSML" not in content + "".join(name + arguments for name, arguments in calls)
    if limit <= len(ids):
        assert reason == "length"
    else:
        assert (content, reason) == ("ok", "tool_calls")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("add", ARGUMENTS)]


def test_markup_without_tools_is_content(site: Site) -> None:
    """Without tools, or with none to be called, a reply that quotes the markup is delivered as it is."""
    site.engine.source = say(ids_of(CALL))
    assert shape(site.choice())[1] == CALL
    assert shape(site.choice(tools=[TOOL], tool_choice="none"))[1] == CALL


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls_are_calls_whatever_the_model_wants(site: Site, choice: Any, thinking: str) -> None:
    """A forced call comes, thinking or not, with arguments that its schema allows, though the model wants to talk."""
    talk = ids_of("No, I will not")
    wish = [*talk, END_THINK, *talk * 3] if thinking == "enabled" else talk * 3
    site.engine.source = follow(wish)
    other = {"type": "function", "function": {"name": "other"}}
    found = shape(site.choice(tools=[TOOL, other], tool_choice=choice, thinking={"type": thinking}, max_tokens=400))
    assert found[0] == ("No, I will not" if thinking == "enabled" else "")
    assert found[1].strip() == ""
    assert found[2] == "tool_calls"
    for name, arguments in found[3]:
        assert name in ("add", "other")
        given = json.loads(arguments)
        assert name == "other" or isinstance(given["a"], int)
    assert choice == "required" or {name for name, _ in found[3]} == {"add"}


def test_free_calls_are_held_to_their_markup(site: Site) -> None:
    """Text is free beside tools; once a call has begun, its markup and arguments are enforced."""
    site.engine.source = follow(ids_of("Hello there"))
    assert shape(site.choice(tools=[TOOL]))[1:3] == ("Hello there", "stop")
    begun = CALL[: CALL.index("2</｜DSML｜parameter>")]
    site.engine.source = follow([*ids_of(begun), *ids_of("not a number")])
    _, content, reason, calls = shape(site.choice(tools=[TOOL], max_tokens=400))
    assert (content, reason) == ("ok", "tool_calls")
    assert isinstance(json.loads(calls[0][1])["a"], int)


def test_the_marker_is_a_token_and_its_spelling_is_text(site: Site) -> None:
    """Markup spelled in ordinary tokens is text, before a call and inside one, where the marker itself cannot come."""
    spelled = [token_id for letter in CALL for token_id in ids_of(letter)]
    site.engine.source = follow(spelled)
    assert shape(site.choice(tools=[TOOL], max_tokens=len(spelled) + 1))[1:] == (CALL, "stop", [])
    begun, ending = CALL[: CALL.index("x <b>")], CALL[CALL.index("</｜DSML｜parameter>\n</") :]
    site.engine.source = follow([*ids_of(begun), DSML, DSML, *spelled, *ids_of(ending)])
    ((_, arguments),) = shape(site.choice(tools=[TOOL], max_tokens=1000))[3]
    assert json.loads(arguments)["note"].endswith(CALL)


def test_types_of_arguments(site: Site) -> None:
    """Numbers, booleans, lists and nulls come as JSON, texts as text even where they look like something else."""
    values = {"a": True, "b": 3, "c": 1.5, "d": None, "e": [1], "f": {"a": 1}}
    texts = {"g": "123", "h": "true", "i": "", "j": 'say "hi"\n'}
    parameters = "".join(
        f'<｜DSML｜parameter name="{name}" string="{"true" if name in texts else "false"}">'
        f"{found if name in texts else json.dumps(found)}</｜DSML｜parameter>\n"
        for name, found in (values | texts).items()
    )
    open_tool = {"type": "function", "function": {"name": "f"}}
    call = f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{parameters}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    site.engine.source = follow(ids_of(call))
    (found,) = shape(site.choice(tools=[open_tool]))[3]
    assert json.loads(found[1]) == values | texts


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def constrained(kind: str, found: Any) -> dict[str, Any]:
    inner = {"name": "x", "schema": found} if kind == "json_schema" else found
    return {"response_format": {"type": kind, kind: inner}, "max_tokens": 300}


@pytest.mark.parametrize("wish", [" ", "\n", "God", "</think>", "", '"', "{", "😀"])
def test_json_whatever_the_model_wants(site: Site, wish: str) -> None:
    """A model that always wants white space, words or the end gives JSON of the schema, and then stops."""
    site.engine.source = follow(ids_of(wish) * 400)
    _, content, reason, _ = shape(site.choice(**constrained("json_schema", SCHEMA)))
    assert reason == "stop"
    found = json.loads(content)
    assert set(found) == {"name", "n"}
    assert isinstance(found["n"], int)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (("regex", "[0-9]+/[a-z]{2}"), "12/ab"),
        (("regex", "[a-z]+"), "ab"),
        (("choice", ["yes 😀", "n/o"]), "n/o"),
        (("json_schema", SCHEMA), '{"name": "ab",\n  "n": 3}'),
    ],
)
def test_constraints_let_through_what_fits(site: Site, format: tuple[str, Any], text: str) -> None:
    """A reply that fits comes unchanged; one that does not is bent; each request obeys its own constraint."""
    site.engine.source = follow(ids_of(text))
    assert shape(site.choice(**constrained(*format)))[1:3] == (text, "stop")
    site.engine.source = follow(ids_of("Zebra") * 50)
    assert shape(site.choice(**constrained(*format)))[1] != "Zebra"


def test_constraints_begin_after_the_thinking(site: Site) -> None:
    """Thinking is free and may not end by other tokens that spell its end; then the constraint holds."""
    spelled = [token_id for letter in "a</think>b" for token_id in ids_of(letter)]
    site.engine.source = follow([*spelled, END_THINK, *ids_of("God")])
    fields = constrained("json_schema", SCHEMA) | {"thinking": {"type": "enabled"}}
    reasoning, content, reason, _ = shape(site.choice(**fields))
    assert (reasoning, reason) == ("a</think>b", "stop")
    assert set(json.loads(content)) == {"name", "n"}
    site.engine.source = follow(ids_of("God") * 400)
    assert shape(site.choice(**fields | {"max_tokens": 20}))[1:3] == ("", "length")


BAD_CONSTRAINTS = [
    constrained("regex", "(a"), constrained("regex", "(?=a)b"), constrained("choice", []), constrained("choice", [""]),
    constrained("json_schema", {"type": "objekt"}), constrained("json_schema", {"type": "object", "if": {}}),
    constrained("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    constrained("json_schema", {"enum": [str(n) * 50 for n in range(3000)]}), constrained("json_schema", 7),
    {"response_format": {"type": "regex"}}, {"response_format": {"type": "poem"}}, {"response_format": {}},
    {"response_format": "json_object"}, constrained("regex", "a") | {"ignore_eos": True},
    constrained("regex", "a") | {"min_tokens": 3}, constrained("regex", "a") | {"tools": [TOOL]},
    {"tool_choice": "required"}, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}},
    {"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, {"tools": [7]}, {"tools": [TOOL, TOOL]},
    {"functions": [{"name": "f"}]}, {"modalities": ["audio"]}, {"top_logprobs": 3}, {"logprobs": 3},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_CONSTRAINTS, ids=range(len(BAD_CONSTRAINTS)))
def test_what_cannot_be_enforced_is_refused(site: Site, fields: dict[str, Any]) -> None:
    """Constraints that do not compile, allow nothing, are too large or contradict other fields get 400."""
    assert site.chat(status=400, **fields)["error"]["message"]


def encoded(messages: list[dict[str, Any]], **fields: Any) -> str:
    """Render a conversation with DeepSeek's own encoder, without the server."""
    body = {"model": "DeepSeek-V4-Pro", "messages": messages} | fields
    request = recipe.ChatCompletionRequest(json.dumps(body)).convert(recipe.ConversionOptions())
    return recipe.DeepseekV4Encoding().render_conversation(request.conversation).prompt


WORDS = st.text("ab <é", min_size=1, max_size=6) | st.sampled_from(["</think>", "<｜User｜>", "｜DSML｜"])


@examples(25)
@given(st.lists(st.tuples(WORDS, WORDS, st.none() | WORDS), max_size=3), WORDS, st.sampled_from([None, "none", "max"]))
def test_prompts_are_those_of_the_reference_encoder(
    site: Site, turns: list[tuple[str, str, str | None]], last: str, effort: str | None
) -> None:
    """Conversations with earlier thinking and spelled-out control tokens become the ids of the reference encoder."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}]
    for question, answer, thought in turns:
        reply = {"role": "assistant", "content": answer} | ({} if thought is None else {"reasoning_content": thought})
        messages += [{"role": "user", "content": question}, reply]
    messages.append({"role": "user", "content": last})
    site.engine.source = say([])
    fields = {"reasoning_effort": "none"} if effort is None else {"reasoning_effort": effort}
    given = [message | ({"role": "developer"} if message["role"] == "system" else {}) for message in messages]
    given = [{("reasoning" if key == "reasoning_content" else key): one for key, one in m.items()} for m in given]
    reply = site.server.post(CHAT, {"model": "tiny", "messages": given} | fields)
    assert reply.status == 200, reply.text
    prompt = site.engine.asks[-1].prompt_ids
    assert TOKENIZER.decode(list(prompt), skip_special_tokens=False) == encoded(messages, **fields)
    n_users = sum(message["role"] == "user" for message in messages)
    assert list(prompt).count(TOKENIZER.token_to_id("<｜User｜>")) == n_users
    assert DSML not in prompt


def history(name: str, arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]


@pytest.mark.parametrize("text", ["</｜DSML｜parameter>", "\\uff5cDSML\\uff5c"])
def test_earlier_calls_that_hold_the_markup_are_refused(site: Site, text: str) -> None:
    """Arguments of earlier calls may hold anything but the markup itself, which has no escapes; users may say it."""
    site.engine.source = say([])
    assert site.chat(messages=history("add", '{"note": "fine < >"}'), tools=[TOOL])
    error = site.chat(status=400, messages=history("add", f'{{"note": "{text}"}}'), tools=[TOOL])["error"]
    assert error["param"].startswith("messages[1]")
    assert site.chat(messages=[{"role": "user", "content": text}])


def test_stops_of_the_client_inside_a_call(site: Site) -> None:
    """A stop token of the client's own inside a call ends the reply, and the piece of a call is not called complete."""
    ids = ids_of(CALL)
    stop = ids_of("2")[0]
    site.engine.source = say(ids)
    assert shape(site.choice(tools=[TOOL], stop_token_ids=[stop]))[2] == "stop"
