"""Reading a checkpoint into ``Params``, and writing one.

Everything that can be wrong is looked for in the headers first: names, shapes, types and files. One error tells all of
it, before memory is taken. Of the values only the expert tables of the hash layers are looked at, because their rows
must be distinct expert ids, and stored weights, whose codes and scales must be numbers.

Source: DeepSeek-V4 release, ``inference/convert.py`` (names) and ``model.safetensors.index.json``.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..ops.formats import E8M0, Fp4Weight, Fp8Weight, StoredWeight, weight_shape
from ..state.config import Config
from ..state.config_reading import config_from_dict, config_to_dict
from ..state.errors import ConfigError, DtypeError, ShapeError
from .cuts import check_layout, leaf_cuts, placed_experts
from .filling import Progress, float_type, official_blocks, read_weights
from .header_checks import check_expert_tables, match_tensors
from .initial import init_params
from .layout import expected_shapes, leaf_shapes, parameter_count, tensor_pieces
from .leaves import params_from_leaves, weights_from_params
from .params import Params
from .part_reading import read_parts
from .ranks import Ranks
from .shards import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Faults, read_headers, read_json
from .slicing import checked_layers, moved_path, slice_config
from .storage import Form, declared_forms, quantization_header, scale_names

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

_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
"""The model dtypes that a ``config.json`` can name."""

_CODE_TYPES: Final = (torch.float8_e4m3fn, torch.int8)
"""The types of codes in files."""

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
    stored: bool | None = None,
    layers: Iterable[int] | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> tuple[Config, Params]:
    """Read a checkpoint: ``config.json`` and one safetensors file, or several with an index.

    Files outside the index are ignored, with a ``CheckpointNote``; so is the draft block ``mtp.0``, which
    ``read_draft`` reads.

    Args:
        folder: of the checkpoint.
        dtype: of the weights in the result; by default the one that the configuration names. What the model keeps in
            F32 (mHC, sinks, position and selection biases) is F32 whatever this says.
        stored: keep FP8 and FP4 weights as codes and scales; by default where no ``dtype`` is given. A part of the
            weights is always expanded.
        layers: read these alone, in ascending order, as a model of their own. All by default.
        progress: called after each weight with (weights done, weights in all, name).
        ranks: this process's place in a layout; it reads its part of the weights and no other. Default: alone.
    Returns:
        (config, params): the configuration as the file has it, or that of the layers chosen, and the weights on the
        CPU, in memory of their own.
    Raises:
        CheckpointError: files or tensors are missing, damaged, left over, misshapen, of a wrong type or without scales.
        ConfigError: the configuration is not of a model that purestep can run, or not in this layout, or has no such
            layers; or a part of the weights is to be kept stored.
        DtypeError: ``dtype`` is not a floating type of at least 16 bits.
    """
    where = Path(folder)
    raw = read_json(where / CONFIG_FILE)
    config = config_from_dict(raw)
    ranks = ranks or Ranks()
    check_layout(config, ranks.parallel)
    if ranks.world.size > 1 and stored:
        raise ConfigError(
            "stored: expected False or None over several ranks, which expand their parts of the weights, got True",
            field="stored",
            expected=False,
            got=stored,
        )
    kept = getattr(torch, config.torch_dtype) if dtype is None else dtype
    if kept not in (*_DTYPES, torch.float64):
        raise DtypeError(f"dtype: expected bfloat16, float16, float32 or float64, got {kept}", field="dtype", got=kept)
    if layers is not None and ranks.parallel.placement:
        raise ConfigError(
            "layers: expected all of them with a placement of experts, which is that of the whole model, got a choice",
            field="layers",
            expected=None,
        )
    chosen = None if layers is None else checked_layers(config, layers)
    faults, shards = Faults(where), read_headers(where)
    found = match_tensors(config, shards, faults, declared=declared_forms(raw), layers=chosen).weights
    faults.raise_if_any()
    check_expert_tables(config, found, shards, faults)
    faults.raise_if_any()
    keeps = dtype is None if stored is None else stored
    weights: Mapping[str, Tensor | StoredWeight]
    if ranks.world.size > 1:
        cuts = partial(leaf_cuts, config, ranks)
        weights = read_parts(shards, found, leaf_shapes(config), kept, cuts, progress=progress)
    else:
        weights = read_weights(shards, found, leaf_shapes(config), kept, stored=keeps, progress=progress)
    if shards.strays:
        names = ", ".join(shards.strays[:20])
        warnings.warn(
            f"checkpoint {where}: ignored {len(shards.strays)} files or tensors that its index does not name: {names}",
            CheckpointNote,
            stacklevel=2,
        )
    if chosen is not None:
        moved = {moved_path(path, chosen): weight for path, weight in weights.items()}
        weights = {path: weight for path, weight in moved.items() if path is not None}
        config = slice_config(config, chosen)
    return config, placed_experts(params_from_leaves(weights), ranks.parallel)


def official_tensors(config: Config, params: Params) -> dict[str, Tensor]:
    """List the weights under their official names; stored ones as codes, and scales after them.

    Args:
        config: the numbers of the model that ``params`` belongs to.
        params: the weights.
    Returns:
        Tensors by name, as ``expected_shapes`` lists them, and scales.
    Raises:
        ShapeError: ``params`` does not have the tensors that ``config`` asks for, or FP8 blocks that run across two of
            them.
    Aliasing: the result shares all storage with ``params``.
    """
    weights = weights_from_params(params)
    expected = {path: shape for path, (shape, _) in leaf_shapes(config).items()}
    got = {path: _shape_of(weight) for path, weight in weights.items()}
    wrong = [path for path in expected.keys() | got.keys() if expected.get(path) != got.get(path)]
    if wrong:
        shown = "; ".join(f"{path}: expected {expected.get(path)}, got {got.get(path)}" for path in sorted(wrong)[:20])
        raise ShapeError(
            f"params: {len(wrong)} tensors do not fit the configuration: {shown}; pass the config that they belong to",
            field=min(wrong),
            expected=expected.get(min(wrong)),
            got=got.get(min(wrong)),
        )
    tensors = {}
    for piece in tensor_pieces(config):
        weight = weights[piece.leaf]
        if isinstance(weight, Tensor):
            tensors[piece.name] = weight[piece.block]
            continue
        blocks = official_blocks(weight, piece)
        if blocks is None:
            raise ShapeError(
                f"params: {piece.leaf}: expected FP8 blocks of 128 rows within {piece.name}, got blocks that go on in "
                "the next tensor; expand the weights first",
                field=piece.leaf,
            )
        tensors[piece.name], tensors[scale_names(piece.name)[0]] = blocks
    return tensors


def _shape_of(weight: Tensor | StoredWeight) -> tuple[int, ...]:
    return tuple(weight.shape) if isinstance(weight, Tensor) else weight_shape(weight)


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
        dtype: of what is written as floats; by default that of ``params.embed``. What the model keeps in F32 is written
            in F32, stored weights as they are stored.
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
    header = config_to_dict(attrs.evolve(config, torch_dtype=_DTYPES[kept])) | _stored_header(config, params)
    config_from_dict(header)
    tensors = official_tensors(config, params)
    kinds = {name: kind for name, (_, kind) in expected_shapes(config).items()}
    types = {
        name: tensor.dtype if tensor.dtype in _CODE_TYPES or name not in kinds else float_type(kinds[name], kept)
        for name, tensor in tensors.items()
    }
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


def _stored_header(config: Config, params: Params) -> dict[str, object]:
    """Say in which forms the weights are, as a release's configuration does."""
    weights = weights_from_params(params)
    forms: dict[str, Form] = {}
    scales = "F8_E8M0"
    for path, (_, kind) in leaf_shapes(config).items():
        weight = weights.get(path)
        if isinstance(weight, Fp8Weight | Fp4Weight):
            forms[kind] = "fp8" if isinstance(weight, Fp8Weight) else "fp4"
            scales = scales if weight.scales.dtype is E8M0 else "F32"
    return quantization_header(forms.get("linear", "wide"), forms.get("expert", "wide"), scales)


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
