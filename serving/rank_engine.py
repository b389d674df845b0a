"""The engine over several ranks: rank 0 speaks to the world, every replica schedules and steps its own requests.

A turn begins with an ``Order`` of rank 0, a value: what has happened to whose requests, and what their constraints
allow next. Every rank derives its replica's plan from it with the same pure scheduler, steps (an idle one too), and all
hear each other's report. A turn without news is made now and then, so that a lost rank is missed while nobody asks.

Source: none; upstream broadcasts requests to schedulers of its own for every replica (SGLang 0.5.23
``managers/data_parallel_controller.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
from torch import Tensor

from ..model.model import Model
from ..model.ranks import Ranks
from ..state.errors import RankError
from .asks import CONSTRAINT_ERROR, Ask, Ended, Sampled
from .engine import Engine, EngineLimits, News, Stream, Usage, usage_of
from .pool import Pool
from .rank_values import broadcast_value, gather_values
from .scheduler import Cancelled, Event, SchedulerState, Stepped

__all__ = ["Order", "RankedEngine", "Report", "Seat", "serve_rank"]

BEATS = 4
"""Turns without news within the time that ranks wait for each other."""


@attrs.frozen(eq=False, kw_only=True)
class Order:
    """What one replica is told at the beginning of a turn.

    Attributes:
        events: what has happened to its requests.
        asks: key -> new request; its mask stays with rank 0.
        masks: key -> what the next token of a constrained request may be.
    """

    events: tuple[Event, ...] = ()
    asks: Mapping[int, Ask] = attrs.field(factory=dict)
    masks: Mapping[int, Tensor | None] = attrs.field(factory=dict)


@attrs.frozen(eq=False, kw_only=True)
class Report:
    """What a rank tells at the end of a turn.

    Attributes:
        news: of its replica.
        usage: of its pool.
        digest: of the order and of everything that followed from it; equal within a replica.
    """

    news: News
    usage: Usage
    digest: str


class Seat:
    """One rank's part in the turns: the scheduler and the pool of its replica."""

    def __init__(self, engine: Engine) -> None:
        """Take over an engine's empty pool.

        Args:
            engine: steps; nothing of it is changed.
        """
        self._engine = engine
        self._scheduler: SchedulerState = engine._scheduler
        self._pool: Pool = engine._pool
        self._asks: dict[int, tuple[Ask, tuple[int, ...]]] = {}

    def turn(self, order: Order) -> Report:
        """Make a turn.

        Args:
            order: of this replica.
        Returns:
            What it led to.
        """
        self._asks |= {key: (ask, ()) for key, ask in order.asks.items()}
        pool = attrs.evolve(self._pool, params={key: ask.params for key, (ask, _) in self._asks.items()})
        asks = {key: (_masked(ask, key, order.masks), outputs) for key, (ask, outputs) in self._asks.items()}
        turn = self._engine._turn(self._scheduler, order.events, pool, asks)
        self._scheduler, self._pool, news = turn.scheduler, turn.pool, turn.news
        for key, item in news.said:
            if isinstance(item, Sampled):
                ask, outputs = self._asks[key]
                self._asks[key] = (ask, (*outputs, item.token_id))
            else:
                del self._asks[key]
        usage = usage_of(turn.scheduler, turn.pool)
        said = repr((order.events, sorted(order.asks), sorted(order.masks), news, usage))
        return Report(news=news, usage=usage, digest=hashlib.blake2b(said.encode(), digest_size=16).hexdigest())


def _masked(ask: Ask, key: int, masks: Mapping[int, Tensor | None]) -> Ask:
    if key not in masks:
        return ask
    bits = masks[key]
    return attrs.evolve(ask, mask=lambda _: bits)


def _exchange(seat: Seat, ranks: Ranks, orders: Sequence[Order] | None) -> list[Report] | None:
    """Make a turn on this rank with all others; None when rank 0 has said that it was the last.

    Raises:
        RankError: a rank is lost or late, or ranks of a replica came to different ends.
    """
    orders = broadcast_value(orders, ranks.world)
    if orders is None:
        return None
    reports: list[Report] = gather_values(seat.turn(orders[ranks.replica]), ranks.world)
    tp = ranks.parallel.tp
    others = [rank for rank, report in enumerate(reports) if report.digest != reports[rank // tp * tp].digest]
    if others:
        raise RankError(
            f"turn: expected the ranks of a replica to plan and sample alike, but ranks {others} did not",
            field="digest",
            got=others,
        )
    return reports[::tp]


def serve_rank(model: Model, limits: EngineLimits) -> None:
    """Take part in the turns of rank 0 until it has made the last.

    Args:
        model: this rank's part of the model.
        limits: of every replica.
    Raises:
        RankError: another rank is lost or late.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 lets requests end and then says so
    seat = Seat(Engine(model, limits))
    while _exchange(seat, model.ranks, None) is not None:
        pass


class RankedEngine(Engine):
    """The engine of rank 0; ``EngineLimits`` are those of every replica."""

    def __init__(self, model: Model, limits: EngineLimits) -> None:
        """Allocate the pools.

        Args:
            model: this rank's part of it.
            limits: how much every replica takes on.
        """
        super().__init__(model, limits)
        self._seat = Seat(self)
        self._homes: dict[int, int] = {}
        self._new: dict[int, Ask] = {}
        self._faults: dict[int, str] = {}
        self._used = (usage_of(self._scheduler, self._pool),) * model.ranks.parallel.dp

    async def stop(self, deadline_s: float = 0.0) -> None:
        """Stop as ``Engine.stop`` does, and let the other ranks go.

        Args:
            deadline_s: seconds to wait at most.
        """
        await super().stop(deadline_s)
        if self._task is not None and self._task.cancelled():  # it did not end by a fault of its own
            broadcast_value(None, self.model.ranks.world)

    def submit(self, ask: Ask) -> Stream:
        """Take a request in, for the replica that has fewest.

        Args:
            ask: as in ``Engine.submit``.
        """
        stream = super().submit(ask)
        loads = [0] * self.model.ranks.parallel.dp
        for key in self._replies.keys() & self._homes.keys():
            loads[self._homes[key]] += 1
        self._homes[stream.key] = loads.index(min(loads))
        self._new[stream.key] = attrs.evolve(self._replies[stream.key].ask, mask=None)
        return stream

    def _usages(self) -> Sequence[Usage]:
        return self._used

    async def _one_turn(self) -> None:
        if not self._events and not self._replies:
            self._wake.clear()
            beat = self.model.ranks.parallel.timeout_s / BEATS
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), beat)
            self._progress = time.monotonic()
        events, self._events = self._events, []
        new, self._new = self._new, {}
        constrained = {
            key: (reply.ask, reply.outputs) for key, reply in self._replies.items() if reply.ask.mask is not None
        }
        reports = await self._worker.call(self._turn_of_all, events, new, constrained)
        self._used = tuple(report.usage for report in reports)
        for report in reports:
            self._tell(self._blamed(report.news))
        self._homes = {key: home for key, home in self._homes.items() if key in self._replies or self._events}

    def _turn_of_all(
        self, events: Sequence[Event], new: Mapping[int, Ask], constrained: Mapping[int, tuple[Ask, tuple[int, ...]]]
    ) -> list[Report]:
        """Make a turn with all ranks; runs in the worker thread."""
        masks: dict[int, Tensor | None] = {}
        broken: list[Event] = []
        for key, (ask, outputs) in constrained.items():
            assert ask.mask is not None, "only constrained requests are here"
            try:
                masks[key] = ask.mask(outputs)
            except Exception as error:
                self._faults[key] = f"{CONSTRAINT_ERROR}{error}"
                broken.append(Cancelled(key=key))
        homes = range(self.model.ranks.parallel.dp)
        orders = [
            Order(
                events=tuple(self._events_of(home, [*events, *broken])),
                asks={key: ask for key, ask in new.items() if self._homes[key] == home},
                masks={key: bits for key, bits in masks.items() if self._homes[key] == home},
            )
            for home in homes
        ]
        reports = _exchange(self._seat, self.model.ranks, orders)
        assert reports is not None, "orders were given"
        return reports

    def _events_of(self, home: int, events: Sequence[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if isinstance(event, Stepped):
                found.append(Stepped(finished=tuple(key for key in event.finished if self._homes.get(key) == home)))
            elif self._homes.get(event.key) == home:
                found.append(event)
        return found

    def _blamed(self, news: News) -> News:
        """Let requests that their own constraint ended say so."""

        def blamed(key: int, item: Any) -> Any:
            is_fault = isinstance(item, Ended) and key in self._faults
            return attrs.evolve(item, reason="error", error=self._faults.pop(key)) if is_fault else item

        return attrs.evolve(news, said=tuple((key, blamed(key, item)) for key, item in news.said))
