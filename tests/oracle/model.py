"""DeepSeek-V4 for one sequence without any cache: the slow, plain reading of the published formulas.

Every layer is computed for all tokens at once; loops run over layers, heads, experts and compressed entries. Tensors
are taken by their official checkpoint names, unquantised. By default the mathematics is plain (no rounding to FP8 or
FP4, no Hadamard rotation); four switches turn on what the released code does.

Source: DeepSeek-V4 release, ``inference/model.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from oracle.ops import (
    clamped_swiglu,
    hadamard_matrix,
    head_mix,
    mix_from_logits,
    pool_overlapping,
    pool_plain,
    qdq4,
    qdq8,
    rms_norm,
    rope_frequencies,
    rotate_pairs,
    router_scores,
    router_weights,
    select_largest,
)
from torch import Tensor

__all__ = ["comparable_rows", "oracle_logits", "picks_from_trace"]

OVERLAPPING_RATIO = 4
Trace = dict[str, Any]
Replay = Mapping[int, Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Run:
    """What every part of one run needs to know."""

    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    token_ids: Tensor
    positions: Tensor
    replay: Replay
    kv_qdq: bool
    indexer_hadamard: bool
    indexer_qdq: bool
    clamp_shared_expert: bool

    def frequencies(self, ratio: int) -> list[float]:
        c = self.config
        if ratio == 0:
            return rope_frequencies(c["qk_rope_head_dim"], c["rope_theta"])
        return rope_frequencies(c["qk_rope_head_dim"], c["compress_rope_theta"], c.get("rope_scaling"))

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        return rms_norm(x, None if name is None else self.weights[name], self.config["rms_norm_eps"])

    def round_kv(self, x: Tensor) -> Tensor:
        if not self.kv_qdq:
            return x
        plain = x.shape[-1] - self.config["qk_rope_head_dim"]
        return torch.cat([qdq8(x[..., :plain]), x[..., plain:]], -1)

    def round_index(self, x: Tensor) -> Tensor:
        if self.indexer_hadamard:
            x = x @ hadamard_matrix(x.shape[-1], x.dtype)
        return qdq4(x) if self.indexer_qdq else x


def oracle_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    trace: Trace | None = None,
    replay: Replay | None = None,
    *,
    kv_qdq: bool = False,
    indexer_hadamard: bool = False,
    indexer_qdq: bool = False,
    clamp_shared_expert: bool = True,
    first_position: int = 0,
) -> Tensor:
    """Compute the logits of every position of one sequence.

    Args:
        config: the fields of ``config.json``.
        tensors: the checkpoint's tensors by official name, unquantised.
        ids: token ids.
        dtype: float32 or float64, for everything.
        trace: a dict to be filled. ``trace["layers"][i]`` holds ``streams_in``, ``streams_mid``, ``streams_out``
            float[T,M,H]; ``attn`` and ``ffn``, each a dict of ``pre``, ``post``, ``comb``, ``x`` (the normed input of
            the sublayer) and ``y`` (its output); ``q`` float[T,N,D] and ``kv`` float[T,D], both rotated; ``o``
            float[T,N,D] (rotated back); ``visible`` bool[T,T+C] (window, then entries); ``router_scores`` float[T,E],
            ``expert_ids`` i64[T,K], ``expert_weights`` float[T,K], ``expert_margin`` float[T]; in layers that compress
            ``entries`` float[C,D]; in ratio-4 layers ``index_keys`` float[C,J], ``entry_scores`` float[T,C],
            ``entry_ids`` i64[T,P] (ascending, -1 where there is none) and ``entry_margin`` float[T]. ``trace`` itself
            holds ``hidden`` float[T,H] (what the head multiplies) and ``margin`` float[T], the smallest of the layers.
        replay: choices to make instead of the model's own, by layer: ``expert_ids`` i64[T,K] and ``entry_ids``
            i64[T,P], as in ``trace``; either may be missing.
        kv_qdq: round the plain channels of window rows and main entries to FP8 and back.
        indexer_hadamard: rotate index queries and keys by the Walsh-Hadamard matrix.
        indexer_qdq: round index queries and keys to FP4 and back.
        clamp_shared_expert: whether ``swiglu_limit`` holds for the shared expert too.
        first_position: rotary position of the first token; the blocks of the compressors still start at it.

    Returns:
        float[T,V] in ``dtype``.
    """
    weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    token_ids = torch.tensor(list(ids), dtype=torch.int64)
    run = _Run(
        config=config,
        weights=weights,
        token_ids=token_ids,
        positions=first_position + torch.arange(len(token_ids)),
        replay=replay or {},
        kv_qdq=kv_qdq,
        indexer_hadamard=indexer_hadamard,
        indexer_qdq=indexer_qdq,
        clamp_shared_expert=clamp_shared_expert,
    )
    streams = weights["embed.weight"][token_ids][:, None, :].repeat(1, config["hc_mult"], 1)
    layers = []
    for layer in range(config["num_hidden_layers"]):
        seen: Trace = {"streams_in": streams}
        streams = _sublayer(run, layer, "attn", streams, seen)
        seen["streams_mid"] = streams
        streams = _sublayer(run, layer, "ffn", streams, seen)
        seen["streams_out"] = streams
        layers.append(seen)
    hidden = run.norm(_merge_for_head(run, streams), "norm.weight")
    if trace is not None:
        margins = [seen[key] for seen in layers for key in ("expert_margin", "entry_margin") if key in seen]
        trace.update(layers=layers, hidden=hidden, margin=torch.stack(margins).amin(0))
    return hidden @ weights["head.weight"].T


def picks_from_trace(trace: Trace) -> dict[int, dict[str, Tensor]]:
    """Take the choices of a traced run, in the form that ``replay`` expects."""
    return {
        layer: {key: seen[key] for key in ("expert_ids", "entry_ids") if key in seen}
        for layer, seen in enumerate(trace["layers"])
    }


def comparable_rows(trace: Trace, margin: float = 1e-5) -> Tensor:
    """Tell which positions another correct implementation must reproduce.

    A position counts only if all its own selections were decided by more than ``margin``, and so were those of every
    earlier position outside the last layer: through the attention of the next layer they reach all later positions.

    Returns:
        bool[T].
    """
    clear = [
        torch.stack([seen[key] > margin for key in ("expert_margin", "entry_margin") if key in seen]).all(0)
        for seen in trace["layers"]
    ]
    handed_on = torch.stack([torch.ones_like(clear[0]), *clear[:-1]]).all(0)
    return handed_on.long().cumprod(0).bool() & clear[-1]


def _stream_logits(run: _Run, fn: Tensor, streams: Tensor) -> Tensor:
    """Project the flattened streams with ``fn`` and divide by their root mean square."""
    return run.norm(streams.flatten(1), None) @ fn.T


def _sublayer(run: _Run, layer: int, kind: str, streams: Tensor, seen: Trace) -> Tensor:
    """Run attention or MoE inside its own mHC and return the next streams."""
    c, prefix = run.config, f"layers.{layer}."
    scale, base = run.weights[f"{prefix}hc_{kind}_scale"], run.weights[f"{prefix}hc_{kind}_base"]
    m = _stream_logits(run, run.weights[f"{prefix}hc_{kind}_fn"], streams)
    pre, post, comb = mix_from_logits(m, scale, base, c["hc_mult"], c["hc_sinkhorn_iters"], c["hc_eps"])
    x = run.norm((pre[:, :, None] * streams).sum(1), f"{prefix}{kind}_norm.weight")
    y = (_attention if kind == "attn" else _experts)(run, layer, x, seen)
    seen[kind] = {"pre": pre, "post": post, "comb": comb, "x": x, "y": y}
    return torch.stack(
        [post[:, k, None] * y + (comb[:, :, k, None] * streams).sum(1) for k in range(c["hc_mult"])], dim=1
    )


def _merge_for_head(run: _Run, streams: Tensor) -> Tensor:
    m = _stream_logits(run, run.weights["hc_head_fn"], streams)
    p = head_mix(m, run.weights["hc_head_scale"], run.weights["hc_head_base"], run.config["hc_eps"])
    return (p[:, :, None] * streams).sum(1)


def _attention(run: _Run, layer: int, x: Tensor, seen: Trace) -> Tensor:
    c, w, prefix = run.config, run.weights, f"layers.{layer}.attn."
    ratio = c["compress_ratios"][layer]
    frequencies = run.frequencies(ratio)
    tokens, heads, width = len(x), c["num_attention_heads"], c["head_dim"]

    qr = run.norm(x @ w[prefix + "wq_a.weight"].T, prefix + "q_norm.weight")
    q = run.norm((qr @ w[prefix + "wq_b.weight"].T).reshape(tokens, heads, width), None)
    q = rotate_pairs(q, run.positions, frequencies)
    kv = run.norm(x @ w[prefix + "wkv.weight"].T, prefix + "kv_norm.weight")
    kv = run.round_kv(rotate_pairs(kv, run.positions, frequencies))

    t = torch.arange(tokens)
    visible = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - c["sliding_window"])
    keys = kv
    if ratio:
        entries = run.round_kv(_compress(run, prefix + "compressor.", ratio, x))
        seen["entries"] = entries
        keys = torch.cat([kv, entries])
        complete = torch.arange(len(entries))[None, :] < ((t + 1) // ratio)[:, None]
        if ratio == OVERLAPPING_RATIO:
            complete = _picked_entries(run, layer, x, qr, complete, seen)
        visible = torch.cat([visible, complete], dim=1)

    o = torch.stack([_attend(q[:, h], keys, visible, w[prefix + "attn_sink"][h]) for h in range(heads)], dim=1)
    o = rotate_pairs(o, run.positions, frequencies, sign=-1)
    seen.update(q=q, kv=kv, o=o, visible=visible)

    groups = o.reshape(tokens, c["o_groups"], -1)
    down = w[prefix + "wo_a.weight"].reshape(c["o_groups"], c["o_lora_rank"], -1)
    z = torch.cat([groups[:, g] @ down[g].T for g in range(c["o_groups"])], dim=1)
    return z @ w[prefix + "wo_b.weight"].T


def _attend(q: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """Attend with one head; key and value are the same, and the sink takes weight without giving a value."""
    scores = (q @ keys.T * q.shape[-1] ** -0.5).masked_fill(~visible, -math.inf)
    largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
    p = torch.exp(scores - largest)
    return p @ keys / (p.sum(-1, keepdim=True) + torch.exp(sink - largest))


def _compress(run: _Run, prefix: str, ratio: int, x: Tensor) -> Tensor:
    """Pool, norm and rotate the entries of one compressor, main or indexer; an entry stands at its block's start."""
    w = run.weights
    ape = w[prefix + "ape"]
    values = x @ w[prefix + "wkv.weight"].T
    logits = x @ w[prefix + "wgate.weight"].T + ape[torch.arange(len(x)) % ratio]
    pool = pool_overlapping if ratio == OVERLAPPING_RATIO else pool_plain
    entries = run.norm(pool(values, logits, ratio), prefix + "norm.weight")
    starts = run.positions[0] + torch.arange(len(entries)) * ratio
    return rotate_pairs(entries, starts, run.frequencies(ratio))


def _picked_entries(run: _Run, layer: int, x: Tensor, qr: Tensor, complete: Tensor, seen: Trace) -> Tensor:
    """Choose the entries that each token sees in a ratio-4 layer; bool[T,C]."""
    c, w, prefix = run.config, run.weights, f"layers.{layer}.attn.indexer."
    heads, width = c["index_n_heads"], c["index_head_dim"]
    iq = (qr @ w[prefix + "wq_b.weight"].T).reshape(len(x), heads, width)
    iq = run.round_index(rotate_pairs(iq, run.positions, run.frequencies(OVERLAPPING_RATIO)))
    keys = run.round_index(_compress(run, prefix + "compressor.", OVERLAPPING_RATIO, x))
    head_weights = x @ w[prefix + "weights_proj.weight"].T * width**-0.5 * heads**-0.5
    scores = torch.zeros(len(x), len(keys), dtype=x.dtype)
    for h in range(heads):
        scores = scores + head_weights[:, h, None] * (iq[:, h] @ keys.T).clamp(min=0)
    scores = scores.masked_fill(~complete, -math.inf)
    ids, margin = select_largest(scores, c["index_topk"])
    ids = run.replay.get(layer, {}).get("entry_ids", ids)
    seen.update(index_keys=keys, entry_scores=scores, entry_ids=ids, entry_margin=margin)

    picked = torch.zeros_like(complete)
    for t in range(len(x)):
        picked[t, ids[t][ids[t] >= 0]] = True
    return picked


def _experts(run: _Run, layer: int, x: Tensor, seen: Trace) -> Tensor:
    c, w, prefix = run.config, run.weights, f"layers.{layer}.ffn."
    scores = router_scores(x @ w[prefix + "gate.weight"].T)
    if layer < c["num_hash_layers"]:
        ids = w[prefix + "gate.tid2eid"][run.token_ids]
        margin = torch.full((len(x),), math.inf, dtype=x.dtype)
    else:
        ids, margin = select_largest(scores + w[prefix + "gate.bias"], c["num_experts_per_tok"])
    ids = run.replay.get(layer, {}).get("expert_ids", ids)
    weights = router_weights(scores, ids, c["routed_scaling_factor"])
    seen.update(router_scores=scores, expert_ids=ids, expert_weights=weights, expert_margin=margin)

    def expert(name: str, rows: Tensor, limit: float | None) -> Tensor:
        w1, w2, w3 = (w[f"{prefix}{name}.{part}.weight"] for part in ("w1", "w2", "w3"))
        return clamped_swiglu(rows, w1, w2, w3, limit)

    y = torch.zeros_like(x)
    for e in range(c["n_routed_experts"]):
        chosen = (ids == e).any(-1)
        weight = (weights * (ids == e)).sum(-1, keepdim=True)
        y[chosen] += weight[chosen] * expert(f"experts.{e}", x[chosen], c["swiglu_limit"])
    return y + expert("shared_experts", x, c["swiglu_limit"] if run.clamp_shared_expert else None)
