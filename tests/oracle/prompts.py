"""DeepSeek-V4's prompts by the rules: what a conversation becomes, with control tokens apart from text.

The two texts that are constants of the encoder, the instructions about tools and about effort, are compared by their
published checksums instead of being repeated here.

Source: the rules of the released checkpoints' encoding/encoding_dsv4.py, from a description in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["BEGIN", "Piece", "conversation_pieces"]

Piece = tuple[bool, str]
"""Whether it is a control token, and its spelling."""

BEGIN: Final = "<｜begin▁of▁sentence｜>"
END: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
MARKER: Final = "｜DSML｜"


def conversation_pieces(
    messages: Sequence[Mapping[str, Any]], *, thinking: bool, effort: str, tools: Sequence[Piece]
) -> Iterator[Piece]:
    """Yield a prompt in pieces.

    Args:
        messages: at most one system message, which comes first; the last is a user's or a tool's.
        thinking: whether the reply begins with thinking.
        effort: text that asks for effort; empty for none.
        tools: text about the tools, which keep all earlier thinking; empty for none.
    """
    yield True, BEGIN
    yield False, effort
    turns = list(_turns(messages))
    last_user = max(at for at, (role, _) in enumerate(turns) if role == "user")
    if turns[0][0] != "system" and tools:
        turns.insert(0, ("system", [{"content": ""}]))
        last_user += 1
    for at, (role, found) in enumerate(turns):
        keeps = thinking and (bool(tools) or at >= last_user)
        if role == "system":
            yield False, found[0]["content"] + ("\n\n" if tools else "")
            yield from tools
        elif role == "user":
            yield True, USER
            yield False, "\n\n".join(_blocks(found, turns[at - 1][1] if at else []))
            yield True, ASSISTANT
            yield True, "<think>" if keeps else "</think>"
        else:
            (reply,) = found
            if keeps:
                yield False, reply.get("reasoning_content") or ""
                yield True, "</think>"
            yield False, reply.get("content") or ""
            yield from _calls(reply.get("tool_calls") or ())
            yield True, END


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Group messages: what users and tools say between two replies is one turn."""
    turn: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] in ("user", "tool"):
            turn.append(message)
            continue
        if turn:
            yield "user", turn
            turn = []
        yield message["role"], [message]
    yield "user", turn


def _blocks(turn: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Write a turn's blocks; results of tools take each other's places until they stand in the order of their calls."""
    order = [call["id"] for reply in before for call in reply.get("tool_calls") or ()]
    results = iter(
        sorted((one for one in turn if one["role"] == "tool"), key=lambda one: order.index(one["tool_call_id"]))
    )
    for message in turn:
        if message["role"] == "user":
            yield message["content"]
        else:
            yield f"<tool_result>{next(results)['content']}</tool_result>"


def _calls(calls: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    if not calls:
        return
    yield from _tag("\n\n<", "tool_calls>\n")
    for at, call in enumerate(calls):
        yield from _tag("\n<" if at else "<", f'invoke name="{call["function"]["name"]}">\n')
        for name, found in json.loads(call["function"]["arguments"]).items():
            is_text = isinstance(found, str)
            yield from _tag("<", f'parameter name="{name}" string="{"true" if is_text else "false"}">')
            yield False, found if is_text else json.dumps(found, ensure_ascii=False)
            yield from _tag("</", "parameter>\n")
        yield from _tag("</", "invoke>")
    yield from _tag("\n</", "tool_calls>")


def _tag(opening: str, rest: str) -> Iterator[Piece]:
    yield False, opening
    yield True, MARKER
    yield False, rest
