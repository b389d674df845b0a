"""Forks: requests that begin as a part of another one's history.

Source: none; upstream shares prefixes through a radix tree of pages (SGLang 0.5.23 ``mem_cache/radix_cache.py``).
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO, PoolSizes
from ..state.decode import DecodeState, Request, find_request
from ..state.errors import RequestError
from ..state.kv import C4_RING
from ..state.sampling import SamplingParams, SamplingState, fork_row, row_of
from ..state.table import Edit, RequestTable, write_table
from ..state.tokens import TokenLog
from .cuts import checked_length, cut_history, cut_record, reuse_point
from .metadata import c4_state_loc
from .prepare import require_committed
from .relay import put_token
from .release import Copy, copied_rows, read_holdings
from .requests import check_params

__all__ = ["fork_request"]

Ints = NDArray[np.int64]


def fork_request(
    state: DecodeState,
    request_id: int,
    *,
    at: int | None = None,
    sampling: SamplingParams | None = None,
    as_prompt: bool = False,
) -> tuple[DecodeState, int]:
    """Open a request that shares another one's history, whole or up to a token.

    Shared pages are whole; the partly filled ones and the pooling state that belongs to them are copied, so neither
    side can ever write what the other reads. Everything else is inherited, seed and pending token included: without
    ``at`` and ``sampling`` the fork continues identically.

    With ``at`` the fork has the first ``at`` tokens. It starts at the nearest *reuse point*: all that the parent has
    cached, or a multiple of the page size and of 128 whose window pages still live, or nothing. The tokens from there
    on are fed first by its next step: ``find_request(state, fork_id).n_unfed`` of them. Where that is none, a step that
    names it feeds its last tokens again.

    Args:
        state: before.
        request_id: the request to fork; one that has finished may be forked at an earlier token.
        at: tokens to share; default all, the pending one included.
        sampling: other parameters for the fork (another seed, say).
        as_prompt: count all shared tokens as given, none as sampled: for a new request on an old prefix.
    Returns:
        (state, fork_id).
    Raises:
        RequestError: no such request, not so many tokens, or ids in ``sampling`` outside the vocabulary.
        CapacityError: no row or page for the copies; nothing was changed.
    """
    require_committed(state)
    parent = find_request(state, request_id)
    n = len(parent.tokens) if at is None else checked_length(parent, at, "at")
    point = reuse_point(state, parent, n)
    cut = parent if n == len(parent.tokens) else cut_record(parent, n, point)
    if as_prompt:
        cut = attrs.evolve(cut, output_positions=TokenLog(), kept_len=n, finished=None)
    fork_id = state.next_id
    sampled = _forked_sampling(state, cut, fork_id, sampling, is_whole=cut is parent)
    free_rows, (row,) = state.table.free_rows.take(1)
    table, copies = _forked_table(attrs.evolve(state.table, free_rows=free_rows), parent, row, point)
    layout = state.kv.layout
    copies.append(("c128_state", layout.open_c128(parent.row, point), layout.open_c128(row, point)))
    fork = attrs.evolve(cut, request_id=fork_id, row=row)
    state = attrs.evolve(
        state,
        next_id=fork_id + 1,
        requests=(*state.requests, fork),
        table=table,
        kv=copied_rows(state.kv, copies),
        relay=put_token(state.relay, fork),
        sampling=sampled,
    )
    return state, fork_id


def _forked_sampling(
    state: DecodeState, cut: Request, fork_id: int, params: SamplingParams | None, *, is_whole: bool
) -> SamplingState:
    """Continue the parent's sampling row with the tokens that the fork has."""
    if params is not None:
        check_params(state, params)
        if params.max_new_tokens is not None and params.max_new_tokens <= cut.n_outputs:
            raise RequestError(
                f"max_new_tokens: the fork of request {cut.request_id} has {cut.n_outputs} outputs already and counts "
                f"them; expected more than that, got {params.max_new_tokens}",
                field="max_new_tokens",
                expected=f"> {cut.n_outputs}",
                got=params.max_new_tokens,
            )
    has_counts = (
        params is None or not params.has_penalties or row_of(state.sampling, cut.request_id).params.has_penalties
    )
    history = None if is_whole and has_counts else cut_history(state, cut)
    return fork_row(state.sampling, cut.request_id, fork_id, params, history=history)


def _forked_table(table: RequestTable, parent: Request, row: int, n: int) -> tuple[RequestTable, list[Copy]]:
    """Name the parent's whole pages of ``n`` positions from ``row`` too, and take own pages for partly filled ones."""
    sizes = table.sizes
    n_rest, n_rest_c128 = n % sizes.page_size, n // C128_RATIO % C128_PAGE
    held = read_holdings(table, parent, n)
    free_full, own_full = table.free_pages.take(int(n_rest > 0))
    free_swa, own_swa = table.free_swa_pages.take(int(n_rest > 0))
    free_c128, own_c128 = table.free_c128_pages.take(int(n_rest_c128 > 0))
    shared = held.pages[: len(held.pages) - len(own_full)]
    shared_swa = held.swa_pages[: len(held.swa_pages) - len(own_swa)]
    shared_c128 = held.c128[: len(held.c128) - len(own_c128)]
    pages = np.append(shared, np.array(own_full, np.int64))
    slots = (pages[:, None] * sizes.page_size + np.arange(sizes.page_size)).reshape(-1)[:n]
    edits: list[Edit] = [
        ("req_to_token", row * sizes.context + np.arange(n), slots),
        (
            "sidecar",
            row * sizes.sidecar_width + np.arange(len(held.c128)),
            np.append(shared_c128, np.array(own_c128, np.int64)),
        ),
    ]
    rest = np.arange(n_rest)
    copies: list[Copy] = []
    for full, swa in zip(own_full, own_swa, strict=True):
        edits.append(("full_to_swa", full * sizes.page_size + rest, swa * sizes.page_size + rest))
        copies += _page_copies(sizes, n_rest, (int(held.pages[-1]), full), (int(held.swa_pages[-1]), swa))
    for page in own_c128:
        entries = np.arange(n_rest_c128)
        copies.append(("c128", held.c128[-1] * C128_PAGE + entries, page * C128_PAGE + entries))
    for name, both, own in (
        ("page_refs", shared, own_full),
        ("swa_refs", shared_swa, own_swa),
        ("c128_refs", shared_c128, own_c128),
    ):
        counts = table.handle.rows(name, torch.from_numpy(both)).numpy().astype(np.int64)
        edits += [(name, both, counts + 1), (name, np.array(own, np.int64), 1)]
    table = attrs.evolve(
        table,
        handle=write_table(table, edits),
        free_pages=free_full,
        free_swa_pages=free_swa,
        free_c128_pages=free_c128,
    )
    return table, copies


def _page_copies(sizes: PoolSizes, n_rest: int, full: tuple[int, int], swa: tuple[int, int]) -> list[Copy]:
    """List what lies in a partly filled page of ``n_rest`` tokens: window rows, C4 entries, pooling state."""
    rest = np.arange(n_rest)
    entries = np.arange(n_rest // C4_RATIO)
    # Where a page starts within the ring depends on the page number, so ring rows are matched by position.
    live = np.arange(max(0, n_rest - C4_RING), n_rest)
    source, target = (c4_state_loc(page * sizes.page_size + live, sizes.page_size) for page in swa)
    groups = (full[0] * sizes.c4_page + entries, full[1] * sizes.c4_page + entries)
    return [
        ("swa", swa[0] * sizes.page_size + rest, swa[1] * sizes.page_size + rest),
        *((name, *groups) for name in ("c4", "index", "index_scale")),
        *((name, source, target) for name in ("c4_state", "index_state")),
    ]
