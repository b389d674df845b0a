"""Opening, closing and forking requests, and the empty state.

Source: SGLang 0.5.23 ``mem_cache/common.py``, ``hardware_backend/npu/dsv4/dsv4_req_to_token_pool.py``; decode-path
sheet 1.10, 4.4. Forking has no counterpart upstream.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..model.model import Model
from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO, Capacity, PoolSizes
from ..state.decode import DecodeState, Request, find_request
from ..state.errors import ConfigError, RequestError
from ..state.handles import create_handle
from ..state.kv import C4_RING, C128_RING, KVState, init_kv
from ..state.pages import FreeList, c128_pages
from ..state.sampling import (
    SEED_LIMIT,
    SamplingParams,
    SamplingState,
    add_row,
    check_vocabulary,
    count_history,
    drop_row,
    fork_row,
    row_of,
)
from ..state.table import Edit, RequestTable, init_table, read_table, write_table
from ..state.tokens import TokenLog
from .metadata import c4_state_loc
from .prepare import require_committed

__all__ = ["close_request", "fork_request", "init_state", "open_request"]

Ints = NDArray[np.int64]


def init_state(model: Model, capacity: Capacity, *, page_size: int = 128, seed: int = 0) -> DecodeState:
    """Build an empty state for a model.

    Args:
        model: what will step it.
        capacity: requests, tokens and context to make room for.
        page_size: tokens per page, a multiple of 4.
        seed: base of the seeds of requests that bring none.
    Returns:
        A state without requests; all pools allocated and free.
    Raises:
        ConfigError: a page size or seed that cannot be used, or a context beyond the model's positions.
    """
    if capacity.context > model.config.max_position_embeddings:
        raise ConfigError(
            f"Capacity.context: expected at most the model's {model.config.max_position_embeddings} positions, got "
            f"{capacity.context}",
            field="context",
            expected=f"<= {model.config.max_position_embeddings}",
            got=capacity.context,
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEED_LIMIT:
        raise ConfigError(
            f"seed: expected an integer, 0 <= seed < 2**64, got {seed!r}", field="seed", expected="u64", got=seed
        )
    sizes = PoolSizes.of(capacity, page_size)
    return DecodeState(
        config=model.config,
        capacity=capacity,
        seed=seed,
        next_id=0,
        requests=(),
        table=init_table(sizes),
        kv=init_kv(model.config, sizes, model.dtype, model.device),
        relay=create_handle({"token_ids": torch.zeros(sizes.requests + 1, dtype=torch.int64, device=model.device)}),
        sampling=SamplingState(rows=()),
        launched=None,
    )


def open_request(state: DecodeState, params: SamplingParams | None = None) -> tuple[DecodeState, int]:
    """Open a request without tokens.

    Args:
        state: before.
        params: how to sample; default ``SamplingParams()``.
    Returns:
        (state, request_id).
    Raises:
        CapacityError: no table row is free.
        RequestError: ids in ``params`` outside the vocabulary.
    """
    request_id = state.next_id
    params = SamplingParams() if params is None else params
    _check_params(state, params)
    sampling = add_row(
        state.sampling,
        request_id,
        params,
        base_seed=state.seed,
        vocab_size=state.config.vocab_size,
        device=state.kv.device,
    )
    free_rows, (row,) = state.table.free_rows.take(1)
    state = attrs.evolve(
        state,
        table=attrs.evolve(state.table, free_rows=free_rows),
        next_id=request_id + 1,
        requests=(*state.requests, Request(request_id=request_id, row=row, tokens=TokenLog(), outputs=TokenLog())),
        sampling=sampling,
    )
    return state, request_id


def _check_params(state: DecodeState, params: SamplingParams) -> None:
    """Refuse what is no ``SamplingParams``, or one that holds back every token of this model."""
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"params: expected SamplingParams, got {type(params).__name__}", field="params", expected="SamplingParams"
        )
    check_vocabulary(params, state.config.vocab_size)
    held_back = {*params.stop_token_ids, *state.config.eos_token_id}
    if params.min_new_tokens and len(held_back) >= state.config.vocab_size:
        raise RequestError(
            "stop_token_ids: with the model's own they are every token, and min_new_tokens holds them all back",
            field="stop_token_ids",
        )


@attrs.frozen(eq=False, kw_only=True)
class _Holdings:
    """What one request names, read from the table.

    Attributes:
        pages: full pages, in order of position.
        swa_pages: window pages of the positions that are not evicted.
        c128: C128 pages.
    """

    pages: Ints
    swa_pages: Ints
    c128: Ints


def _holdings(table: RequestTable, request: Request) -> _Holdings:
    sizes = table.sizes
    firsts = np.arange(0, request.kv_len, sizes.page_size)
    with read_table(table) as view:
        slots = view["req_to_token"][request.row * sizes.context + firsts].astype(np.int64)
        windows = view["full_to_swa"][slots[firsts >= request.evicted_len]]
        named = view["sidecar"][request.row * sizes.sidecar_width :][: c128_pages(request.kv_len)].astype(np.int64)
    return _Holdings(pages=slots // sizes.page_size, swa_pages=windows // sizes.page_size, c128=named)


def _released(table: RequestTable, name: str, free: FreeList, pages: Ints, edits: list[Edit]) -> tuple[FreeList, Ints]:
    """Drop one reference of each page: (free list with the orphaned pages, the orphaned pages)."""
    left = table.handle.rows(name, torch.from_numpy(pages)).numpy().astype(np.int64) - 1
    edits.append((name, pages, left))
    orphans = pages[left == 0]
    return free.give(orphans.tolist()), orphans


def close_request(state: DecodeState, request_id: int) -> DecodeState:
    """Close a request: its row and every page that nobody else names become free.

    Args:
        state: before; it keeps its content, the request included.
        request_id: an open request, finished or not.
    Returns:
        The state without the request.
    Raises:
        RequestError: no such request is open.
    """
    require_committed(state)
    request = find_request(state, request_id)
    table, sizes = state.table, state.table.sizes
    held = _holdings(table, request)
    edits: list[Edit] = []
    # Window peers first: freeing them reads the map that the full pages still have.
    free_swa, gone_swa = _released(table, "swa_refs", table.free_swa_pages, held.swa_pages, edits)
    free_full, gone_full = _released(table, "page_refs", table.free_pages, held.pages, edits)
    free_c128, _ = _released(table, "c128_refs", table.free_c128_pages, held.c128, edits)
    owners = held.pages[len(held.pages) - len(held.swa_pages) :][np.isin(held.swa_pages, gone_swa)]
    edits.append(("full_to_swa", (owners[:, None] * sizes.page_size + np.arange(sizes.page_size)).reshape(-1), 0))
    assert np.isin(gone_full, held.pages).all(), "only pages of this request can become free here"
    edits.append(("sidecar", request.row * sizes.sidecar_width + np.arange(len(held.c128)), 0))
    table = attrs.evolve(
        table,
        handle=write_table(table, edits),
        free_rows=table.free_rows.give((request.row,)),
        free_pages=free_full,
        free_swa_pages=free_swa,
        free_c128_pages=free_c128,
    )
    return attrs.evolve(
        state,
        table=table,
        kv=_cleared_ring(state.kv, request.row) if request.kv_len else state.kv,
        requests=tuple(other for other in state.requests if other is not request),
        sampling=drop_row(state.sampling, request_id),
    )


def _layer_rows(kv: KVState, name: str, slots: Ints) -> torch.Tensor:
    """Return the buffer rows of ``slots`` in every layer, layer-major."""
    firsts = np.arange(kv.layout.n_layers(name))[:, None] * kv.layout.n_slots(name)
    return torch.from_numpy((firsts + slots).reshape(-1)).to(kv.device)


def _cleared_ring(kv: KVState, row: int) -> KVState:
    """Reset the C128 pooling state of a table row to (value 0, score -inf)."""
    name = "c128_state"
    if not kv.layout.n_layers(name):
        return kv
    rows = _layer_rows(kv, name, row * C128_RING + np.arange(C128_RING))
    with kv.handle.write({name: rows}) as write:
        state = write.tensors[name]
        half = state.shape[1] // 2
        empty = torch.cat((state.new_zeros(half), state.new_full((half,), -torch.inf)))
        state.index_copy_(0, rows, empty.expand(len(rows), -1))
    return attrs.evolve(kv, handle=write.handle)


def fork_request(
    state: DecodeState, request_id: int, *, sampling: SamplingParams | None = None
) -> tuple[DecodeState, int]:
    """Open a request that shares another one's whole history.

    Whole pages are shared; the partly filled full, window and C128 pages and the pooling state that belongs to them are
    copied, so neither side can ever write what the other reads. Everything else is inherited, seed and pending token
    included: without ``sampling`` the fork continues identically.

    Args:
        state: before.
        request_id: the request to fork.
        sampling: other parameters for the fork (another seed, say).
    Returns:
        (state, fork_id).
    Raises:
        RequestError: no such request, or ids in ``sampling`` outside the vocabulary.
        CapacityError: no row or page for the copies; nothing was changed.
    """
    require_committed(state)
    parent = find_request(state, request_id)
    fork_id = state.next_id
    sampled = _forked_sampling(state, parent, fork_id, sampling)
    free_rows, (row,) = state.table.free_rows.take(1)
    table, copies = _forked_table(attrs.evolve(state.table, free_rows=free_rows), parent, row)
    with state.relay.write({"token_ids": torch.tensor([row], device=state.kv.device)}) as write:
        write.tensors["token_ids"][row] = write.tensors["token_ids"][parent.row]
    state = attrs.evolve(
        state,
        next_id=fork_id + 1,
        requests=(*state.requests, attrs.evolve(parent, request_id=fork_id, row=row)),
        table=table,
        kv=_copied(state.kv, copies),
        relay=write.handle,
        sampling=sampled,
    )
    return state, fork_id


def _forked_sampling(state: DecodeState, parent: Request, fork_id: int, params: SamplingParams | None) -> SamplingState:
    """Continue the parent's sampling row, counting its tokens where new penalties need it."""
    history = None
    if params is not None:
        _check_params(state, params)
        if params.max_new_tokens is not None and params.max_new_tokens <= len(parent.outputs):
            raise RequestError(
                f"max_new_tokens: request {parent.request_id} has {len(parent.outputs)} outputs already, and a fork "
                f"counts them; expected more than that, got {params.max_new_tokens}",
                field="max_new_tokens",
                expected=f"> {len(parent.outputs)}",
                got=params.max_new_tokens,
            )
        if params.has_penalties and not row_of(state.sampling, parent.request_id).params.has_penalties:
            outputs = parent.outputs.numpy()
            left = np.bincount(parent.tokens.numpy(), minlength=state.config.vocab_size)
            left -= np.bincount(outputs, minlength=state.config.vocab_size)
            device = state.kv.device
            prompt = np.flatnonzero(left)
            history = count_history(prompt, outputs, vocab_size=state.config.vocab_size, device=device)
    return fork_row(state.sampling, parent.request_id, fork_id, params, history=history)


_Copy = tuple[str, Ints, Ints]
"""Buffer name, slots read, slots written; in every layer of the buffer."""


def _forked_table(table: RequestTable, parent: Request, row: int) -> tuple[RequestTable, list[_Copy]]:
    """Name the parent's whole pages from ``row`` too, and take own pages for the partly filled ones."""
    sizes, n = table.sizes, parent.kv_len
    n_rest, n_rest_c128 = n % sizes.page_size, n // C128_RATIO % C128_PAGE
    held = _holdings(table, parent)
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
    copies: list[_Copy] = []
    for full, swa in zip(own_full, own_swa, strict=True):
        edits.append(("full_to_swa", full * sizes.page_size + rest, swa * sizes.page_size + rest))
        copies += _page_copies(sizes, n_rest, (int(held.pages[-1]), full), (int(held.swa_pages[-1]), swa))
    for page in own_c128:
        entries = np.arange(n_rest_c128)
        copies.append(("c128", held.c128[-1] * C128_PAGE + entries, page * C128_PAGE + entries))
    ring = np.arange(n % C128_RATIO)
    copies.append(("c128_state", parent.row * C128_RING + ring, row * C128_RING + ring))
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


def _page_copies(sizes: PoolSizes, n_rest: int, full: tuple[int, int], swa: tuple[int, int]) -> list[_Copy]:
    """List what lies in a partly filled page of ``n_rest`` tokens: window rows, C4 entries, pooling state."""
    rest = np.arange(n_rest)
    entries = np.arange(n_rest // C4_RATIO)
    # Where a page starts within the ring depends on the page number, so ring rows are matched by position.
    live = np.arange(max(0, n_rest - C4_RING), n_rest)
    source, target = (c4_state_loc(page * sizes.page_size + live, sizes.page_size) for page in swa)
    return [
        ("swa", swa[0] * sizes.page_size + rest, swa[1] * sizes.page_size + rest),
        *((name, full[0] * sizes.c4_page + entries, full[1] * sizes.c4_page + entries) for name in ("c4", "index")),
        *((name, source, target) for name in ("c4_state", "index_state")),
    ]


def _copied(kv: KVState, copies: list[_Copy]) -> KVState:
    """Copy cache rows within every layer."""
    plans = {
        name: (_layer_rows(kv, name, source), _layer_rows(kv, name, target))
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
