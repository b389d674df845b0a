"""Manifold-constrained hyper-connections (mHC): M residual streams around every sublayer.

A sublayer reads one mixture of the streams (``pre``) and writes its output back into all of them (``post``), while the
streams themselves are mixed by a matrix ``comb`` that Sinkhorn rounds bring near the doubly stochastic ones. Everything
is local to a token row.

Source: DeepSeek-V4 ``inference/model.py``, ``hc_pre``/``hc_post`` and kernel ``hc_split_sinkhorn``; model sheet 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .activations import sigmoid

__all__ = [
    "enter_streams",
    "head_weights",
    "join_streams",
    "mix_weights",
    "sinkhorn",
    "split_streams",
    "update_streams",
]


def split_streams(x: Tensor, n_streams: int) -> Tensor:
    """Start all streams with the embedding.

    Args:
        x: float[...,H].
        n_streams: M.
    Returns:
        float[...,M,H].
    """
    return x.unsqueeze(-2).expand(*x.shape[:-1], n_streams, x.shape[-1])


def sinkhorn(logits: Tensor, n_iters: int, eps: float) -> Tensor:
    """Turn mixing logits into a positive matrix whose columns (and nearly its rows) sum to one.

    ``C = softmax over [to] + eps``, a column step, then ``n_iters - 1`` times a row step and a column step; every
    division adds ``eps`` to its divisor.

    Args:
        logits: f32[...,M,M], element [from, to].
        n_iters: rounds.
        eps: as above.
    Returns:
        f32[...,M,M].
    """
    # Token axes last: sums over the two small axes then run over contiguous vectors of tokens.
    comb = (logits.softmax(-1) + eps).movedim((-2, -1), (0, 1)).contiguous()
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(n_iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb.movedim((0, 1), (-2, -1))


def mix_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the three mixes of one mHC from the streams it wraps.

    Args:
        streams: float[...,M,H].
        fn: f32[(2+M)*M,M*H]. Rows: pre, post, comb row-major [from, to].
        base: f32[(2+M)*M].
        scale: f32[3].
        n_iters: Sinkhorn rounds.
        eps: of ``pre`` and Sinkhorn.
        norm_eps: of the norm over all streams.
    Returns:
        (pre f32[...,M], post f32[...,M], comb f32[...,M,M] as [from, to]).
    Rounding: f32 throughout.
    """
    n = streams.shape[-2]
    flat = streams.flatten(-2).float()
    mixed = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = mixed.split((n, n, n * n), dim=-1)
    base_pre, base_post, base_comb = base.split((n, n, n * n))
    pre = sigmoid(pre * scale[0] + base_pre) + eps
    post = sigmoid(post * scale[1] + base_post) * 2
    comb = (comb * scale[2] + base_comb).unflatten(-1, (n, n))
    return pre, post, sinkhorn(comb, n_iters, eps)


def join_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum the streams with one weight each.

    Args:
        streams: float[...,M,H].
        weights: f32[...,M].
    Returns:
        float[...,H] in the dtype of ``streams``.
    Rounding: f32 inside, one rounding at the end.
    """
    return (weights.unsqueeze(-2) @ streams.float()).squeeze(-2).to(streams.dtype)


def enter_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a sublayer reads, and the two mixes that its output comes back by.

    Args:
        streams: float[...,M,H].
        fn: f32[(2+M)*M,M*H]. As in ``mix_weights``, and so are the others.
        base: f32[(2+M)*M].
        scale: f32[3].
        n_iters: Sinkhorn rounds.
        eps: of ``pre`` and Sinkhorn.
        norm_eps: of the norm over all streams.
    Returns:
        (y float[...,H], post f32[...,M], comb f32[...,M,M]).
    """
    pre, post, comb = mix_weights(streams, fn, base, scale, n_iters=n_iters, eps=eps, norm_eps=norm_eps)
    return join_streams(streams, pre), post, comb


def update_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, *, rounding: bool = False) -> Tensor:
    """Mix the streams among themselves and add the sublayer's output to each.

    ``R'[to] = post[to] * y + sum over from of comb[from, to] * R[from]``.

    Args:
        streams: float[...,M,H].
        y: float[...,H].
        post: f32[...,M].
        comb: f32[...,M,M].
        rounding: round weights, product and both summands to the dtype of ``streams``, as transformers does.
    Returns:
        float[...,M,H] in the dtype of ``streams``.
    Rounding: f32 inside, one rounding at the end.
    """
    if rounding:
        mixed = comb.to(streams.dtype).transpose(-1, -2) @ streams
        return post.to(streams.dtype).unsqueeze(-1) * y.unsqueeze(-2) + mixed
    added = post.unsqueeze(-1) * y.float().unsqueeze(-2)
    return (comb.transpose(-1, -2) @ streams.float() + added).to(streams.dtype)


def head_weights(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float) -> Tensor:
    """Compute the head's mix of the streams: a sigmoid, no Sinkhorn.

    Args:
        streams: float[...,M,H].
        fn: f32[M,M*H].
        base: f32[M].
        scale: f32[1].
        eps: added to the weights.
        norm_eps: of the norm over all streams.
    Returns:
        f32[...,M].
    Rounding: f32 throughout.
    """
    flat = streams.flatten(-2).float()
    mixed = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return sigmoid(mixed * scale + base) + eps
