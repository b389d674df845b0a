"""A whole state in a folder: ``state.json`` (records, free lists) and ``state.safetensors`` (what its pages hold).

A restored state steps on to the same bits and slot numbers as the saved one. Only pages and rows that somebody owns
are written, so a file grows with what is in use, not with the pools.

Source: none; the contents are those of ``state/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from os import PathLike
from typing import Any, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..model.fingerprint import fingerprint
from ..model.model import Model
from ..state.capacity import C128_PAGE, Capacity, PoolSizes
from ..state.decode import DecodeState
from ..state.errors import CapacityError, CheckpointError
from ..state.handles import Handle
from ..state.invariants import check
from ..state.kv import C4_RING, CacheForm, init_kv
from ..state.pages import FreeList, c128_pages
from ..state.sampling import SamplingState
from ..state.table import init_table, read_table
from .container import Stored, open_folder, write_folder
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
from .requests import check_seed

__all__ = ["restore_state", "save_state"]

Ints = NDArray[np.int64]

KIND: Final = "state"
FREE_LISTS: Final = ("free_rows", "free_pages", "free_swa_pages", "free_c128_pages")


def save_state(state: DecodeState, path: str | PathLike[str]) -> None:
    """Write a state to a folder.

    Args:
        state: any held state; it stays as it is.
        path: folder, made if missing. An earlier state there is replaced only once the new one is written whole.
    Raises:
        StateBusyError: a step is launched and not committed.
        CheckpointError: the path is a file.
        ConfigError: this rank holds a part of the caches only (``dcp``).
    """
    require_committed(state)
    require_whole(state.kv.layout.ways)
    records = {
        "model": model_record(state),
        "page_size": state.table.sizes.page_size,
        "capacity": attrs.asdict(state.capacity),
        "seed": state.seed,
        "next_id": state.next_id,
        "requests": [request_record(request) for request in state.requests],
        "sampling": [sampling_record(row) for row in state.sampling.rows],
        "free": {name: getattr(state.table, name).to_record() for name in FREE_LISTS},
    }
    tensors: dict[str, Tensor] = {}
    for request, row in zip(state.requests, state.sampling.rows, strict=True):
        tensors |= request_tensors(request, row, f"request.{request.request_id}.")
    for group, handle in _handles(state).items():
        for name, rows in _owned_rows(state)[group].items():
            tensors |= {f"{group}.{name}.rows": rows, f"{group}.{name}": handle.rows(name, rows)}
    write_folder(path, KIND, records, tensors)


def restore_state(model: Model, path: str | PathLike[str]) -> DecodeState:
    """Read a state that ``save_state`` wrote.

    Args:
        model: what will step it: the model of the saved state, with the same dtype and numerics; kernels may differ.
            The caches keep the form that they were saved in.
        path: the folder.
    Returns:
        A state of its own memory, equal to the saved one.
    Raises:
        CheckpointError: files are missing, cut, altered, of another version, or of another model.
        CapacityError: there is no memory for pools of the saved sizes.
        ConfigError: a rank of this model holds a part of the caches only (``dcp``).
    """
    require_whole(model.ranks.parallel.dcp)
    with open_folder(path, KIND) as stored:
        empty = _empty(model, stored.records, torch.device("meta"))
        form = empty.kv.layout.form if empty.kv.layout.form in model.cache_forms else model.cache_form
        require_model(model_record(empty) | {"caches": form}, stored.records["model"], stored.file)
        for group, handle in _handles(empty).items():
            for name in handle.names:
                shape, dtype, _ = handle.spec(name)
                n_rows = stored.specs.get(f"{group}.{name}.rows", ((0,), None))[0][0]
                stored.require(f"{group}.{name}.rows", (n_rows,), torch.int64)
                stored.require(f"{group}.{name}", (n_rows, *shape[1:]), dtype)
        state = _filled(_allocated(model, stored, empty), stored)
        for request, row in zip(state.requests, state.sampling.rows, strict=True):
            check_counts(request, row, model.config.vocab_size, stored.file)
        wrong = check(state)
    if wrong:
        raise CheckpointError(
            f"{stored.file}: is no sound state: {wrong[0]} ({len(wrong)} violations); save it again",
            field=KIND,
            got=wrong,
        )
    return state


def _handles(state: DecodeState) -> dict[str, Handle]:
    return {"table": state.table.handle, "kv": state.kv.handle}


def _owned_rows(state: DecodeState) -> dict[str, dict[str, Tensor]]:
    """List the rows of every buffer that belong to a request or to a page that one names, by group of buffers."""
    table, sizes, kv = state.table, state.table.sizes, state.kv
    with read_table(table) as view:
        refs = {name: np.flatnonzero(view[name]) for name in ("page_refs", "swa_refs", "c128_refs")}
    placed = [request for request in state.requests if not request.is_parked]
    rows = np.array([request.row for request in placed], np.int64)
    full, swa = refs["page_refs"], refs["swa_refs"]
    named: dict[str, list[Ints]] = {
        "req_to_token": [request.row * sizes.context + np.arange(request.kv_len) for request in placed],
        "sidecar": [request.row * sizes.sidecar_width + np.arange(c128_pages(request.kv_len)) for request in placed],
        "full_to_swa": [_span(full, sizes.page_size)],
        **{name: [pages] for name, pages in refs.items()},
    }
    slots = {
        "swa": _span(swa, sizes.page_size),
        "c4": _span(full, sizes.c4_page),
        "index": _span(full, sizes.c4_page),
        "index_scale": _span(full, sizes.c4_page),
        "c128": _span(refs["c128_refs"], C128_PAGE),
        "c4_state": _span(swa, C4_RING),
        "index_state": _span(swa, C4_RING),
        "c128_state": kv.layout.c128_bank(rows),
    }
    empty = np.empty(0, np.int64)
    return {
        "table": {name: torch.from_numpy(np.concatenate([empty, *parts])) for name, parts in named.items()},
        "kv": {name: layer_rows(kv, name, slots[name]).cpu() for name in kv.handle.names},
    }


def _span(pages: Ints, size: int) -> Ints:
    return (pages[:, None] * size + np.arange(size)).reshape(-1)


def _empty(model: Model, records: Mapping[str, Any], device: torch.device | None) -> DecodeState:
    """Build the empty state of the records' sizes; on the meta device it takes no memory."""
    capacity = Capacity(**records["capacity"])
    check_seed(records["seed"])
    sizes = PoolSizes.of(capacity, records["page_size"])
    form: CacheForm = records["model"].get("caches", "plain")
    on = model.device if device is None else device
    return DecodeState(
        config=model.config,
        numerics=model.numerics,
        fingerprint=fingerprint(model),
        capacity=capacity,
        seed=records["seed"],
        next_id=records["next_id"],
        requests=(),
        table=init_table(sizes, device),
        kv=init_kv(model.config, sizes, model.dtype, on, form, model.key_dtype),
        relay=torch.zeros(sizes.requests + 1, dtype=torch.int64, device=on),
        sampling=SamplingState(),
        launched=None,
    )


def _allocated(model: Model, stored: Stored, empty: DecodeState) -> DecodeState:
    try:
        return _empty(model, stored.records, None)
    except (RuntimeError, MemoryError) as error:
        n_bytes = sum(handle.nbytes for handle in _handles(empty).values())
        raise CapacityError(
            f"{stored.file}: its pools need {n_bytes:,} bytes, and there is no memory for them ({error})",
            field="capacity",
            expected=n_bytes,
        ) from error


def _filled(empty: DecodeState, stored: Stored) -> DecodeState:
    handles = {}
    for group, handle in _handles(empty).items():
        rows = {name: stored.read(f"{group}.{name}.rows") for name in handle.names}
        with handle.write(rows) as write:
            for name, numbers in rows.items():
                buffer = write.tensors[name]
                content = stored.read(f"{group}.{name}").to(buffer.device)
                buffer.index_copy_(0, numbers.to(buffer.device), content)
        handles[group] = write.handle
    records = stored.records
    loose = {name: stored.read(name) for name in stored.specs if name.startswith("request.")}
    free: dict[str, Any] = {name: FreeList.of_record(record) for name, record in records["free"].items()}
    requests, sampling = [], []
    for record, row in zip(records["requests"], records["sampling"], strict=True):
        prefix = f"request.{record['request_id']}."
        requests.append(read_request(record, loose, prefix))
        sampling.append(read_sampling(row, loose, prefix, empty.kv.device))
    return attrs.evolve(
        empty,
        requests=tuple(requests),
        table=attrs.evolve(empty.table, handle=handles["table"], **free),
        kv=attrs.evolve(empty.kv, handle=handles["kv"]),
        relay=reduce(put_token, requests, empty.relay),
        sampling=SamplingState(rows=tuple(sampling)),
    )
