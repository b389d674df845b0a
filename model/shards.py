"""Finding the files of a checkpoint and opening them, without reading any weights.

The index decides which files belong to the checkpoint; without one it is ``model.safetensors``, or the only safetensors
file there is. Opening a file maps it and reads its header, and the safetensors library refuses files that are cut off,
too long, or inconsistent.

Source: safetensors format specification; ``model.safetensors.index.json`` as in the DeepSeek-V4 release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..state.errors import CheckpointError

__all__ = ["CONFIG_FILE", "INDEX_FILE", "SINGLE_FILE", "Faults", "Header", "Shards", "open_shards", "read_json"]

CONFIG_FILE: Final = "config.json"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_LISTED: Final = 20
"""Names of one fault that a message repeats; the rest is counted."""


@attrs.frozen
class Faults:
    """Collects what is wrong with a checkpoint, so that one error can say it all."""

    folder: Path
    found: dict[str, list[str]] = attrs.field(factory=dict)

    def add(self, kind: str, item: str) -> None:
        """Note one item of a kind of fault."""
        self.found.setdefault(kind, []).append(item)

    def raise_if_any(self) -> None:
        """Raise a CheckpointError that names every fault, if there is one."""
        if not self.found:
            return
        lines = []
        for kind, items in self.found.items():
            rest = f", and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
            lines.append(f"\n  {len(items)} {kind}: {', '.join(items[:_LISTED])}{rest}")
        kind, items = next(iter(self.found.items()))
        raise CheckpointError(
            f"checkpoint {self.folder} cannot be loaded:{''.join(lines)}\n"
            "Expected the unquantised weights of the model that its config.json describes; get the files again, or "
            "convert them.",
            field=items[0].partition(" (")[0],
            expected="a complete DeepSeek-V4 checkpoint",
            got=kind,
        )


@attrs.frozen
class Header:
    """What a file says about one tensor.

    Attributes:
        file: the name of its file.
        dtype: as safetensors spells it.
        shape: as stored.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]


@attrs.frozen
class Shards:
    """The open files of a checkpoint.

    Attributes:
        headers: every tensor that counts, by name.
        unread: tensors that the index places in a file that could not be opened.
        strays: files and tensors that the index leaves out; they are ignored.
        handles: the open files, by name.
    """

    headers: Mapping[str, Header]
    unread: frozenset[str]
    strays: tuple[str, ...]
    handles: Mapping[str, Any]

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """Map one tensor, or a part of it alone; its storage is the file's, so copy what is to be kept."""
        handle = self.handles[self.headers[name].file]
        tensor: Tensor = handle.get_tensor(name) if part is None else handle.get_slice(name)[part]
        return tensor


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected a JSON file, got {type(error).__name__}: {error}; get the file again",
            field=path.name,
            expected="a JSON file",
            got=str(error),
        ) from error


def open_shards(folder: Path, stack: ExitStack, faults: Faults) -> Shards:
    """Open every file of a checkpoint and read the headers.

    Args:
        folder: holds the safetensors files.
        stack: closes them.
        faults: what is wrong is noted here.
    Returns:
        The open files, as far as they could be opened.
    Raises:
        CheckpointError: the folder holds no checkpoint, or not one that can be told apart.
    """
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX_FILE).exists():
        index = _read_index(folder / INDEX_FILE)
        files = sorted(set(index.values()))
    else:
        index, files = None, [_only_file(folder, present)]
    handles = {}
    for file in files:
        try:
            handles[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
        except FileNotFoundError:
            faults.add("missing files", file)
        except (OSError, SafetensorError) as error:
            faults.add("unreadable files (damaged or cut off)", f"{file} ({error})")
    headers: dict[str, Header] = {}
    strays = [file for file in present if file not in files]
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 (the handle is not a mapping)
            if index is not None and index.get(name) != file:
                strays.append(f"{name} in {file}")
                continue
            part = handle.get_slice(name)
            headers[name] = Header(file, part.get_dtype(), tuple(part.get_shape()))
    unread = set()
    for name, file in (index or {}).items():
        if file not in handles:
            unread.add(name)
        elif name not in headers:
            faults.add("tensors that the index places in a file that lacks them", f"{name} ({file})")
            unread.add(name)
    return Shards(headers, frozenset(unread), tuple(strays), handles)


def _only_file(folder: Path, present: list[str]) -> str:
    if SINGLE_FILE in present or len(present) == 1:
        return SINGLE_FILE if SINGLE_FILE in present else present[0]
    got = f"several safetensors files ({', '.join(present[:_LISTED])})" if present else "no safetensors file"
    raise CheckpointError(
        f"checkpoint {folder}: expected {SINGLE_FILE} or {INDEX_FILE}, got {got}; point to the folder of a checkpoint",
        field=INDEX_FILE,
        expected=SINGLE_FILE,
        got=got,
    )


def _read_index(path: Path) -> dict[str, str]:
    raw = read_json(path)
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    # A file name with a folder in it would lead out of the checkpoint.
    if isinstance(index, dict) and index and all(isinstance(file, str) and _is_plain(file) for file in index.values()):
        return index
    raise CheckpointError(
        f"{path}: expected a weight_map from tensor names to names of files beside it, got {str(index)[:120]}; "
        "get the file again",
        field="weight_map",
        expected="an object of file names",
        got=index,
    )


def _is_plain(file: str) -> bool:
    return Path(file).name == file
