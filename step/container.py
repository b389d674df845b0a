"""Values in a folder: ``<kind>.json`` (records) and ``<kind>.safetensors`` (tensors), with a checksum for every part.

A file that is cut, altered, of another kind or of another version is refused before its tensors are read. Sizes come
from the files themselves, so no claim in a record can take memory that the file does not hold.

Source: none; the tensors are in the safetensors format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..state.errors import CheckpointError

__all__ = ["FORMAT", "Stored", "malformed", "open_folder", "seal", "write_folder"]

FORMAT: Final = 2
"""Version of the files; a reader refuses any other."""

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}
"""What the format calls the dtypes that values here have."""


@attrs.frozen(eq=False)
class Stored:
    """An open folder: its records are checked, its tensors are checked as they are read.

    Attributes:
        file: the file of tensors.
        records: everything else.
        specs: name -> shape and dtype of every tensor in the file.
    """

    file: Path
    records: Mapping[str, Any]
    specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    _tensors: Any

    def require(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Refuse a tensor that is missing or of another shape or dtype, without reading it.

        Raises:
            CheckpointError: it is not what the records need.
        """
        if self.specs.get(name) != (tuple(shape), dtype):
            raise CheckpointError(
                f"{self.file}: {name}: expected {dtype} {tuple(shape)}, got {self.specs.get(name, 'nothing')}; the "
                "records do not belong to these tensors",
                field=name,
                expected=(tuple(shape), dtype),
                got=self.specs.get(name),
            )

    def read(self, name: str) -> Tensor:
        """Read a tensor of its own memory.

        Raises:
            CheckpointError: it is missing or was altered.
        """
        if name not in self.specs:
            raise CheckpointError(f"{self.file}: expected a tensor {name}, got none; save it again", field=name)
        tensor: Tensor = self._tensors.get_tensor(name).clone()
        if _checksum(tensor) != self.records["parts"].get(name):
            raise CheckpointError(
                f"{self.file}: {name} was altered (its checksum differs); save it again", field=name, got=name
            )
        return tensor


def write_folder(
    path: str | PathLike[str], kind: str, records: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a value to a folder, made if missing; an earlier one is replaced only once the new one is whole.

    Args:
        path: the folder.
        kind: names the files.
        records: plain data.
        tensors: by name; on any device.
    Raises:
        CheckpointError: the path is a file.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder to write to, got a file", field="path")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: expected a folder that can be made, got: {error}", field="path") from error
    # Clones, because forks share their counts and the format refuses tensors that share memory.
    on_host = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    parts = {name: _checksum(tensor) for name, tensor in on_host.items()}
    sealed = seal({**records, "format": FORMAT, "kind": kind, "parts": parts})
    new = {name: folder / f"{name}.new" for name in (f"{kind}.safetensors", f"{kind}.json")}
    save_file(on_host, new[f"{kind}.safetensors"])
    new[f"{kind}.json"].write_text(json.dumps(sealed, indent=1))
    for name, file in new.items():
        file.replace(folder / name)


@contextmanager
def open_folder(path: str | PathLike[str], kind: str) -> Iterator[Stored]:
    """Open what ``write_folder`` wrote.

    Args:
        path: the folder.
        kind: what it must hold.
    Raises:
        CheckpointError: files are missing, cut, altered, of another kind or of another version.
    """
    records_file, tensors_file = (Path(path) / f"{kind}.{ending}" for ending in ("json", "safetensors"))
    records = _read_records(records_file, kind)
    try:
        with malformed(records_file), safe_open(tensors_file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a mapping)
            specs = {name: (tuple(one.get_shape()), DTYPES.get(one.get_dtype())) for name, one in slices.items()}
            strange = {*specs} ^ {*records["parts"]} | {name for name, (_, dtype) in specs.items() if dtype is None}
            if strange:
                raise CheckpointError(
                    f"{tensors_file}: its tensors are not those of {records_file.name}: {', '.join(sorted(strange))}",
                    field=tensors_file.name,
                    got=sorted(strange),
                )
            known = {name: (shape, dtype) for name, (shape, dtype) in specs.items() if dtype is not None}
            yield Stored(tensors_file, records, known, tensors)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{tensors_file}: expected saved tensors, got: {error}; save it again", field=tensors_file.name
        ) from error


@contextmanager
def malformed(file: Path) -> Iterator[None]:
    """Turn what goes wrong while records are taken apart into one error.

    Raises:
        CheckpointError: the body met records that are not what it reads.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{file}: expected records that belong together, got something else ({error!r}); save it again",
            field=file.name,
        ) from error


def seal(records: Mapping[str, Any]) -> dict[str, Any]:
    """Add the checksum of everything else in the records."""
    rest = {name: entry for name, entry in records.items() if name != "digest"}
    return rest | {"digest": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def _read_records(file: Path, kind: str) -> dict[str, Any]:
    try:
        records = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected the records of a saved {kind}, got: {error}; save it again", field=file.name
        ) from error
    found = (records.get("format"), records.get("kind")) if isinstance(records, dict) else None
    if found != (FORMAT, kind):
        raise CheckpointError(
            f"{file}: expected format {FORMAT} of a {kind}, got {found}; it was not written by this version",
            field="format",
            expected=(FORMAT, kind),
            got=found,
        )
    if records != seal(records):
        raise CheckpointError(f"{file}: was altered (its checksum differs); save it again", field="digest")
    return dict(records)


def _checksum(tensor: Tensor) -> str:
    """Summarise dtype, shape and content: the same bytes under another header are another tensor."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.numel():  # an empty tensor may have strides that no view as bytes accepts
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
