"""Reading a rank's part of a checkpoint: slices of tensors, and of their codes and scales where they are quantised.

Nothing but the slices is taken out of the files; where a weight is quantised they are widened to whole blocks, whose
scale says what their codes mean, and expanded.

Source: none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import ceil
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..ops.formats import BLOCK, GROUP, expand
from ..state.errors import CheckpointError
from .cuts import Cut, cut_shape, piece_parts
from .filling import Progress, as_stored, check_codes, check_scales, float_type
from .header_checks import Found
from .layout import Kind
from .shards import Shards

__all__ = ["read_parts"]


def read_parts(
    shards: Shards,
    weights: Sequence[Found],
    shapes: Mapping[str, tuple[tuple[int, ...], Kind]],
    dtype: torch.dtype,
    cuts_of: Callable[[str], tuple[Cut, ...]],
    *,
    progress: Progress | None,
) -> dict[str, Tensor]:
    """Read a rank's part of weights into memory of its own, as floats.

    Args:
        shards: the files, checked.
        weights: what is to be read.
        shapes: shape and kind of every weight by path.
        dtype: of the floats, but for what is F32 in any model.
        cuts_of: path -> what the rank keeps of the weight.
        progress: called after each weight with (weights done, weights in all, name).
    Returns:
        The parts by path; padding is zero.
    Raises:
        CheckpointError: codes or scales that are no numbers, or files that changed meanwhile.
    """
    filled: dict[str, Tensor] = {}
    in_order = sorted(weights, key=lambda found: shards.headers[found.piece.name].file)
    with ExitStack() as stack:
        files: dict[str, Any] = {}

        def tensor(name: str) -> Any:
            file = shards.headers[name].file
            if file not in files:
                files[file] = stack.enter_context(safe_open(shards.folder / file, framework="pt"))
            return files[file].get_slice(name)

        for done, found in enumerate(in_order, 1):
            piece = found.piece
            (shape, kind), cuts = shapes[piece.leaf], cuts_of(piece.leaf)
            if piece.leaf not in filled:
                filled[piece.leaf] = torch.zeros(cut_shape(shape, cuts), dtype=float_type(kind, dtype))
            try:
                for part, place in piece_parts(shape, piece.block, cuts):
                    whole = tuple(slice(0, n) for n in piece.shape)
                    filled[piece.leaf][place].copy_(_numbers(found, part or whole, tensor, shards))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"checkpoint {shards.folder}: {piece.name}: expected what the headers said a moment ago, got "
                    f"{error}; load it again when nobody writes to it",
                    field=piece.name,
                    got=str(error),
                ) from error
            if progress is not None:
                progress(done, len(weights), piece.name)
    return filled


def _numbers(found: Found, part: tuple[slice, ...], tensor: Callable[[str], Any], shards: Shards) -> Tensor:
    """Read a part of one tensor as floats."""
    if found.scale is None:
        numbers: Tensor = tensor(found.piece.name)[part]
        return numbers
    *lead, rows, columns = part
    high, wide = found.piece.shape[-2:]
    row_unit, column_unit, packed = (BLOCK, BLOCK, 1) if found.form == "fp8" else (1, GROUP, 2)
    rows_read, columns_read = _widened(rows, row_unit, high), _widened(columns, column_unit, wide)
    codes = tensor(found.piece.name)[(*lead, rows_read, _divided(columns_read, packed))]
    scales = tensor(found.scale)[(*lead, _divided(rows_read, row_unit), _divided(columns_read, column_unit))]
    check_codes(found, codes, shards)
    check_scales(found, scales, shards)
    numbers = expand(as_stored(found.form, codes, scales), torch.float32)
    first, left = rows.start - rows_read.start, columns.start - columns_read.start
    return numbers[..., first : first + rows.stop - rows.start, left : left + columns.stop - columns.start]


def _widened(part: slice, unit: int, length: int) -> slice:
    return slice(part.start // unit * unit, min(ceil(part.stop / unit) * unit, length))


def _divided(part: slice, unit: int) -> slice:
    return slice(part.start // unit, ceil(part.stop / unit))
