"""An engine for tests of the HTTP layer: every generation runs alone, in a thread, from a script or by public steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import purestep as ps
import torch
from purestep.serving.asks import CONSTRAINT_ERROR, Ask, Ended, QueueFullError, Sampled
from purestep.serving.engine import EngineStatus

__all__ = ["StandIn", "prefer", "say", "step_by_step"]

Source = Callable[[Ask], Iterator[Sampled | Ended]]


class _Stream:
    def __init__(self, engine: StandIn) -> None:
        self.events: asyncio.Queue[Sampled | Ended] = asyncio.Queue()
        self.is_cancelled = threading.Event()
        self.is_complete = False
        self._engine = engine
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[Sampled | Ended]:
        return self

    async def __anext__(self) -> Sampled | Ended:
        if self._is_over:
            raise StopAsyncIteration
        event = await self.events.get()
        self._is_over = isinstance(event, Ended)
        return event

    def cancel(self) -> None:
        self.is_cancelled.set()

    def finish(self) -> None:
        self.is_complete = True
        self.cancel()


class StandIn:
    """Runs generations as the engine does, without batching.

    Args:
        source: makes the tokens of one generation.
        queue: generations at once; one more is refused.
    """

    def __init__(self, source: Source, *, queue: int = 1000) -> None:
        self.source = source
        self.queue = queue
        self.asks: list[Ask] = []
        self.n_aborts = 0
        self.n_steps = 0
        self.silent: float | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self, deadline_s: float) -> None:
        """Let what runs end."""
        if self._open:
            await asyncio.wait(self._open, timeout=deadline_s)

    def submit(self, ask: Ask) -> _Stream:
        """Begin a generation."""
        if len(self._open) >= self.queue:
            raise QueueFullError("the queue is full; ask again later")
        self.asks.append(ask)
        stream = _Stream(self)
        task = asyncio.ensure_future(self._run(ask, stream))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return stream

    async def _run(self, ask: Ask, stream: _Stream) -> None:
        source = self.source(ask)
        while True:
            if stream.is_cancelled.is_set():
                self.n_aborts += not stream.is_complete
                reason = "stop" if stream.is_complete else "abort"
                stream.events.put_nowait(Ended(reason=reason, n_cached=3, prompt_logprobs=_flat_scores(ask)))
                return
            try:
                event = await asyncio.to_thread(next, source)
            except Exception as error:
                of_constraint = CONSTRAINT_ERROR if isinstance(error, ps.RequestError) else ""
                event = Ended(reason="error", error=f"{of_constraint}{error}")
            self.n_steps += 1
            stream.events.put_nowait(event)
            if isinstance(event, Ended):
                return

    def status(self) -> EngineStatus:
        """Say what runs."""
        return EngineStatus(
            running=len(self._open),
            waiting=0,
            pools={},
            pool_bytes={},
            counters={"steps": self.n_steps, "aborts": self.n_aborts},
            seconds_since_progress=self.silent,
            is_ready=True,
        )


def prefer(choose: Callable[[Ask, tuple[int, ...], Sequence[int] | None], int], *, pause: float = 0.0) -> Source:
    """Make a source that samples whatever ``choose(ask, outputs, allowed ids or None)`` returns."""

    def source(ask: Ask) -> Iterator[Sampled | Ended]:
        outputs: tuple[int, ...] = ()
        while True:
            time.sleep(pause)
            allowed = None
            if ask.mask is not None and (bits := ask.mask(outputs)) is not None:
                words = bits.tolist()
                allowed = [32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1]
            token_id = choose(ask, outputs, allowed)
            outputs += (token_id,)
            top = ((token_id, -0.5), (2, -float("inf"))) if ask.params.logprobs else ()
            yield Sampled(token_id=token_id, logprob=None if ask.params.logprobs is None else -0.5, top=top)
            if token_id in (*ask.params.stop_token_ids, *(() if ask.params.ignore_eos else (1,))):
                yield Ended(reason="stop", n_cached=3, prompt_logprobs=_flat_scores(ask))
            if len(outputs) == ask.params.max_new_tokens:
                yield Ended(reason="length", n_cached=3, prompt_logprobs=_flat_scores(ask))

    return source


def _flat_scores(ask: Ask) -> tuple | None:
    return None if ask.prompt_logprobs is None else ((None, ()), *[(-0.5, ())] * (len(ask.prompt_ids) - 1))


def say(ids: Sequence[int], *, pause: float = 0.0) -> Source:
    """Make a source that samples these ids and then the end, whatever the constraint would be."""
    return prefer(lambda ask, outputs, allowed: [*ids, *[1] * (len(outputs) + 1)][len(outputs)], pause=pause)


def step_by_step(model: ps.Model) -> Source:
    """Make a source that runs the public steps."""

    def source(ask: Ask) -> Iterator[Sampled | Ended]:
        context = len(ask.prompt_ids) + (ask.params.max_new_tokens or 1)
        state = ps.init_state(model, ps.Capacity(requests=1, tokens=context, context=context))
        state, request = ps.open_request(state, ask.params)
        outputs: tuple[int, ...] = ()
        scores = None
        while True:
            mask = None if ask.mask is None else ask.mask(outputs)
            masks = None if mask is None else {request: mask}
            if not outputs:
                state, out = ps.extend_step(model, state, {request: ask.prompt_ids}, logits="all", mask=masks)
                scores = _scores(ask, out.logits)
            else:
                state, out = ps.decode_step(model, state, mask=masks)
            outputs += out.next_token_ids
            logprob, top = None, ()
            if out.logprobs is not None:
                logprob = out.logprobs.token_logprobs[0].item()
                top = tuple(zip(out.logprobs.top_ids[0].tolist(), out.logprobs.top_logprobs[0].tolist(), strict=True))
            yield Sampled(token_id=outputs[-1], logprob=logprob, top=top)
            if out.finished:
                yield Ended(reason=out.finished[request], prompt_logprobs=scores)

    return source


def _scores(ask: Ask, logits: torch.Tensor) -> tuple | None:
    if ask.prompt_logprobs is None:
        return None
    found: list = [(None, ())]
    for row, token_id in zip(logits.log_softmax(-1), ask.prompt_ids[1:], strict=False):
        top = row.topk(ask.prompt_logprobs)
        found.append((row[token_id].item(), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))))
    return tuple(found)
