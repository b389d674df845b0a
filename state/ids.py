"""The id spaces of a slot, and the layouts that lead from one to the next.

A slot has up to three ids, and each space is a type of its own, so that an id cannot be translated twice or not at all:

============ ============================= ============================================================
type         kept in                       changes
============ ============================= ============================================================
VirtualLoc   ``req_to_token``, free lists  never, as long as the slot lives
PhysicalLoc  nowhere                       when a page is moved
KernelLoc    ``ForwardBatch``              with the physical id; the row that a kernel reads or writes
============ ============================= ============================================================

A layout is a value that translates. With page size ``ps``, ``M`` row blocks in a page and the page table ``v2p``::

    physical(t) = v2p[t div ps] * ps       + t mod ps
    kernel(t)   = v2p[t div ps] * (ps * M) + t mod ps

Where several ranks share the positions, a layout deals blocks of ``I`` ids to ``ways`` ranks in turn::

    owner(t) = (t div I) mod ways          local(t) = (t div (ways * I)) * I + t mod I

**Ids that lead nowhere.** A negative id, an id on an unmapped page and another rank's id all become 0, the sink, in
``PhysicalLoc`` and ``KernelLoc``: these two cannot be built with a negative id, so no indexed write can wrap round to
the last row. The other marker in use, -1 for "another rank's row", exists only in ``MarkedLoc``, which is no id space
and has no ``ids``: kernels that skip -1 take it, everything else goes through ``MarkedLoc.sink``. Whether an id is this
rank's is asked of ``is_mine``, never read off the id.

All arithmetic is in int64: block 29,077 at a stride of 73,856 rows is already beyond int32.

Source: sgl-project/sglang, ``python/sglang/srt/mem_cache/kv_index_translator.py``, ``kv_loc_plan.py``,
``allocator/unified_hybrid_swa.py`` and ``allocator/page_interleave.py`` in the same folder, and
``python/sglang/srt/layers/dcp/layout.py``, at release 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from .errors import ConfigError, DtypeError
from .values import value

__all__ = [
    "BlockInterleave",
    "KernelLoc",
    "Layout",
    "MarkedLoc",
    "PageInterleave",
    "PhysicalLoc",
    "PlainLayout",
    "ShardedLayout",
    "TokenInterleave",
    "UnifiedLayout",
    "VirtualLoc",
    "invert_pages",
    "window_from_kernel",
]


def _wide(ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise DtypeError(
            f"ids: expected an int64 tensor, got {got}; widen with .to(torch.int64) before any arithmetic",
            field="ids",
            expected=torch.int64,
            got=got,
        )
    return ids


def _wide_or_sink(ids: Tensor) -> Tensor:
    return _wide(ids).clamp(min=0)


@value
@attrs.frozen(eq=False, kw_only=True)
class VirtualLoc:
    """Ids as allocated, i64[T]; -1 means "no slot"."""

    ids: Tensor = attrs.field(converter=_wide)


@value
@attrs.frozen(eq=False, kw_only=True)
class PhysicalLoc:
    """Ids of slots where they lie now, i64[T]; a negative id given becomes 0, the sink."""

    ids: Tensor = attrs.field(converter=_wide_or_sink)


@value
@attrs.frozen(eq=False, kw_only=True)
class KernelLoc:
    """Rows as kernels index them, i64[T]; a negative id given becomes 0, the sink."""

    ids: Tensor = attrs.field(converter=_wide_or_sink)


@value
@attrs.frozen(eq=False, kw_only=True)
class MarkedLoc:
    """Rank-local rows, i64[T], for kernels that skip -1 ("another rank's row"); never index with them."""

    marked: Tensor = attrs.field(converter=_wide)

    def sink(self) -> KernelLoc:
        """Point every marked row to the sink, so that the ids can be indexed with."""
        return KernelLoc(ids=self.marked)


class Layout(Protocol):
    """What every layout can do."""

    @property
    def is_translating(self) -> bool:
        """Whether write ids differ from allocated ids."""

    def physical(self, loc: VirtualLoc) -> PhysicalLoc:
        """Find where slots lie."""

    def kernel(self, loc: VirtualLoc) -> KernelLoc:
        """Find the rows that kernels index for slots."""


class ShardedLayout(Layout, Protocol):
    """What a layout can do in which every position lies on one of several ranks."""

    def owner(self, loc: VirtualLoc) -> Tensor:
        """Find the rank that holds each id, -1 for an id that is none."""

    def is_mine(self, loc: VirtualLoc) -> Tensor:
        """Tell which ids lie on this rank."""

    def local_row(self, loc: VirtualLoc) -> Tensor:
        """Find the place of each id within its owner."""

    def local_len(self, end: int, start: int = 0) -> int:
        """Count the positions of ``[start, end)`` that lie on this rank."""

    def local_positions(self, length: int) -> Tensor:
        """List the positions below ``length`` that lie on this rank."""


def _at_least_one(instance: Any, attribute: attrs.Attribute[int], number: int) -> None:
    if number < 1:
        where = f"{type(instance).__name__}.{attribute.name}"
        raise ConfigError(
            f"{where}: expected at least 1, got {number}; give the layout its real size",
            field=attribute.name,
            expected=">= 1",
            got=number,
        )


def _below_ways(instance: _Interleave, attribute: attrs.Attribute[int], rank: int) -> None:
    if not 0 <= rank < instance.ways:
        where = f"{type(instance).__name__}.{attribute.name}"
        raise ConfigError(
            f"{where}: expected 0..{instance.ways - 1}, got {rank}; ranks of {instance.ways} ways start at 0",
            field=attribute.name,
            expected=f"0..{instance.ways - 1}",
            got=rank,
        )


def _allocated(loc: VirtualLoc) -> Tensor:
    if not isinstance(loc, VirtualLoc):
        got = type(loc).__name__
        raise DtypeError(
            f"layout: expected VirtualLoc, got {got}; ids are translated once, from the allocated ones",
            field="loc",
            expected="VirtualLoc",
            got=got,
        )
    return loc.ids


@value
@attrs.frozen(eq=False, kw_only=True)
class PlainLayout:
    """One space: allocated ids are rows (Ascend V4 without context parallelism, full side)."""

    page_size: int = attrs.field(validator=_at_least_one)

    @property
    def is_translating(self) -> bool:
        """Whether write ids differ from allocated ids: no."""
        return False

    def physical(self, loc: VirtualLoc) -> PhysicalLoc:
        """Find where slots lie: where they were allocated."""
        return PhysicalLoc(ids=_allocated(loc))

    def kernel(self, loc: VirtualLoc) -> KernelLoc:
        """Find the rows that kernels index for slots: the slots."""
        return KernelLoc(ids=_allocated(loc))


@value
@attrs.frozen(eq=False, kw_only=True)
class UnifiedLayout:
    """A pool whose pages can be moved, and hold ``row_blocks`` blocks of rows each.

    A window sub-pool is a second layout of this class with its own table. Its ids come **directly** from the virtual
    ones, ``window.kernel(loc)``; ``window_from_kernel`` is the other route.

    Args:
        page_size: slots in a page.
        row_blocks: blocks of ``page_size`` rows in a physical page (several layers, say).
        v2p: 1-D int64, the physical page of every virtual page, -1 where unmapped; ``v2p[0] = 0``.
    """

    page_size: int = attrs.field(validator=_at_least_one)
    row_blocks: int = attrs.field(validator=_at_least_one)
    v2p: Tensor = attrs.field(converter=_wide)

    @property
    def is_translating(self) -> bool:
        """Whether write ids differ from allocated ids: they may."""
        return True

    def physical(self, loc: VirtualLoc) -> PhysicalLoc:
        """Find where slots lie now."""
        return PhysicalLoc(ids=self._address(_allocated(loc), self.page_size))

    def kernel(self, loc: VirtualLoc) -> KernelLoc:
        """Find the rows that kernels index for slots."""
        return KernelLoc(ids=self._address(_allocated(loc), self.page_size * self.row_blocks))

    def virtual(self, loc: KernelLoc, p2v: Tensor) -> VirtualLoc:
        """Find the allocated ids of rows; those of the sink and of unmapped pages are 0.

        Args:
            loc: rows from ``kernel``.
            p2v: ``invert_pages`` of this table.
        """
        stride = self.page_size * self.row_blocks
        page = p2v[loc.ids // stride]
        return VirtualLoc(ids=torch.where(page >= 0, page * self.page_size + loc.ids % stride, 0))

    def _address(self, ids: Tensor, stride: int) -> Tensor:
        # A negative id must not index the table either: it would read the last page.
        page = self.v2p[ids.clamp(min=0) // self.page_size]
        return torch.where((ids >= 0) & (page >= 0), page * stride + ids % self.page_size, 0)


def invert_pages(v2p: Tensor, n_pages: int) -> Tensor:
    """Invert a page table.

    Args:
        v2p: 1-D int64, physical page of every virtual page, -1 where unmapped.
        n_pages: physical pages of the pool, page 0 included.
    Returns:
        1-D int64 of ``n_pages``: virtual page of every physical page, -1 where none.
    """
    # Unmapped pages are sent to one entry too many, which is cut off: the shape then depends on no content.
    p2v = v2p.new_full((n_pages + 1,), -1)
    p2v[torch.where(v2p < 0, n_pages, v2p)] = torch.arange(len(v2p), device=v2p.device)
    return p2v[:n_pages]


def window_from_kernel(full: UnifiedLayout, p2v: Tensor, window: UnifiedLayout, loc: KernelLoc) -> KernelLoc:
    """Find a window row from the full side's row, by going back to the allocated id.

    Agrees with the direct route ``window.kernel(virtual)`` for every slot that the full side still maps.

    Args:
        full: the full side's layout.
        p2v: ``invert_pages`` of its table.
        window: the window side's layout.
        loc: rows from ``full.kernel``.
    """
    return window.kernel(full.virtual(loc, p2v))


@value
@attrs.frozen(eq=False, kw_only=True)
class _Interleave:
    """Blocks of ids dealt to ``ways`` ranks in turn, as seen by one ``rank``."""

    ways: int = attrs.field(validator=_at_least_one)
    rank: int = attrs.field(validator=_below_ways)

    @property
    def _block(self) -> int:
        raise NotImplementedError

    @property
    def is_translating(self) -> bool:
        """Whether write ids differ from allocated ids."""
        return self.ways > 1

    def physical(self, loc: VirtualLoc) -> PhysicalLoc:
        """Find where this rank's slots lie; the others' go to the sink."""
        return PhysicalLoc(ids=self._sink_others(loc, self.local_row(loc)))

    def kernel(self, loc: VirtualLoc) -> KernelLoc:
        """Find the rows that kernels index for this rank's slots; the others' go to the sink."""
        return KernelLoc(ids=self._sink_others(loc, self.local_row(loc)))

    def owner(self, loc: VirtualLoc) -> Tensor:
        """Find the rank that holds each id, -1 for an id that is none."""
        ids = _allocated(loc)
        return torch.where(ids < 0, -1, ids // self._block % self.ways)

    def is_mine(self, loc: VirtualLoc) -> Tensor:
        """Tell which ids lie on this rank."""
        return self.owner(loc) == self.rank

    def local_row(self, loc: VirtualLoc) -> Tensor:
        """Find the place of each id within its owner, 0 for an id that is none."""
        ids = _allocated(loc).clamp(min=0)
        return ids // (self.ways * self._block) * self._block + ids % self._block

    def local_len(self, end: int, start: int = 0) -> int:
        """Count the positions of ``[start, end)`` that lie on this rank."""
        return self._owned_below(end) - self._owned_below(start)

    def local_positions(self, length: int) -> Tensor:
        """List the positions below ``length`` that lie on this rank, in order."""
        row = torch.arange(self.local_len(length))
        return (row // self._block * self.ways + self.rank) * self._block + row % self._block

    def _owned_below(self, length: int) -> int:
        rounds, rest = divmod(length, self.ways * self._block)
        return rounds * self._block + min(max(rest - self.rank * self._block, 0), self._block)

    def _sink_others(self, loc: VirtualLoc, rows: Tensor) -> Tensor:
        return torch.where(self.is_mine(loc), rows, 0)


@value
@attrs.frozen(eq=False, kw_only=True)
class TokenInterleave(_Interleave):
    """Context parallelism that deals single tokens, over another layout on each rank.

    An allocated ("widened") page is ``ways`` pages of ``inner``, one on each rank. Not this rank's: 0.
    """

    inner: PlainLayout | UnifiedLayout

    @property
    def is_translating(self) -> bool:
        """Whether write ids differ from allocated ids."""
        return self.ways > 1 or self.inner.is_translating

    @property
    def _block(self) -> int:
        return 1

    def physical(self, loc: VirtualLoc) -> PhysicalLoc:
        """Find where this rank's slots lie; the others' go to the sink."""
        return PhysicalLoc(ids=self._sink_others(loc, self.inner.physical(self._inner_loc(loc)).ids))

    def kernel(self, loc: VirtualLoc) -> KernelLoc:
        """Find the rows that kernels index for this rank's slots; the others' go to the sink."""
        return KernelLoc(ids=self._sink_others(loc, self.inner.kernel(self._inner_loc(loc)).ids))

    def _inner_loc(self, loc: VirtualLoc) -> VirtualLoc:
        return VirtualLoc(ids=self.local_row(loc))


@value
@attrs.frozen(eq=False, kw_only=True)
class BlockInterleave(_Interleave):
    """Context parallelism that deals blocks of ``block`` tokens, usually pages (NPU).

    Kernels there take -1 for another rank's row: ``marked``. ``physical`` and ``kernel`` send it to the sink, like
    every other layout.
    """

    block: int = attrs.field(validator=_at_least_one)

    @property
    def _block(self) -> int:
        return self.block

    def marked(self, loc: VirtualLoc) -> MarkedLoc:
        """Find this rank's rows, with -1 for another rank's, for kernels that skip it."""
        return MarkedLoc(marked=torch.where(self.is_mine(loc), self.local_row(loc), -1))


@value
@attrs.frozen(eq=False, kw_only=True)
class PageInterleave(_Interleave):
    """Sharding that deals whole logical pages; logical pages ``0..ways-1`` are every rank's sink page.

    A chain of pages starts at a ``base`` class and goes round from there; ``local_len`` and ``local_positions`` count
    positions of a chain with base 0. Not this rank's: 0.
    """

    page_size: int = attrs.field(validator=_at_least_one)

    @property
    def _block(self) -> int:
        return self.page_size

    def page_class(self, base: int, page: int) -> int:
        """Find the rank for page number ``page`` of a chain that starts at ``base``."""
        return (base + page) % self.ways

    def chain_base(self, n_free: Sequence[int]) -> int:
        """Choose where a new chain starts: the class with most free pages, the lowest among equals."""
        return max(range(self.ways), key=lambda rank: (n_free[rank], -rank))

    def n_available(self, n_free: Sequence[int]) -> int:
        """Count the tokens that surely fit, given the free pages of every class; pessimistic on purpose."""
        return self.ways * self.page_size * min(n_free)
