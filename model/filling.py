"""Copying the weights of a checkpoint into memory: as floats, or as the codes and scales that are in the files.

Tensors are taken in the order of the files, so that one file is mapped at a time, and a weight's memory is not touched
before its first tensor is read. So reading needs the memory of the result and that of one file.

Weights are copied out of the mapped files. A mapped tensor would sit at whatever address its file gives it, and matrix
products on a CPU round differently at different alignments: the same weights would give other logits when they are read
from other files. It would also change, or end the process, when its file is overwritten.

Source: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, prod
from typing import Final

import torch
from torch import Tensor

from ..ops.formats import BLOCK, E8M0, GROUP, Fp4Weight, Fp8Weight, StoredWeight, expand
from ..state.errors import CheckpointError
from .header_checks import Found
from .layout import Kind, Piece
from .shards import Shards
from .storage import Form

__all__ = ["Progress", "as_stored", "check_codes", "check_scales", "float_type", "official_blocks", "read_weights"]

Progress = Callable[[int, int, str], None]

Shapes = Mapping[str, tuple[tuple[int, ...], Kind]]

_JOINED: Final = ("w13", "shared_w13")
"""Leaves that are two tensors of a release, one under the other."""

_ROWS: Final = 2 * BLOCK
"""Rows that are expanded at once."""

_NAN: Final = 0x7F
"""The code of e4m3 that is no number, without its sign."""


def float_type(kind: Kind, dtype: torch.dtype) -> torch.dtype:
    """Tell the type in memory of a weight that is kept as numbers."""
    if kind == "ids":
        return torch.int64
    return torch.float32 if kind == "f32" else dtype


def read_weights(
    shards: Shards,
    weights: Sequence[Found],
    shapes: Shapes,
    dtype: torch.dtype,
    *,
    stored: bool,
    progress: Progress | None,
) -> dict[str, Tensor | StoredWeight]:
    """Read weights into memory of their own.

    Args:
        shards: the files, checked.
        weights: what is to be read.
        shapes: shape and kind of every weight of the result by path; together the pieces fill them.
        dtype: of the floats, but for what is F32 in any model.
        stored: keep codes and scales as they are instead of their numbers.
        progress: called after each weight with (weights done, weights in all, name).
    Returns:
        The weights by path.
    Raises:
        CheckpointError: codes or scales that are no numbers, or files that changed meanwhile.
    """
    filled: dict[str, Tensor | StoredWeight] = {}
    done = 0
    for found, tensors in _in_file_order(shards, weights, together=not stored):
        piece = found.piece
        if piece.leaf not in filled:
            filled[piece.leaf] = _empty(found, shapes[piece.leaf], dtype, shards, stored=stored)
        target = filled[piece.leaf]
        if isinstance(target, Tensor):
            _fill_floats(target[piece.block], found, tensors, shards)
        else:
            _fill_stored(target, found, tensors, shards)
        if piece.name in tensors:
            done += 1
            if progress is not None:
                progress(done, len(weights), piece.name)
    return filled


def as_stored(form: Form, codes: Tensor, scales: Tensor) -> StoredWeight:
    """See the two tensors of a file as one weight; shares storage."""
    if scales.dtype is torch.uint8:
        scales = scales.view(E8M0)
    return Fp8Weight(codes, scales.unsqueeze(-3)) if form == "fp8" else Fp4Weight(codes.view(torch.uint8), scales)


def official_blocks(w: StoredWeight, piece: Piece) -> tuple[Tensor, Tensor] | None:
    """Cut the tensors of a file out of a stored weight; shares storage.

    Args:
        w: the weight.
        piece: the tensor that is wanted, and its place in the weight.
    Returns:
        (codes, scales), or None where a block of the weight runs across the tensor's edge.
    """
    codes = w.codes[piece.block]
    if isinstance(w, Fp4Weight):
        return codes.view(torch.int8), w.scales[piece.block]
    at, rows = _places(piece)
    scales = w.scales[at]
    if rows is None:
        is_aligned = scales.shape[-3] == 1 or w.codes.shape[-2] // scales.shape[-3] % BLOCK == 0
        return (codes, scales.flatten(-3, -2)) if is_aligned else None
    if scales.shape[-3] == 1 and w.codes.shape[-2] > piece.shape[-2]:
        return None
    return codes, scales[..., rows.start // piece.shape[-2], :, :]


def _in_file_order(
    shards: Shards, weights: Sequence[Found], *, together: bool
) -> Iterator[tuple[Found, dict[str, Tensor]]]:
    """Map the tensors of every weight, file by file; those of one weight at once, or each for itself."""
    groups: list[tuple[Found, tuple[str, ...]]] = []
    for found in weights:
        names: tuple[str, ...] = (found.piece.name, found.scale) if found.scale else (found.piece.name,)
        groups += [(found, names)] if together else [(found, (name,)) for name in names]
    groups.sort(key=lambda group: shards.headers[group[1][0]].file)
    tensors = shards.read(names for _, names in groups)
    for (found, names), mapped in zip(groups, tensors, strict=True):
        yield found, dict(zip(names, mapped, strict=True))


def _empty(
    found: Found, spec: tuple[tuple[int, ...], Kind], dtype: torch.dtype, shards: Shards, *, stored: bool
) -> Tensor | StoredWeight:
    """Reserve the memory of a weight."""
    shape, kind = spec
    if found.scale is None or not stored:
        return torch.empty(shape, dtype=float_type(kind, dtype))
    *lead, rows, columns = shape
    if found.form == "fp4":
        scales = torch.empty((*lead, rows, ceil(columns / GROUP)), dtype=E8M0)
        return Fp4Weight(torch.empty((*lead, rows, columns // 2), dtype=torch.uint8), scales)
    is_joined = found.piece.leaf.rsplit(".", 1)[-1] in _JOINED
    parts = 2 if is_joined and (found.piece.shape[-2] < rows or rows // 2 % BLOCK == 0) else 1
    blocks = (*lead, parts, ceil(rows // parts / BLOCK), ceil(columns / BLOCK))
    scale_type = torch.float32 if shards.headers[found.scale].dtype == "F32" else E8M0
    return Fp8Weight(torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(blocks, dtype=scale_type))


def _places(piece: Piece) -> tuple[tuple[int, ...], slice | None]:
    """Part the block of a piece into the indices of its stack and its rows."""
    return (
        tuple(at for at in piece.block if isinstance(at, int)),
        next((at for at in piece.block if isinstance(at, slice)), None),
    )


def _fill_floats(target: Tensor, found: Found, tensors: Mapping[str, Tensor], shards: Shards) -> None:
    codes = tensors[found.piece.name]
    if found.scale is None:
        target.copy_(codes)
        return
    scales = tensors[found.scale]
    check_codes(found, codes, shards)
    check_scales(found, scales, shards)
    # A few rows at a time: numbers in f32 on their way may take more memory than the result.
    flat = target.view(-1, *target.shape[-2:])
    count = prod(target.shape[:-2])
    pairs = zip(codes.view(count, *codes.shape[-2:]), scales.view(count, *scales.shape[-2:]), strict=True)
    share = BLOCK if found.form == "fp8" else 1
    for one, (its_codes, its_scales) in zip(flat, pairs, strict=True):
        for a in range(0, len(one), _ROWS):
            scale_rows = its_scales[a // share : ceil((a + _ROWS) / share)]
            part = as_stored(found.form, its_codes[a : a + _ROWS], scale_rows)
            one[a : a + _ROWS].copy_(expand(part, target.dtype))


def _fill_stored(target: StoredWeight, found: Found, tensors: Mapping[str, Tensor], shards: Shards) -> None:
    piece = found.piece
    if piece.name in tensors:
        check_codes(found, tensors[piece.name], shards)
        target.codes[piece.block].view(torch.uint8).copy_(tensors[piece.name].view(torch.uint8))
    if found.scale is not None and found.scale in tensors:
        scales = tensors[found.scale]
        check_scales(found, scales, shards)
        at, rows = _places(piece)
        if isinstance(target, Fp4Weight):
            place = target.scales[piece.block]
        elif rows is None:
            place = target.scales[at].flatten(-3, -2)
        else:
            place = target.scales[at][rows.start // piece.shape[-2]]
        place.view(torch.uint8).copy_(scales.view(torch.uint8))


def check_codes(found: Found, codes: Tensor, shards: Shards) -> None:
    if found.form == "fp8" and bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
        raise _damaged(shards, found.piece.name, "e4m3 codes that are numbers")


def check_scales(found: Found, scales: Tensor, shards: Shards) -> None:
    is_f32 = scales.dtype is torch.float32
    is_bad = ~scales.isfinite() if is_f32 else scales.view(torch.uint8) == 255
    if bool(is_bad.any()):
        raise _damaged(shards, str(found.scale), "scales that are numbers")


def _damaged(shards: Shards, name: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {shards.folder}: {name}: expected {expected}, got NaN or infinity; get the file again",
        field=name,
        expected=expected,
        got="NaN or infinity",
    )
