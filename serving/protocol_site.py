"""What the parts of the HTTP server share: its settings, the model it serves, and what is known of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import attrs
from aiohttp import web

from ..model.model import Model
from .chat import ChatModel
from .engine import EngineStatus
from .metrics import Metrics
from .protocol_run import Submits, Tally
from .text import Vocabulary

__all__ = ["SERVED", "VISIT", "RunsGenerations", "Served", "Settings", "Visit"]


class RunsGenerations(Submits, Protocol):
    """The engine as the server needs it."""

    def status(self) -> EngineStatus: ...

    async def start(self) -> None: ...

    async def stop(self, deadline_s: float) -> None: ...


@attrs.frozen(eq=False, kw_only=True)
class Settings:
    """How the server behaves.

    Attributes:
        name: that requests call the model by.
        context: tokens that a request may have in all.
        thinking: whether chats that do not say think.
        api_key: that requests must carry; None lets everybody in.
        most_generations: of one request; what the engine runs and queues. None for any number.
        body_bytes: of a request at most.
        read_seconds: for a request's body to arrive.
        idle_seconds: for a connection's next request to begin and its headers to arrive; then it is closed.
        stall_seconds: without progress after which the server calls itself unhealthy.
        drain_seconds: for running requests to end at shutdown.
        log: takes one record for every request; None for no log.
        log_prompts: whether the record has the prompts' text.
    """

    name: str
    context: int
    thinking: bool = False
    api_key: str | None = None
    most_generations: int | None = None
    body_bytes: int = 4 * 1024 * 1024
    read_seconds: float = 30.0
    idle_seconds: float = 75.0
    stall_seconds: float = 60.0
    drain_seconds: float = 30.0
    log: Callable[[Mapping[str, Any]], None] | None = None
    log_prompts: bool = False


@attrs.define(eq=False)
class Visit:
    """What is found out about one request while it is served.

    Attributes:
        id: names it in the log and in its reply.
        path: that it asked for.
        began: when, by the monotonic clock.
        tally: counts its tokens.
        notes: more for its line in the log.
        has_left: whether its client did not wait.
    """

    id: str
    path: str
    began: float
    tally: Tally = attrs.Factory(Tally)
    notes: dict[str, Any] = attrs.Factory(dict)
    has_left: bool = False


@attrs.frozen(eq=False, kw_only=True)
class Served:
    """What handlers share."""

    model: Model
    engine: RunsGenerations
    settings: Settings
    vocabulary: Vocabulary
    chat: ChatModel | None
    fingerprint: str
    created: int
    draining: asyncio.Event
    metrics: Metrics
    visits: dict[str, Visit]


SERVED: Final = web.AppKey("served", Served)
VISIT: Final = web.RequestKey("visit", Visit)
