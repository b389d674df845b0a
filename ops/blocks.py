"""Experts on blocks of the rows that chose them, each weight read once for a whole block.

The rows of an expert are cut into blocks of a few; a generated kernel then multiplies every weight that it loads with
all rows of its block, in f32 whatever the weight is kept in, and reads nothing of experts that nobody chose. How many
blocks there are, the choice decides, so this is one opaque operator that looks at its operands, like the plain one.

Source: none; grouped products with register blocking over rows.
"""

from __future__ import annotations

from functools import cache

import attrs
import numpy as np
import torch
from torch import Tensor

from .experts import PLAIN, ExpertMath, inner_rows, summed
from .graph import Graph, compile_graph

__all__ = ["experts_blocked"]


def experts_blocked(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, *, how: ExpertMath = PLAIN
) -> Tensor:
    """Run the chosen experts of every row; see ``experts.experts_sorted``."""
    return torch.ops.purestep.experts_blocked(x, ids, weights, w13, w2, limit, *attrs.astuple(how))


def _experts_blocked(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    after: bool,
    steps: bool,
    inner: bool,
) -> Tensor:
    how = ExpertMath(weighs_after=after, rounds_steps=steps, rounds_inner=inner)
    n_experts = w13.shape[0]
    height = 4 if ids.numel() >= 2 * n_experts else 2
    blocks = _blocks(ids.numpy(), weights.numpy(), n_experts, height)
    kernel = _kernel(height, ids.shape[1], limit, how, x.dtype, w13.dtype, tuple(w13.shape))
    return kernel((x, weights, w13, w2, *blocks))[0]


def _blocks(
    ids: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    weights: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    n_experts: int,
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut the rows of every expert into blocks.

    Returns:
        (expert i64[C], rows i64[A,C], scales f32[A,C], places i64[T*K]): expert of every block; row and weight of each
        of its A members, or row 0 and weight 0; place in [A,C] of every choice.
    """
    flat, n_chosen = ids.reshape(-1), ids.shape[1]
    order = flat.argsort(kind="stable")
    by_expert = flat[order]
    counts = np.bincount(flat, minlength=n_experts)
    heights = -(-counts // height)
    n_blocks = int(heights.sum())
    place = np.arange(len(flat)) - (counts.cumsum() - counts)[by_expert]
    at = place % height * n_blocks + (heights.cumsum() - heights)[by_expert] + place // height
    rows, scales, places = np.zeros(height * n_blocks, np.int64), np.zeros(height * n_blocks, np.float32), at.copy()
    rows[at], scales[at], places[order] = order // n_chosen, weights.reshape(-1)[order], at
    shape = (height, n_blocks)
    return (
        torch.from_numpy(np.arange(n_experts).repeat(heights)),
        torch.from_numpy(rows.reshape(shape)),
        torch.from_numpy(scales.reshape(shape)),
        torch.from_numpy(places),
    )


@cache
def _kernel(
    height: int,
    n_chosen: int,
    limit: float,
    how: ExpertMath,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    shape: tuple[int, int, int],
) -> Graph:
    """Generate the kernel for any number of rows and blocks; a pure function of its arguments, so it is kept."""
    n_experts, inner_width, width = shape[0], shape[1] // 2, shape[2]

    def run(
        x: Tensor,
        weights: Tensor,
        w13: Tensor,
        w2: Tensor,
        expert: Tensor,
        rows: Tensor,
        scales: Tensor,
        places: Tensor,
    ) -> Tensor:
        given = x[rows].float()
        up = w13[expert].float()
        hidden = [(up * given[n].unsqueeze(-2)).sum(-1).to(x.dtype) for n in range(height)]
        inner = [inner_rows(one, scales[n].unsqueeze(-1), limit, how).float() for n, one in enumerate(hidden)]
        down = w2[expert].float()
        out = torch.cat([(down * one.unsqueeze(-2)).sum(-1).to(x.dtype) for one in inner])
        return summed(out[places].unflatten(0, (-1, n_chosen)), weights.unsqueeze(-1), 1, how)

    n_rows, n_blocks = 16, 24
    args = (
        torch.empty(n_rows, width, dtype=dtype),
        torch.empty(n_rows, n_chosen),
        torch.empty(shape, dtype=weight_dtype),
        torch.empty(n_experts, width, inner_width, dtype=weight_dtype),
        torch.empty(n_blocks, dtype=torch.int64),
        torch.empty(height, n_blocks, dtype=torch.int64),
        torch.empty(height, n_blocks),
        torch.empty(n_rows * n_chosen, dtype=torch.int64),
    )
    return compile_graph(run, args, free={0: 0, 1: 0, 4: 0, 5: 1, 6: 1, 7: 0})


def _fake(x: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


_LIBRARY = torch.library.Library("purestep", "FRAGMENT")
_LIBRARY.define(
    "experts_blocked(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, float limit, bool after, bool steps, "
    "bool inner) -> Tensor"
)
_LIBRARY.impl("experts_blocked", _experts_blocked, "CPU")
torch.library.register_fake("purestep::experts_blocked", _fake)
