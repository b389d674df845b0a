"""The engine loop: one task owns the state; steps run in one worker thread, so that the event loop stays responsive.

A turn takes what has happened since the last one, lets the scheduler plan, makes the step, and tells every stream what
was sampled. Nothing but the current pool is kept. A step that raises leaves the pool as it was; the requests that were
in it end with the error, all others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from math import isnan, lcm
from typing import Final, Literal

import attrs
import torch
from torch import Tensor

from ..model.model import Model
from ..ops.sampling import token_logprobs
from ..state.batch import StepOutput
from ..state.capacity import Capacity
from ..state.decode import DecodeState, find_request
from ..state.errors import CapacityError, ConfigError, PurestepError, RankError, RequestError
from ..state.invariants import check
from ..state.kv import CacheForm
from ..step.announce import CANNOT_BEGIN
from ..step.compiled import CompiledStep
from ..step.extend import extend_step
from ..step.requests import check_params, init_state
from .asks import CONSTRAINT_ERROR, Ask, Ended, QueueFullError, Sampled, TokenLogprobs
from .pool import Pool
from .runaway import ends_in_repetition
from .scheduler import UNIT, Arrived, Cancelled, Event, Limits, Plan, Rows, SchedulerState, Stepped, schedule
from .worker import Worker

__all__ = ["Engine", "EngineLimits", "EngineStatus", "News", "Stream", "Turn", "Usage", "usage_of"]

_COUNTERS: Final = (
    *("steps", "compiled_steps", "prompt_tokens", "cached_tokens", "generated_tokens", "fed_tokens"),
    *("retractions", "aborts", "repetitions"),
)

_POOL_PAGES: Final = {"full": "free_pages", "window": "free_swa_pages", "C128": "free_c128_pages", "rows": "free_rows"}


@attrs.frozen(kw_only=True)
class EngineLimits:
    """How much the engine takes on.

    What cannot work together is a ``ConfigError`` here or in ``Engine``: a budget without room for a prompt beside all
    that decode, less room than a token and its reply, pages that are no whole C4 groups, a context that the model does
    not have. A context in which no prefix is long enough to be reused is allowed: nothing is, and ``reuses`` says so.

    Attributes:
        running: requests that run at once.
        waiting: requests that may wait besides; more are refused.
        tokens: tokens of all requests together that may own a slot.
        context: longest request, reply included.
        page_size: tokens per page.
        caches: form of the caches, as in ``init_state``; None for the model's own.
        budget: tokens that a step feeds at most; at least 128 more than ``running``.
        points: prefixes held for reuse; 0 switches reuse off.
        checks_invariants: whether every state is checked; for debugging.
    """

    running: int = 8
    waiting: int = 64
    tokens: int = 16384
    context: int = 2048
    page_size: int = 128
    caches: CacheForm | None = None
    budget: int = 512
    points: int = 8
    checks_invariants: bool = False

    def __attrs_post_init__(self) -> None:
        for field, least in (("running", 1), ("waiting", 0), ("points", 0), ("tokens", 2), ("context", 2)):
            if getattr(self, field) < least:
                raise ConfigError(
                    f"{field}: expected at least {least}, got {getattr(self, field)}",
                    field=field,
                    expected=f">= {least}",
                    got=getattr(self, field),
                )
        if self.budget < self.running + UNIT:
            least = self.running + UNIT
            raise ConfigError(
                f"budget: expected at least {least} tokens a step, one for each of {self.running} running requests and "
                f"{UNIT} of a prompt, got {self.budget}; raise --chunked-prefill-size or run fewer requests",
                field="budget",
                expected=f">= {least}",
                got=self.budget,
            )

    @property
    def reuse_unit(self) -> int:
        """Tokens of the smallest prefix that can be reused; longer ones are multiples of it."""
        return lcm(self.page_size, UNIT)

    @property
    def reuses(self) -> bool:
        """Whether any prompt can be long enough to take over a prefix and to sample a token."""
        return self.points > 0 and self.reuse_unit + 1 < min(self.context, self.tokens)


@attrs.frozen(kw_only=True)
class EngineStatus:
    """What the engine is doing.

    Attributes:
        running: requests that own rows.
        waiting: requests that do not yet, or not any more.
        pools: name -> (used, total) pages, or rows of the request table.
        pool_bytes: bytes of each cache buffer.
        counters: what has happened since the start.
        seconds_since_progress: since the last turn ended, while there is something to do; None when idle.
        is_ready: whether it takes requests.
        failure: why the engine is gone; None while it is not.
    """

    running: int
    waiting: int
    pools: Mapping[str, tuple[int, int]]
    pool_bytes: Mapping[str, int]
    counters: Mapping[str, int]
    seconds_since_progress: float | None
    is_ready: bool
    failure: str | None = None


@attrs.frozen(kw_only=True)
class Usage:
    """What of a pool is in use.

    Attributes:
        running: keys of the requests that own rows.
        pools: name -> (used, total) pages, or rows of the request table.
        n_retracted: retractions since the start.
    """

    running: tuple[int, ...]
    pools: Mapping[str, tuple[int, int]]
    n_retracted: int


def usage_of(scheduler: SchedulerState, pool: Pool) -> Usage:
    """Say what of a pool is in use; reads host values alone."""
    table, sizes = pool.state.table, pool.state.table.sizes
    totals = {"full": sizes.pages, "window": sizes.swa_pages, "C128": sizes.c128_pages, "rows": sizes.requests}
    return Usage(
        running=tuple(job.key for job in scheduler.running),
        pools={name: (totals[name] - len(getattr(table, free)), totals[name]) for name, free in _POOL_PAGES.items()},
        n_retracted=scheduler.n_retracted,
    )


class Stream:
    """The reply to one ask: an async iterator of ``Sampled``, and ``Ended`` last."""

    def __init__(self, key: int, engine: Engine) -> None:
        self.key = key
        self._engine = engine
        self._queue: asyncio.Queue[Sampled | Ended] = asyncio.Queue()

    def cancel(self) -> None:
        """Stop the generation; what was sampled already still comes, then ``Ended``. Doing it twice does nothing."""
        self._engine._post(Cancelled(key=self.key))

    def finish(self) -> None:
        """Stop the generation because the reply is complete: the same, but it ends with "stop" and is no abort."""
        self._engine._finish(self.key)

    async def __aiter__(self) -> AsyncIterator[Sampled | Ended]:
        while True:
            item = await self._queue.get()
            yield item
            if isinstance(item, Ended):
                return


@attrs.define(eq=False, kw_only=True)
class _Reply:
    """What is being put together for one ask.

    Attributes:
        ask: the ask.
        stream: where it goes.
        outputs: tokens sampled so far.
        n_cached: prompt tokens taken over.
        prompt_logprobs: of the prompt tokens so far, where asked for.
        is_complete: whether its listener wants no more.
    """

    ask: Ask
    stream: Stream
    is_complete: bool = False
    outputs: tuple[int, ...] = ()
    n_cached: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ((None, ()),)

    def ended(self, end: Ended) -> Ended:
        """Add to an end what the reply knows about it."""
        reason = "stop" if end.reason == "abort" and self.is_complete else end.reason
        logprobs = self.prompt_logprobs if self.ask.prompt_logprobs is not None else None
        return attrs.evolve(end, reason=reason, n_cached=self.n_cached, prompt_logprobs=logprobs)


@attrs.frozen(eq=False, kw_only=True)
class News:
    """What a turn has to tell; plain values, which travel between ranks.

    Attributes:
        said: (key, tokens or end) in order.
        prompt_logprobs: (key, first position, log-probabilities of prompt tokens from there on) where asked for.
        n_cached: key -> prompt tokens taken over, of what runs.
        finished: keys that ended in the step.
        broken: keys that a failed step is to blame on.
        fed: tokens fed.
        is_idle: whether nothing ran.
        is_compiled: whether the step ran in compiled graphs.
    """

    said: tuple[tuple[int, Sampled | Ended], ...]
    prompt_logprobs: tuple[tuple[int, int, tuple[TokenLogprobs, ...]], ...]
    n_cached: Mapping[int, int]
    finished: tuple[int, ...]
    broken: tuple[int, ...]
    fed: int
    is_idle: bool
    is_compiled: bool


@attrs.frozen(eq=False, kw_only=True)
class Turn:
    """A turn, as the worker thread makes it.

    Attributes:
        scheduler: the scheduler's state after it.
        pool: the pool after it.
        others: as in ``News``.
    """

    scheduler: SchedulerState
    pool: Pool
    said: tuple[tuple[int, Sampled | Ended], ...]
    prompt_logprobs: tuple[tuple[int, int, tuple[TokenLogprobs, ...]], ...]
    finished: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    fed: int = 0
    is_idle: bool = False
    is_compiled: bool = False

    @property
    def news(self) -> News:
        """What it has to tell."""
        return News(
            said=self.said,
            prompt_logprobs=self.prompt_logprobs,
            n_cached={job.key: job.n_cached for job in self.scheduler.running},
            finished=self.finished,
            broken=self.broken,
            fed=self.fed,
            is_idle=self.is_idle,
            is_compiled=self.is_compiled,
        )


class _Fault(Exception):
    """What one request of a step is to blame for, and no other."""

    def __init__(self, key: int, message: str) -> None:
        super().__init__(message)
        self.key = key


class Engine:
    """Runs requests until it is stopped; all methods belong to one event loop."""

    def __init__(self, model: Model, limits: EngineLimits, *, compiled: CompiledStep | None = None) -> None:
        """Allocate the pools.

        Args:
            model: steps everything.
            limits: how much it takes on.
            compiled: what steps that only decode run in, where a bucket holds them; of this model, its page size and
                form of caches those of the limits.
        """
        self.model, self.limits, self._compiled = model, limits, compiled
        rows = limits.running + limits.points
        capacity = Capacity(requests=rows, tokens=limits.tokens, context=limits.context)
        self._pool = Pool(state=init_state(model, capacity, page_size=limits.page_size, caches=limits.caches))
        self._scheduler = SchedulerState(
            limits=Limits(running=limits.running, budget=limits.budget, points=limits.points, unit=limits.reuse_unit)
        )
        self._replies: dict[int, _Reply] = {}
        self._events: list[Event] = []
        self._keys = count()
        self._wake = asyncio.Event()
        self._worker = Worker("steps")
        self._task: asyncio.Task[None] | None = None
        self._is_open = False
        self._failure: str | None = None
        self._progress = time.monotonic()
        self._counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)

    async def start(self) -> None:
        """Begin to take requests."""
        self._is_open = True
        self._task = asyncio.create_task(self._run())

    async def stop(self, deadline_s: float = 0.0) -> None:
        """Take no more requests, let those that run end until the deadline, and cancel the rest.

        Args:
            deadline_s: seconds to wait at most.
        """
        self._is_open = False
        end = time.monotonic() + deadline_s
        while self._replies and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for key in list(self._replies):
            self._post(Cancelled(key=key))
        while (self._replies or self._events) and self._task is not None and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._worker.stop()

    def submit(self, ask: Ask) -> Stream:
        """Take a request in.

        Args:
            ask: the request; its ``max_new_tokens`` is cut to what context and pools can hold.
        Returns:
            Its reply as it comes.
        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, or parameters that this model cannot honour.
            CapacityError: the prompt can never fit; the message names the limit.
            QueueFullError: too many wait; or the engine is stopping.
        """
        ask = self._checked(ask)
        if not self._is_open or len(self._replies) >= self.limits.running + self.limits.waiting:
            raise QueueFullError(
                f"engine: {len(self._replies)} requests are being served or wait, at most "
                f"{self.limits.running + self.limits.waiting} may; ask again later",
                field="queue",
                got=len(self._replies),
            )
        if not self._replies:
            self._progress = time.monotonic()  # silence is counted from here, not from the end of the last work
        key = next(self._keys)
        stream = Stream(key, self)
        self._replies[key] = _Reply(ask=ask, stream=stream)
        self._pool = attrs.evolve(self._pool, params={**self._pool.params, key: ask.params})
        self._counters["prompt_tokens"] += len(ask.prompt_ids)
        self._post(Arrived(key=key, prompt=ask.prompt_ids, may_reuse=ask.prompt_logprobs is None))
        return stream

    def status(self) -> EngineStatus:
        """Say what the engine is doing; reads host values alone."""
        handle, usages = self._pool.state.kv.handle, self._usages()
        running = sum(key in self._replies for usage in usages for key in usage.running)
        return EngineStatus(
            running=running,
            waiting=len(self._replies) - running,
            pools={
                name: (sum(usage.pools[name][0] for usage in usages), sum(usage.pools[name][1] for usage in usages))
                for name in _POOL_PAGES
            },
            pool_bytes={name: _bytes_of(handle.spec(name)) for name in handle.names},
            counters={**self._counters, "retractions": sum(usage.n_retracted for usage in usages)},
            seconds_since_progress=time.monotonic() - self._progress if self._replies else None,
            is_ready=self._is_open and self._task is not None and not self._task.done(),
            failure=self._failure,
        )

    def _usages(self) -> Sequence[Usage]:
        """Say what is in use, pool by pool; this engine has one."""
        return (usage_of(self._scheduler, self._pool),)

    def _checked(self, ask: Ask) -> Ask:
        n, context, tokens = len(ask.prompt_ids), self.limits.context, self.limits.tokens
        vocab_size = self.model.config.vocab_size
        wrong = [i for i in ask.prompt_ids if not 0 <= i < vocab_size]
        if not n or wrong:
            raise RequestError(
                f"prompt: expected at least one token id in [0, {vocab_size}), got {wrong[:8] or 'none'}",
                field="prompt",
                got=wrong[:8],
            )
        check_params(self._pool.state, ask.params)
        room = min(context, tokens) - n
        if room < 1:
            raise CapacityError(
                f"prompt: {n} tokens leave no room for a reply; the context is {context}, the pools hold {tokens}",
                field="context",
                expected=f"< {min(context, tokens)}",
                got=n,
            )
        most = ask.params.max_new_tokens
        return attrs.evolve(
            ask, params=attrs.evolve(ask.params, max_new_tokens=room if most is None else min(most, room))
        )

    def _finish(self, key: int) -> None:
        if key in self._replies:
            self._replies[key].is_complete = True
            self._post(Cancelled(key=key))

    def _post(self, event: Event) -> None:
        self._events.append(event)
        self._wake.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._one_turn()
        except BaseException as error:
            # A fault of the engine's own, or its task was taken away: nobody is left waiting, and status() says so.
            self._failure = _say(error) if self._is_open else None
            self._is_open = False
            for reply in self._replies.values():
                reply.stream._queue.put_nowait(Ended(reason="error", error=_say(error)))
            self._replies.clear()
            raise

    async def _one_turn(self) -> None:
        if not self._events and not self._replies:
            self._wake.clear()
            await self._wake.wait()
            self._progress = time.monotonic()
        events, self._events = self._events, []
        asks = {key: (reply.ask, reply.outputs) for key, reply in self._replies.items()}
        self._accept(await self._worker.call(self._turn, self._scheduler, events, self._pool, asks))

    def _accept(self, turn: Turn) -> None:
        """Take over the state after a turn and tell the streams."""
        # Requests that came during the turn have put their parameters into the pool that the turn started from.
        open_params = {key: reply.ask.params for key, reply in self._replies.items()}
        self._pool = attrs.evolve(turn.pool, params=open_params)
        self._scheduler = turn.scheduler
        self._tell(turn.news)

    def _tell(self, turn: News) -> None:
        """Tell the streams what a turn led to."""
        self._progress = time.monotonic()
        self._counters["steps"] += not turn.is_idle
        self._counters["compiled_steps"] += turn.is_compiled
        self._counters["fed_tokens"] += turn.fed
        for key, n_cached in turn.n_cached.items():
            reply = self._replies[key]
            self._counters["cached_tokens"] += n_cached - reply.n_cached
            reply.n_cached = n_cached
        for key, first, found in turn.prompt_logprobs:
            reply = self._replies[key]
            reply.prompt_logprobs = (*reply.prompt_logprobs[:first], *found)
        for key, item in turn.said:
            reply = self._replies[key]
            if isinstance(item, Sampled):
                reply.outputs += (item.token_id,)
                self._counters["generated_tokens"] += 1
                reply.stream._queue.put_nowait(item)
                continue
            end = reply.ended(item)
            reply.stream._queue.put_nowait(end)
            self._counters["aborts"] += end.reason == "abort"
            self._counters["repetitions"] += ends_in_repetition(reply.outputs)
            name = f"finished_{end.reason}"
            self._counters[name] = self._counters.get(name, 0) + 1
            del self._replies[key]
        if turn.finished or turn.broken:
            self._events = [
                Stepped(finished=turn.finished),
                *(Cancelled(key=key) for key in turn.broken),
                *self._events,
            ]
            self._wake.set()

    def _turn(
        self,
        scheduler: SchedulerState,
        events: Sequence[Event],
        pool: Pool,
        asks: Mapping[int, tuple[Ask, tuple[int, ...]]],
    ) -> Turn:
        """Plan and make one step; runs in the worker thread and changes nothing of the engine."""
        scheduler, plan = schedule(scheduler, events, pool)
        said: list[tuple[int, Sampled | Ended]] = [
            (key, Ended(reason="abort")) for key in plan.cancelled if key in asks
        ]
        said += [(key, Ended(reason="error", error="the pools cannot hold this request")) for key in plan.failed]
        rows, pool = plan.rows, plan.view
        turn = Turn(scheduler=scheduler, pool=pool, said=tuple(said), prompt_logprobs=(), is_idle=not rows)
        if rows or self.model.ranks.world.size > 1:  # what is idle takes part in the step of the other replicas
            try:
                turn = self._stepped(turn, plan, asks)
            except RankError as error:
                if error.field != CANNOT_BEGIN:
                    raise
                # Nothing was stepped anywhere, and these requests are not to blame: the next turn tries again.
            except Exception as error:
                broken = _broken_keys(error, pool, rows)
                ends = ((key, Ended(reason="error", error=_say(error))) for key in broken)
                turn = attrs.evolve(turn, said=(*said, *ends), broken=broken)
        wrong = check(turn.pool.state) if self.limits.checks_invariants else ()
        if wrong:
            raise RuntimeError(f"engine: the state is unsound: {wrong[0]}")
        return turn

    def _stepped(self, turn: Turn, plan: Plan, asks: Mapping[int, tuple[Ask, tuple[int, ...]]]) -> Turn:
        """Make the step of a plan."""
        pool, rows = plan.view, plan.rows
        state, out, logits_of, is_compiled = self._step(plan, asks)
        keys = {request: key for key, request in pool.ids.items()}
        found = []
        for key, logits in logits_of.items():
            first = pool.progress(key).n_cached + 1
            scores = _prompt_logprobs(asks[key][0], first, logits)
            if any(logprob is not None and isnan(logprob) for logprob, _ in scores):
                raise _Fault(key, "prompt: its logits hold NaN")
            found.append((key, first, scores))
        return attrs.evolve(
            turn,
            pool=pool.stepped(state, rows),
            said=(*turn.said, *_said(out, keys)),
            prompt_logprobs=tuple(found),
            finished=tuple(keys[request] for request in out.finished),
            fed=_cached(state) - _cached(pool.state),
            is_compiled=is_compiled,
        )

    def _step(
        self, plan: Plan, asks: Mapping[int, tuple[Ask, tuple[int, ...]]]
    ) -> tuple[DecodeState, StepOutput, dict[int, Tensor], bool]:
        """Make the step of a plan.

        Returns:
            (state, output, key -> logits of the fed prompt tokens where asked for, whether it ran compiled).
        """
        pool = plan.view
        masks: dict[int, Tensor] = {}
        for key, most in plan.rows:
            ask, outputs = asks[key]
            if ask.mask is None:
                continue
            progress = pool.progress(key)
            if progress.n_tokens - progress.n_cached <= most:
                try:
                    bits = ask.mask(outputs)
                except Exception as error:
                    raise _Fault(key, f"{CONSTRAINT_ERROR}{_say(error)}") from error
                masks |= {} if bits is None else {pool.ids[key]: bits}
        wanted = [key for key, _ in plan.rows if asks[key][0].prompt_logprobs is not None and not asks[key][1]]
        step = self._compiled
        longest = None if step is None or wanted else pool.decoded_len(plan.rows)
        if step is not None and longest is not None and step.holds(len(plan.rows), longest):
            state, out = step(self.model, pool.state, only=pool.chunks(plan.rows), mask=masks)
            return state, out, {}, True
        state, out = extend_step(
            self.model,
            pool.state,
            pool.chunks(plan.rows),
            limit=pool.limits(plan.rows),
            logits="all" if wanted else "last",
            mask=masks,
        )
        if not wanted:
            return state, out, {}, False
        lens = [find_request(state, pool.ids[key]).kv_len - pool.progress(key).n_cached for key, _ in plan.rows]
        parts = dict(zip((key for key, _ in plan.rows), out.logits.split(lens), strict=True))
        return state, out, {key: parts[key] for key in wanted}, False


def _cached(state: DecodeState) -> int:
    return sum(request.kv_len for request in state.requests)


def _bytes_of(spec: tuple[torch.Size, torch.dtype, torch.device]) -> int:
    shape, dtype, _ = spec
    return shape.numel() * dtype.itemsize


def _broken_keys(error: Exception, pool: Pool, rows: Rows) -> tuple[int, ...]:
    """Return the requests that a failed step is to blame on: those that the error names, or all of the step."""
    if isinstance(error, _Fault):
        return (error.key,)
    named = error.got if isinstance(error, RequestError) and error.field == "logits" else None
    return tuple(key for key, _ in rows if named is None or pool.ids[key] in named)


def _say(error: BaseException) -> str:
    return str(error) if isinstance(error, PurestepError | _Fault) else f"{type(error).__name__}: {error}"


def _said(out: StepOutput, keys: Mapping[int, int]) -> list[tuple[int, Sampled | Ended]]:
    """Return what a step says to whom: the tokens, and the ends."""
    said: list[tuple[int, Sampled | Ended]] = []
    for row, (request, token) in enumerate(zip(out.request_ids, out.next_token_ids, strict=True)):
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        n_top = None if out.logprobs is None else out.logprobs.counts[row]
        if out.logprobs is not None and n_top is not None:
            logprob = float(out.logprobs.token_logprobs[row])
            ids, logprobs = out.logprobs.top_ids[row].tolist(), out.logprobs.top_logprobs[row].tolist()
            top = tuple(zip(ids[:n_top], logprobs[:n_top], strict=True))
        said.append((keys[request], Sampled(token_id=token, logprob=logprob, top=top)))
        if request in out.finished:
            reason: Literal["stop", "length"] = "stop" if out.finished[request] == "stop" else "length"
            said.append((keys[request], Ended(reason=reason)))
    return said


def _prompt_logprobs(ask: Ask, first: int, logits: Tensor) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of the prompt tokens from ``first`` on, whose logits these are."""
    following = ask.prompt_ids[first : first + len(logits)]
    if not following:
        return ()
    ids = torch.tensor(following, device=logits.device)
    chosen, top_ids, top = token_logprobs(logits[: len(following)], ids, ask.prompt_logprobs or 0)
    tops = (tuple(zip(i, p, strict=True)) for i, p in zip(top_ids.tolist(), top.tolist(), strict=True))
    return tuple(zip(chosen.tolist(), tops, strict=True))
