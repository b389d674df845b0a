"""Faster CPU versions of what a long chunk runs, in blocks of rows whose scratch stays in the processor's caches.

Same names, signatures and values, within float rounding, as the plain operators; the thin counterparts for decoding are
in ``ops/fused.py``. New memory is the dearest thing a chunk asks for (a page must be zeroed before it is written), so
results are written where they belong and everything else is done in place. None of them can be differentiated.

Source: none; they are the plain operators in other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from . import attention, indexer
from .streams import update_streams as plain_update

__all__ = ["attend_chunk", "index_scores", "run_blocks", "sinkhorn_columns", "update_streams"]

TILE_SCORES: Final = 1 << 18
"""Scores of one attention tile: 1 MiB."""

TILE_KEYS: Final = 1 << 19
"""Numbers gathered at once where every row reads entries of its own: 2 MiB."""

LEAST_ROWS: Final = 8
"""Rows of a tile that neither of the two pushes it below."""

MOST_ROWS: Final = 32
"""Rows of a tile at most: each costs a score for every other, whether or not it lies in its window."""

DENSE_ENTRIES: Final = 2
"""Times ``index_topk``: up to so many entries it is cheaper to score all than to gather those picked."""

BLOCK: Final = 1 << 20
"""Numbers of a block of residual streams: 4 MiB."""


def attend_chunk(
    q: Tensor,
    window: Tensor,
    entries: Tensor | None,
    picks: Tensor | None,
    sink: Tensor,
    *,
    first: int,
    ratio: int,
    reach: int,
    scale: float,
    rounding: bool | str,
    budget: int,
) -> Tensor:
    """Attend from the tokens of a chunk; see ``attention.attend_chunk``.

    A tile holds its scores once, sink included, and softmax is one call. Where the indexer picks few of many entries,
    each row gathers its own instead of scoring all of them.
    """
    if rounding == "normalised":
        return attention.attend_chunk(
            q,
            window,
            entries,
            picks,
            sink,
            first=first,
            ratio=ratio,
            reach=reach,
            scale=scale,
            rounding=rounding,
            budget=budget,
        )
    n_rows, n_heads, width = q.shape
    n_all = 0 if entries is None else len(entries)
    n_picks = n_all if picks is None else picks.shape[-1]
    n_scored = min(n_all, DENSE_ENTRIES * n_picks)
    step = min(n_rows, MOST_ROWS, budget // (n_heads * (reach + MOST_ROWS + n_scored)))
    step = max(1, min(step, max(LEAST_ROWS, TILE_SCORES // (n_heads * (reach + n_scored)))))
    own_step = max(1, min(step, max(LEAST_ROWS, TILE_KEYS // max(1, n_picks * width))))
    start = first + n_rows - len(window)
    out, a = torch.empty_like(q), 0
    rounded = q.dtype if rounding and q.dtype is not torch.float32 else None
    while a < n_rows:
        n_seen = (first + min(a + step, n_rows)) // ratio if entries is not None else 0
        owns = picks is not None and n_seen > DENSE_ENTRIES * n_picks
        b = min(a + (own_step if owns else step), n_rows)
        keys = window[max(0, first + a - reach + 1) - start : first + b - start]
        mask = attention.band(b - a, len(keys), reach, q.device)
        own = None
        if entries is not None and picks is not None and owns:
            own = (entries, picks[a:b])
        elif entries is not None and n_seen:
            n_seen = (first + b) // ratio
            seen = attention.seen_entries(first + a, b - a, n_seen, ratio, None if picks is None else picks[a:b], q)
            keys, mask = torch.cat((keys, entries[:n_seen])), torch.cat((mask, seen), dim=1)
        out[a:b] = _attend_tile(q[a:b], keys, mask, own, sink, scale, rounded)
        a = b
    return out


def _attend_tile(
    q: Tensor,
    keys: Tensor,
    mask: Tensor,
    own: tuple[Tensor, Tensor] | None,
    sink: Tensor,
    scale: float,
    rounded: torch.dtype | None,
) -> Tensor:
    """Attend over keys that all rows share, and entries that each picked for itself: f32[T,N,D]."""
    (n_rows, n_heads, width), n_keys = q.shape, len(keys)
    n_own = 0 if own is None else own[1].shape[-1]
    wide, keys = q.float(), keys.float()
    scores = wide.new_empty((n_rows, n_heads, n_keys + n_own + 1))
    # What a row does not see starts from -inf, and the product is added to that: cheaper than hiding it afterwards.
    hidden = torch.where(mask, 0.0, -torch.inf).unsqueeze(1)
    scores[..., :n_keys] = hidden
    shared = scores.view(n_rows * n_heads, -1)[:, :n_keys]
    torch.addmm(shared, wide.view(-1, width), keys.t(), alpha=scale, out=shared)
    gathered = None
    if own is not None:
        entries, picks = own
        gathered = entries.index_select(0, picks.flatten().clamp(min=0)).float().view(n_rows, n_own, width)
        part = scores[..., n_keys:-1]
        torch.mul(torch.bmm(wide, gathered.transpose(1, 2)), scale, out=part)
        part.masked_fill_((picks < 0).unsqueeze(1), -torch.inf)
    scores[..., -1] = sink
    weights, total = _rounded_weights(scores, rounded) if rounded else (scores.softmax(-1), None)
    out = torch.mm(weights.view(n_rows * n_heads, -1)[:, :n_keys], keys).view(n_rows, n_heads, width)
    if gathered is not None:
        out.baddbmm_(weights[..., n_keys:-1], gathered)
    return out if total is None else out.div_(total)


def _rounded_weights(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Turn scores, the sink's last, into probabilities that are rounded before they are divided, and their sum."""
    sink = scores[..., -1:]
    top = scores[..., :-1].amax(-1, keepdim=True)
    weights = scores.sub_(torch.where(top > -torch.inf, top, sink)).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights.to(dtype).float(), total


def run_blocks(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    multiply: Callable[[Tensor, Tensor], Tensor],
    counts: Sequence[int],
) -> Tensor:
    """Run the experts that were hit one after the other, each from its rows to its results; see ``experts.run_sorted``.

    What lies between the two products of an expert is written over in place and gone before the next expert begins.
    ``counts`` says how many rows each expert has.
    """
    if not ids.numel():
        return torch.zeros_like(x, dtype=torch.float32)
    n_rows, n_chosen = ids.shape
    order = torch.argsort(ids.flatten(), stable=True)
    tokens, scales = order // n_chosen, weights.flatten().index_select(0, order).unsqueeze(-1)
    out = torch.empty((len(order), w2.shape[1]), dtype=torch.float32, device=x.device)
    a = 0
    for e, count in enumerate(counts):
        b = a + count
        if count:
            hidden = multiply(x.index_select(0, tokens[a:b]), w13[e]).float()
            gate, up = hidden.chunk(2, dim=-1)
            inner = F.silu(gate.clamp_(max=limit), inplace=True).mul_(up.clamp_(-limit, limit)).mul_(scales[a:b])
            if x.dtype is w2.dtype is torch.float32:
                torch.mm(inner, w2[e].t(), out=out[a:b])
            else:
                out[a:b] = multiply(inner.to(x.dtype), w2[e])
        a = b
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return F.embedding_bag(place.view(n_rows, n_chosen), out, mode="sum")


def sinkhorn_columns(logits: Tensor, n_iters: int, eps: float) -> Tensor:
    """Do the rounds of ``streams.sinkhorn`` on the scales of rows and columns, tokens along the last axis.

    Of many tokens a sum over an axis of 4 is then three additions of long vectors.

    Args:
        logits: f32[T,M,M], element [from, to].
        n_iters: rounds.
        eps: as there.
    Returns:
        f32[T,M,M].
    """
    k = logits.softmax(-1).add_(eps).movedim(0, -1).contiguous()
    work, r = torch.empty_like(k), k.new_ones((k.shape[0], 1, k.shape[2]))
    c = k.sum(0, keepdim=True).add_(eps).reciprocal_()
    for _ in range(n_iters - 1):
        r = torch.addcdiv(torch.mul(k, c, out=work).sum(1, keepdim=True), r.new_ones(()), r, value=eps).reciprocal_()
        c = torch.addcdiv(torch.mul(k, r, out=work).sum(0, keepdim=True), c.new_ones(()), c, value=eps).reciprocal_()
    # Contiguous, as a batched product wants its matrices: it would copy them one by one.
    return k.mul_(r).mul_(c).movedim(-1, 0).contiguous()


def update_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, *, rounding: bool = False) -> Tensor:
    """Mix the streams and add the sublayer's output, block by block into the result; see ``streams.update_streams``."""
    if rounding or streams.dim() != 3:
        return plain_update(streams, y, post, comb, rounding=rounding)
    out, step = torch.empty_like(streams, memory_format=torch.contiguous_format), _block_rows(streams)
    across = comb.transpose(1, 2)
    for a in range(0, len(streams), step):
        rows = slice(a, a + step)
        if streams.dtype is torch.float32:
            torch.bmm(across[rows], streams[rows], out=out[rows])
            out[rows].addcmul_(post[rows].unsqueeze(-1), y[rows].unsqueeze(-2))
        else:
            mixed = torch.bmm(across[rows], streams[rows].float())
            out[rows] = mixed.addcmul_(post[rows].unsqueeze(-1), y[rows].float().unsqueeze(-2))
    return out


def _block_rows(x: Tensor) -> int:
    return max(1, BLOCK // max(1, x[0].numel() if len(x) else 1))


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, *, rounding: bool) -> Tensor:
    """Score entries that all rows share in blocks of rows; see ``indexer.index_scores``."""
    if keys.dim() != 2 or (rounding and weights.dtype is not torch.float32):
        return indexer.index_scores(q, keys, weights, rounding=rounding)
    n_rows, n_heads, width = q.shape
    wide, weights = keys.float().t(), weights.float().unsqueeze(1)
    out = weights.new_empty((n_rows, 1, len(keys)))
    step = max(1, TILE_SCORES // max(1, n_heads * len(keys)))
    for a in range(0, n_rows, step):
        rows = slice(a, a + step)
        products = torch.mm(q[rows].float().reshape(-1, width), wide).relu_()
        torch.bmm(weights[rows], products.view(-1, n_heads, len(keys)), out=out[rows])
    return out.squeeze(1)
