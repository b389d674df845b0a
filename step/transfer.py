"""Moving one request between states, batches, pool geometries and processes.

What is moved is what the request needs to go on: its tokens and counts, every compressed entry, the last window and
the pooling state of the open groups, by position instead of by slot. It goes on to the same tokens, in ``invariant``
numerics to the same bits. Earlier reuse points stay behind: after an import a fork at an earlier token recomputes.

Source: none; upstream moves whole pages between equal pools (SGLang 0.5.23 ``disaggregation``).
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO
from ..state.decode import DecodeState, Request, find_request
from ..state.errors import CapacityError, CheckpointError, RequestError
from ..state.exported import ExportedRequest
from ..state.kv import C4_RING, KVLayout
from ..state.sampling import SamplingState, row_of
from ..state.table import RequestTable, read_table
from .allocate import MIN_KEPT, Growth, allocate, eviction_end
from .container import open_folder, write_folder
from .metadata import c4_state_loc
from .prepare import require_committed
from .records import (
    check_counts,
    model_record,
    read_request,
    read_sampling,
    request_record,
    request_tensors,
    require_model,
    require_whole,
    sampling_record,
)
from .relay import put_token
from .release import layer_rows

__all__ = ["export_request", "import_request", "load_request", "save_request"]

Ints = NDArray[np.int64]

KIND: Final = "request"
CACHES: Final = "caches."


def export_request(state: DecodeState, request_id: int) -> ExportedRequest:
    """Copy one request out of a state.

    Args:
        state: it stays as it is, the request included.
        request_id: an open request.
    Returns:
        The request as a value; ``import_request`` takes it into any state of the same model, as often as you like.
    Raises:
        RequestError: no such request is open.
        StateBusyError: a step is launched and not committed.
        ConfigError: this rank holds a part of the caches only (``dcp``).
    """
    require_committed(state)
    require_whole(state.kv.layout.ways)
    request = find_request(state, request_id)
    reach = max(state.config.sliding_window, MIN_KEPT)
    alone = attrs.evolve(request, row=0, evicted_len=max(request.evicted_len, request.kv_len - reach, 0))
    kv, caches = state.kv, {}
    for name, slots in _slots(state.table, kv.layout, attrs.evolve(alone, row=request.row)).items():
        if name in kv.handle.names:
            rows = kv.handle.rows(name, layer_rows(kv, name, slots))
            caches[name] = rows.unflatten(0, (kv.layout.n_layers(name), len(slots)))
    return ExportedRequest(
        model=model_record(state), request=alone, sampling=row_of(state.sampling, request_id), caches=caches
    )


def import_request(state: DecodeState, exported: ExportedRequest) -> tuple[DecodeState, int]:
    """Take a request into a state, with pages of its own.

    Args:
        state: of the same model, dtype, numerics and form of caches; page size and capacity may differ.
        exported: of ``export_request`` or ``load_request``.
    Returns:
        (state, request_id): it has a new id and keeps its seed, so that it goes on as it would have.
    Raises:
        CheckpointError: it is of another model, or its parts do not belong together.
        RequestError: it is no exported request.
        CapacityError: no row, no pages, or longer than the context; nothing was changed.
        ConfigError: this rank holds a part of the caches only (``dcp``).
    """
    require_committed(state)
    require_whole(state.kv.layout.ways)
    if not isinstance(exported, ExportedRequest):
        raise RequestError(
            f"import_request: expected an ExportedRequest, got {type(exported).__name__}; see export_request and "
            "load_request",
            field="exported",
            expected="ExportedRequest",
            got=type(exported).__name__,
        )
    require_model(model_record(state), exported.model, "import_request")
    request_id, request = state.next_id, exported.request
    _check_sound(state, exported)
    if len(request.tokens) > state.capacity.context:
        raise CapacityError(
            f"import_request: {len(request.tokens)} tokens, but the state's context is {state.capacity.context}; give "
            "init_state a larger Capacity(context=...)",
            field="context",
            expected=f"<= {state.capacity.context}",
            got=len(request.tokens),
        )
    request = attrs.evolve(request, request_id=request_id)
    table, kv = state.table, state.kv
    if request.kv_len:
        table, request = _placed(table, request, state.config.sliding_window)
        plans = {
            name: layer_rows(kv, name, slots)
            for name, slots in _slots(table, kv.layout, request).items()
            if name in exported.caches
        }
        with kv.handle.write(plans) as write:
            for name, rows in plans.items():
                content = exported.caches[name].flatten(0, 1).to(kv.device)
                write.tensors[name].index_copy_(0, rows, content)
        kv = attrs.evolve(kv, handle=write.handle)
    counts = tree_map_only(torch.Tensor, lambda count: count.to(kv.device), exported.sampling)
    row = attrs.evolve(counts, request_id=request_id)
    state = attrs.evolve(
        state,
        next_id=request_id + 1,
        requests=(*state.requests, request),
        table=table,
        kv=kv,
        relay=put_token(state.relay, request),
        sampling=SamplingState(rows=(*state.sampling.rows, row)),
    )
    return state, request_id


def save_request(exported: ExportedRequest, path: str | PathLike[str]) -> None:
    """Write an exported request to a folder: ``request.json`` and ``request.safetensors``.

    Args:
        exported: the request.
        path: folder, made if missing.
    Raises:
        CheckpointError: the path is a file.
    """
    records = {
        "model": exported.model,
        "request": request_record(exported.request),
        "sampling": sampling_record(exported.sampling),
    }
    tensors = request_tensors(exported.request, exported.sampling, "")
    write_folder(path, KIND, records, tensors | {f"{CACHES}{name}": one for name, one in exported.caches.items()})


def load_request(path: str | PathLike[str]) -> ExportedRequest:
    """Read a request that ``save_request`` wrote.

    Args:
        path: the folder.
    Returns:
        The request; whether it fits a state is for ``import_request`` to say.
    Raises:
        CheckpointError: files are missing, cut, altered or of another version.
    """
    with open_folder(path, KIND) as stored:
        tensors = {name: stored.read(name) for name in stored.specs}
        return ExportedRequest(
            model=stored.records["model"],
            request=read_request(stored.records["request"], tensors, ""),
            sampling=read_sampling(stored.records["sampling"], tensors, "", torch.device("cpu")),
            caches={name.removeprefix(CACHES): one for name, one in tensors.items() if name.startswith(CACHES)},
        )


def _slots(table: RequestTable, layout: KVLayout, request: Request) -> Mapping[str, Ints]:
    """List the cache slots of one layer that a request needs to go on, by buffer, in order of position."""
    sizes, n = table.sizes, request.kv_len
    groups = np.arange(n // C128_RATIO)
    with read_table(table) as view:
        full = view["req_to_token"][request.row * sizes.context :][:n].astype(np.int64)
        window = view["full_to_swa"][full[request.evicted_len :]]
        sidecar = view["sidecar"][request.row * sizes.sidecar_width + groups // C128_PAGE].astype(np.int64)
    entries = full[C4_RATIO - 1 :: C4_RATIO] // C4_RATIO
    ring = c4_state_loc(window[-C4_RING:], sizes.page_size)
    return {
        "swa": window,
        "c4": entries,
        "index": entries,
        "index_scale": entries,
        "c128": sidecar * C128_PAGE + groups % C128_PAGE,
        "c4_state": ring,
        "index_state": ring,
        "c128_state": layout.open_c128(request.row, n),
    }


def _placed(table: RequestTable, request: Request, window: int) -> tuple[RequestTable, Request]:
    """Give a request a row and slots; where window pages are scarce, window by window as a chunked prefill does."""
    free_rows, (row,) = table.free_rows.take(1)
    table = attrs.evolve(table, free_rows=free_rows)
    size, n, evicted = table.sizes.page_size, request.kv_len, 0
    piece = n if -(-n // size) <= len(table.free_swa_pages) else max(window, size)
    for start in range(0, n, piece):
        evict_to = eviction_end(start, evicted, window, size)
        end = min(start + piece, n)
        table, evicted = allocate(table, Growth.of([(row, start, end, evicted, evict_to)]))[0], evict_to
    last = Growth.of([(row, n, n, evicted, request.evicted_len)])
    return allocate(table, last)[0], attrs.evolve(request, row=row)


def _check_sound(state: DecodeState, exported: ExportedRequest) -> None:
    """Refuse a request whose parts do not belong together, before anything is allocated for it."""
    request, kv = exported.request, state.kv
    check_counts(request, exported.sampling, state.config.vocab_size, "import_request")
    n, first = request.kv_len, request.evicted_len
    counts = {
        "swa": n - first,
        "c4": n // C4_RATIO,
        "index": n // C4_RATIO,
        "index_scale": n // C4_RATIO,
        "c128": n // C128_RATIO,
        "c4_state": min(n - first, C4_RING),
        "index_state": min(n - first, C4_RING),
        "c128_state": len(kv.layout.open_c128(0, n)),
    }
    shapes = {name: (kv.layout.n_layers(name), counts[name], *kv.handle.spec(name)[0][1:]) for name in kv.handle.names}
    found = {name: tuple(tensor.shape) for name, tensor in exported.caches.items()}
    dtypes = {name: tensor.dtype for name, tensor in exported.caches.items()}
    reach = max(state.config.sliding_window, MIN_KEPT)
    is_sound = (
        0 <= first <= max(0, n - reach) <= n <= len(request.tokens)
        and found == shapes
        and dtypes == {name: kv.handle.spec(name)[1] for name in kv.handle.names}
    )
    if not is_sound:
        raise CheckpointError(
            f"import_request: expected caches {shapes} for {n} of {len(request.tokens)} tokens, got {found}; the "
            "parts do not belong together: export it again",
            field="exported",
            expected=shapes,
            got=found,
        )
