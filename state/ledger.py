"""A host copy of what a state holds, for predicates and comparisons; reading one leaves the state as it is.

Whole tables are copied, so this is for tests, debugging and reports, not for a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .capacity import C4_RATIO, C128_PAGE, C128_RATIO, PoolSizes
from .decode import DecodeState, Request
from .kv import C4_RING
from .pages import c128_pages
from .table import read_table

__all__ = [
    "Holding",
    "Ledger",
    "c4_state_rows",
    "common_prefix",
    "digest",
    "digest_rows",
    "live_rows",
    "read_ledger",
    "same_record",
]

Ints = NDArray[np.int64]


@attrs.frozen(eq=False, kw_only=True)
class Holding:
    """What one open request names.

    Attributes:
        request: its record.
        tokens: i64[T]. Every token so far.
        slots: i64[L]. Full slots of the positions that own one.
        windows: i64[L]. Their window slots; 0 where the window page was given back.
        pages: i64[P]. Full page of every page of positions, by its first position.
        sidecar: i64[C]. The whole row of C128 pages.
    """

    request: Request
    tokens: Ints
    slots: Ints
    windows: Ints
    pages: Ints
    sidecar: Ints

    @property
    def name(self) -> str:
        """How messages call the request."""
        return f"request {self.request.request_id}"

    @property
    def n_c128(self) -> int:
        """Count the C128 pages that the request holds."""
        return c128_pages(self.request.kv_len)


@attrs.frozen(eq=False, kw_only=True)
class Ledger:
    """One state, read out.

    Attributes:
        state: what was read.
        holdings: one per open request, in order of opening.
        req_to_token: i64[B+1,S].
        full_to_swa: i64[S].
        sidecar: i64[B+1,C].
        page_refs: i64[S] by full page.
        swa_refs: i64[S] by window page.
        c128_refs: i64[S] by C128 page.
        relay: i64[B+1].
        free_rows: free table rows, next to be taken first; so are the others.
        free_pages: free full pages.
        free_swa_pages: free window pages.
        free_c128_pages: free C128 pages.
    """

    state: DecodeState
    holdings: tuple[Holding, ...]
    req_to_token: Ints
    full_to_swa: Ints
    sidecar: Ints
    page_refs: Ints
    swa_refs: Ints
    c128_refs: Ints
    relay: Ints
    free_rows: Ints
    free_pages: Ints
    free_swa_pages: Ints
    free_c128_pages: Ints

    @property
    def sizes(self) -> PoolSizes:
        """Numbers of pages and rows."""
        return self.state.table.sizes

    @property
    def by_id(self) -> Mapping[int, Holding]:
        """The holdings by request id."""
        return {holding.request.request_id: holding for holding in self.holdings}

    def swa_pages(self, holding: Holding) -> Ints:
        """Return the window pages that a request still holds, in order of position."""
        size = self.sizes.page_size
        return holding.windows[holding.request.evicted_len // size * size :: size] // size

    def cut(self, holding: Holding, n: int) -> Holding:
        """Return what a request named when it had ``n`` positions; window pages given back since are not among it."""
        return attrs.evolve(
            holding,
            request=attrs.evolve(holding.request, kv_len=n, evicted_len=min(holding.request.evicted_len, n)),
            slots=holding.slots[:n],
            windows=holding.windows[:n],
            pages=holding.pages[: -(-n // self.sizes.page_size)],
        )


def read_ledger(state: DecodeState) -> Ledger:
    """Read a state out.

    Args:
        state: any state; entries that point outside the tables are read as entry 0, so that broken states can be read.
    Returns:
        Copies that do not change any more.
    """
    table, sizes = state.table, state.table.sizes
    with read_table(table) as view:
        copies = {name: array.astype(np.int64) for name, array in view.items()}
    req_to_token = copies["req_to_token"].reshape(sizes.requests + 1, sizes.context)
    sidecar = copies["sidecar"].reshape(sizes.requests + 1, sizes.sidecar_width)
    return Ledger(
        state=state,
        holdings=tuple(_hold(r, req_to_token, copies["full_to_swa"], sidecar, sizes) for r in state.requests),
        req_to_token=req_to_token,
        full_to_swa=copies["full_to_swa"],
        sidecar=sidecar,
        page_refs=copies["page_refs"],
        swa_refs=copies["swa_refs"],
        c128_refs=copies["c128_refs"],
        relay=state.relay.cpu().numpy(),
        free_rows=np.array(tuple(table.free_rows), np.int64),
        free_pages=np.array(tuple(table.free_pages), np.int64),
        free_swa_pages=np.array(tuple(table.free_swa_pages), np.int64),
        free_c128_pages=np.array(tuple(table.free_c128_pages), np.int64),
    )


def _hold(request: Request, req_to_token: Ints, full_to_swa: Ints, sidecar: Ints, sizes: PoolSizes) -> Holding:
    row = request.row if 0 <= request.row <= sizes.requests else 0
    slots = req_to_token[row, : max(0, request.kv_len)].copy()
    inside = (slots >= 0) & (slots < len(full_to_swa) - 1)
    return Holding(
        request=request,
        tokens=request.tokens.numpy(),
        slots=slots,
        windows=full_to_swa[np.where(inside, slots, 0)],
        pages=slots[:: sizes.page_size] // sizes.page_size,
        sidecar=sidecar[row].copy(),
    )


def same_record(one: Holding, other: Holding) -> bool:
    """Tell whether two records of a request agree in every field."""
    return attrs.astuple(one.request, recurse=False) == attrs.astuple(other.request, recurse=False)


def common_prefix(one: Ints, other: Ints) -> int:
    """Count the leading ids that two sequences share."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


def c4_state_rows(windows: Ints, page_size: int) -> Ints:
    """Return the pooling-state rows of window slots, a ring of 8 per window page."""
    return windows // page_size * C4_RING + windows % C4_RING


def live_rows(ledger: Ledger, holding: Holding) -> Mapping[str, Ints]:
    """List the cache rows that a request may still read, by buffer; within one layer."""
    request, size = holding.request, ledger.sizes.page_size
    n, row = request.kv_len, request.row
    groups = np.arange(n // C128_RATIO)
    ring = c4_state_rows(holding.windows[max(0, n - C4_RING, request.evicted_len) :], size)
    entries = holding.slots[C4_RATIO - 1 :: C4_RATIO] // C4_RATIO
    return {
        "swa": holding.windows[request.evicted_len :],
        "c4": entries,
        "index": entries,
        **({"index_scale": entries} if ledger.state.kv.layout.is_paged else {}),
        "c128": holding.sidecar[groups // C128_PAGE] * C128_PAGE + groups % C128_PAGE,
        "c4_state": ring,
        "index_state": ring,
        "c128_state": ledger.state.kv.layout.open_c128(row, n),
    }


def digest_rows(ledger: Ledger, holding: Holding) -> bytes:
    """Summarise the content of the cache rows that a request may still read, whatever their numbers."""
    found = hashlib.blake2b()
    kv = ledger.state.kv
    for buffer, slots in live_rows(ledger, holding).items():
        n_layers = kv.layout.n_layers(buffer)
        if n_layers and len(slots):
            found.update(_bytes(kv.handle.rows(buffer, torch.from_numpy(kv.layout.rows(buffer, slots)))))
    return found.digest()


def _bytes(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return b"none"
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def digest(state: DecodeState) -> bytes:
    """Summarise everything that a state can still act on: records, allocation, live cache rows, sampling.

    Args:
        state: any state.
    Returns:
        A hash; equal for states that behave alike to the bit, slot numbers included.
    """
    ledger = read_ledger(state)
    found = hashlib.blake2b()

    def add(*values: object) -> None:
        found.update(repr(values).encode())

    add(state.seed, state.next_id, state.capacity, state.launched and state.launched.request_ids)
    for name in ("full_to_swa", "page_refs", "swa_refs", "c128_refs", "sidecar"):
        found.update(getattr(ledger, name).tobytes())
    for name in ("free_rows", "free_pages", "free_swa_pages", "free_c128_pages"):
        found.update(getattr(ledger, name).tobytes())
    for holding in ledger.holdings:
        request = holding.request
        add(request.request_id, request.row, request.kv_len, request.evicted_len, request.decode_count)
        add(
            request.kept_len,
            request.finished,
            request.tokens.tolist(),
            request.output_positions.tolist(),
            holding.slots.tolist(),
        )
        add(int(ledger.relay[request.row]) if request.has_pending and request.row else None)
        found.update(digest_rows(ledger, holding))
    for row in state.sampling.rows:
        add(row.request_id, row.params, row.seed, row.n_outputs)
        found.update(_bytes(row.output_counts) + _bytes(row.prompt_seen))
    return found.digest()
