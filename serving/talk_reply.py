"""The model's side of a chat in the terminal: one engine, asked the way the server asks it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

import attrs

from ..model.model import Model
from ..state.errors import ConfigError
from ..state.sampling import SamplingParams, derive_seed
from .chat import chat_model
from .engine import Engine, EngineLimits
from .protocol_chat import ChatRequest, chat_pieces, read_chat
from .protocol_run import Tally, submit_all
from .talk import Talk, Turn

__all__ = ["Partner", "Reply"]

Hear = Callable[[str, bool], None]
"""Takes a piece of a reply, and whether it is thinking."""


@attrs.frozen(kw_only=True)
class Reply:
    """A reply, whole or cut short.

    Attributes:
        turn: what was said.
        reason: why it ended: "stop", "length", or "interrupted".
        seed: that it was sampled with.
        tally: its counts; the cached tokens of an interrupted reply are not known.
        first_s: seconds to the first piece; None where none came.
        whole_s: seconds to the end.
    """

    turn: Turn
    reason: str
    seed: int
    tally: Tally
    first_s: float | None
    whole_s: float


class Partner:
    """Replies to a chat; all methods belong to one event loop.

    Args:
        model: that replies.
        limits: of the engine.
        params: how to sample; reply number n is sampled with a seed derived from theirs and n.
        thinking: whether it thinks before it replies.
    Raises:
        ConfigError: the checkpoint has no tokenizer, or one without tokens for chats.
    """

    def __init__(self, model: Model, limits: EngineLimits, params: SamplingParams, *, thinking: bool) -> None:
        found = None
        if model.tokenizer is not None:
            found = chat_model(model, name="chat", context=min(limits.context, limits.tokens), thinking=thinking)
        if found is None:
            raise ConfigError(
                "model: expected a tokenizer with the tokens that frame the turns of chats, got none; "
                "use purestep generate, which continues plain text",
                field="tokenizer",
            )
        self._model = found
        self._engine = Engine(model, limits)
        self._params = params
        self._n_asked = 0

    async def start(self) -> None:
        """Begin to take turns."""
        await self._engine.start()

    async def stop(self) -> None:
        """Drop what runs."""
        await self._engine.stop(0.0)

    async def reply(self, talk: Talk, user: str, hear: Hear) -> Reply:
        """Reply to what the user says next.

        Cancelling this ends the reply, which is returned as far as it came.

        Args:
            talk: what was said before.
            user: what is said now.
            hear: takes the pieces as they come.
        Raises:
            ApiError: the chat has grown too long, or the engine failed.
        """
        began, first_s = time.perf_counter(), None
        heard: dict[bool, str] = {True: "", False: ""}
        tally, reason = Tally(), "interrupted"
        request = self._request(talk, user)
        seed = request.asks[0].params.seed
        assert seed is not None, "every reply has a seed of its own"
        streams = submit_all(self._engine, request.asks)
        try:
            async with aclosing(chat_pieces(streams, request, self._model, tally)) as pieces:
                async for piece in pieces:
                    for text, is_thinking in _texts(piece["delta"]):
                        first_s = time.perf_counter() - began if first_s is None else first_s
                        heard[is_thinking] += text
                        hear(text, is_thinking)
            reason = "length" if tally.reasons == ["length"] else "stop"
        except asyncio.CancelledError:
            streams[0].cancel()
        except BaseException:
            streams[0].cancel()
            raise
        return Reply(
            turn=Turn(user=user, content=heard[False], reasoning=heard[True]),
            reason=reason,
            seed=seed,
            tally=tally,
            first_s=first_s,
            whole_s=time.perf_counter() - began,
        )

    def _request(self, talk: Talk, user: str) -> ChatRequest:
        """Encode the chat, and ask for as much as there is room for."""
        asked = Talk(system=talk.system, turns=(*talk.turns, Turn(user=user, content="")))
        request = read_chat({"model": self._model.name, "messages": asked.messages()[:-1]}, self._model)
        (ask,) = request.asks
        room, most = ask.params.max_new_tokens, self._params.max_new_tokens
        assert room is not None, "a request without a limit gets all the room there is"
        params = attrs.evolve(
            self._params, seed=self._next_seed(), max_new_tokens=room if most is None else min(room, most)
        )
        return attrs.evolve(request, asks=(attrs.evolve(ask, params=params),))

    def _next_seed(self) -> int:
        """Give the first reply the seed that was asked for, and every later one its own."""
        assert self._params.seed is not None, "whoever starts a chat draws a seed"
        number, self._n_asked = self._n_asked, self._n_asked + 1
        return derive_seed(self._params.seed, number) if number else self._params.seed


def _texts(delta: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the texts of a piece, each with whether it is thinking."""
    named = (("reasoning_content", True), ("content", False))
    return [(delta[name], is_thinking) for name, is_thinking in named if delta.get(name)]
