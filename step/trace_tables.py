"""The host half of a traced step: requests, free lists, and what is looked up and written in the tables.

Everything is read from two ledgers: of the state before the step, and of the prepared one, where slots are allocated
and contents are still to be written.

Source: none; the lookups are those of ``step/allocate.py`` and ``step/metadata.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ..state.batch import ScheduleBatch, StepOutput
from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO
from ..state.ledger import Holding, Ledger
from ..state.pages import FreeList, c128_slot
from .trace_values import Access, TracePool, TraceRequest

__all__ = ["HostView", "access", "ints", "touched"]

Ints = NDArray[np.int64]

N_NEXT: Final = 8
"""How many pages at the head of a free list are shown."""


def ints(numbers: Iterable[Any]) -> tuple[int, ...]:
    """Turn numbers of any kind into Python integers."""
    return tuple(int(number) for number in numbers)


def access(
    store: str,
    request_id: int,
    slots: Iterable[Any],
    *,
    layer: int | None = None,
    positions: Iterable[Any] = (),
    values: Iterable[Any] = (),
) -> Access:
    """Note that rows of a store are read or written for a request."""
    return Access(
        store=store,
        layer=layer,
        request_id=request_id,
        positions=ints(positions),
        slots=ints(slots),
        values=ints(values),
    )


@attrs.frozen(eq=False, kw_only=True)
class HostView:
    """The host half of one step.

    Attributes:
        before: the state that is stepped.
        prepared: the same after ``prepare_decode``.
        batch: what that returned.
    """

    before: Ledger
    prepared: Ledger
    batch: ScheduleBatch

    @property
    def rows(self) -> Iterator[tuple[Holding, Holding]]:
        """What every batch row's request holds before and after preparation, in batch order."""
        old, new = self.before.by_id, self.prepared.by_id
        for request_id in self.batch.request_ids:
            yield old[request_id], new[request_id]

    def requests(self, out: StepOutput) -> tuple[TraceRequest, ...]:
        """Describe every open request across the step.

        Args:
            out: what the step returned.
        """
        batch_rows = {request_id: i for i, request_id in enumerate(self.batch.request_ids)}
        sampled = dict(zip(out.request_ids, out.next_token_ids, strict=True))
        found = []
        for old, new in zip(self.before.holdings, self.prepared.holdings, strict=True):
            request, first = new.request, old.request.kv_len
            positions, slots = np.arange(first, request.kv_len), new.slots[first:]
            groups = np.arange(first // C128_RATIO, request.kv_len // C128_RATIO)
            found.append(
                TraceRequest(
                    request_id=request.request_id,
                    row=request.row,
                    batch_row=batch_rows.get(request.request_id),
                    len_before=first,
                    len_after=request.kv_len,
                    tokens=ints(new.tokens[: request.kv_len]),
                    input_ids=ints(new.tokens[first : request.kv_len]),
                    positions=ints(positions),
                    out_full_loc=ints(slots),
                    out_swa_loc=ints(new.windows[first:]),
                    slot_rules=tuple(self._slot_rule(new, position) for position in positions.tolist()),
                    out_c4_loc=ints(slots[slots % C4_RATIO == C4_RATIO - 1] // C4_RATIO),
                    out_c128_loc=ints(c128_slot(new.sidecar.tolist(), group) for group in groups.tolist()),
                    slots_before=ints(old.slots),
                    slots_after=ints(new.slots),
                    windows_before=ints(old.windows),
                    windows_after=ints(new.windows),
                    sidecar_before=ints(old.sidecar[: old.n_c128]),
                    sidecar_after=ints(new.sidecar[: new.n_c128]),
                    sampled=sampled.get(request.request_id),
                    finished=out.finished.get(request.request_id),
                )
            )
        return tuple(found)

    def _slot_rule(self, holding: Holding, position: int) -> str:
        size = self.prepared.sizes.page_size
        slot = int(holding.slots[position])
        return f"slot {slot - 1} + 1" if position % size else f"new page {slot // size}"

    def pools(self) -> tuple[TracePool, ...]:
        """Describe what preparation does to the free lists."""
        size = self.prepared.sizes.page_size
        firsts = [new.slots[self._opened(old, new)] for old, new in self.rows]
        windows = [new.windows[self._opened(old, new)] for old, new in self.rows]
        columns = [new.sidecar[old.n_c128 : new.n_c128] for old, new in self.rows]
        old_table, new_table = self.before.state.table, self.prepared.state.table
        return (
            _pool("full", size, old_table.free_pages, new_table.free_pages, _pages(firsts, size), ()),
            _pool(
                "window",
                size,
                old_table.free_swa_pages,
                new_table.free_swa_pages,
                _pages(windows, size),
                self._given(),
            ),
            _pool("c128", C128_PAGE, old_table.free_c128_pages, new_table.free_c128_pages, _pages(columns, 1), ()),
        )

    def _opened(self, old: Holding, new: Holding) -> Ints:
        """List the new positions that open a page."""
        positions = np.arange(old.request.kv_len, new.request.kv_len)
        return positions[positions % self.prepared.sizes.page_size == 0]

    def _passed(self, old: Holding, new: Holding) -> Ints:
        """List the first positions of the window pages that the request's window has passed in this step."""
        size = self.prepared.sizes.page_size
        return np.arange(old.request.evicted_len // size * size, new.request.evicted_len // size * size, size)

    def _freed(self, old: Holding, new: Holding) -> Ints:
        """List those of ``_passed`` whose page nobody's window needs any more."""
        passed = self._passed(old, new)
        return passed[self.prepared.full_to_swa[old.slots[passed]] == 0]

    def _given(self) -> tuple[int, ...]:
        freed = [old.windows[self._freed(old, new)] for old, new in self.rows]
        return tuple(dict.fromkeys(_pages(freed, self.prepared.sizes.page_size)))

    def allocation_reads(self) -> tuple[Access, ...]:
        """List what preparation looks up: the last slot and its window slot, the C128 pages, passed windows."""
        found = []
        for old, new in self.rows:
            last = np.arange(old.request.kv_len)[-1:]
            looked = np.union1d(self._passed(old, new), last)
            slots = old.slots[looked]
            request_id, n_pages = new.request.request_id, old.n_c128
            found += [
                access("req_to_token", request_id, looked, positions=looked, values=slots),
                access("full_to_swa", request_id, slots, positions=looked, values=old.windows[looked]),
                access("sidecar", request_id, range(n_pages), values=old.sidecar[:n_pages]),
            ]
        return touched(found)

    def allocation_writes(self) -> tuple[Access, ...]:
        """List what preparation writes: the new slots and their window slots, reference counts, C128 pages."""
        size, after = self.prepared.sizes.page_size, self.prepared
        found = []
        for old, new in self.rows:
            request_id = new.request.request_id
            positions = np.arange(old.request.kv_len, new.request.kv_len)
            freed = (self._freed(old, new)[:, None] + np.arange(size)).reshape(-1)
            # Whole pages lose their peers, also the slots behind the last token of the page's other holders.
            bases = old.slots[self._freed(old, new)]
            forgotten = (bases[:, None] + np.arange(size)).reshape(-1)
            opened, columns = self._opened(old, new), np.arange(old.n_c128, new.n_c128)
            counts = {
                "page_refs": new.slots[opened] // size,
                "swa_refs": np.union1d(old.windows[self._passed(old, new)], new.windows[opened]) // size,
                "c128_refs": new.sidecar[columns],
            }
            found += [
                access("full_to_swa", request_id, forgotten, positions=freed, values=after.full_to_swa[forgotten]),
                access("req_to_token", request_id, positions, positions=positions, values=new.slots[positions]),
                access(
                    "full_to_swa",
                    request_id,
                    new.slots[positions],
                    positions=positions,
                    values=new.windows[positions],
                ),
                access("sidecar", request_id, columns, values=new.sidecar[columns]),
                *(
                    access(name, request_id, pages, values=getattr(after, name)[pages])
                    for name, pages in counts.items()
                ),
            ]
        return touched(found)

    def view_reads(self, window: int) -> tuple[Access, ...]:
        """List what ``forward_batch`` looks up: inputs in the relay, and the slots of everything that can be read.

        Args:
            window: W.
        """
        size, found = self.prepared.sizes.page_size, []
        for old, new in self.rows:
            request_id, n = new.request.request_id, new.request.kv_len
            visible = np.arange(max(0, old.request.kv_len - window + 1), n)
            looked = np.union1d(visible, np.arange(0, n, size))
            if self.batch.input_ids is None:
                row = new.request.row
                found.append(access("relay", request_id, [row], positions=[n - 1], values=[self.before.relay[row]]))
            found += [
                access("req_to_token", request_id, looked, positions=looked, values=new.slots[looked]),
                access("full_to_swa", request_id, new.slots[visible], positions=visible, values=new.windows[visible]),
                access("sidecar", request_id, range(new.n_c128), values=new.sidecar[: new.n_c128]),
            ]
        return touched(found)

    def relay_writes(self, out: StepOutput) -> tuple[Access, ...]:
        """List what the relay takes.

        Args:
            out: what the step returned.
        """
        rows = zip(self.batch.request_ids, self.batch.req_pool_indices, self.batch.seq_lens, strict=True)
        return tuple(
            access("relay", request_id, [row], positions=[seq_len], values=[token])
            for (request_id, row, seq_len), token in zip(rows, out.next_token_ids, strict=True)
        )


def touched(found: Iterable[Access]) -> tuple[Access, ...]:
    """Leave out what touches no row."""
    return tuple(one for one in found if one.slots)


def _pages(slots: Sequence[Ints], size: int) -> tuple[int, ...]:
    return ints(slot // size for part in slots for slot in part)


def _pool(
    name: str, page_size: int, before: FreeList, after: FreeList, taken: tuple[int, ...], given: tuple[int, ...]
) -> TracePool:
    return TracePool(
        name=name,
        page_size=page_size,
        n_free_before=len(before),
        n_free_after=len(after),
        next_before=tuple(islice(before, N_NEXT)),
        next_after=tuple(islice(after, N_NEXT)),
        taken=taken,
        given=given,
    )
