"""A whole state in a folder: ``state.json`` (records, free lists, checksums) and ``state.safetensors`` (contents).

A restored state steps on to the same bits and slot numbers as the saved one. A file that is damaged, of another format
or of another model is refused before anything is built from it.

Source: none; the contents are those of ``state/``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..model.model import Model
from ..state.capacity import Capacity, PoolSizes
from ..state.config_reading import config_to_dict
from ..state.decode import DecodeState, Request
from ..state.errors import CheckpointError
from ..state.handles import Handle, create_handle
from ..state.kv import init_kv
from ..state.pages import FreeList
from ..state.sampling import SamplingParams, SamplingRow, SamplingState
from ..state.table import RequestTable, init_table
from ..state.tokens import TokenLog
from .prepare import require_committed

__all__ = ["restore_state", "save_state"]

FORMAT: Final = 1
"""Version of the files; a reader refuses any other."""

RECORDS, CONTENTS = "state.json", "state.safetensors"
FREE_LISTS: Final = ("free_rows", "free_pages", "free_swa_pages", "free_c128_pages")


def save_state(state: DecodeState, path: str | PathLike[str]) -> None:
    """Write a state to a folder.

    Args:
        state: any held state; it stays as it is.
        path: folder, made if missing. An earlier state there is replaced only once the new one is written whole.
    Raises:
        StateBusyError: a step is launched and not committed.
    """
    require_committed(state)
    tensors = _contents(state)
    records = {
        "format": FORMAT,
        "model": _fingerprint(state),
        "dtype": str(state.kv.dtype),
        "page_size": state.table.sizes.page_size,
        "capacity": attrs.asdict(state.capacity),
        "seed": state.seed,
        "next_id": state.next_id,
        "requests": [_request_record(request) for request in state.requests],
        "sampling": [_sampling_record(row) for row in state.sampling.rows],
        "free": {name: getattr(state.table, name).to_record() for name in FREE_LISTS},
        "checksums": {name: _checksum(tensor) for name, tensor in tensors.items()},
    }
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder to write to, got a file", field="path")
    folder.mkdir(parents=True, exist_ok=True)
    new = {name: folder / f"{name}.new" for name in (CONTENTS, RECORDS)}
    save_file(tensors, new[CONTENTS])
    new[RECORDS].write_text(json.dumps(records | {"digest": _digest(records)}, indent=1))
    for name, file in new.items():
        file.replace(folder / name)


def restore_state(model: Model, path: str | PathLike[str]) -> DecodeState:
    """Read a state that ``save_state`` wrote.

    Args:
        model: what will step it; its configuration and dtype must be those of the saved state.
        path: the folder.
    Returns:
        A state of its own memory, equal to the saved one.
    Raises:
        CheckpointError: files are missing, damaged, of another format, or of another model.
    """
    folder = Path(path)
    records = _read_records(folder / RECORDS)
    try:
        empty = _empty_like(model, records, folder)
        tensors = _read_contents(folder / CONTENTS, records["checksums"])
        return _filled(empty, records, tensors, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / RECORDS}: expected the records of a saved state, got something else ({error!r}); save it again",
            field=RECORDS,
        ) from error


def _handles(state: DecodeState) -> dict[str, Handle]:
    return {"table": state.table.handle, "kv": state.kv.handle, "relay": state.relay}


def _contents(state: DecodeState) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for group, handle in _handles(state).items():
        with handle.read() as buffers:
            tensors |= {f"{group}.{name}": buffer.detach().cpu().clone() for name, buffer in buffers.items()}
    for request in state.requests:
        tensors[f"tokens.{request.request_id}"] = torch.from_numpy(request.tokens.numpy())
        tensors[f"outputs.{request.request_id}"] = torch.from_numpy(request.outputs.numpy())
    for row in state.sampling.rows:
        if row.output_counts is not None and row.prompt_seen is not None:
            tensors[f"counts.{row.request_id}"] = row.output_counts.cpu().clone()
            tensors[f"seen.{row.request_id}"] = row.prompt_seen.cpu().clone()
    return tensors


def _checksum(tensor: Tensor) -> str:
    if not tensor.numel():  # an empty tensor may have strides that no view as bytes accepts
        return hashlib.sha256().hexdigest()
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _digest(records: Mapping[str, Any]) -> str:
    """Checksum of everything else in the records."""
    rest = {name: entry for name, entry in records.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _fingerprint(state: DecodeState) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(config_to_dict(state.config)))
    return config


def _request_record(request: Request) -> dict[str, Any]:
    record = attrs.asdict(request, recurse=False, filter=attrs.filters.exclude("tokens", "outputs"))
    return dict(record)


def _sampling_record(row: SamplingRow) -> dict[str, Any]:
    return {
        "request_id": row.request_id,
        "params": attrs.asdict(row.params),
        "seed": row.seed,
        "n_outputs": row.n_outputs,
    }


def _read_records(file: Path) -> dict[str, Any]:
    try:
        records = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected a saved state's records, got: {error}", field=file.name) from error
    found = records.get("format") if isinstance(records, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{file}: expected format {FORMAT}, got {found!r}; it was not written by this version's save_state",
            field="format",
            expected=FORMAT,
            got=found,
        )
    if records.get("digest") != _digest(records):
        raise CheckpointError(
            f"{file}: the records were altered (their checksum differs); save the state again", field="digest"
        )
    return dict(records)


def _read_contents(file: Path, checksums: Mapping[str, str]) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: expected a saved state's contents, got: {error}", field=file.name) from error
    damaged = sorted(
        name
        for name in {*tensors, *checksums}
        if name not in tensors or _checksum(tensors[name]) != checksums.get(name)
    )
    if damaged:
        raise CheckpointError(
            f"{file}: {len(damaged)} parts are missing or altered: {', '.join(damaged[:20])}; save the state again",
            field=file.name,
            got=damaged,
        )
    return tensors


def _empty_like(model: Model, records: Mapping[str, Any], folder: Path) -> DecodeState:
    """Build the empty state of the records' sizes on paper: handles of no memory come later."""
    capacity = Capacity(**records["capacity"])
    sizes = PoolSizes.of(capacity, records["page_size"])
    meta = torch.device("meta")
    state = DecodeState(
        config=model.config,
        capacity=capacity,
        seed=records["seed"],
        next_id=records["next_id"],
        requests=(),
        table=init_table(sizes, meta),
        kv=init_kv(model.config, sizes, model.dtype, meta),
        relay=create_handle({"token_ids": torch.zeros(sizes.requests + 1, dtype=torch.int64, device=meta)}),
        sampling=SamplingState(),
        launched=None,
    )
    if records["model"] != _fingerprint(state) or records["dtype"] != str(model.dtype):
        raise CheckpointError(
            f"{folder}: expected a state of this model in {model.dtype}, got one of another configuration or in "
            f"{records['dtype']}; restore it with the model it was made for",
            field="model",
            expected=str(model.dtype),
            got=records["dtype"],
        )
    return state


def _filled(empty: DecodeState, records: Mapping[str, Any], tensors: dict[str, Tensor], folder: Path) -> DecodeState:
    contents: dict[str, dict[str, Tensor]] = {group: {} for group in _handles(empty)}
    for group, handle in _handles(empty).items():
        for name in handle.names:
            shape, dtype, _ = handle.spec(name)
            tensor = tensors[f"{group}.{name}"]
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise CheckpointError(
                    f"{folder / CONTENTS}: {group}.{name}: expected {dtype} {tuple(shape)}, got {tensor.dtype} "
                    f"{tuple(tensor.shape)}; the records do not belong to these contents",
                    field=name,
                    expected=tuple(shape),
                    got=tuple(tensor.shape),
                )
            contents[group][name] = tensor
    free = {name: FreeList.of_record(record) for name, record in records["free"].items()}
    table = RequestTable(sizes=empty.table.sizes, handle=create_handle(contents["table"]), **free)
    return attrs.evolve(
        empty,
        requests=tuple(_request(record, tensors) for record in records["requests"]),
        table=table,
        kv=attrs.evolve(empty.kv, handle=create_handle(contents["kv"])),
        relay=create_handle(contents["relay"]),
        sampling=SamplingState(rows=tuple(_sampling_row(record, tensors) for record in records["sampling"])),
    )


def _request(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Request:
    request_id = record["request_id"]
    tokens, outputs = (TokenLog.of(tensors[f"{name}.{request_id}"].numpy()) for name in ("tokens", "outputs"))
    return Request(**record, tokens=tokens, outputs=outputs)


def _sampling_row(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SamplingRow:
    given = {**record["params"], "logit_bias": [tuple(pair) for pair in record["params"]["logit_bias"]]}
    return SamplingRow(
        request_id=record["request_id"],
        params=SamplingParams(**given),
        seed=record["seed"],
        n_outputs=record["n_outputs"],
        output_counts=tensors.get(f"counts.{record['request_id']}"),
        prompt_seen=tensors.get(f"seen.{record['request_id']}"),
    )
