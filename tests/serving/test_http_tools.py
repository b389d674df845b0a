"""Tool calls on every endpoint: cut anywhere, spelled anyhow, forced or forbidden, streamed and plain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import running
from kit.protocols import CHATS, PATHS, Site, Tool, ask, body_of
from kit.stand_in import StandIn, prefer, say
from kit.steps import examples
from purestep.serving.text import read_vocabulary

MODEL = ps.load_model("tiny")
TOKENIZER = MODEL.tokenizer
THINK, END_THINK, DSML = (TOKENIZER.token_to_id(token) for token in ("<think>", "</think>", "｜DSML｜"))
ADD = Tool(
    "add",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string"}, "unit": {"enum": ["kg", "m"]}},
        "required": ["a"],
    },
)
ANY = Tool("any", {"type": "object"})
VALUES = st.one_of(
    st.booleans(),
    st.none(),
    st.integers(-99, 99),
    st.sampled_from([1.5, -0.25, 1e20]),
    st.lists(st.integers(0, 3) | st.text("a<>/", max_size=3), max_size=2),
    st.dictionaries(st.text("ab", min_size=1, max_size=2), st.integers(0, 9), max_size=2),
    st.text("a <>&/1\n\"'é😀｜", max_size=12),
    st.sampled_from(["<", ">&1", "</", "123", "true", "null", '{"a": 1}', "</｜", "</tool_calls>", "｜DSML", "]]>"]),
)
NAMES = st.text("abc_-./é｜", min_size=1, max_size=5)
LESS, SLASH = (TOKENIZER.token_to_id(piece) for piece in "</")
ENDINGS = (LESS, *(TOKENIZER.token_to_id(piece) for piece in '>"}]:'))
CLOSING = {LESS: SLASH, SLASH: DSML}
WORDS = read_vocabulary(TOKENIZER, MODEL.config.vocab_size)
MARKS = {WORDS.pieces[token_id]: token_id for token_id in (END_THINK, DSML)}
PLAIN = {WORDS.pieces[token_id]: token_id for token_id in range(3, TOKENIZER.token_to_id("<｜User｜>"))}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    with running(MODEL, engine, context=4000) as server:
        yield Site(server, engine)


def speak(text: str, *, by_letters: bool = False) -> Any:
    """A model that says a text in the longest or shortest tokens that it may; where it may not, it ends things soon."""
    raw = text.encode()

    def choose(ask: Any, outputs: tuple[int, ...], allowed: list[int] | None) -> int:
        said = b"".join(WORDS.pieces[token_id] for token_id in outputs)
        rest = raw[len(said) :] if raw.startswith(said) else b""
        fits = [token_id for piece, token_id in MARKS.items() if rest.startswith(piece)] or [
            PLAIN[rest[:length]] for length in range(1, 17) if rest[:length] in PLAIN
        ]
        fits = fits if allowed is None else [token_id for token_id in fits if token_id in allowed]
        if fits:
            return fits[0 if by_letters else -1]
        if allowed is None or 1 in allowed:
            return 1
        if outputs and CLOSING.get(outputs[-1]) in allowed:
            return CLOSING[outputs[-1]]
        # Drawn, so that it goes round in no circle, and from the outputs, so that streams and plain replies agree.
        return Random(hash(outputs)).choice([one for one in ENDINGS if one in allowed] or allowed)

    return prefer(choose)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def markup(*calls: tuple[str, dict[str, Any]]) -> str:
    """Write calls as the prompt teaches it."""

    def parameter(name: str, found: Any) -> str:
        is_text = isinstance(found, str)
        said = found if is_text else json.dumps(found)
        kind = "true" if is_text else "false"
        return f'<｜DSML｜parameter name="{name}" string="{kind}">{said}</｜DSML｜parameter>\n'

    invokes = [
        f'<｜DSML｜invoke name="{name}">\n{"".join(parameter(*one) for one in given.items())}</｜DSML｜invoke>'
        for name, given in calls
    ]
    return "\n\n<｜DSML｜tool_calls>\n" + "\n".join(invokes) + "\n</｜DSML｜tool_calls>"


CALL = markup(("add", {"a": 2, "note": "x <b> >&1<", "unit": "kg"}))


@examples(25)
@given(st.dictionaries(NAMES, VALUES, max_size=4), st.booleans(), st.sampled_from(CHATS), st.text("ok \n", max_size=4))
def test_any_arguments_in_any_spelling(
    site: Site, given_: dict[str, Any], by_letters: bool, protocol: str, before: str
) -> None:
    """Arguments of every type come back as they were, whole words or letter by letter, streamed and plain."""
    text = before + markup(("any", given_))
    site.engine.source = speak(text, by_letters=by_letters)
    said = site.says(protocol, tools=[ANY], limit=1500)
    assert said.reason == "tool_calls"
    ((name, arguments),) = said.calls
    assert name == "any"
    assert json.loads(arguments) == given_
    assert said.text.strip() == before.strip()


@pytest.mark.parametrize("protocol", CHATS)
def test_calls_side_by_side(site: Site, protocol: str) -> None:
    """Several calls in one reply come in order, each with its own arguments, and after the thinking."""
    text = "why</think>ok" + markup(("add", {"a": 1}), ("any", {"b": ["<"]}), ("add", {"a": 3, "note": "</"}))
    site.engine.source = speak(text)
    said = site.says(protocol, tools=[ADD, ANY], thinks=True, limit=900)
    assert (said.reasoning, said.text, said.reason) == ("why", "ok", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in said.calls] == [
        ("add", {"a": 1}),
        ("any", {"b": ["<"]}),
        ("add", {"a": 3, "note": "</"}),
    ]


@pytest.mark.parametrize(("protocol", "stride"), [("chat", 1), ("messages", 4), ("responses", 4)])
def test_limits_over_a_call(site: Site, protocol: str, stride: int) -> None:
    """At every limit of tokens a call that was cut ends with "length", and only the whole one is a call made."""
    call = markup(("any", {"a": "x<"}))
    ids = ids_of(call)
    site.engine.source = say(ids)
    for limit in [*range(1, len(ids), stride), len(ids), len(ids) + 1]:
        said = site.says(protocol, tools=[ANY], limit=limit)
        assert "DSML" not in said.text + str(said.calls)
        assert said.reason == ("tool_calls" if limit > len(ids) else "length"), limit
        assert said.counts[2] == limit
    assert json.loads(said.calls[0][1]) == {"a": "x<"}


@pytest.mark.parametrize("limit", [60, 80, 100])
def test_a_cut_call_is_marked_incomplete(site: Site, limit: int) -> None:
    """Where the protocol has a status for every call, that of one that was cut is incomplete."""
    site.engine.source = say(ids_of("ok" + CALL))
    body = body_of("responses", tools=[ADD], limit=limit)
    output = site.server.post(PATHS["responses"], body).json["output"]
    assert [item["status"] for item in output if item["type"] == "function_call"] == ["incomplete"]


@pytest.mark.parametrize("by_letters", [False, True])
@pytest.mark.parametrize("protocol", CHATS)
def test_quoted_markup_without_tools(site: Site, protocol: str, by_letters: bool) -> None:
    """Without tools, or with none to be called, a reply that quotes the markup is content as it is."""
    text = "ok" + CALL
    site.engine.source = say(
        [token_id for letter in text for token_id in ids_of(letter)] if by_letters else ids_of(text)
    )
    for wish in ({}, {"tools": [ADD], "choice": "none"}):
        said = site.says(protocol, limit=900, **wish)
        assert (said.text, said.reason, said.calls) == (text, "stop", ())


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("choice", ["auto", "none", "required", "add"])
@pytest.mark.parametrize("protocol", CHATS)
def test_choices_of_tools(site: Site, protocol: str, choice: str, thinking: bool) -> None:
    """A model that wants to talk talks where it may; forced, it calls, with arguments of the schema and no markup."""
    site.engine.source = speak("No, I will not</think>No, I will not" if thinking else "No, I will not")
    said = site.says(protocol, tools=[ADD, ANY], choice=choice, thinks=thinking, limit=600)
    assert said.reasoning == ("No, I will not" if thinking else "")
    assert "DSML" not in said.text + str(said.calls)
    if choice in ("auto", "none"):
        assert (said.text, said.reason, said.calls) == ("No, I will not", "stop", ())
        return
    assert (said.text.strip(), said.reason) == ("", "tool_calls")
    for name, arguments in said.calls:
        assert name in ({"add", "any"} if choice == "required" else {"add"})
        assert name == "any" or json.loads(arguments)["a"] % 1 == 0


@pytest.mark.parametrize("protocol", CHATS)
def test_a_model_that_wants_to_call(site: Site, protocol: str) -> None:
    """A model that wants to call calls, where it may choose; one call only, where that was asked for."""
    text = markup(("add", {"a": 1}), ("add", {"a": 2}))
    site.engine.source = speak(text)
    for choice in ("auto", "required"):
        said = site.says(protocol, tools=[ADD], choice=choice, limit=600)
        assert [json.loads(arguments)["a"] for _, arguments in said.calls] == [1, 2]
    single = {"parallel_tool_calls": False}
    if protocol == "messages":
        single = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert len(site.says(protocol, tools=[ADD], limit=600, **single).calls) == 1


BROKEN_VALUES = ["{bad", "nul", "1 2", "", '"a', "[1,", "tru", "01", "NaN", "-", "'a'"]


@pytest.mark.parametrize("value", BROKEN_VALUES)
def test_values_that_are_no_json(site: Site, value: str) -> None:
    """Where JSON stands a model that wants something else is held to JSON: no text, no crash, no broken arguments."""
    site.engine.source = speak(markup(("any", {"v": 7})).replace("7", value))
    for protocol in CHATS:
        said = site.says(protocol, tools=[ANY], limit=600)
        assert said.reason == "tool_calls"
        assert "v" in json.loads(said.calls[0][1])


@pytest.mark.parametrize(
    ("asked", "is_thinking"),
    [
        (("messages", {}), False),
        (("messages", {"thinking": {"type": "enabled"}}), True),
        (("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}), True),
        (("messages", {"thinking": {"type": "adaptive"}}), True),
        (("messages", {"thinking": {"type": "disabled"}}), False),
        (("responses", {}), False),
        (("responses", {"reasoning": {"effort": "high"}}), True),
        (("responses", {"reasoning": {"effort": "none"}}), False),
        (("chat", {"reasoning_effort": "max"}), True),
        (("chat", {"thinking": {"type": "adaptive"}}), True),
        (("chat", {"chat_template_kwargs": {"enable_thinking": True}}), True),
        (("chat", {"chat_template_kwargs": {"thinking": False}}), False),
    ],
)
def test_the_parser_follows_the_prompt(site: Site, asked: tuple[str, dict[str, Any]], is_thinking: bool) -> None:
    """Through every field that asks for thinking, the prompt ends as asked and the reply is split accordingly."""
    protocol, fields = asked
    site.engine.source = say(ids_of("why</think>ok"))
    said = site.says(protocol, **fields)
    assert site.engine.asks[-1].prompt_ids[-1] == (THINK if is_thinking else END_THINK)
    assert (said.reasoning, said.text) == (("why", "ok") if is_thinking else ("", "whyok"))


def test_thinking_by_default() -> None:
    """A server whose default is to think does so on every endpoint, unless asked not to."""
    engine = StandIn(say(ids_of("why</think>ok")))
    with running(MODEL, engine, context=500, thinking=True) as server:
        for protocol in CHATS:
            (said,) = ask(server, protocol)
            assert (said.reasoning, said.text) == ("why", "ok")
            (said,) = ask(server, protocol, thinks=False)
            assert (said.reasoning, said.text) == ("", "whyok")


@pytest.mark.parametrize("name", ["a b", "a ", " a", "a\tb", "a\\b", 'a"b', "a<b", "a\nb", ""])
def test_names_that_cannot_be_read(site: Site, name: str) -> None:
    """A tool with an argument whose name the markup cannot hold is refused; a model that makes one up is held back."""
    odd = Tool("odd", {"type": "object", "properties": {name: {"type": "integer"}}})
    for protocol in CHATS:
        reply = site.server.post(PATHS[protocol], body_of(protocol, tools=[odd]))
        assert reply.status == 400, reply.text
        assert "names without" in reply.text
        site.engine.source = speak(markup(("any", {name: 1})))
        said = site.says(protocol, tools=[ANY], limit=600)
        assert (said.text, said.reason) == ("", "tool_calls")
        assert isinstance(json.loads(said.calls[0][1]), dict)


HISTORY = ("</｜DSML｜parameter>", "\\uff5cDSML\\uff5c", "｜DSML｜")


@pytest.mark.parametrize("text", HISTORY)
@pytest.mark.parametrize("protocol", CHATS)
def test_earlier_calls_that_hold_the_markup(site: Site, protocol: str, text: str) -> None:
    """Earlier calls with the markup in them are refused on every endpoint, as it has no escapes; other text is fine."""
    site.engine.source = say([])
    fine, broken = (json.loads(f'{{"note": "{found}"}}') for found in ("fine < ></ </think>", text))
    for given_, status in ((fine, 200), (broken, 400)):
        reply = site.server.post(PATHS[protocol], body_of(protocol, tools=[ANY]) | earlier_call(protocol, given_))
        assert reply.status == status, reply.text
    assert "DSML" in reply.json["error"]["message"]
    assert site.says(protocol, content=text).reason == "stop"


def earlier_call(protocol: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A conversation in which the assistant has called, as the endpoint reads it."""
    user, written = {"role": "user", "content": "x"}, json.dumps(arguments)
    if protocol == "responses":
        call = {"type": "function_call", "call_id": "1", "name": "any", "arguments": written}
        return {"input": [user, call, {"type": "function_call_output", "call_id": "1", "output": "3"}]}
    if protocol == "messages":
        use = {"type": "tool_use", "id": "1", "name": "any", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "1", "content": "3"}
        return {"messages": [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}
    function = {"name": "any", "arguments": written}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    return {"messages": [user, call, {"role": "tool", "tool_call_id": "1", "content": "3"}]}
