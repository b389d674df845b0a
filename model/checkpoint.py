"""Reading a checkpoint into ``Params``, and writing one.

Everything that can be wrong is looked for in the headers first: names, shapes, types and files. One error tells all of
it, before memory is taken. Of the values only the expert tables of the hash layers are looked at, because their rows
must be distinct expert ids.

Weights are copied out of the mapped files. A mapped tensor would sit at whatever address its file gives it, and matrix
products on a CPU round differently at different alignments: the same weights would give other logits when they are read
from other files. It would also change, or end the process, when its file is overwritten.

Source: DeepSeek-V4 release, ``inference/convert.py`` (names) and ``model.safetensors.index.json``.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..state.config import Config
from ..state.config_reading import config_from_dict, config_to_dict
from ..state.errors import ConfigError, DtypeError, ShapeError
from .cuts import check_layout, cut_shape, leaf_cuts, piece_parts, placed_experts
from .header_checks import check_expert_tables, match_tensors
from .initial import init_params
from .layout import Kind, Piece, expected_shapes, leaf_shapes, parameter_count, tensor_pieces
from .leaves import leaves_from_params, params_from_leaves
from .params import Params
from .ranks import Ranks
from .shards import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Faults, Shards, open_shards, read_json

__all__ = [
    "CheckpointNote",
    "expected_shapes",
    "init_params",
    "official_tensors",
    "parameter_count",
    "read_checkpoint",
    "read_config",
    "write_checkpoint",
]

Progress = Callable[[int, int, str], None]

_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
"""The model dtypes that a ``config.json`` can name."""

_OWN_FILES: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""What ``write_checkpoint`` writes besides ``config.json``, and so replaces."""


class CheckpointNote(UserWarning):
    """Something in a checkpoint's folder was left aside."""


def read_config(folder: str | os.PathLike[str]) -> Config:
    """Read the ``config.json`` of a checkpoint.

    Args:
        folder: of the checkpoint.
    Returns:
        The configuration.
    Raises:
        CheckpointError: there is no such file, or it is not JSON.
        ConfigError: it describes a model that purestep cannot run.
    """
    return config_from_dict(read_json(Path(folder) / CONFIG_FILE))


def read_checkpoint(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> tuple[Config, Params]:
    """Read a checkpoint: ``config.json`` and one safetensors file, or several with an index.

    Files outside the index are ignored, with a ``CheckpointNote``; so is the draft block ``mtp.0``.

    Args:
        folder: of the checkpoint.
        dtype: of the weights in the result; by default the one that the configuration names. What the model keeps in
            F32 (mHC, sinks, position and selection biases) is F32 whatever this says.
        progress: called after each tensor with (tensors done, tensors in all, name).
        ranks: this process's place in a layout; it reads its part of the weights and no other. Default: alone.
    Returns:
        (config, params): the configuration as the file has it, and the weights on the CPU, in memory of their own.
    Raises:
        CheckpointError: files or tensors are missing, damaged, left over, misshapen, quantised or of a wrong type.
        ConfigError: the configuration is not of a model that purestep can run, or not in this layout.
        DtypeError: ``dtype`` is not a floating type of at least 16 bits.
    """
    where = Path(folder)
    config = read_config(where)
    ranks = ranks or Ranks()
    check_layout(config, ranks.parallel)
    kept = getattr(torch, config.torch_dtype) if dtype is None else dtype
    if kept not in (*_DTYPES, torch.float64):
        raise DtypeError(f"dtype: expected bfloat16, float16, float32 or float64, got {kept}", field="dtype", got=kept)
    faults = Faults(where)
    with ExitStack() as stack:
        shards = open_shards(where, stack, faults)
        pieces = match_tensors(config, shards, faults)
        faults.raise_if_any()
        check_expert_tables(config, pieces, shards, faults)
        faults.raise_if_any()
        leaves = _read_leaves(config, ranks, pieces, shards, kept, progress)
    if shards.strays:
        names = ", ".join(shards.strays[:20])
        warnings.warn(
            f"checkpoint {where}: ignored {len(shards.strays)} files or tensors that its index does not name: {names}",
            CheckpointNote,
            stacklevel=2,
        )
    return config, placed_experts(config, params_from_leaves(leaves), ranks.parallel)


def official_tensors(config: Config, params: Params) -> dict[str, Tensor]:
    """List the weights under their official names.

    Args:
        config: the numbers of the model that ``params`` belongs to.
        params: the weights.
    Returns:
        Tensors by name, as ``expected_shapes`` lists them.
    Raises:
        ShapeError: ``params`` does not have the tensors that ``config`` asks for.
    Aliasing: the result shares all storage with ``params``.
    """
    leaves = leaves_from_params(params)
    expected = {path: shape for path, (shape, _) in leaf_shapes(config).items()}
    got = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    wrong = [path for path in expected.keys() | got.keys() if expected.get(path) != got.get(path)]
    if wrong:
        shown = "; ".join(f"{path}: expected {expected.get(path)}, got {got.get(path)}" for path in sorted(wrong)[:20])
        raise ShapeError(
            f"params: {len(wrong)} tensors do not fit the configuration: {shown}; pass the config that they belong to",
            field=min(wrong),
            expected=expected.get(min(wrong)),
            got=got.get(min(wrong)),
        )
    return {piece.name: leaves[piece.leaf][piece.block] for piece in tensor_pieces(config)}


def write_checkpoint(
    folder: str | os.PathLike[str],
    config: Config,
    params: Params,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a checkpoint under official names: ``config.json`` and one safetensors file, or several with an index.

    A checkpoint that was written there before is replaced, as the last thing that happens: if writing fails, it is
    still whole; if the exchange itself is cut short, the folder has no ``config.json`` and does not load.

    Args:
        folder: made if it does not exist.
        config: the model's numbers; ``torch_dtype`` in the file is the dtype written.
        params: the weights.
        dtype: of what is written; by default that of ``params.embed``. What the model keeps in F32 is written in F32.
        max_shard_bytes: start a new file before one gets bigger than this (a single tensor may still be bigger).
    Raises:
        ConfigError: ``config`` is not one that ``read_checkpoint`` would take, or ``max_shard_bytes`` is not positive.
        DtypeError: ``dtype`` is not bfloat16, float16 or float32.
        ShapeError: ``params`` does not fit ``config``.
    """
    kept = params.embed.dtype if dtype is None else dtype
    if kept not in _DTYPES:
        raise DtypeError(f"dtype: expected bfloat16, float16 or float32, got {kept}", field="dtype", got=kept)
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ConfigError(
            f"max_shard_bytes: expected a positive number, got {max_shard_bytes}; leave it out for a single file",
            field="max_shard_bytes",
            expected="a positive number",
            got=max_shard_bytes,
        )
    header = config_to_dict(attrs.evolve(config, torch_dtype=_DTYPES[kept]))
    config_from_dict(header)
    tensors = official_tensors(config, params)
    kinds = {name: kind for name, (_, kind) in expected_shapes(config).items()}
    types = {name: _dtype_of(kinds[name], kept) for name in tensors}
    groups = _group(tensors, types, max_shard_bytes)
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    parts = {
        file: where / f"{file}.part" for file in (*groups, CONFIG_FILE, *([INDEX_FILE] if len(groups) > 1 else []))
    }
    try:
        for file, names in groups.items():
            save_file(_on_cpu(tensors, types, names), parts[file], metadata={"format": "pt"})
        if INDEX_FILE in parts:
            _write_json(parts[INDEX_FILE], _index_of(groups, tensors, types))
        _write_json(parts[CONFIG_FILE], header)
        _exchange(where, parts)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _dtype_of(kind: Kind, dtype: torch.dtype) -> torch.dtype:
    if kind == "ids":
        return torch.int64
    return torch.float32 if kind == "f32" else dtype


def _read_leaves(
    config: Config, ranks: Ranks, pieces: list[Piece], shards: Shards, dtype: torch.dtype, progress: Progress | None
) -> dict[str, Tensor]:
    leaves: dict[str, Tensor] = {}
    shapes = leaf_shapes(config)
    for done, piece in enumerate(pieces, 1):
        full, cuts = shapes[piece.leaf][0], leaf_cuts(config, ranks, piece.leaf)
        if piece.leaf not in leaves:
            leaves[piece.leaf] = torch.zeros(cut_shape(full, cuts), dtype=_dtype_of(piece.kind, dtype))
        for part, place in piece_parts(full, piece.block, cuts):
            leaves[piece.leaf][place].copy_(shards.read(piece.name, part))
        if progress is not None:
            progress(done, len(pieces), piece.name)
    return leaves


def _n_bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * dtype.itemsize


def _group(
    tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype], max_bytes: int | None
) -> dict[str, list[str]]:
    """Deal the tensors, in order, into files; return the names in each."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = _n_bytes(tensor, types[name])
        if max_bytes is not None and groups[-1] and held + size > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{at:05d}-of-{len(groups):05d}.safetensors": names for at, names in enumerate(groups, 1)}


def _on_cpu(tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype], names: list[str]) -> dict[str, Tensor]:
    """Prepare the tensors of one file; two names of one tensor (a tied head) become two tensors."""
    ready: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name in names:
        tensor = tensors[name].detach().to(device="cpu", dtype=types[name]).contiguous()
        ready[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
        addresses.add(tensor.data_ptr())
    return ready


def _index_of(
    groups: Mapping[str, list[str]], tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype]
) -> dict[str, object]:
    total = sum(_n_bytes(tensor, types[name]) for name, tensor in tensors.items())
    weight_map = {name: file for file, names in groups.items() for name in names}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _exchange(folder: Path, parts: Mapping[str, Path]) -> None:
    """Put the finished files in place of what was there; the configuration goes first and comes back last."""
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    for old in folder.iterdir():
        if _OWN_FILES.fullmatch(old.name) and old.name not in parts:
            old.unlink()
    for file, part in parts.items():
        if file != CONFIG_FILE:
            part.replace(folder / file)
    parts[CONFIG_FILE].replace(folder / CONFIG_FILE)
