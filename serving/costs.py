"""What a model costs: parameters and bytes by part, bytes of its caches.

Everything follows from ``config.json``; only the bytes in files are read, from the headers of the weight files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Final

import attrs
import torch

from ..model.layout import DIALECTS, leaf_shapes, parameter_count, tensor_pieces
from ..model.shards import Faults, read_headers
from ..state.capacity import C4_RATIO, C128_RATIO, Capacity, PoolSizes
from ..state.config import Config
from ..state.errors import ConfigError
from ..state.kv import C4_RING, C128_RING, init_kv

__all__ = [
    "PAGE_SIZE",
    "CacheCost",
    "PartCost",
    "active_parameters",
    "cache_costs",
    "file_bytes",
    "part_costs",
    "pool_bytes",
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

_OTHER: Final = "scales, draft block"
"""Where tensors of a file are counted that are no parameters of the main model."""


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


def part_costs(config: Config) -> dict[str, PartCost]:
    """Count parameters and bytes by part of the model."""
    costs: dict[str, PartCost] = {}
    sizes = {"f32": 4, "ids": 8}
    for path, (shape, kind) in leaf_shapes(config).items():
        count = prod(shape)
        part = _part_of(path)
        before = costs.get(part, PartCost(0, 0))
        n_bytes = count * sizes.get(kind, _dtype(config).itemsize)
        costs[part] = PartCost(before.n_parameters + count * (kind != "ids"), before.n_bytes + n_bytes)
    return costs


def active_parameters(config: Config) -> int:
    """Count the parameters that one token meets: all but the routed experts that it does not choose."""
    routed = part_costs(config)["routed experts"].n_parameters
    return parameter_count(config) - routed + routed // config.n_routed_experts * config.num_experts_per_tok


def cache_costs(config: Config, dtype: torch.dtype | None = None) -> dict[str, CacheCost]:
    """Compute what a sequence has to keep, by kind.

    Args:
        config: the model's numbers.
        dtype: of entries; default the one that the configuration names. Pooling state is f32.
    Returns:
        Bytes that the model needs; how a layout rounds them up to pages is in ``pool_bytes``.
    """
    itemsize, f32 = (dtype or _dtype(config)).itemsize, torch.float32.itemsize
    width, index_width = config.head_dim, config.index_head_dim
    n_c4, n_c128 = config.n_layers_of_ratio(C4_RATIO), config.n_layers_of_ratio(C128_RATIO)
    # A pooling state holds values and scores; overlapping groups hold both for each of their two halves.
    c4_state = n_c4 * C4_RING * 4 * (width + index_width) * f32
    c128_state = n_c128 * C128_RING * 2 * width * f32
    return {
        "window": CacheCost(Fraction(0), config.num_hidden_layers * config.sliding_window * width * itemsize),
        "C4 entries": CacheCost(Fraction(n_c4 * width * itemsize, C4_RATIO), 0),
        "index keys": CacheCost(Fraction(n_c4 * index_width * itemsize, C4_RATIO), 0),
        "C128 entries": CacheCost(Fraction(n_c128 * width * itemsize, C128_RATIO), 0),
        "pooling state": CacheCost(Fraction(0), c4_state + c128_state),
    }


def pool_bytes(config: Config, capacity: Capacity) -> dict[str, int]:
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
    handle = init_kv(config, PoolSizes.of(capacity, PAGE_SIZE), _dtype(config), torch.device("meta")).handle
    specs = {name: handle.spec(name) for name in handle.names}
    return {name: prod(shape) * dtype.itemsize for name, (shape, dtype, _) in specs.items()}


def file_bytes(folder: Path, config: Config) -> dict[str, int]:
    """Read from the headers how many bytes each part has in the weight files; empty where there are no files.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    if not any(folder.glob("*.safetensors*")):
        return {}
    leaves = {piece.name: piece.leaf for dialect in DIALECTS for piece in tensor_pieces(config, dialect)}
    found: dict[str, int] = {}
    faults, shards = Faults(folder), read_headers(folder)
    for fault in shards.absent.values():
        faults.add(*fault)
    faults.raise_if_any()
    for name, header in shards.headers.items():
        part = _part_of(leaves[name]) if name in leaves else _OTHER
        found[part] = found.get(part, 0) + prod(header.shape) * _bits_of(header.dtype) // 8
    return found


def _dtype(config: Config) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.torch_dtype)
    return dtype


def _part_of(path: str) -> str:
    return next(part for pattern, part in _PARTS.items() if re.fullmatch(pattern, path))


def _bits_of(dtype: str) -> int:
    """Read the width out of a safetensors type such as ``BF16`` or ``F8_E4M3``; only ``BOOL`` names none."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
