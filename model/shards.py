"""Finding the files of a checkpoint and opening them, without reading any weights.

The index decides which files belong to the checkpoint; without one it is ``model.safetensors``, or the only safetensors
file there is. Opening a file maps it and reads its header, and the safetensors library refuses files that are cut off,
too long, or inconsistent. Weights are read file by file with one file mapped at a time, so that memory holds no more of
the files than one of them.

Source: safetensors format specification; ``model.safetensors.index.json`` as in the DeepSeek-V4 release.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..state.errors import CheckpointError

__all__ = ["CONFIG_FILE", "INDEX_FILE", "SINGLE_FILE", "Faults", "Header", "Shards", "read_headers", "read_json"]

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
            "Expected the weights of the model that its config.json describes, as a release or transformers stores "
            "them; get the files again, or convert them.",
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
    """The files of a checkpoint.

    Attributes:
        folder: that they lie in.
        headers: every tensor that counts, by name.
        unread: file by tensor, for tensors that the index places in a file that could not be opened.
        absent: (kind of fault, what to say) by file, for files that could not be opened.
        strays: files and tensors that the index leaves out; they are ignored.
    """

    folder: Path
    headers: Mapping[str, Header]
    unread: Mapping[str, str]
    absent: Mapping[str, tuple[str, str]]
    strays: tuple[str, ...]

    def read(self, groups: Iterable[tuple[str, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Map tensors, group by group, with one file mapped at a time; copy what is to be kept.

        Args:
            groups: names of tensors that are wanted together; those of one file should come one after the other.
        Returns:
            The tensors of each group. Their storage is the files'.
        Raises:
            CheckpointError: a file is no longer what its header said.
        """
        held: dict[str, Any] = {}
        for names in groups:
            files = {self.headers[name].file for name in names}
            held = {file: held.get(file) or self._open(file) for file in sorted(files)}
            try:
                yield tuple(held[self.headers[name].file].get_tensor(name) for name in names)
            except (OSError, SafetensorError) as error:
                raise self._changed(", ".join(names), error) from error

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise self._changed(file, error) from error

    def _changed(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.folder}: {what}: expected what the headers said a moment ago, got {error}; "
            "load it again when nobody writes to it",
            field=what,
            expected="files that stay as they are",
            got=str(error),
        )


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


def read_headers(folder: Path) -> Shards:
    """Read the headers of every file of a checkpoint.

    Args:
        folder: holds the safetensors files.
    Returns:
        What they say, as far as they could be opened.
    Raises:
        CheckpointError: the folder holds no checkpoint, or not one that can be told apart.
    """
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX_FILE).exists():
        index = _read_index(folder / INDEX_FILE)
        files = sorted(set(index.values()))
    else:
        index, files = None, [_only_file(folder, present)]
    headers: dict[str, Header] = {}
    absent: dict[str, tuple[str, str]] = {}
    strays = [file for file in present if file not in files]
    for file in files:
        try:
            found = _read_header(folder / file)
        except FileNotFoundError:
            absent[file] = "missing files", file
            continue
        except (OSError, SafetensorError, ValueError) as error:
            absent[file] = "unreadable files (damaged or cut off)", f"{file} ({error})"
            continue
        for name, header in found.items():
            if index is None or index.get(name) == file:
                headers[name] = header
            else:
                strays.append(f"{name} in {file}")
    unread = {name: file for name, file in (index or {}).items() if name not in headers}
    return Shards(folder, headers, unread, absent, tuple(strays))


def _read_header(path: Path) -> dict[str, Header]:
    """Let the library judge a file, then read what its header says; asking for every tensor would take far longer."""
    with safe_open(path, framework="pt"), path.open("rb") as file:
        raw = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    file_name = path.name
    return {
        name: Header(file_name, entry["dtype"], tuple(entry["shape"]))
        for name, entry in raw.items()
        if name != "__metadata__"
    }


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
    if isinstance(index, dict) and index and all(isinstance(file, str) for file in index.values()):
        owners: dict[str, str] = index
        if all(map(_is_plain, set(owners.values()))):
            return owners
    raise CheckpointError(
        f"{path}: expected a weight_map from tensor names to names of files beside it, got {str(index)[:120]}; "
        "get the file again",
        field="weight_map",
        expected="an object of file names",
        got=index,
    )


def _is_plain(file: str) -> bool:
    return Path(file).name == file
