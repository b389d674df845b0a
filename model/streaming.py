"""Writing a checkpoint one tensor at a time, file after file, in any form and under any names.

No more than one tensor of the source is in memory, and of stacked experts their scales. A file is complete when it has
its name; until then it ends in ``.part``. What is complete is noted with its checksum in ``writing.json``, so that a
second call with the same arguments goes on where the first one ended. ``config.json`` comes last: a folder that is not
finished does not load. ``SHA256SUMS`` then has the checksum of every file (``sha256sum -c SHA256SUMS``).

Source: safetensors format specification (eight bytes of header length, a JSON header, the tensors one after the other).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import attrs
import torch
from torch import Tensor

from ..ops.formats import BLOCK
from ..state.config import Config
from ..state.config_reading import config_to_dict
from ..state.errors import CheckpointError, ConfigError
from .layout import Dialect, Piece, draft_pieces, tensor_pieces
from .recoding import file_tensors, recode
from .shards import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_json
from .sources import WeightSource
from .storage import TYPES, Cell, Storage, cells_of, quantization_header

__all__ = ["SUMS_FILE", "WRITING_FILE", "stream_checkpoint"]

SUMS_FILE: Final = "SHA256SUMS"
WRITING_FILE: Final = "writing.json"

_PIECE: Final = 1 << 24
"""Bytes that are written and summed at once."""

Progress = Callable[[int, int, str], None]


@attrs.frozen(eq=False)
class _Job:
    """One weight of the result.

    Attributes:
        cells: its tensors: floats, or codes and scales.
        parts: the official tensors that it consists of, in order.
    """

    cells: tuple[Cell, ...]
    parts: tuple[Piece, ...]

    @property
    def n_bytes(self) -> int:
        return sum(_n_bytes(cell) for cell in self.cells)


def stream_checkpoint(
    folder: Path,
    source: WeightSource,
    storage: Storage,
    *,
    dialect: Dialect = "official",
    max_shard_bytes: int = 5 * 10**9,
    others: Iterable[Path] = (),
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint, or go on with writing it.

    Args:
        folder: empty, or of a call with the same arguments that did not come to its end.
        source: of the weights.
        storage: the forms to write.
        dialect: of the names. Module names have no draft block.
        max_shard_bytes: start a new file before one gets bigger than this (a single tensor may still be bigger).
        others: files to copy beside the weights.
        progress: called as (bytes done, bytes in all, name) after every tensor of the source.
    Raises:
        CheckpointError: the folder holds something else, or weights that cannot be quantised.
        ConfigError: a form that the names cannot express.
    """
    config, has_draft = source.config, source.has_draft and dialect == "official"
    jobs = _jobs(config, storage, dialect, has_draft=has_draft)
    files = _files(jobs, max_shard_bytes)
    label = {
        "weights": source.identity(),
        "storage": attrs.asdict(storage),
        "dialect": dialect,
        "limit": max_shard_bytes,
    }
    sums = _begin(folder, label)
    total, done = sum(job.n_bytes for job in jobs), 0
    for file, own in files.items():
        if file not in sums:
            counted = _counting(progress, done, total)
            sums[file] = _write_file(folder / file, own, source, storage, counted)
            _note(folder, label, sums)
        done += sum(job.n_bytes for job in own)
        if progress is not None:
            progress(done, total, file)
    _finish(folder, _header(config, storage, has_draft=has_draft), _index(files), sums, others)


def _jobs(config: Config, storage: Storage, dialect: Dialect, *, has_draft: bool) -> list[_Job]:
    official = list(tensor_pieces(config))
    if dialect == "official":
        pieces = [*official, *(draft_pieces(config) if has_draft else ())]
        return [_Job(tuple(cells_of(piece, storage)), (piece,)) for piece in pieces]
    by_leaf: dict[str, list[Piece]] = {}
    for piece in official:
        by_leaf.setdefault(piece.leaf, []).append(piece)
    jobs = []
    for piece in tensor_pieces(config, dialect):
        parts = tuple(part for part in by_leaf[piece.leaf] if part.block[: len(piece.block)] == piece.block)
        if storage.form(piece.kind) == "fp8" and len(parts) > 1 and parts[0].shape[0] % BLOCK and parts[0].block[1:]:
            raise ConfigError(
                f"moe_intermediate_size: expected a multiple of {BLOCK} for FP8 experts under these names, which put "
                f"gate and up projection into one tensor, got {config.moe_intermediate_size}; choose official names",
                field="moe_intermediate_size",
                got=config.moe_intermediate_size,
            )
        jobs.append(_Job(tuple(cells_of(piece, storage)), parts))
    return jobs


def _n_bytes(cell: Cell) -> int:
    return prod(cell.shape) * TYPES[cell.type].itemsize


def _files(jobs: Sequence[_Job], limit: int) -> dict[str, list[_Job]]:
    """Deal the weights, in order, into files."""
    if limit < 1:
        raise ConfigError(
            f"max_shard_bytes: expected a positive number, got {limit}", field="max_shard_bytes", got=limit
        )
    groups: list[list[_Job]] = [[]]
    held = 0
    for job in jobs:
        if groups[-1] and held + job.n_bytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(job)
        held += job.n_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{at:05d}-of-{len(groups):05d}.safetensors": group for at, group in enumerate(groups, 1)}


def _begin(folder: Path, label: Mapping[str, Any]) -> dict[str, str]:
    """Look what a call before has left; return the checksums of the files that are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in folder.iterdir())
    if not present:
        _note(folder, label, {})
        return {}
    noted = read_json(folder / WRITING_FILE) if WRITING_FILE in present else None
    if not isinstance(noted, dict) or noted.get("label") != label:
        got = "another conversion that is not finished" if noted else ", ".join(present[:5])
        raise CheckpointError(
            f"{folder}: expected an empty folder, or one in which the same writing was interrupted, got {got}; "
            "empty it or choose another",
            field=str(folder),
            expected="an empty folder",
            got=got,
        )
    sums: dict[str, str] = noted["files"]
    for file, checksum in sums.items():
        if not (folder / file).is_file() or _sum_of(folder / file) != checksum:
            raise CheckpointError(
                f"{folder / file}: expected the file that was written before the interruption, got other bytes; "
                "empty the folder and begin anew",
                field=file,
            )
    return sums


def _note(folder: Path, label: Mapping[str, Any], sums: Mapping[str, str]) -> None:
    part = folder / f"{WRITING_FILE}.part"
    part.write_text(json.dumps({"label": label, "files": sums}, indent=2) + "\n", encoding="utf-8")
    part.replace(folder / WRITING_FILE)


def _counting(progress: Progress | None, before: int, total: int) -> Callable[[int, str], None]:
    count = before

    def tell(n_bytes: int, name: str) -> None:
        nonlocal count
        count += n_bytes
        if progress is not None:
            progress(count, total, name)

    return tell


def _write_file(
    path: Path, jobs: Sequence[_Job], source: WeightSource, storage: Storage, tell: Callable[[int, str], None]
) -> str:
    """Write one file and return its checksum."""
    digest = hashlib.sha256()
    part = path.with_name(f"{path.name}.part")
    weights = source.weights([piece for job in jobs for piece in job.parts])
    with part.open("wb") as file:
        _put(file, digest, _file_header(jobs))
        for job in jobs:
            behind: list[Tensor] = []
            for piece, weight in zip(job.parts, islice(weights, len(job.parts)), strict=True):
                first, *scales = file_tensors(recode(weight, piece.kind, storage, piece.name))
                _put(file, digest, _bytes_of(first))
                # Mapped scales would keep their file open.
                behind += [one.clone() for one in scales]
                tell(first.numel() * first.element_size(), piece.name)
            for one in behind:
                _put(file, digest, _bytes_of(one))
    part.replace(path)
    return digest.hexdigest()


def _file_header(jobs: Iterable[_Job]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for cell in (cell for job in jobs for cell in job.cells):
        end = at + _n_bytes(cell)
        header[cell.name] = {"dtype": cell.type, "shape": list(cell.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _put(file: IO[bytes], digest: Any, data: bytes | memoryview) -> None:
    for at in range(0, len(data), _PIECE):
        file.write(data[at : at + _PIECE])
        digest.update(data[at : at + _PIECE])


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(config: Config, storage: Storage, *, has_draft: bool) -> dict[str, Any]:
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    header = config_to_dict(attrs.evolve(config, torch_dtype=names[storage.wide]))
    if has_draft:
        header |= {"num_nextn_predict_layers": 1, "compress_ratios": [*config.compress_ratios, 0]}
    return header | quantization_header(storage.linear, storage.expert, storage.scales)


def _index(files: Mapping[str, Sequence[_Job]]) -> dict[str, Any] | None:
    if len(files) == 1:
        return None
    owners = {cell.name: file for file, jobs in files.items() for job in jobs for cell in job.cells}
    total = sum(job.n_bytes for jobs in files.values() for job in jobs)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(owners.items()))}


def _finish(
    folder: Path,
    header: Mapping[str, Any],
    index: Mapping[str, Any] | None,
    sums: dict[str, str],
    others: Iterable[Path],
) -> None:
    texts = {} if index is None else {INDEX_FILE: _json_bytes(index)}
    contents: Iterator[tuple[str, bytes]] = ((path.name, path.read_bytes()) for path in others)
    for name, content in (*texts.items(), *contents):
        (folder / name).write_bytes(content)
        sums[name] = hashlib.sha256(content).hexdigest()
    config = _json_bytes(header)
    sums[CONFIG_FILE] = hashlib.sha256(config).hexdigest()
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(sums.items()))
    (folder / SUMS_FILE).write_text(lines, encoding="utf-8")
    part = folder / f"{CONFIG_FILE}.part"
    part.write_bytes(config)
    part.replace(folder / CONFIG_FILE)
    (folder / WRITING_FILE).unlink()


def _json_bytes(content: object) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
