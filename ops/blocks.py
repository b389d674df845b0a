"""Experts on blocks of the rows that chose them, each weight read once for a whole block.

The rows of an expert are cut into blocks of a few; a generated kernel then multiplies every weight that it loads with
all rows of its block, in f32 whatever the weight is kept in, and reads nothing of experts that nobody chose. How many
blocks there are, the choice decides, so the kernel is one opaque operator that looks at that number.

Source: none; grouped products with register blocking over rows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from .experts import PLAIN, ExpertMath, inner_rows, summed
from .graph import Graph, compile_graph
from .kept import kept

__all__ = ["experts_blocked"]


def experts_blocked(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, *, how: ExpertMath = PLAIN
) -> Tensor:
    """Run the chosen experts of every row; see ``experts.experts_sorted``."""
    n_experts = w13.shape[0]
    blocks = _cut(ids, weights, n_experts, 4 if ids.numel() >= 2 * n_experts else 2)
    return torch.ops.purestep.experts_blocked(x, weights, w13, w2, *blocks, limit, *attrs.astuple(how))


class _Blocks(NamedTuple):
    """The rows of every expert in blocks of A; C is the most that there can be.

    Attributes:
        expert: i64[C]. Of every block.
        rows: i64[C,A]. Its members; 0 where it has fewer.
        scales: f32[C,A]. Their routing weights; 0 where it has fewer.
        places: i64[T*K]. Where every choice is in [C,A].
        n: i64[]. How many blocks there are; the others mean nothing.
    """

    expert: Tensor
    rows: Tensor
    scales: Tensor
    places: Tensor
    n: Tensor


def _cut(ids: Tensor, weights: Tensor, n_experts: int, height: int) -> _Blocks:
    """Cut choices i64[T,K] into blocks; all comparisons, which a compiler turns into a few short loops."""
    flat, n_all = ids.flatten(), ids.numel()
    most = (n_all + (height - 1) * min(n_experts, n_all)) // height
    at, experts = torch.arange(n_all, device=ids.device), torch.arange(n_experts, device=ids.device)
    rank = ((flat == flat.unsqueeze(-1)) & (at < at.unsqueeze(-1))).sum(-1)  # among the choices of the same expert
    heights = ((flat == experts.unsqueeze(-1)).sum(-1) + height - 1) // height
    starts = torch.where(experts < experts.unsqueeze(-1), heights, 0).sum(-1)
    places = (starts[flat] + rank // height) * height + rank % height
    expert = (starts + heights <= torch.arange(most, device=ids.device).unsqueeze(-1)).sum(-1)
    rows = torch.zeros(most * height, dtype=torch.int64, device=ids.device).scatter(0, places, at // ids.shape[1])
    scales = torch.zeros(most * height, device=ids.device).scatter(0, places, weights.flatten())
    shape = (most, height)
    return _Blocks(expert, rows.view(shape), scales.view(shape), places, heights.sum())


def _experts_blocked(
    x: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert: Tensor,
    rows: Tensor,
    scales: Tensor,
    places: Tensor,
    count: Tensor,
    limit: float,
    after: bool,
    steps: bool,
    inner: bool,
) -> Tensor:
    how = ExpertMath(weighs_after=after, rounds_steps=steps, rounds_inner=inner)
    n, n_chosen, height = int(count), weights.shape[1], rows.shape[1]
    kernel = _kernel(height, n_chosen, limit, how, x.dtype, w13.dtype, tuple(w13.shape))
    return kernel((x, weights, w13, w2, expert[:n], rows[:n], scales[:n], places))[0]


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
        given = kept(x[rows].float())
        up, down = w13[expert].float(), w2[expert].float()
        out = []
        for n in range(height):
            hidden = (up * given[:, n].unsqueeze(-2)).sum(-1).to(x.dtype)
            inner = kept(inner_rows(hidden, scales[:, n].unsqueeze(-1), limit, how).float())
            out.append((down * inner.unsqueeze(-2)).sum(-1).to(x.dtype))
        chosen = torch.stack(out, dim=1).flatten(0, 1)[places]
        return summed(chosen.unflatten(0, (-1, n_chosen)), weights.unsqueeze(-1), 1, how)

    n_rows, n_blocks = 16, 24
    args = (
        torch.empty(n_rows, width, dtype=dtype),
        torch.empty(n_rows, n_chosen),
        torch.empty(shape, dtype=weight_dtype),
        torch.empty(n_experts, width, inner_width, dtype=weight_dtype),
        torch.empty(n_blocks, dtype=torch.int64),
        torch.empty(n_blocks, height, dtype=torch.int64),
        torch.empty(n_blocks, height),
        torch.empty(n_rows * n_chosen, dtype=torch.int64),
    )
    about = ("experts in blocks", height, n_chosen, limit, how)
    return compile_graph(run, args, free={0: 0, 1: 0, 4: 0, 5: 0, 6: 0, 7: 0}, about=about)


def _fake(x: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


_LIBRARY = torch.library.Library("purestep", "FRAGMENT")
_LIBRARY.define(
    "experts_blocked(Tensor x, Tensor weights, Tensor w13, Tensor w2, Tensor expert, Tensor rows, Tensor scales, "
    "Tensor places, Tensor count, float limit, bool after, bool steps, bool inner) -> Tensor"
)
_LIBRARY.impl("experts_blocked", _experts_blocked, "CPU")
torch.library.register_fake("purestep::experts_blocked", _fake)
