"""What a model costs: parameters and bytes by part, bytes of its caches, and what its files hold.

Everything follows from ``config.json``; only what is said about files is read, from the headers of the weight files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Final

import attrs
import torch

from ..model.header_checks import match_tensors, storage_of
from ..model.layout import DRAFT, leaf_shapes, parameter_count
from ..model.loading import is_widened
from ..model.shards import CONFIG_FILE, Faults, read_headers, read_json
from ..model.storage import Storage, declared_forms, scale_shape
from ..state.capacity import C4_RATIO, C128_RATIO, Capacity, PoolSizes
from ..state.config import Config
from ..state.errors import ConfigError
from ..state.kv import C4_RING, C128_RING, CacheForm, init_kv, row_specs

__all__ = [
    "PAGE_SIZE",
    "CacheCost",
    "FileReport",
    "PartCost",
    "active_parameters",
    "cache_costs",
    "file_report",
    "part_costs",
    "part_of",
    "pool_bytes",
    "smallest_layout",
    "weight_bytes",
]

PAGE_SIZE: Final = 128
"""Tokens per page of the pools that ``info`` sizes, as ``init_state`` has it by default."""

_PARTS: Final[Mapping[str, str]] = {
    r"embed": "embedding",
    r"head": "head",
    r".*hc_.*": "mHC",
    r".*attn\.compressor\..*": "compressors",
    r".*attn\.indexer\..*": "indexers",
    r".*\battn\..*": "attention",
    r".*ffn\.(gate|bias)": "routers",
    r".*ffn\.tid2eid": "expert tables",
    r".*ffn\.shared.*": "shared experts",
    r".*ffn\.w.*": "routed experts",
    r".*norm": "norms",
}
"""Pattern of a ``Params`` path -> part of the model that it is counted to; the first that fits counts."""

DRAFT_PART: Final = "draft block"
"""Where tensors of a file are counted that belong to the draft block."""

FOREIGN: Final = "foreign"
"""Where tensors of a file are counted that belong to nothing."""

_DIVIDED: Final = r"embed|head|.*\.(wq_b|attn_sink|wo_a|wo_b|weights_proj)|.*\.ffn\.w(13|2)"
"""Weights that the release divides among ranks."""


@attrs.frozen
class PartCost:
    """One part of the model.

    Attributes:
        n_parameters: expert tables of the hash layers are none.
        n_bytes: in memory, in the dtype that the configuration names.
    """

    n_parameters: int
    n_bytes: int


@attrs.frozen
class CacheCost:
    """What one sequence keeps of one kind.

    Attributes:
        per_token: bytes for each token, on average; a group of tokens shares an entry.
        fixed: bytes however long it is.
    """

    per_token: Fraction
    fixed: int


@attrs.frozen
class FileReport:
    """What the weight files of a folder hold.

    Attributes:
        n_files: that belong to the checkpoint.
        sizes: (tensors, bytes) by (part of the model, type).
        faults: kinds of what is wrong, with the names; empty if the folder can be loaded.
        strays: files and tensors that are ignored.
        storage: the forms of the weights, or None where they have several for one kind.
    """

    n_files: int
    sizes: Mapping[tuple[str, str], tuple[int, int]]
    faults: Mapping[str, Sequence[str]]
    strays: Sequence[str]
    storage: Storage | None

    def bytes_by_part(self) -> dict[str, int]:
        """Add up bytes by part of the model."""
        found: dict[str, int] = {}
        for (part, _), (_, n_bytes) in self.sizes.items():
            found[part] = found.get(part, 0) + n_bytes
        return found


def part_costs(config: Config) -> dict[str, PartCost]:
    """Count parameters and bytes by part of the model."""
    costs: dict[str, PartCost] = {}
    sizes = {"f32": 4, "ids": 8}
    for path, (shape, kind) in leaf_shapes(config).items():
        count = prod(shape)
        part = part_of(path)
        before = costs.get(part, PartCost(0, 0))
        n_bytes = count * sizes.get(kind, _dtype(config).itemsize)
        costs[part] = PartCost(before.n_parameters + count * (kind != "ids"), before.n_bytes + n_bytes)
    return costs


def active_parameters(config: Config) -> int:
    """Count the parameters that one token meets: all but the routed experts that it does not choose."""
    routed = part_costs(config)["routed experts"].n_parameters
    return parameter_count(config) - routed + routed // config.n_routed_experts * config.num_experts_per_tok


def cache_costs(config: Config, dtype: torch.dtype | None = None, form: CacheForm = "plain") -> dict[str, CacheCost]:
    """Compute what a sequence has to keep, by kind.

    Args:
        config: the model's numbers.
        dtype: of entries; default the one that the configuration names. Pooling state is f32.
        form: how caches are stored.
    Returns:
        Bytes that the model needs; how a layout rounds them up to pages is in ``pool_bytes``.
    """
    specs = row_specs(config, form, dtype or _dtype(config))
    row = {name: width * kind.itemsize for name, (width, kind) in specs.items()}
    n_c4, n_c128 = config.n_layers_of_ratio(C4_RATIO), config.n_layers_of_ratio(C128_RATIO)
    c4_state = n_c4 * C4_RING * (row["c4_state"] + row["index_state"])
    c128_state = n_c128 * (1 if form.endswith("online") else C128_RING) * row["c128_state"]
    return {
        "window": CacheCost(Fraction(0), config.num_hidden_layers * config.sliding_window * row["swa"]),
        "C4 entries": CacheCost(Fraction(n_c4 * row["c4"], C4_RATIO), 0),
        "index keys": CacheCost(Fraction(n_c4 * row["index"], C4_RATIO), 0),
        "C128 entries": CacheCost(Fraction(n_c128 * row["c128"], C128_RATIO), 0),
        "pooling state": CacheCost(Fraction(0), c4_state + c128_state),
    }


def pool_bytes(config: Config, capacity: Capacity, form: CacheForm = "plain") -> dict[str, int]:
    """Compute the size of every cache buffer that ``init_state`` would allocate, sinks and page rounding included.

    Raises:
        ConfigError: the context is beyond the model's positions.
    """
    if capacity.context > config.max_position_embeddings:
        raise ConfigError(
            f"context: expected at most the model's {config.max_position_embeddings} positions, got {capacity.context}",
            field="context",
            expected=f"<= {config.max_position_embeddings}",
            got=capacity.context,
        )
    handle = init_kv(config, PoolSizes.of(capacity, PAGE_SIZE), _dtype(config), torch.device("meta"), form).handle
    specs = {name: handle.spec(name) for name in handle.names}
    return {name: prod(shape) * dtype.itemsize for name, (shape, dtype, _) in specs.items()}


def file_report(folder: Path, config: Config) -> FileReport | None:
    """Read from the headers what the weight files hold, and what is wrong with it.

    Returns:
        None where there are no files.
    Raises:
        CheckpointError: files that cannot be told to be one checkpoint.
        ConfigError: ``config.json`` names a quantisation that no release has.
    """
    if not any(folder.glob("*.safetensors*")):
        return None
    faults, shards = Faults(folder), read_headers(folder)
    match = match_tensors(config, shards, faults, declared=declared_forms(read_json(folder / CONFIG_FILE)))
    parts: dict[str, str] = {}
    for found in match.weights:
        names = (found.piece.name, found.scale) if found.scale else (found.piece.name,)
        parts |= dict.fromkeys(names, part_of(found.piece.leaf))
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for name, header in shards.headers.items():
        key = parts.get(name) or (DRAFT_PART if name.startswith(DRAFT) else FOREIGN), header.dtype
        count, n_bytes = sizes.get(key, (0, 0))
        sizes[key] = count + 1, n_bytes + prod(header.shape) * _bits_of(header.dtype) // 8
    files = {header.file for header in shards.headers.values()} | shards.absent.keys()
    return FileReport(len(files), sizes, faults.found, shards.strays, storage_of(match.weights, shards))


def weight_bytes(config: Config, storage: Storage) -> dict[str, int]:
    """Compute the memory of a loaded model's weights by their path, stored ones as they are stored.

    What is computed in f32 is kept in f32 (``load_model``), so this is more than the files have.
    """
    size = _dtype(config).itemsize
    found = {}
    for path, (shape, kind) in leaf_shapes(config).items():
        form = storage.form(kind)
        if form == "wide":
            found[path] = prod(shape) * {"ids": 8, "f32": 4}.get(kind, 4 if is_widened(path) else size)
            continue
        # Two tensors one under the other have blocks of their own.
        parts = 2 if path.endswith("w13") else 1
        own = (*shape[:-2], shape[-2] // parts, shape[-1])
        kept = prod(own) // 2 if form == "fp4" else prod(own)
        scale = 4 if form == "fp8" and storage.scales == "F32" else 1
        found[path] = parts * (kept + scale * prod(scale_shape(own, form)))
    return found


def smallest_layout(config: Config, sizes: Mapping[str, int], pools: int, memory: int) -> int | None:
    """Find the smallest tensor-parallel degree whose ranks each have room for their weights and the pools.

    The split is the release's: heads, output groups, index heads, experts and vocabulary; the rest is on every rank.

    Args:
        config: the model's numbers.
        sizes: bytes of every weight.
        pools: bytes of the caches, which every rank has.
        memory: bytes of one rank.
    Returns:
        The degree, or None if none will do.
    """
    divided = sum(size for path, size in sizes.items() if re.fullmatch(_DIVIDED, path))
    whole = sum(sizes.values()) - divided + pools
    counts = (config.num_attention_heads, config.o_groups, config.index_n_heads, config.n_routed_experts)
    degrees = [n for n in range(1, config.o_groups + 1) if not any(count % n for count in (*counts, config.vocab_size))]
    return next((n for n in degrees if whole + divided / n <= memory), None)


def _dtype(config: Config) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.torch_dtype)
    return dtype


def part_of(path: str) -> str:
    """Tell the part of the model that a weight is counted to."""
    return next(part for pattern, part in _PARTS.items() if re.fullmatch(pattern, path))


def _bits_of(dtype: str) -> int:
    """Read the width out of a safetensors type such as ``BF16`` or ``F8_E4M3``; only ``BOOL`` names none."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
