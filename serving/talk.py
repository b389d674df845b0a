"""A chat as a value: who said what, and the files that it is kept in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs

from ..state.errors import RequestError
from .protocol import is_unicode

__all__ = ["Talk", "Turn", "load_talk", "save_talk"]

_REASONING: Final = "reasoning_content"
"""The field of a message that holds its thinking, as DeepSeek's interface names it."""


@attrs.frozen(kw_only=True)
class Turn:
    """What the user said and what the model replied.

    Attributes:
        user: the user's words.
        content: the reply.
        reasoning: the thinking before it; empty without any.
    """

    user: str
    content: str
    reasoning: str = ""


@attrs.frozen(kw_only=True)
class Talk:
    """A chat so far.

    Attributes:
        system: what the model is told first; empty for nothing.
        turns: the turns, the oldest first.
    """

    system: str = ""
    turns: tuple[Turn, ...] = ()

    def messages(self) -> list[dict[str, str]]:
        """Write the chat as messages of OpenAI's interface."""
        found = [_message("system", self.system)] if self.system else []
        for turn in self.turns:
            reasoning = {_REASONING: turn.reasoning} if turn.reasoning else {}
            found += [_message("user", turn.user), _message("assistant", turn.content) | reasoning]
        return found


def save_talk(talk: Talk, path: Path) -> None:
    """Write a chat's messages as JSON."""
    path.write_text(json.dumps(talk.messages(), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def load_talk(path: Path) -> Talk:
    """Read a chat from a list of messages, or from an object that has one as ``messages``.

    Raises:
        RequestError: the file holds no chat in which user and assistant take turns.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: expected JSON in UTF-8, got something else: {error}", field=str(path)) from error
    if isinstance(found, dict):
        found = found.get("messages")
    if not isinstance(found, list):
        raise RequestError(f"{path}: expected a list of messages, got none", field=str(path))
    messages = [_checked(path, at, one) for at, one in enumerate(found)]
    has_system = bool(messages) and messages[0]["role"] == "system"
    system, rest = (messages[0]["content"], messages[1:]) if has_system else ("", messages)
    for at, message in enumerate(rest, len(messages) - len(rest)):
        expected = ("user", "assistant")[(at - has_system) % 2]
        if message["role"] != expected:
            _refuse(path, at, f"the role {expected!r}", repr(message["role"]), "user and assistant take turns")
    if len(rest) % 2:
        _refuse(path, len(messages), "a reply to the last message", "none", "leave that message out, and say it here")
    pairs = zip(rest[::2], rest[1::2], strict=True)
    turns = (
        Turn(user=said["content"], content=reply["content"], reasoning=reply.get(_REASONING, ""))
        for said, reply in pairs
    )
    return Talk(system=system, turns=tuple(turns))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _checked(path: Path, at: int, message: Any) -> dict[str, str]:
    """Return the fields of a message that a chat keeps."""
    if not isinstance(message, dict):
        _refuse(path, at, "an object", type(message).__name__, "write it as role and content")
    found = {name: message[name] for name in ("role", "content", _REASONING) if message.get(name) is not None}
    for name in ("role", "content"):
        if name not in found:
            _refuse(path, at, f"{name} as text", "none", "chats hold messages of text alone")
    for name, one in found.items():
        if not isinstance(one, str) or not is_unicode(one):
            _refuse(path, at, f"{name} as text", type(one).__name__, "chats hold messages of text alone")
    return found


def _refuse(path: Path, at: int, expected: str, got: str, cure: str) -> NoReturn:
    where = f"{path}: messages[{at}]"
    raise RequestError(f"{where}: expected {expected}, got {got}; {cure}", field=where, expected=expected, got=got)
