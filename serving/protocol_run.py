"""Several generations of one request as one stream of events, and what is counted of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Final, Protocol

import attrs

from .asks import CONSTRAINT_ERROR, Ask, Ended, Sampled
from .protocol import ApiError, bad_request

__all__ = ["Submits", "Tally", "TokenStream", "check_end", "finite", "listen", "submit_all", "usage"]

LOGPROB_FLOOR: Final = -9999.0
"""What a log-probability of minus infinity is written as: JSON has no infinities."""


class TokenStream(Protocol):
    """One generation as it is heard of: tokens, and at last how it ended."""

    def __aiter__(self) -> AsyncIterator[Sampled | Ended]: ...

    def cancel(self) -> None: ...

    def finish(self) -> None: ...


class Submits(Protocol):
    """Whatever generations can be asked of."""

    def submit(self, ask: Ask) -> TokenStream: ...


@attrs.define
class Tally:
    """What was counted of one request, for its reply and its line in the log.

    Attributes:
        n_prompt: tokens of the prompts, each counted once however many choices it has.
        n_cached: of these, tokens that no choice had to compute.
        n_reply: tokens of all choices, those that end a reply included.
        n_reasoning: of these, tokens of thinking.
        reasons: why the choices ended.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_reply: int = 0
    n_reasoning: int | None = None
    reasons: list[str] = attrs.Factory(list)


def usage(tally: Tally) -> dict[str, Any]:
    """Write the counts in the shape that OpenAI's clients read."""
    found: dict[str, Any] = {
        "prompt_tokens": tally.n_prompt,
        "completion_tokens": tally.n_reply,
        "total_tokens": tally.n_prompt + tally.n_reply,
        "prompt_tokens_details": {"cached_tokens": tally.n_cached},
    }
    if tally.n_reasoning is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": tally.n_reasoning}
    return found


def finite(logprob: float) -> float:
    """Write a log-probability as a number that JSON has."""
    return max(logprob, LOGPROB_FLOOR)


def submit_all(engine: Submits, asks: Sequence[Ask]) -> list[TokenStream]:
    """Ask for all generations of a request, or for none.

    Raises:
        QueueFullError: no room for all of them now.
        PurestepError: one of them is impossible.
    """
    streams: list[TokenStream] = []
    try:
        for ask in asks:
            streams.append(engine.submit(ask))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


async def listen(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, Sampled | Ended], None]:
    """Yield (number of the stream, event) as they come, until every stream has ended.

    Whoever stops listening before then has to cancel the streams.

    """
    iterators = [aiter(stream) for stream in streams]
    waiting = {asyncio.ensure_future(anext(one)): number for number, one in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number, event = waiting.pop(task), task.result()
                if isinstance(event, Sampled):
                    waiting[asyncio.ensure_future(anext(iterators[number]))] = number
                yield number, event
    finally:
        for task in waiting:
            task.cancel()


def check_end(event: Ended) -> None:
    """Raise where a generation ended otherwise than its request wanted."""
    if event.reason == "error" and (event.error or "").startswith(CONSTRAINT_ERROR):
        # Some grammars turn out to be too large only on the way; that is the request's fault and not the server's.
        bad_request(f"this constraint cannot be enforced: {event.error}", None, "unsupported_constraint")
    if event.reason == "error":
        raise ApiError(f"the engine could not go on: {event.error}", status=500, code="engine_error")
    if event.reason == "abort":
        raise ApiError("the server is shutting down; ask again later", status=503, code="shutting_down", retry_after=5)
