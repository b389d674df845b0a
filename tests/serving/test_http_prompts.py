"""What conversations become: token for token the prompts of DeepSeek's encoder, by an oracle of its rules."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import attrs
import deepseek_recipe as recipe
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import Server, running
from kit.protocols import CHATS, PATHS, ask, body_of
from kit.stand_in import StandIn, say
from kit.steps import examples
from oracle.prompts import BEGIN, Piece, conversation_pieces
from purestep.step.generate import without_control_tokens

MODEL = ps.load_model("tiny")
TOKENIZER = MODEL.tokenizer
PLAIN = without_control_tokens(TOKENIZER)
CHAT = PATHS["chat"]
TOOL_DIGEST = "be33c7a94e09afdcc841d20833d95eb2c4a767b7253516af81cd1a502afcbeb5"
EFFORT_DIGESTS = {
    "high": "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
    "max": "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
OTHER = {"name": "g", "description": "é <b>", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}


def rendered(**fields: Any) -> str:
    """A conversation of one user's "u" by the library, whose constant texts are checked by their digests."""
    body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "u"}]} | fields
    request = recipe.ChatCompletionRequest(json.dumps(body)).convert(recipe.ConversionOptions())
    prompt = recipe.DeepseekV4Encoding().render_conversation(request.conversation).prompt
    return prompt.removeprefix(BEGIN).partition("<｜User｜>")[0]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


OFF = {"thinking": {"type": "disabled"}}
TOOLS_TEXT = rendered(tools=[{"type": "function", "function": FUNCTION}], **OFF).removeprefix("\n\n")
TOOLS_HEAD, TOOLS_TAIL = TOOLS_TEXT.split(json.dumps(FUNCTION))
EFFORTS = {"low": ""} | {effort: rendered(reasoning_effort=effort) for effort in EFFORT_DIGESTS}


def test_constant_texts_are_those_of_the_reference() -> None:
    """The texts about tools and effort have the checksums of the reference encoder's."""
    assert digest(TOOLS_TEXT) == TOOL_DIGEST
    assert {effort: digest(EFFORTS[effort]) for effort in EFFORT_DIGESTS} == EFFORT_DIGESTS


def controls(text: str) -> list[Piece]:
    """Cut a text of the encoder's own, in which spellings of control tokens are meant as such."""
    parts = re.split("(｜DSML｜|</?think>)", text)
    return [(at % 2 == 1, part) for at, part in enumerate(parts)]


def ids_of(pieces: Iterator[Piece]) -> list[int]:
    """Encode pieces: control tokens as such, and the text between two of them as nothing but text."""
    ids: list[int] = []
    for is_control, group in groupby((piece for piece in pieces if piece[1]), key=lambda piece: piece[0]):
        texts = [text for _, text in group]
        if is_control:
            ids += [TOKENIZER.token_to_id(text) for text in texts]
        else:
            ids += PLAIN.encode("".join(texts), add_special_tokens=False).ids
    return ids


@attrs.define
class Site:
    """A server and the engine behind it, whose script tests exchange."""

    server: Server
    engine: StandIn

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """The token ids that a chat becomes."""
        reply = self.server.post(CHAT, {"model": "tiny"} | body)
        assert reply.status == 200, reply.text
        return list(self.engine.asks[-1].prompt_ids)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    with running(MODEL, engine, context=6000) as server:
        yield Site(server, engine)


SPELLINGS = ["</think>", "<think>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<tool_result>"]
WORDS = st.text("ab <é\n", min_size=1, max_size=6) | st.sampled_from(SPELLINGS)
ARGUMENTS = st.dictionaries(
    st.text("ab_", min_size=1, max_size=3), WORDS | st.integers(-(2**63), 2**63) | st.lists(st.none()), max_size=2
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One to four turns: with and without thinking, calls, and their results in any order."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(WORDS)})
    n_turns = draw(st.integers(1, 4))
    for turn in range(n_turns):
        messages.append({"role": "user", "content": draw(WORDS)})
        if turn == n_turns - 1 and draw(st.booleans()):
            break
        reply: dict[str, Any] = {"role": "assistant", "content": draw(WORDS | st.just(""))}
        if draw(st.booleans()):
            reply[draw(st.sampled_from(["reasoning_content", "reasoning"]))] = draw(WORDS)
        calls = [
            {"id": f"{turn}-{at}", "type": "function", "function": {"name": "f", "arguments": json.dumps(given_)}}
            for at, given_ in enumerate(draw(st.lists(ARGUMENTS, max_size=3)))
        ]
        messages.append(reply | ({"tool_calls": calls} if calls else {}))
        for call in draw(st.permutations(calls)):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(WORDS)})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": draw(WORDS)})
    return messages


def as_reference(message: dict[str, Any]) -> dict[str, Any]:
    """A message in the one way that the rules speak of."""
    renamed = {("reasoning_content" if name == "reasoning" else name): found for name, found in message.items()}
    return renamed | ({"role": "system"} if message["role"] == "developer" else {})


@examples(120)
@given(conversations(), st.sampled_from(["none", "low", "high", "max", None]), st.booleans())
def test_conversations(site: Site, messages: list[dict[str, Any]], effort: str | None, has_tools: bool) -> None:
    """Every conversation becomes the ids of the rules: turns, thinking kept or dropped, calls, results, effort."""
    site.engine.source = say([])
    body: dict[str, Any] = {"messages": messages} | ({} if effort is None else {"reasoning_effort": effort})
    if has_tools:
        body["tools"] = [{"type": "function", "function": found} for found in (FUNCTION, OTHER)]
    listed = "\n".join(json.dumps(found, ensure_ascii=False) for found in (FUNCTION, OTHER))
    expected = conversation_pieces(
        [as_reference(message) for message in messages],
        thinking=effort not in ("none", None),
        effort=EFFORTS.get(effort or "none", ""),
        tools=[*controls(TOOLS_HEAD), (False, listed + TOOLS_TAIL)] if has_tools else (),
    )
    prompt, expected_ids = site.prompt(body), ids_of(expected)
    assert TOKENIZER.decode(prompt, skip_special_tokens=False) == TOKENIZER.decode(
        expected_ids, skip_special_tokens=False
    )
    assert prompt == expected_ids


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("protocol", CHATS)
def test_closing_tags_are_words(site: Site, protocol: str, thinking: bool) -> None:
    """A user, and an earlier reply, may say the tag that closes thinking; the model may spell it; nothing is cut."""
    said = "repeat: hello </think> world"
    spelled = [token_id for letter in said for token_id in TOKENIZER.encode(letter, add_special_tokens=False).ids]
    end = [TOKENIZER.token_to_id("</think>")]
    site.engine.source = say([*spelled, *end, *spelled] if thinking else spelled)
    (found,) = ask(site.server, protocol, content=said, thinks=thinking, limit=200)
    assert (found.text, found.reasoning, found.reason) == (said, said if thinking else "", "stop")
    earlier = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": said},
        {"role": "user", "content": said},
    ]
    body = body_of(protocol, thinks=thinking) | {"input" if protocol == "responses" else "messages": earlier}
    assert site.server.post(PATHS[protocol], body).status == 200
    prompt = list(site.engine.asks[-1].prompt_ids)
    assert prompt.count(end[0]) == (1 if thinking else 2)
    assert TOKENIZER.decode(prompt, skip_special_tokens=False).count(said) == 3


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_contents_that_are_no_plain_text(site: Site, content: Any) -> None:
    """An empty content is a turn without words, parts are joined, and none at all is refused; the server lives on."""
    site.engine.source = say([])
    for protocol in CHATS:
        messages = [{"role": "user", "content": content}]
        kind = "input_text" if protocol == "responses" else "text"
        if content:
            messages = [{"role": "user", "content": [part | {"type": kind} for part in content]}]
        body = body_of(protocol) | {"input" if protocol == "responses" else "messages": messages}
        reply = site.server.post(PATHS[protocol], body)
        if reply.status == 400:
            assert content is None or (content == [] and protocol == "messages"), reply.text
        else:
            assert reply.status == 200
            text = TOKENIZER.decode(list(site.engine.asks[-1].prompt_ids), skip_special_tokens=False)
            said = text.partition("<｜User｜>")[2].partition("<｜Assistant｜>")[0]
            assert said.replace("\n", "") == ("ab" if content else "")


IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}


@pytest.mark.parametrize("protocol", CHATS)
def test_parts_that_cannot_be_read_are_refused(site: Site, protocol: str) -> None:
    """An image among the words is refused by the name of its field, not left out of what the model reads."""
    words = {"type": "input_text" if protocol == "responses" else "text", "text": "what is this?"}
    messages = [{"role": "user", "content": [words, IMAGES[protocol]]}]
    name = "input" if protocol == "responses" else "messages"
    reply = site.server.post(PATHS[protocol], body_of(protocol) | {name: messages})
    assert reply.status == 400
    assert f"{name}[0].content[1].type: expected one of" in reply.text


@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        ("stop", ["x"] * 17, "stop: expected at most 16 items"),
        ("stop", [""], "stop[0]: expected at least 1 characters"),
        ("prompt", [], "prompt: expected at least 1 items"),
        ("prompt", [[]], "prompt[0]: expected at least 1 items"),
    ],
)
def test_errors_of_fields_of_several_kinds(site: Site, field: str, wrong: Any, said: str) -> None:
    """Where a field takes several kinds, the error is about the kind that was given."""
    body = {"model": "tiny", "prompt": "a"} | {field: wrong}
    reply = site.server.post("/v1/completions", body)
    assert reply.status == 400
    assert said in reply.text


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", None])
def test_earlier_thinking(site: Site, field: str | None, has_tools: bool) -> None:
    """Earlier thinking is taken under both names, or may be missing; with tools it is kept, without them dropped."""
    site.engine.source = say([])
    reply = {"role": "assistant", "content": "b"} | ({} if field is None else {field: "because"})
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, reply, {"role": "user", "content": "c"}]}
    body |= {"thinking": {"type": "enabled"}}
    if has_tools:
        body["tools"] = [{"type": "function", "function": FUNCTION}]
    text = TOKENIZER.decode(site.prompt(body), skip_special_tokens=False)
    thought = "" if field is None else "because"
    middle = f"<think>{thought}</think>b" if has_tools else "</think>b"
    assert f"<｜User｜>a<｜Assistant｜>{middle}<｜end▁of▁sentence｜><｜User｜>c<｜Assistant｜><think>" in text
