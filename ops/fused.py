"""Faster CPU versions of some operators, with the names and signatures of the plain ones.

They compute the same values in other orders, within float rounding of the plain versions. None of them can be
differentiated: they write into buffers of their own.
"""

from __future__ import annotations

from operator import mul
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from . import chunks, norms
from . import experts as plain
from .experts import PLAIN, ExpertMath, gate_up, inner_rows
from .indexer import masked_scores, padded_picks
from .linear import grouped_linear as plain_grouped
from .streams import join_streams

__all__ = [
    "apply_rotary",
    "enter_streams",
    "expert",
    "experts_sorted",
    "grouped_linear",
    "linear",
    "mix_weights",
    "normalize_query",
    "pick_entries",
    "rms_norm",
]

THIN_ROWS: Final = 32
"""Rows up to which oneDNN reads a large f32 weight faster than the BLAS behind ``F.linear``."""

EMULATES_BF16: Final = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this CPU has no bfloat16 arithmetic; thin products then still gain from half the bytes, others do not."""

EMULATED_ROWS: Final = 8
"""Rows up to which an emulated bfloat16 product is faster than widening its weight first."""

FEW_ROWS: Final = 16
"""Rows of the busiest expert up to which a batched product over all experts only waits for their weights."""

MOST_EXPERTS: Final = 0.6
"""Share of experts that must be hit for reading all of them to pay: the batched product is about twice as fast."""

MANY_ROWS: Final = 512
"""Rows from which Sinkhorn's sums run along the rows."""

LARGE_WEIGHT: Final = 1 << 20
"""Elements from which that pays; a call of oneDNN costs some 50 us before it multiplies anything."""


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply rows by a weight, through oneDNN where few rows meet an f32 weight.

    Args:
        x: float[...,H].
        w: float[F,H].
    Returns:
        float[...,F].
    """
    if x.dtype is not w.dtype:
        return linear(x.to(w.dtype), w).to(x.dtype)
    if EMULATES_BF16 and w.dtype is torch.bfloat16 and x.numel() > EMULATED_ROWS * x.shape[-1]:
        return F.linear(x.float(), w.float()).to(x.dtype)
    if w.numel() >= LARGE_WEIGHT and w.dtype is torch.float32 and 0 < x.numel() <= THIN_ROWS * x.shape[-1]:
        return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return F.linear(x, w)


def grouped_linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply every group by its own weight; see ``linear.grouped_linear``.

    Where bfloat16 is emulated, few rows meet large weights one group at a time and the others are widened: widening a
    large weight takes far longer than multiplying a row by it.
    """
    if EMULATES_BF16 and w.dtype is torch.bfloat16:
        is_thin = x.numel() <= EMULATED_ROWS * x.shape[-2] * x.shape[-1]
        if is_thin and w[0].numel() >= LARGE_WEIGHT:
            return torch.stack([linear(one, own) for one, own in zip(x.unbind(-2), w, strict=True)], dim=-2)
        return plain_grouped(x.float(), w.float()).to(x.dtype)
    return plain_grouped(x, w)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale to unit root mean square in one call; see ``norms.rms_norm``."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def normalize_query(q: Tensor, eps: float, *, rounding: bool | str) -> Tensor:
    """Scale every head to unit root mean square in one call; see ``norms.normalize_query``."""
    if rounding:
        return norms.normalize_query(q, eps, rounding=rounding)
    return F.rms_norm(q.float(), q.shape[-1:], None, eps).to(q.dtype)


def expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float | None, *, how: ExpertMath = PLAIN) -> Tensor:
    """Run one (shared) expert on every row; see ``experts.expert``."""
    return linear(inner_rows(linear(x, w13), None, limit, how), w2)


def experts_sorted(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, *, how: ExpertMath = PLAIN
) -> Tensor:
    """Run the experts that were hit, through oneDNN where they are thin; see ``experts.experts_sorted``."""
    if how is not PLAIN:
        return plain.experts_sorted(x, ids, weights, w13, w2, limit, how=how)
    return torch.ops.purestep.experts_thin(x, ids, weights, w13, w2, limit)


def _experts_thin(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    if x.shape[0] == 1:
        return _one_row(x, ids, weights, w13, w2, limit)
    counts = torch.bincount(ids.flatten(), minlength=w13.shape[0]).tolist()
    is_few = 0 < max(counts) <= FEW_ROWS and sum(map(bool, counts)) >= len(counts) * MOST_EXPERTS
    if is_few and not (EMULATES_BF16 and w13.dtype is torch.bfloat16):
        return _padded_experts(x, ids, weights, w13, w2, limit, max(counts))
    return chunks.run_blocks(x, ids, weights, w13, w2, limit, linear, counts)


def _padded_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, room: int
) -> Tensor:
    """Give every expert ``room`` rows, so that two batched products read all weights once, on all cores."""
    n_rows, n_chosen = ids.shape
    n_experts = w13.shape[0]
    expert_ids, order = ids.flatten().sort(stable=True)
    place = torch.arange(len(order), device=x.device) - torch.searchsorted(expert_ids, expert_ids)
    slot = expert_ids * room + place
    rows = x.new_zeros((n_experts * room, x.shape[1])).index_copy_(0, slot, x.index_select(0, order // n_chosen))
    scale = weights.new_zeros((n_experts * room, 1))
    scale.index_copy_(0, slot, weights.flatten().index_select(0, order).unsqueeze(-1))
    hidden = torch.bmm(rows.to(w13.dtype).unflatten(0, (n_experts, room)), w13.transpose(1, 2)).to(x.dtype)
    hidden = gate_up(hidden.flatten(0, 1), limit).mul_(scale).to(x.dtype)
    out = torch.bmm(hidden.to(w2.dtype).unflatten(0, (n_experts, room)), w2.transpose(1, 2)).to(x.dtype)
    back = torch.empty_like(slot).index_copy_(0, order, slot)
    return out.flatten(0, 1).index_select(0, back).unflatten(0, (n_rows, n_chosen)).sum(1, dtype=torch.float32)


def _one_row(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    # One row has nothing to sort: each of its experts multiplies it.
    chosen = ids[0].tolist()
    hidden = torch.cat([linear(x, w13[e]) for e in chosen])
    hidden = gate_up(hidden, limit).mul_(weights.view(-1, 1)).to(x.dtype)
    out = torch.cat([linear(hidden[j : j + 1], w2[e]) for j, e in enumerate(chosen)])
    return out.sum(0, keepdim=True, dtype=torch.float32)


_LIBRARY = torch.library.Library("purestep", "FRAGMENT")
_LIBRARY.define("experts_thin(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, float limit) -> Tensor")
_LIBRARY.impl("experts_thin", _experts_thin, "CompositeExplicitAutograd")
torch.library.register_fake(
    "purestep::experts_thin", lambda x, ids, weights, w13, w2, limit: torch.empty_like(x, dtype=torch.float32)
)


def apply_rotary(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate the last R channels in one copy of ``x``; see ``rotary.apply_rotary``."""
    rotary = 2 * factors.shape[-1]
    if x.dtype is not torch.float32:
        out = x.clone(memory_format=torch.contiguous_format)
        tail = out.narrow(-1, x.shape[-1] - rotary, rotary)
        turned = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2))).mul_(factors)
        tail.copy_(torch.view_as_real(turned).flatten(-2))
        return out
    out = x.clone(memory_format=torch.contiguous_format)
    pairs = out.narrow(-1, x.shape[-1] - rotary, rotary).unflatten(-1, (-1, 2))
    torch.view_as_complex(pairs).mul_(factors)
    return out


def _sinkhorn(logits: Tensor, n_iters: int, eps: float) -> Tensor:
    # The first matrix K stays, and two vectors scale its rows and columns: C = r K c. Dividing C by (row sums + eps) is
    # r <- r / (r (K c) + eps) = 1 / (K c + eps / r), and alike for c: three small operations a step instead of three
    # over the matrix.
    if logits.shape[0] == 1:
        return torch.ops.purestep.sinkhorn_one(logits, n_iters, eps)
    if logits.shape[0] >= MANY_ROWS:
        return chunks.sinkhorn_columns(logits, n_iters, eps)
    k = logits.softmax(-1).add_(eps)
    across = k.transpose(1, 2)
    ones = k.new_ones(k.shape[0], k.shape[1], 1)
    r, c = ones, torch.addcdiv(torch.bmm(across, ones), ones, ones, value=eps).reciprocal_()
    for _ in range(n_iters - 1):
        r = torch.addcdiv(torch.bmm(k, c), ones, r, value=eps).reciprocal_()
        c = torch.addcdiv(torch.bmm(across, r), ones, c, value=eps).reciprocal_()
    return k.mul_(r).mul_(c.transpose(1, 2))


def _sinkhorn_one(logits: Tensor, n_iters: int, eps: float) -> Tensor:
    # One token's matrix is smaller than the cost of calling an operator on it: plain numbers are several times faster.
    k = logits[0].softmax(-1).add_(eps)
    rows = k.tolist()
    columns = list(zip(*rows, strict=True))
    r = [1.0] * len(rows)
    c = [1.0 / (sum(column) + eps) for column in columns]
    for _ in range(n_iters - 1):
        r = [1.0 / (sum(map(mul, row, c)) + eps / x) for row, x in zip(rows, r, strict=True)]
        c = [1.0 / (sum(map(mul, column, r)) + eps / x) for column, x in zip(columns, c, strict=True)]
    return (k * k.new_tensor(r).unsqueeze(1) * k.new_tensor(c)).unsqueeze(0)


_LIBRARY.define("sinkhorn_one(Tensor logits, int n_iters, float eps) -> Tensor")
_LIBRARY.impl("sinkhorn_one", _sinkhorn_one, "CompositeExplicitAutograd")
torch.library.register_fake("purestep::sinkhorn_one", lambda logits, n_iters, eps: torch.empty_like(logits))


def mix_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the three mixes of one mHC with fewer, in-place operations; see ``streams.mix_weights``."""
    n = streams.shape[-2]
    flat = streams.flatten(1).float()
    inverse = (
        torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square_().div_(flat.shape[-1]).add_(norm_eps).rsqrt_()
    )
    mixed = linear(flat, fn).mul_(inverse)
    pre, post, comb = mixed.split((n, n, n * n), dim=-1)
    base_pre, base_post, base_comb = base.split((n, n, n * n))
    s_pre, s_post, s_comb = scale.unbind()
    pre = torch.addcmul(base_pre, pre, s_pre).sigmoid_().add_(eps)
    post = torch.addcmul(base_post, post, s_post).sigmoid_().mul_(2)
    comb = torch.addcmul(base_comb, comb, s_comb).view(-1, n, n)
    return pre, post, _sinkhorn(comb, n_iters, eps)


def enter_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a sublayer reads and how its output comes back; see ``streams.enter_streams``."""
    pre, post, comb = mix_weights(streams, fn, base, scale, n_iters=n_iters, eps=eps, norm_eps=norm_eps)
    return join_streams(streams, pre), post, comb


def pick_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Choose the best visible entries without sorting them all; see ``indexer.pick_entries``.

    Score and index are packed into one integer whose order is that of (score, lower index first), so no two are equal
    and ``topk`` has no tie to decide.
    """
    n = scores.shape[-1]
    masked, index = masked_scores(scores, visible)
    bits = (masked + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (ordered << 32) | (n - 1 - index)
    order = n - 1 - (keys.topk(min(count, n), dim=-1).values & 0xFFFFFFFF)
    return padded_picks(order, visible, count)
