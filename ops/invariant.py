"""Row-independent arithmetic: a row's bits do not depend on which rows it was computed with, or where among them.

Matrix products and reductions choose their order of summation by the shape of the whole call. So every operator that is
local to a row runs here on tiles of exactly ``ROWS`` rows, padded with zeros, and attention runs over tiles of exactly
``KEYS`` keys whose partial sums are added one after the other: every call then has one shape, whatever the batch, and a
tile of masked keys adds exact zeros.

Measured on CPU: within a tile of 8 or 16 rows a matrix product gives a row the same bits at every place, in float32 and
bfloat16, once its inner width is a multiple of 4 and at least 8 (else the BLAS takes other paths for the last rows), so
other widths are padded with zeros. 8 rows are what a small batch wastes least with.

Source: none; the idea is that of batch-invariant kernels, in its plainest form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ..state.errors import ConfigError
from . import experts as plain
from . import indexer
from . import linear as product
from .attention import rounded_scores

__all__ = ["attend", "attend_chunk", "by_rows", "experts_sorted", "grouped_linear", "index_scores", "linear"]

ROWS: Final = 8
"""Rows of every call."""

WIDTH: Final = 8
"""Inner widths of matrix products are padded to a multiple of this."""

KEYS: Final = 128
"""Keys of every attention tile."""


def by_rows(operator: Callable[..., Any], n_row_arguments: int) -> Callable[..., Any]:
    """Make a row-local operator run on tiles of exactly ``ROWS`` rows.

    Args:
        operator: its first arguments have the rows on axis 0; it returns one such tensor or a tuple of them.
        n_row_arguments: how many.
    Returns:
        A function with the operator's signature.
    """

    @wraps(operator)
    def tiled(*args: Any, **options: Any) -> Any:
        row_args, rest = args[:n_row_arguments], args[n_row_arguments:]
        n_rows = row_args[0].shape[0]
        if not n_rows:
            return operator(*args, **options)
        padded = [_padded(arg, ROWS, 0) for arg in row_args]
        if n_rows <= ROWS:
            out = operator(*padded, *rest, **options)
            return tuple(part[:n_rows] for part in out) if isinstance(out, tuple) else out[:n_rows]
        outs = [operator(*tiles, *rest, **options) for tiles in zip(*(arg.split(ROWS) for arg in padded), strict=True)]
        if isinstance(outs[0], tuple):
            return tuple(torch.cat(parts)[:n_rows] for parts in zip(*outs, strict=True))
        return torch.cat(outs)[:n_rows]

    return tiled


def _padded(x: Tensor, size: int, axis: int) -> Tensor:
    """Pad an axis with zeros (False) to a multiple of ``size``."""
    missing = -x.shape[axis] % size
    if not missing:
        return x
    behind = x.dim() - 1 - axis % x.dim()
    return F.pad(x, (0, 0) * behind + (0, missing))


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply rows by a weight in tiles of rows; see ``linear.linear``.

    Args:
        x: float[T,H].
        w: float[F,H].
    Returns:
        float[T,F].
    """
    return _linear(_padded(x, WIDTH, -1), _padded(w, WIDTH, -1))


def grouped_linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply every group of channels by its own weight in tiles of rows; see ``linear.grouped_linear``.

    Args:
        x: float[T,G,D].
        w: float[G,U,D].
    Returns:
        float[T,G,U].
    """
    return _grouped_linear(_padded(x, WIDTH, -1), _padded(w, WIDTH, -1))


_linear: Callable[..., Tensor] = by_rows(product.linear, 1)
_grouped_linear: Callable[..., Tensor] = by_rows(product.grouped_linear, 1)


experts_sorted: Callable[..., Tensor] = plain.sorted_operator("experts_tiled", linear)
"""Run the experts that were hit, each on tiles of ``ROWS`` rows; see ``experts.experts_sorted``."""


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, *, rounding: bool) -> Tensor:
    """Score entries that every row owns alone, in tiles of rows and keys; see ``indexer.index_scores``.

    Args:
        q: float[B,1,I,J].
        keys: float[B,C,J].
        weights: float[B,1,I].
        rounding: as there.
    Returns:
        f32[B,1,C].
    """
    n_keys = keys.shape[1]
    score = by_rows(indexer.index_scores, 3)
    tiles = _padded(keys, KEYS, 1).split(KEYS, dim=1)
    return torch.cat([score(q, tile, weights, rounding=rounding) for tile in tiles], dim=-1)[..., :n_keys]


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, *, scale: float, rounding: bool | str) -> Tensor:
    """Attend over keys that every row owns alone, in tiles of rows and keys; see ``attention.attend``.

    Args:
        q: float[B,1,N,D].
        keys: float[B,X,D]. The place of a key on axis X must depend on its row alone.
        mask: bool[B,1,X].
        sink: f32[N].
        scale: of the dot products.
        rounding: as there.
    Returns:
        float[B,1,N,D].
    """
    keys, mask = _padded(keys, KEYS, 1), _padded(mask, KEYS, 2)
    return by_rows(_attend_tile, 3)(q, keys, mask, sink, scale=scale, rounding=rounding)


def _attend_tile(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, *, scale: float, rounding: bool | str) -> Tensor:
    wide, tiles = q.squeeze(1).float(), [tile.float() for tile in keys.split(KEYS, dim=1)]
    dtype = q.dtype if rounding == "normalised" else None
    scores = [rounded_scores(wide @ tile.transpose(1, 2), scale, dtype) for tile in tiles]
    scores = [torch.where(seen, score, -torch.inf) for score, seen in zip(scores, mask.split(KEYS, dim=2), strict=True)]
    sink = sink.unsqueeze(-1)
    top = torch.stack([score.amax(-1, keepdim=True) for score in scores]).amax(0)
    top = torch.where(top > -torch.inf, top, sink) if rounding is True else top.maximum(sink)
    parts, total = [(score - top).exp() for score in scores], (sink - top).exp()
    for part in parts:
        total = total + part.sum(-1, keepdim=True)
    if rounding == "normalised":
        parts, total = [part / total for part in parts], torch.ones_like(total)
    out = torch.zeros_like(wide)
    for part, tile in zip(parts, tiles, strict=True):
        out = out + (part.to(q.dtype).float() if rounding else part) @ tile
    return (out / total).to(q.dtype).unsqueeze(1)


def attend_chunk(*_args: object, **_options: object) -> Tensor:
    """Refuse: rows that share keys are summed in an order that depends on their company.

    Raises:
        ConfigError: always. A step of these numerics gives every token tables of its own.
    """
    raise ConfigError(
        "attend_chunk: row-independent kernels read every token by tables of its own, got rows that share keys; "
        "build the batch with rowwise metadata",
        field="kernels",
        expected="rowwise metadata",
        got="a chunk",
    )
