"""Comparing the headers of a checkpoint with what its configuration asks for.

Source: DeepSeek-V4 release, ``model.safetensors.index.json``; layouts of quantised storage as in transformers 5.24
(``integrations/finegrained_fp8.py``), sglang and vllm-ascend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ..state.config import Config
from .layout import DIALECTS, Piece, tensor_pieces
from .shards import Faults, Header, Shards

__all__ = ["check_expert_tables", "match_tensors"]

_FLOATS: Final = ("BF16", "F16", "F32")
"""Types that a file may store a float in; transformers, say, saves norms in F32 beside BF16 matrices."""

_IDS: Final = ("I32", "I64")

_DRAFT: Final = re.compile(r"(model\.)?mtp\.(?P<block>\d+)\.")
"""The draft block for speculative decoding, which is not part of the main model."""

_SCALES: Final[Mapping[str, str]] = {
    ".weight_scale_inv": "weight_scale_inv, as transformers and sglang write",
    "_scale_inv": "stacked experts with _scale_inv, as transformers writes",
    ".weight_scale": "weight_scale, as vllm-ascend and compressed-tensors write",
    ".input_scale": "input_scale, for static activation scales",
    ".scale": "scale, the release's own layout",
}
"""Endings of the names of scales, longest first, with the layout that they belong to."""


def match_tensors(config: Config, shards: Shards, faults: Faults) -> list[Piece]:
    """Find the tensors of the model among those of the checkpoint, and note what does not fit.

    Args:
        config: the model's numbers.
        shards: the open files.
        faults: what is wrong is noted here.
    Returns:
        The tensors of the model in the naming dialect that fits the checkpoint best.
    """
    headers = shards.headers
    known = headers.keys() | shards.unread
    dialects = [list(tensor_pieces(config, dialect)) for dialect in DIALECTS]
    pieces = max(dialects, key=lambda option: sum(piece.name in known for piece in option))
    names = {piece.name for piece in pieces}
    extra = [name for name in headers if name not in names]
    drafts = {name: match for name in extra if (match := _DRAFT.match(name))}
    for name, match in drafts.items():
        if match["block"] != "0":
            faults.add("tensors of another draft model (a DSpark release, which is not supported)", name)
    others = [name for name in extra if name not in drafts]
    quantised = _note_quantised(pieces, others, headers, faults)
    for piece in pieces:
        if piece.name not in known:
            faults.add("missing tensors", piece.name)
        elif piece.name in headers and piece.name not in quantised:
            _compare(piece, headers[piece.name], faults)
    for name in others:
        if name not in quantised:
            faults.add("left-over tensors", name)
    return pieces


def check_expert_tables(config: Config, pieces: list[Piece], shards: Shards, faults: Faults) -> None:
    """Note every expert table whose rows are not distinct ids of experts; the only values that are looked at."""
    n_experts = config.n_routed_experts
    for piece in pieces:
        if piece.kind != "ids":
            continue
        table: Tensor = shards.read(piece.name)
        ordered = table.sort(dim=1).values
        is_outside = (ordered[:, 0] < 0) | (ordered[:, -1] >= n_experts)
        is_repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
        rows = torch.nonzero(is_outside | is_repeated).flatten().tolist()
        if rows:
            got = f"{len(rows)} rows, first row {rows[0]}: {table[rows[0]].tolist()}"
            faults.add(f"tables whose rows are not distinct expert ids 0..{n_experts - 1}", f"{piece.name} ({got})")


def _compare(piece: Piece, header: Header, faults: Faults) -> None:
    if header.shape != piece.shape:
        text = f"{piece.name} (expected {list(piece.shape)}, got {list(header.shape)})"
        faults.add("tensors of a wrong shape", text)
    allowed = _IDS if piece.kind == "ids" else _FLOATS
    if header.dtype not in allowed:
        text = f"{piece.name} (expected {' or '.join(allowed)}, got {header.dtype})"
        faults.add("tensors of a wrong type", text)


def _note_quantised(
    pieces: list[Piece], others: list[str], headers: Mapping[str, Header], faults: Faults
) -> frozenset[str]:
    """Note quantised weights and their scales, under one heading that tells the layout; return their names."""
    floats = [piece.name for piece in pieces if piece.kind != "ids" and piece.name in headers]
    weights = [name for name in floats if _is_low_bit(headers[name].dtype)]
    layouts = {name: layout for name in others if (layout := _scale_layout(name, headers)) is not None}
    if not weights and not layouts:
        return frozenset()
    types = ", ".join(sorted({headers[name].dtype for name in weights})) or "no low-bit weights"
    scales = "; ".join(sorted(set(layouts.values()))) or "no scales"
    kind = f"tensors of quantised storage, which this version does not support (found: {types}, with {scales})"
    for name in (*weights, *layouts):
        faults.add(kind, name)
    return frozenset((*weights, *layouts))


def _is_low_bit(dtype: str) -> bool:
    return dtype in ("I8", "U8") or dtype.startswith(("F8_", "F6_", "F4"))


def _scale_layout(name: str, headers: Mapping[str, Header]) -> str | None:
    for ending, layout in _SCALES.items():
        if name.endswith(ending):
            # Weights of mHC are called scale too; the scale of a quantised weight has the weight beside it.
            is_scale = ending != ".scale" or f"{name.removesuffix(ending)}.weight" in headers
            return layout if is_scale else None
    return None
