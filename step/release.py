"""What a request holds, and giving back what lies behind a position: changes of table and caches as pure functions.

Source: SGLang 0.5.23 ``mem_cache/common.py`` (release), ``hardware_backend/npu/dsv4/dsv4_allocator.py`` (refcounts);
decode-path sheet 1.10, 4.4.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..state.capacity import C128_PAGE, C128_RATIO
from ..state.decode import DecodeState, Request
from ..state.kv import KVState
from ..state.pages import FreeList, c128_pages
from ..state.table import Edit, RequestTable, read_table, write_table

__all__ = [
    "Copy",
    "Holdings",
    "copied_rows",
    "drop_behind",
    "layer_rows",
    "read_holdings",
    "release_row",
]

Ints = NDArray[np.int64]

Copy = tuple[str, Ints, Ints]
"""Buffer name, slots read, slots written; in every layer of the buffer."""


@attrs.frozen(eq=False, kw_only=True)
class Holdings:
    """What one request names for its first positions, read from the table.

    Attributes:
        pages: full pages, in order of position.
        swa_pages: window pages of the positions that are not evicted.
        c128: C128 pages.
    """

    pages: Ints
    swa_pages: Ints
    c128: Ints


def read_holdings(table: RequestTable, request: Request, n: int | None = None) -> Holdings:
    """Read what a request names for its first ``n`` positions; default all of them."""
    sizes, n = table.sizes, request.kv_len if n is None else n
    firsts = np.arange(0, n, sizes.page_size)
    with read_table(table) as view:
        slots = view["req_to_token"][request.row * sizes.context + firsts].astype(np.int64)
        windows = view["full_to_swa"][slots[firsts + sizes.page_size > request.evicted_len]]
        named = view["sidecar"][request.row * sizes.sidecar_width :][: c128_pages(n)].astype(np.int64)
    return Holdings(pages=slots // sizes.page_size, swa_pages=windows // sizes.page_size, c128=named)


def drop_behind(state: DecodeState, request: Request, n: int) -> DecodeState:
    """Give back what a request holds behind its first ``n`` positions.

    Args:
        state: before.
        request: an open request with a row.
        n: a reuse point of it.
    Returns:
        The state with new table and caches; the request's record is still the old one.
    Raises:
        CapacityError: no page for its own copy of a C128 page that a fork reads as well; nothing was changed.
    """
    if n >= request.kv_len:
        return state
    table, sizes = state.table, state.table.sizes
    held, kept = read_holdings(table, request), read_holdings(table, request, n)
    pages, c128 = held.pages[len(kept.pages) :], held.c128[len(kept.c128) :]
    swa_pages = held.swa_pages[len(kept.swa_pages) :]
    edits: list[Edit] = []
    # Window peers first: freeing them reads the map that the full pages still have.
    free_swa, gone_swa = _released(table, "swa_refs", table.free_swa_pages, swa_pages, edits)
    free_full, gone_full = _released(table, "page_refs", table.free_pages, pages, edits)
    free_c128, _ = _released(table, "c128_refs", table.free_c128_pages, c128, edits)
    owners = pages[len(pages) - len(swa_pages) :][np.isin(swa_pages, gone_swa)]
    edits.append(("full_to_swa", (owners[:, None] * sizes.page_size + np.arange(sizes.page_size)).reshape(-1), 0))
    assert np.isin(gone_full, pages).all(), "only pages of this request can become free here"
    columns = request.row * sizes.sidecar_width
    edits.append(("sidecar", columns + np.arange(len(kept.c128), len(held.c128)), 0))
    free_c128, copies = _own_last_c128(table, free_c128, kept, n, columns, edits)
    table = attrs.evolve(
        table,
        handle=write_table(table, edits),
        free_pages=free_full,
        free_swa_pages=free_swa,
        free_c128_pages=free_c128,
    )
    return attrs.evolve(state, table=table, kv=copied_rows(state.kv, copies))


def _own_last_c128(
    table: RequestTable, free: FreeList, kept: Holdings, n: int, columns: int, edits: list[Edit]
) -> tuple[FreeList, list[Copy]]:
    """Replace the partly kept C128 page by an own copy where somebody else reads it: its other entries will change."""
    n_rest = n // C128_RATIO % C128_PAGE
    if not n_rest:
        return free, []
    last = kept.c128[-1:]
    refs = int(table.handle.rows("c128_refs", torch.from_numpy(last))[0])
    if refs == 1:
        return free, []
    free, (page,) = free.take(1)
    edits += [("c128_refs", last, refs - 1), ("c128_refs", np.array([page]), 1)]
    edits.append(("sidecar", np.array([columns + len(kept.c128) - 1]), page))
    entries = np.arange(n_rest)
    return free, [("c128", last[0] * C128_PAGE + entries, page * C128_PAGE + entries)]


def _released(table: RequestTable, name: str, free: FreeList, pages: Ints, edits: list[Edit]) -> tuple[FreeList, Ints]:
    """Drop one reference of each page: (free list with the orphaned pages, the orphaned pages)."""
    left = table.handle.rows(name, torch.from_numpy(pages)).numpy().astype(np.int64) - 1
    edits.append((name, pages, left))
    orphans = pages[left == 0]
    return free.give(orphans.tolist()), orphans


def release_row(state: DecodeState, request: Request) -> DecodeState:
    """Give back everything that a request holds, its row of the table included.

    Args:
        state: before.
        request: an open request; one without a row holds nothing.
    Returns:
        The state with new table and caches; the request's record is still the old one.
    """
    if request.is_parked:
        return state
    state = drop_behind(state, request, 0)
    table = attrs.evolve(state.table, free_rows=state.table.free_rows.give((request.row,)))
    return attrs.evolve(state, table=table, kv=_cleared_ring(state.kv, request.row))


def layer_rows(kv: KVState, name: str, slots: Ints) -> torch.Tensor:
    """Return the buffer rows of ``slots`` in every layer, layer-major."""
    return torch.from_numpy(kv.layout.rows(name, slots)).to(kv.device)


def _cleared_ring(kv: KVState, row: int) -> KVState:
    """Reset the C128 pooling state of a table row to (value 0, score -inf)."""
    name = "c128_state"
    if not kv.layout.n_layers(name):
        return kv
    rows = layer_rows(kv, name, kv.layout.c128_bank(np.array([row])))
    with kv.handle.write({name: rows}) as write:
        state = write.tensors[name]
        empty = state.new_zeros(state.shape[1])
        empty[kv.layout.first_score(name, len(empty)) :] = -torch.inf
        state.index_copy_(0, rows, empty.expand(len(rows), -1))
    return attrs.evolve(kv, handle=write.handle)


def copied_rows(kv: KVState, copies: list[Copy]) -> KVState:
    """Copy cache rows within every layer."""
    plans = {
        name: (layer_rows(kv, name, source), layer_rows(kv, name, target))
        for name, source, target in copies
        if kv.layout.n_layers(name) and len(source)
    }
    if not plans:
        return kv
    with kv.handle.write({name: target for name, (_, target) in plans.items()}) as write:
        for name, (source, target) in plans.items():
            buffer = write.tensors[name]
            buffer.index_copy_(0, target, buffer.index_select(0, source))
    return attrs.evolve(kv, handle=write.handle)
