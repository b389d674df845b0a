"""Products with weights that lie in memory the way oneDNN wants to read them.

Source: none; oneDNN's inner product with a weight in a blocked layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .experts import PLAIN, ExpertMath, sorted_operator

__all__ = ["PackedStack", "PackedWeight", "experts", "grouped_linear", "linear", "pack", "pack_stack"]

_ROWS: Final = 16
"""Rows that the layout is chosen for; other numbers of thin rows do as well with it."""


class PackedWeight(NamedTuple):
    """A weight in oneDNN's layout, or some of the rows of one that several share.

    Attributes:
        blocks: float[F,H] of the mkldnn layout: only its shape, its dtype and its product with rows are known.
        first: its first row in ``blocks``.
        n_rows: how many rows it has.
    """

    blocks: Tensor
    first: int
    n_rows: int

    def float(self) -> PackedWeight:
        """Return itself: what is kept in f32 is packed in f32, and nothing narrower is asked for its wide numbers."""
        return self


class PackedStack(NamedTuple):
    """The weights of a layer's experts, or of its groups of channels, each in oneDNN's layout.

    Attributes:
        blocks: float[F,H] of the mkldnn layout, one by one.
    """

    blocks: Sequence[Tensor]


def pack(*weights: Tensor) -> tuple[PackedWeight, ...]:
    """Reorder weights once; several that meet the same rows become one, and one product serves them all.

    Args:
        weights: float[F,H] each, of one dtype.
    Returns:
        The same numbers, weight by weight; a copy.
    """
    blocks = _reordered(torch.cat(weights))
    found, first = [], 0
    for w in weights:
        found.append(PackedWeight(blocks, first, len(w)))
        first += len(w)
    return tuple(found)


def pack_stack(weights: Iterable[Tensor]) -> PackedStack:
    """Reorder float[F,H] of every expert or group; a copy."""
    return PackedStack([_reordered(w) for w in weights])


def _reordered(w: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(w.contiguous(), _ROWS)
    return found


def linear(x: Tensor, w: Tensor | PackedWeight) -> Tensor:
    """Multiply rows by a packed or a plain weight; see ``linear.linear``.

    Args:
        x: float[...,H].
        w: float[F,H].
    Returns:
        float[...,F] in the dtype of ``x``.
    """
    dtype = w.blocks.dtype if isinstance(w, PackedWeight) else w.dtype
    rows = x if x.dtype is dtype else x.to(dtype)
    if isinstance(w, PackedWeight):
        # Products of one graph that are the same are computed once (``ops/tracing.py``).
        whole: Tensor = torch.ops.purestep.packed_linear(rows, w.blocks)
        out = whole if w.n_rows == whole.shape[-1] else whole.narrow(-1, w.first, w.n_rows)
    else:
        out = F.linear(rows, w)
    return out if x.dtype is dtype else out.to(x.dtype)


def grouped_linear(x: Tensor, w: PackedStack) -> Tensor:
    """Multiply every group of channels by its own packed weight; see ``linear.grouped_linear``."""
    weights = [PackedWeight(blocks, 0, blocks.shape[0]) for blocks in w.blocks]
    return torch.stack([linear(rows, one) for rows, one in zip(x.unbind(-2), weights, strict=True)], dim=-2)


def _packed_linear(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return found


_KEYS: Final = ("CPU", "MkldnnCPU")
"""Where an operator finds tensors in the library's layout, too."""

_LIBRARY = torch.library.Library("purestep", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor w) -> Tensor")
for _key in _KEYS:
    _LIBRARY.impl("packed_linear", _packed_linear, _key)
torch.library.register_fake("purestep::packed_linear", lambda x, w: x.new_empty((*x.shape[:-1], w.shape[0])))


def _multiply(rows: Tensor, w: Tensor) -> Tensor:
    return _packed_linear(rows.to(w.dtype), w).to(rows.dtype)


_experts: Final = sorted_operator("experts_packed", _multiply, "Tensor[]", _KEYS)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedStack,
    w2: PackedStack,
    limit: float,
    *,
    how: ExpertMath = PLAIN,
) -> Tensor:
    """Run the chosen experts of every row, the rows of each in one product; see ``experts.experts_sorted``."""
    return _experts(x, ids, weights, w13.blocks, w2.blocks, limit, how=how)
