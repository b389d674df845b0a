"""Softmax attention of all query heads over one shared key/value head, with a sink.

Key and value are the same vector, so scores and output are two matrix products over one operand.

Source: DeepSeek-V4 ``inference/kernel.py``, ``sparse_attn``; model sheet 2.6.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend", "attend_chunk", "attend_part", "band", "merge_parts", "rounded_scores", "seen_entries"]


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, *, scale: float, rounding: bool | str) -> Tensor:
    """Attend from T queries over X keys that they share.

    ``o = sum_m exp(s_m) k_m / (sum_m exp(s_m) + exp(sink))``, ``s = scale * <q, k>`` over the keys that the mask keeps.
    Keys that one query owns alone (decode) are the case T = 1 with the rows as leading axes.

    Args:
        q: float[...,T,N,D].
        keys: float[...,X,D].
        mask: bool[...,T,X]. True keeps.
        sink: f32[N]. Logit of the sink, not scaled.
        scale: of the dot products.
        rounding: round the unnormalised probabilities to the dtype of ``q`` before they meet the values, as the
            official code does; "normalised" divides them first and rounds the scores too, as transformers does.
    Returns:
        float[...,T,N,D] in the dtype of ``q``.
    Rounding: f32 scores, sums and output; one rounding at the end.
    """
    n_heads = q.shape[-2]
    wide = keys.float()
    scores = (q.flatten(-3, -2).float() @ wide.transpose(-1, -2)).unflatten(-2, (-1, n_heads))
    scores = rounded_scores(scores, scale, q.dtype if rounding == "normalised" else None)
    scores = torch.where(mask.unsqueeze(-2), scores, -torch.inf)
    sink = sink.unsqueeze(-1)
    top = scores.amax(-1, keepdim=True)
    # Where probabilities are rounded unnormalised, the sink has no part in what they are scaled by.
    top = (torch.where(top > -torch.inf, top, sink) if rounding is True else torch.maximum(top, sink)).detach()
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink - top).exp()
    if rounding == "normalised":
        weights, total = weights / total, torch.ones_like(total)
    if rounding:
        weights = weights.to(q.dtype).float()
    out = (weights.flatten(-3, -2) @ wide).unflatten(-2, (-1, n_heads))
    return (out / total).to(q.dtype)


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
    """Attend from the tokens of a chunk of one request, in tiles of query rows.

    A query at position p sees the window keys of the last ``reach`` positions, p included, and of the first
    ``(p + 1) // ratio`` entries all or those it picked.

    Args:
        q: float[T,N,D]. At positions ``first`` and on.
        window: float[S,D]. Of the positions that end with the last query's, back to the first that any query sees.
        entries: float[C,D], or None for none.
        picks: i64[T,P]. Entries that each row reads, -1 where there are fewer; None for all that it sees.
        sink: f32[N].
        first: position of the first query.
        ratio: tokens of an entry; nothing where there are no entries.
        reach: length of the window.
        scale: of the dot products.
        rounding: as in ``attend``.
        budget: of scores held at once.
    Returns:
        float[T,N,D] in the dtype of ``q``.
    """
    n_rows, n_heads, _ = q.shape
    step = budget // (n_heads * (2 * reach + (0 if entries is None else len(entries))))
    step = max(1, min(n_rows, 2 * reach, step))
    start = first + n_rows - len(window)
    out = torch.empty_like(q)
    for a in range(0, n_rows, step):
        b = min(a + step, n_rows)
        keys = window[max(0, first + a - reach + 1) - start : first + b - start]
        mask = band(b - a, len(keys), reach, q.device)
        n_seen = (first + b) // ratio if entries is not None else 0
        if entries is not None and n_seen:
            seen = seen_entries(first + a, b - a, n_seen, ratio, None if picks is None else picks[a:b], q)
            keys, mask = torch.cat((keys, entries[:n_seen])), torch.cat((mask, seen), dim=1)
        out[a:b] = attend(q[a:b], keys, mask, sink, scale=scale, rounding=rounding)
    return out


def band(n_rows: int, n_keys: int, reach: int, device: torch.device) -> Tensor:
    """Mark what the last ``n_rows`` of ``n_keys`` positions see of a window: bool[T,X]."""
    age = torch.arange(n_keys - n_rows, n_keys, device=device).unsqueeze(-1) - torch.arange(n_keys, device=device)
    return (age >= 0) & (age < reach)


def seen_entries(first: int, n_rows: int, n_entries: int, ratio: int, picks: Tensor | None, like: Tensor) -> Tensor:
    """Mark the entries that the rows of a tile read.

    Args:
        first: position of the first row.
        n_rows: T.
        n_entries: C.
        ratio: tokens of an entry.
        picks: i64[T,P], or None for all that are complete.
        like: a tensor on the device.
    Returns:
        bool[T,C].
    """
    if picks is None:
        visible = torch.arange(first + 1, first + n_rows + 1, device=like.device) // ratio
        return torch.arange(n_entries, device=like.device) < visible.unsqueeze(-1)
    # One extra column takes the -1 of missing picks.
    hit = torch.zeros((n_rows, n_entries + 1), dtype=torch.bool, device=like.device)
    return hit.scatter_(1, torch.where(picks < 0, n_entries, picks), True)[:, :n_entries]


def attend_part(q: Tensor, keys: Tensor, mask: Tensor, *, scale: float, rounding: bool) -> tuple[Tensor, Tensor]:
    """Attend over some of the keys, without the sink: what ``merge_parts`` puts together.

    Args:
        q: float[...,T,N,D].
        keys: float[...,X,D]. Some of the keys, or none.
        mask: bool[...,T,X]. True keeps.
        scale: of the dot products.
        rounding: as in ``attend``.
    Returns:
        (out f32[...,T,N,D], the softmax over these keys alone, zero where there are none; lse f32[...,T,N], the
        logarithm of their sum of exponentials, -inf where there are none).
    """
    n_heads = q.shape[-2]
    wide = keys.float()
    scores = (q.flatten(-3, -2).float() @ wide.transpose(-1, -2)).unflatten(-2, (-1, n_heads)) * scale
    scores = torch.where(mask.unsqueeze(-2), scores, -torch.inf)
    top = scores.amax(-1, keepdim=True) if keys.shape[-2] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if rounding:
        weights = weights.to(q.dtype).float()
    out = (weights.flatten(-3, -2) @ wide).unflatten(-2, (-1, n_heads))
    return torch.where(total > 0, out / total, 0.0), (top + total.log()).squeeze(-1)


def merge_parts(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Merge attention over disjoint sets of keys, and count the sink once.

    ``o = sum_k exp(lse_k) out_k / (sum_k exp(lse_k) + exp(sink))``.

    Args:
        out: f32[A,...,T,N,D]. A parts, of ``attend_part``.
        lse: f32[A,...,T,N].
        sink: f32[N].
    Returns:
        f32[...,T,N,D].
    """
    top = torch.maximum(lse.amax(0), sink)
    weights = (lse - top).exp()
    total = weights.sum(0) + (sink - top).exp()
    return (weights.unsqueeze(-1) * out).sum(0) / total.unsqueeze(-1)


def rounded_scores(products: Tensor, scale: float, dtype: torch.dtype | None) -> Tensor:
    """Scale dot products, rounded to ``dtype`` before and after unless that is None: f32, of the same shape."""
    return products * scale if dtype is None else (products.to(dtype) * scale).float()
