"""One wish in the words of every endpoint, and what it said in one shape; plain and streamed replies must agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from kit.http import Reply, Server
from kit.stand_in import StandIn
from purestep.serving.protocol import check_body
from purestep.serving.protocol_replies import REPLIES

__all__ = ["CHATS", "PATHS", "Said", "Site", "Tool", "ask", "body_of", "read_plain", "read_stream"]

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
CHATS = ("chat", "messages", "responses")

_MESSAGE_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


@attrs.frozen
class Tool:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]


@attrs.frozen
class Said:
    """What a choice says, on whatever endpoint.

    Attributes:
        text: its content.
        reasoning: what it thought.
        reason: why it ended, in OpenAI's words.
        calls: names and arguments; a call without arguments so far has "".
        counts: tokens of the prompt, of them cached, and of the reply.
    """

    text: str
    reasoning: str
    reason: str
    calls: tuple[tuple[str, str], ...] = ()
    counts: tuple[int, int, int] = (0, 0, 0)


def body_of(
    protocol: str,
    *,
    content: str = "Hello",
    limit: int = 40,
    stops: Sequence[str] = (),
    tools: Sequence[Tool] = (),
    choice: str = "auto",
    thinks: bool | None = None,
    schema: Mapping[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Write a wish as an endpoint reads it.

    Args:
        protocol: of ``PATHS``.
        content: of the user's message, or the prompt.
        limit: tokens of the reply.
        stops: strings that end it; not for responses, which have none.
        tools: that may be called.
        choice: "auto", "none", "required", or the name of a tool.
        thinks: whether to think; None does not say.
        schema: of the reply.
        **fields: more, as they are.
    """
    body: dict[str, Any] = {"model": "tiny"}
    if protocol == "completions":
        return body | {"prompt": content, "max_tokens": limit, "stop": list(stops)} | fields
    body |= {"input" if protocol == "responses" else "messages": [{"role": "user", "content": content}]}
    body |= {"max_output_tokens" if protocol == "responses" else "max_tokens": limit}
    if stops:
        body |= {"stop_sequences" if protocol == "messages" else "stop": list(stops)}
    if tools:
        body |= {"tools": [_tool(protocol, tool) for tool in tools], "tool_choice": _choice(protocol, choice)}
    if thinks is not None:
        mode = {"type": "enabled" if thinks else "disabled"}
        effort = {"reasoning": {"effort": "high" if thinks else "none"}}
        body |= effort if protocol == "responses" else {"thinking": mode}
    if schema is not None:
        body |= _format(protocol, schema)
    return body | fields


def _tool(protocol: str, tool: Tool) -> dict[str, Any]:
    if protocol == "messages":
        return {"name": tool.name, "input_schema": tool.parameters}
    function = {"name": tool.name, "parameters": tool.parameters}
    return {"type": "function", "function": function} if protocol == "chat" else {"type": "function", **function}


def _choice(protocol: str, choice: str) -> Any:
    if protocol == "messages":
        kind = {"auto": "auto", "none": "none", "required": "any"}.get(choice)
        return {"type": "tool", "name": choice} if kind is None else {"type": kind}
    if choice in ("auto", "none", "required"):
        return choice
    named = {"name": choice}
    return {"type": "function", **({"function": named} if protocol == "chat" else named)}


def _format(protocol: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    if protocol == "chat":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    form = {"type": "json_schema", "schema": schema}
    return {"output_config": {"format": form}} if protocol == "messages" else {"text": {"format": form | {"name": "x"}}}


def ask(server: Server, protocol: str, **wish: Any) -> list[Said]:
    """Ask plainly and streamed for something that must succeed; both must agree choice by choice."""
    body = body_of(protocol, **wish)
    options = {"stream_options": {"include_usage": True}} if protocol in ("completions", "chat") else {}
    plain = server.post(PATHS[protocol], body)
    streamed = server.post(PATHS[protocol], body | {"stream": True} | options)
    assert (plain.status, streamed.status) == (200, 200), plain.text + streamed.text
    said = read_plain(protocol, plain)
    assert read_stream(protocol, streamed) == said
    return said


def read_plain(protocol: str, reply: Reply) -> list[Said]:
    """Read a whole reply, which is as described."""
    found = reply.json
    check_body(REPLIES[PATHS[protocol]], found)
    counts = _counts(found["usage"])
    if protocol == "completions":
        return [Said(one["text"], "", one["finish_reason"], (), counts) for one in found["choices"]]
    if protocol == "chat":
        return [_chat_choice(one["message"], one["finish_reason"], counts) for one in found["choices"]]
    if protocol == "messages":
        blocks = found["content"]
        calls = tuple((one["name"], json.dumps(one["input"])) for one in blocks if one["type"] == "tool_use")
        text = "".join(one["text"] for one in blocks if one["type"] == "text")
        thought = "".join(one["thinking"] for one in blocks if one["type"] == "thinking")
        return [Said(text, thought, _MESSAGE_REASONS[found["stop_reason"]], _normal(calls), counts)]
    return [_response(found, counts)]


def _chat_choice(message: Mapping[str, Any], reason: str, counts: tuple[int, int, int]) -> Said:
    calls = tuple((one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ()))
    return Said(message["content"], message.get("reasoning_content", ""), reason, _normal(calls), counts)


def _response(found: Mapping[str, Any], counts: tuple[int, int, int]) -> Said:
    parts = [(item["type"], part) for item in found["output"] for part in item.get("content", ())]
    text, thought = (
        "".join(part["text"] for kind, part in parts if kind == wanted) for wanted in ("message", "reasoning")
    )
    calls = tuple((one["name"], one["arguments"]) for one in found["output"] if one["type"] == "function_call")
    reason = "length" if found["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return Said(text, thought, reason, _normal(calls), counts)


def _normal(calls: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Write whole arguments in one way, as one protocol has them as JSON and the others as text."""
    return tuple((name, _rewritten(arguments)) for name, arguments in calls)


def _rewritten(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}", parse_int=float))
    except ValueError:
        # One protocol parses what came of a call that was cut; the others have its text.
        return "{}"


def _counts(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    cached = usage.get("cache_read_input_tokens")
    if cached is None:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


def read_stream(protocol: str, reply: Reply) -> list[Said]:
    """Join a stream as a client does, by its deltas; only reasons and counts are taken from the last events."""
    events = reply.events
    if protocol in ("completions", "chat"):
        assert events.pop() == "[DONE]"
        return _joined_choices(events)
    return [_joined_message(events) if protocol == "messages" else _joined_response(events)]


def _joined_choices(events: list[Any]) -> list[Said]:
    last = events.pop()
    assert last["choices"] == []
    assert all(event["usage"] is None for event in events)
    found: dict[int, list[Any]] = {}
    for piece in (piece for event in events for piece in event["choices"]):
        one = found.setdefault(piece["index"], [[], [], None, {}])
        delta = piece.get("delta", {"content": piece.get("text")})
        assert one[2] is None, "nothing follows the reason"
        one[0].append(delta.get("content") or "")
        one[1].append(delta.get("reasoning_content") or "")
        one[2] = piece["finish_reason"]
        for call in delta.get("tool_calls", ()):
            name, arguments = one[3].get(call["index"], (call["function"].get("name"), ""))
            one[3][call["index"]] = (name, arguments + call["function"].get("arguments", ""))
    counts = _counts(last["usage"])
    return [
        Said("".join(text), "".join(thought), reason, _normal(tuple(calls.values())), counts)
        for _, (text, thought, reason, calls) in sorted(found.items())
    ]


def _joined_message(events: list[Any]) -> Said:
    blocks: list[list[Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append([event["content_block"], ""])
        if event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            (said,) = (found for name, found in event["delta"].items() if name != "type")
            blocks[event["index"]][1] += said
    assert events[-1]["type"] == "message_stop"
    last = events[-2]
    text, thought = ("".join(said for block, said in blocks if block["type"] == kind) for kind in ("text", "thinking"))
    calls = tuple((block["name"], said) for block, said in blocks if block["type"] == "tool_use")
    reason = _MESSAGE_REASONS[last["delta"]["stop_reason"]]
    return Said(text, thought, reason, _normal(calls), _counts(last["usage"]))


def _joined_response(events: list[Any]) -> Said:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: dict[int, list[Any]] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            items[event["output_index"]] = [event["item"], ""]
        elif event["type"].endswith(".delta"):
            items[event["output_index"]][1] += event["delta"]
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    assert all(event.get("response", {}).get("status", "in_progress") == "in_progress" for event in events[:-1])
    text, thought = (
        "".join(said for item, said in items.values() if item["type"] == kind) for kind in ("message", "reasoning")
    )
    calls = tuple((item["name"], said) for item, said in items.values() if item["type"] == "function_call")
    reason = "length" if last["type"] == "response.incomplete" else "tool_calls" if calls else "stop"
    return Said(text, thought, reason, _normal(calls), _counts(last["response"]["usage"]))


@attrs.define
class Site:
    """A server and the engine behind it, whose script tests exchange."""

    server: Server
    engine: StandIn

    def says(self, protocol: str, **wish: Any) -> Said:
        """What an endpoint says, as a single choice."""
        (said,) = ask(self.server, protocol, **wish)
        return said
