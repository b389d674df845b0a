"""Page allocation as values: free lists, and the rules that turn lengths into slots.

Everything here is a function of host integers: a free list goes in, a free list and slot numbers come out, and the
list that went in can be used again. A slot is ``page * page_size + offset``; page 0 is the sink, never handed out.

============ ==================================== ==========================================
phase        positions of a request               slots
============ ==================================== ==========================================
page tail    ``[prefix, min(total, up(prefix)))`` ``last_loc + 1, last_loc + 2, ...``
whole pages  ``[up(prefix), down(total))``        all of each new page
page head    ``[down(total), total)``             first slots of one more new page
============ ==================================== ==========================================

``up`` and ``down`` round to a multiple of the page size. A decode step is the case ``prefix = L, total = L + 1``.

Source: the paged allocator of sgl-project/sglang, ``python/sglang/srt/mem_cache/allocation.py`` and
``python/sglang/srt/hardware_backend/npu/dsv4/dsv4_allocator.py`` at release 0.5.23. Different here: nothing is staged
or sorted, and a shortage changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, Final, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from .capacity import C128_PAGE, C128_RATIO
from .errors import CapacityError, ConfigError, ShapeError

__all__ = [
    "FreeList",
    "c128_pages",
    "c128_pages_needed",
    "c128_slot",
    "c128_slots",
    "decode_slots",
    "extend_slots",
    "groups",
    "pages_needed",
]

Slots: TypeAlias = NDArray[np.int64]
_Ints: TypeAlias = Sequence[int] | Slots
_Chain: TypeAlias = tuple[int, Any] | tuple[()]
"""The first page and the rest of the chain, or nothing."""

# Pages start at multiples of the page size, so a slot and its position agree modulo the page size, always.
_BAD_LAST: Final = "last_locs {} are not the slots before positions {}"


@attrs.frozen(eq=False, kw_only=True, repr=False)
class FreeList:
    """The free pages ``1..n_pages`` of a pool, in the order in which they will be handed out.

    Pages that came back are a chain of pairs; pages never handed out yet are the two counters ``fresh`` and
    ``n_pages``. So a list of any size costs nothing to make, and every operation costs one step per page it moves.
    Lists share the chain, and none changes. Pool rows are handed out by the same class.

    It is an opaque leaf of a pytree: as a tree, the chain would be one level per page, its structure would depend on
    the history, and a tree map would rewrite page numbers. For the same reason pickling writes the chain out flat.
    """

    pool: str
    n_pages: int
    fresh: int
    returned: _Chain
    n_returned: int

    @classmethod
    def full(cls, n_pages: int, pool: str = "pages") -> FreeList:
        """Make the list in which every page is free.

        Args:
            n_pages: pages of the pool, without the sink page 0.
            pool: the pool's name, for messages.
        Raises:
            ConfigError: when ``n_pages`` is negative.
        """
        if n_pages < 0:
            raise ConfigError(
                f"FreeList.full: expected n_pages >= 0, got {n_pages}; give pool {pool!r} a size",
                field="n_pages",
                expected=">= 0",
                got=n_pages,
            )
        return cls(pool=pool, n_pages=n_pages, fresh=1, returned=(), n_returned=0)

    def __len__(self) -> int:
        return self.n_returned + self.n_pages + 1 - self.fresh

    def take(self, n: int) -> tuple[FreeList, tuple[int, ...]]:
        """Take the first ``n`` pages.

        Returns:
            (free, pages): the shorter list, and the pages in the order of this list.
        Raises:
            CapacityError: when fewer than ``n`` are free.
        """
        assert n >= 0, f"FreeList.take: a negative number of pages, {n}"
        if n > len(self):
            raise CapacityError(
                f"pool {self.pool!r}: needed {n}, free {len(self)}; close or shorten a request, or give the state a "
                "larger capacity",
                field=self.pool,
                expected=n,
                got=len(self),
            )
        n_old = min(n, self.n_returned)
        chain: Any = self.returned
        old: list[int] = []
        for _ in range(n_old):
            page, chain = chain
            old.append(page)
        fresh = self.fresh + n - n_old
        free = attrs.evolve(self, fresh=fresh, returned=chain, n_returned=self.n_returned - n_old)
        return free, (*old, *range(self.fresh, fresh))

    def give(self, pages: Iterable[int]) -> FreeList:
        """Put pages back at the front, newest first.

        Giving several is giving one after the other: the last page of ``pages`` is the next to be taken, and
        ``give(a + b)`` is ``give(a).give(b)``. A request's pages given in the order of its positions are thus taken
        again from its end.
        """
        back = tuple(int(page) for page in pages)
        # What the counters can tell. A page given again in a later call would take a walk to notice: whoever owns the
        # pages gives each back once.
        assert all(0 < page < self.fresh for page in back), f"pool {self.pool!r}: never handed out, in {back}"
        assert len(set(back)) == len(back), f"pool {self.pool!r}: a page is given twice, in {back}"
        assert len(self) + len(back) <= self.n_pages, f"pool {self.pool!r}: more pages given than were taken"
        chain = self.returned
        for page in back:
            chain = (page, chain)
        return attrs.evolve(self, returned=chain, n_returned=self.n_returned + len(back))

    def __iter__(self) -> Iterator[int]:
        """Yield every free page, first to be taken first; for tests and reports, as it walks the whole list."""
        chain: Any = self.returned
        while chain:
            page, chain = chain
            yield page
        yield from range(self.fresh, self.n_pages + 1)

    def __contains__(self, page: object) -> bool:
        """Tell whether a page is free; for tests and reports, as it walks the whole list."""
        return any(free == page for free in self)

    def __repr__(self) -> str:
        return f"FreeList(pool={self.pool!r}, n_pages={self.n_pages}, free={len(self)})"

    def __copy__(self) -> FreeList:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> FreeList:
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _rebuild, (self.pool, self.n_pages, self.fresh, tuple(islice(self, self.n_returned)))

    def to_record(self) -> dict[str, Any]:
        """Write the list out flat, in numbers and strings, for a file."""
        names = ("pool", "n_pages", "fresh", "returned")
        return dict(zip(names, self.__reduce__()[1], strict=True))

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> FreeList:
        """Read back what ``to_record`` wrote."""
        return _rebuild(record["pool"], record["n_pages"], record["fresh"], tuple(record["returned"]))


def _rebuild(pool: str, n_pages: int, fresh: int, returned: tuple[int, ...]) -> FreeList:
    chain: _Chain = ()
    for page in reversed(returned):
        chain = (page, chain)
    return FreeList(pool=pool, n_pages=n_pages, fresh=fresh, returned=chain, n_returned=len(returned))


def pages_needed(prefix: int, total: int, page_size: int) -> int:
    """Count the pages that a request opens when it grows from ``prefix`` to ``total`` positions."""
    return -(-total // page_size) - -(-prefix // page_size)


def decode_slots(free: FreeList, lens: _Ints, last_locs: _Ints, page_size: int) -> tuple[FreeList, Slots]:
    """Allocate the slot of position ``lens[i]`` for every row, in batch order.

    A row whose length is a multiple of the page size opens a page, any other takes the slot after its last one.

    Args:
        free: the pool's free pages.
        lens: i64[B]. Positions that own a slot, **before** the step.
        last_locs: i64[B]. Slot of position ``lens[i] - 1``; anything where a page is opened.
        page_size: slots in a page.
    Returns:
        (free, slots): the remaining pages; i64[B], a new array.
    Raises:
        CapacityError: when there are fewer free pages than rows that open one.
        ShapeError: when the sequences differ in length.
    """
    old, last = _columns(page_size, lens=lens, last_locs=last_locs)
    free, slots, _ = _next_slots(free, old, last, page_size)
    return free, slots


def _next_slots(free: FreeList, lens: Slots, last: Slots, page_size: int) -> tuple[FreeList, Slots, Slots]:
    """Allocate one slot a row: (free, slots, the rows that open a page)."""
    slots, offset = last + 1, lens % page_size
    opens = offset == 0
    wrong = (slots % page_size != offset) & ~opens
    assert not np.count_nonzero(wrong), _BAD_LAST.format(last[wrong], lens[wrong])
    opening = opens.nonzero()[0]
    if len(opening):  # a decode seldom opens a page
        free, pages = free.take(len(opening))
        slots[opening] = np.asarray(pages, np.int64) * page_size
    return free, slots, opening


def extend_slots(
    free: FreeList, prefix_lens: _Ints, seq_lens: _Ints, last_locs: _Ints, page_size: int
) -> tuple[FreeList, Slots, tuple[tuple[int, ...], ...]]:
    """Allocate the slots of positions ``[prefix_lens[i], seq_lens[i])`` for every row, in batch order.

    Args:
        free: the pool's free pages.
        prefix_lens: i64[B]. Positions that own a slot already.
        seq_lens: i64[B]. Positions that own one afterwards, at least ``prefix_lens``.
        last_locs: i64[B]. Slot of position ``prefix_lens[i] - 1``; anything where the prefix ends with its page.
        page_size: slots in a page.
    Returns:
        (free, slots, new_pages): the remaining pages; i64[T], a new array of the slots of all rows, one row after the
        other; for every row the pages that it opened. Both in the order of positions.
    Raises:
        CapacityError: when there are fewer free pages than all rows open together.
        ShapeError: when the sequences differ in length.
    """
    prefix, total, last = _columns(page_size, prefix_lens=prefix_lens, seq_lens=seq_lens, last_locs=last_locs)
    sizes = total - prefix
    if np.count_nonzero(sizes == 1) == len(sizes):
        free, single, opening = _next_slots(free, prefix, last, page_size)
        opened: list[tuple[int, ...]] = [()] * len(single)
        for row in opening.tolist():
            opened[row] = (int(single[row]) // page_size,)
        return free, single, tuple(opened)
    assert not (sizes < 0).any(), f"extend_slots: seq_lens {seq_lens} below prefix_lens {prefix_lens}"
    if not sizes.any():
        return free, np.empty(0, np.int64), ((),) * len(total)
    wrong = (prefix % page_size != 0) & (sizes > 0) & ((last + 1) % page_size != prefix % page_size)
    assert not wrong.any(), _BAD_LAST.format(last[wrong], prefix[wrong])
    ends = np.cumsum(-(-total // page_size) - -(-prefix // page_size))
    free, pages = free.take(int(ends[-1]))
    bounds = [0, *ends.tolist()]
    new_pages = tuple(pages[start:end] for start, end in pairwise(bounds))
    stops = np.cumsum(sizes)
    row = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(row)) - (stops - sizes)[row]
    # A position lies in a page that the row opens, the first of them starting at the next page border, or in its last.
    page = (prefix[row] + place) // page_size - -(-prefix // page_size)[row]
    first = np.asarray(bounds[:-1], np.int64)[row]
    whole = np.append(np.asarray(pages, np.int64), 0)[first + np.maximum(page, 0)]
    slots = np.where(page < 0, last[row] + 1 + place, whole * page_size + (prefix[row] + place) % page_size)
    return free, slots, new_pages


def groups(length: int) -> int:
    """Count the C128 entries that ``length`` positions have closed."""
    return length // C128_RATIO


def c128_pages(length: int) -> int:
    """Count the C128 pages that a request of ``length`` positions holds."""
    return -(-groups(length) // C128_PAGE)


def c128_pages_needed(prefix: int, total: int) -> int:
    """Count the C128 pages that a request opens when it grows from ``prefix`` to ``total`` positions."""
    return max(0, c128_pages(total) - c128_pages(prefix))


def c128_slot(pages: Sequence[int], group: int) -> int:
    """Find the slot of a request's C128 entry ``group`` from its pages (its row of the sidecar)."""
    page = int(pages[group // C128_PAGE])
    assert page > 0, f"C128 entry {group} lies in a page that the request does not hold: {pages}"
    return page * C128_PAGE + group % C128_PAGE


def c128_slots(
    free: FreeList, prefix_lens: _Ints, seq_lens: _Ints, pages: Sequence[Sequence[int]]
) -> tuple[FreeList, Slots, tuple[tuple[int, ...], ...]]:
    """Allocate the slots of the C128 entries that rows close on the way from ``prefix_lens`` to ``seq_lens``.

    The rule of ``extend_slots`` with entries for positions. A page that a row opens belongs in the columns
    ``c128_pages(prefix), ...`` of its row of the sidecar.

    Args:
        free: the C128 pool's free pages.
        prefix_lens: i64[B]. Positions before, a count of raw positions.
        seq_lens: i64[B]. Positions afterwards.
        pages: for every row the C128 pages that it holds, in order; unused columns of the sidecar may follow.
    Returns:
        (free, slots, new_pages): as in ``extend_slots``; a row that closes no entry has none.
    Raises:
        CapacityError: when there are fewer free pages than all rows open together.
        ShapeError: when the sequences differ in length.
    """
    held = [len(row) for row in pages]
    prefix, total, _ = _columns(C128_PAGE, prefix_lens=prefix_lens, seq_lens=seq_lens, pages=held)
    before, after = prefix // C128_RATIO, total // C128_RATIO
    last = [c128_slot(row, n - 1) if n else -1 for row, n in zip(pages, before.tolist(), strict=True)]
    return extend_slots(free, before, after, last, C128_PAGE)


def _columns(page_size: int, **named: _Ints) -> list[Slots]:
    if page_size < 1:
        raise ConfigError(
            f"page_size: expected at least 1, got {page_size}", field="page_size", expected=">= 1", got=page_size
        )
    columns = [np.asarray(column, np.int64) for column in named.values()]
    if any(column.shape != columns[0].shape or column.ndim != 1 for column in columns):
        shapes = {name: column.shape for name, column in zip(named, columns, strict=True)}
        raise ShapeError(
            f"slots: expected one integer a row in each of {', '.join(named)}, got shapes {shapes}",
            field=", ".join(named),
            expected="equal lengths",
            got=shapes,
        )
    return columns
