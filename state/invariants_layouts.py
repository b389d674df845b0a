"""What holds for layouts of slots; decode-path sheet 9.5.

``TRANSLATED`` is about one layout and some allocated ids, ``SHARDED`` about the layouts of all ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from .ids import PlainLayout, ShardedLayout, UnifiedLayout, VirtualLoc, invert_pages, window_from_kernel
from .violations import Found, listed

__all__ = ["SHARDED", "TRANSLATED", "Translation"]


@attrs.frozen(eq=False, kw_only=True)
class Translation:
    """A layout, ids, and what they can be compared with.

    Attributes:
        layout: plain or unified.
        loc: allocated ids, -1 and unmapped ones included.
        n_pages: physical pages of a unified pool; default as many as it maps.
        window: the window side's layout, where there is one.
        moved: the same layout after pages were moved.
        content: float[S,D]. Kernel rows before the move.
        moved_content: float[S,D]. Kernel rows after it.
    """

    layout: PlainLayout | UnifiedLayout
    loc: VirtualLoc
    n_pages: int | None = None
    window: UnifiedLayout | None = None
    moved: UnifiedLayout | None = None
    content: Tensor | None = None
    moved_content: Tensor | None = None

    def mapped(self) -> Tensor:
        """Return the ids that lie somewhere, each once: i64[T]."""
        ids = self.loc.ids[self.loc.ids >= self.layout.page_size].unique()
        if isinstance(self.layout, UnifiedLayout):
            return ids[self.layout.v2p[ids // self.layout.page_size] > 0]
        return ids

    def inverse(self, layout: UnifiedLayout) -> Tensor:
        """Return the virtual page of every physical page: i64[P]."""
        n_pages = int(layout.v2p.max()) + 1 if self.n_pages is None else self.n_pages
        return invert_pages(layout.v2p, n_pages)


def _rows(layout: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    loc = VirtualLoc(ids=ids)
    return layout.physical(loc).ids, layout.kernel(loc).ids


def plain_is_identity(facts: Translation) -> Found:
    """T01: a layout that does not translate gives back the allocator's ids."""
    if facts.layout.is_translating:
        return
    ids = facts.mapped()
    for name, found in zip(("physical", "kernel"), _rows(facts.layout, ids), strict=True):
        wrong = ids[found != ids]
        if len(wrong):
            yield name, f"expected the ids themselves, not so for {listed(wrong.tolist())}"


def offsets_kept(facts: Translation) -> Found:
    """T02: an id keeps its place within the page, and kernel rows are physical ones at the stride of a page."""
    ids, size = facts.mapped(), facts.layout.page_size
    blocks = facts.layout.row_blocks if isinstance(facts.layout, UnifiedLayout) else 1
    physical, kernel = _rows(facts.layout, ids)
    wrong = ids[physical % size != ids % size]
    if len(wrong):
        yield "physical", f"expected the same place within the page, not so for {listed(wrong.tolist())}"
    wrong = ids[kernel != physical // size * (size * blocks) + ids % size]
    if len(wrong):
        yield (
            "kernel",
            f"expected physical pages at a stride of {size * blocks} rows, not so for {listed(wrong.tolist())}",
        )


def translation_injective(facts: Translation) -> Found:
    """T03: no two mapped ids share a row, page 0 is page 0, and the inverse of the page table leads back."""
    ids = facts.mapped()
    for name, found in zip(("physical", "kernel"), _rows(facts.layout, ids), strict=True):
        if len(found.unique()) != len(ids):
            yield name, f"expected {len(ids)} distinct rows, got {len(found.unique())}"
    if isinstance(facts.layout, UnifiedLayout):
        if int(facts.layout.v2p[0]) != 0:
            yield "v2p", f"expected page 0 to be page 0, got {int(facts.layout.v2p[0])}"
        back = facts.layout.virtual(facts.layout.kernel(VirtualLoc(ids=ids)), facts.inverse(facts.layout)).ids
        wrong = ids[back != ids]
        if len(wrong):
            yield "p2v", f"expected the inverse to lead back, not so for {listed(wrong.tolist())}"


def sinks_stay(facts: Translation) -> Found:
    """T04: 0, -1 and ids on unmapped pages lead to 0."""
    lost = [0, -1]
    if isinstance(facts.layout, UnifiedLayout):
        unmapped = (facts.layout.v2p < 0).nonzero().flatten() * facts.layout.page_size
        lost += unmapped.tolist()
    ids = torch.tensor(lost)
    for name, found in zip(("physical", "kernel"), _rows(facts.layout, ids), strict=True):
        wrong = ids[found != 0]
        if len(wrong):
            yield name, f"expected ids that lead nowhere to become 0, not so for {listed(wrong.tolist())}"


def moves_keep_content(facts: Translation) -> Found:
    """T06: after pages were moved, every id that was mapped leads to the content that it led to before."""
    if facts.moved is None or facts.content is None or facts.moved_content is None:
        return
    ids = facts.mapped()
    old, new = facts.layout.kernel(VirtualLoc(ids=ids)).ids, facts.moved.kernel(VirtualLoc(ids=ids)).ids
    differ = (facts.content[old] != facts.moved_content[new]).flatten(1).any(1)
    if bool(differ.any()):
        yield "content", f"expected the content to move along, not so for ids {listed(ids[differ].tolist())}"


def window_routes_agree(facts: Translation) -> Found:
    """T10: a window row found through the full side's row is the one found from the allocated id."""
    if facts.window is None or not isinstance(facts.layout, UnifiedLayout):
        return
    loc = VirtualLoc(ids=facts.mapped())
    inverse = facts.inverse(facts.layout)
    through = window_from_kernel(facts.layout, inverse, facts.window, facts.layout.kernel(loc)).ids
    wrong = loc.ids[through != facts.window.kernel(loc).ids]
    if len(wrong):
        yield "window", f"expected both routes to lead to one row, not so for ids {listed(wrong.tolist())}"


TRANSLATED: Final[Mapping[str, Callable[[Translation], Found]]] = {
    "T01": plain_is_identity,
    "T02": offsets_kept,
    "T03": translation_injective,
    "T04": sinks_stay,
    "T06": moves_keep_content,
    "T10": window_routes_agree,
}
"""Predicates over a translation, by id."""


def one_owner_each(layouts: Sequence[ShardedLayout], loc: VirtualLoc) -> Found:
    """T07: every id lies on exactly one rank, all ranks agree on which, and (rank, row) names one id."""
    ids = loc.ids[loc.ids >= 0].unique()
    valid = VirtualLoc(ids=ids)
    owners = torch.stack([layout.owner(valid) for layout in layouts])
    mine = torch.stack([layout.is_mine(valid) for layout in layouts])
    wrong = ids[(mine.sum(0) != 1) | (owners != owners[0]).any(0)]
    if len(wrong):
        yield "owner", f"expected exactly one rank each, not so for ids {listed(wrong.tolist())}"
        return
    rows = torch.stack([layout.local_row(valid) for layout in layouts]).gather(0, owners[:1])[0]
    pairs = {(rank, row) for rank, row in zip(owners[0].tolist(), rows.tolist(), strict=True)}
    if len(pairs) != len(ids):
        yield "local_row", f"expected {len(ids)} distinct (rank, row), got {len(pairs)}"


def shares_add_up(layouts: Sequence[ShardedLayout], loc: VirtualLoc) -> Found:
    """T08: the ranks' shares of any length add up to it, count what they own, and differ by one block at most."""
    block = max(int(getattr(layouts[0], name, 1)) for name in ("block", "page_size"))
    everything = VirtualLoc(ids=torch.arange(len(loc.ids)))
    for length in range(len(loc.ids) + 1):
        shares = [layout.local_len(length) for layout in layouts]
        owned = [int(layout.is_mine(everything)[:length].sum()) for layout in layouts]
        if sum(shares) != length or shares != owned or max(shares) - min(shares) > block:
            yield "local_len", f"expected shares {owned} of length {length}, got {shares}"
            return


def read_back_once(layouts: Sequence[ShardedLayout], loc: VirtualLoc) -> Found:
    """T09: what all ranks write through their tables is read back on exactly one of them, position by position."""
    n = len(loc.ids)
    positions = torch.cat([layout.local_positions(n) for layout in layouts])
    if positions.sort().values.tolist() != list(range(n)):
        yield "local_positions", f"expected every position below {n} once, got {listed(positions.tolist())}"
    for rank, layout in enumerate(layouts):
        mine = loc.ids[layout.is_mine(loc)]
        rows = layout.kernel(VirtualLoc(ids=mine)).ids
        stored = dict(zip(rows.tolist(), mine.tolist(), strict=True))
        wrong = [i for i, row in zip(mine.tolist(), rows.tolist(), strict=True) if stored[row] != i]
        if wrong:
            yield f"rank {rank}", f"expected to read back what was written, not so for ids {listed(wrong)}"


SHARDED: Final[Mapping[str, Callable[[Sequence[ShardedLayout], VirtualLoc], Found]]] = {
    "T07": one_owner_each,
    "T08": shares_add_up,
    "T09": read_back_once,
}
"""Predicates over (the layouts of all ranks, allocated ids outside the sink pages), by id."""
