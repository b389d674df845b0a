"""The sublayers of DeepSeek-V4 in bfloat16, each implementation with the roundings that the sheet lists for it.

All numbers are float32; what an implementation keeps in bfloat16 is rounded with ``r``. Every function takes the input
that the engine under test has seen, so that one rounding which falls to the other side does not spread.

Source: model sheet, 2.12 (official rounding points) and 3 (where implementations disagree).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from oracle.ops import (
    E4M3_VALUES,
    hadamard_matrix,
    head_mix,
    mix_from_logits,
    nearest,
    pool_slots,
    qdq4,
    qdq8,
    rope_frequencies,
    router_scores,
    select_largest,
)
from torch import Tensor

__all__ = ["OFFICIAL", "SGLANG", "TRANSFORMERS", "VLLM_ASCEND", "VLLM_ASCEND_NEWEST", "Rules", "Sublayers", "r"]


@dataclass(frozen=True)
class Rules:
    """One column of the table of disagreements."""

    kv: str = "none"
    hadamard: bool = False
    index: str = "none"
    scores_rounded: bool = False
    query_norm: str = "once"
    between: bool = True
    turn_rounded: bool = False
    window_yarn: bool = False
    pooling: str = "official"
    router_rounded: bool = False
    weigh: str = "inside"
    steps_rounded: bool = False
    streams_rounded: bool = False
    activations: bool = False
    wo_a_activations: bool = False
    probabilities: str = "wide"
    head_rounded: bool = False
    clamp_shared: bool = True


OFFICIAL = Rules(
    kv="fp8",
    hadamard=True,
    index="fp4",
    scores_rounded=True,
    query_norm="all",
    probabilities="unnormalised",
)
TRANSFORMERS = Rules(
    query_norm="factor",
    turn_rounded=True,
    pooling="rounded",
    router_rounded=True,
    weigh="after",
    steps_rounded=True,
    streams_rounded=True,
    probabilities="normalised",
    head_rounded=True,
)
SGLANG = Rules(
    kv="fp8 of wide",
    hadamard=True,
    index="fp8",
    between=False,
    pooling="wide",
    weigh="after",
    head_rounded=True,
)
VLLM_ASCEND = Rules(hadamard=True, index="int8", window_yarn=True, weigh="on the sum", head_rounded=True)
VLLM_ASCEND_NEWEST = Rules(
    kv="fp8", hadamard=True, index="fp8", window_yarn=True, weigh="on the sum", head_rounded=True
)


def r(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.to(torch.bfloat16).float()


def _same(x: Tensor) -> Tensor:
    return x


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@dataclass(frozen=True)
class Sublayers:
    """The sublayers of one checkpoint under one set of rules.

    Attributes:
        rules: what is rounded.
        config: the fields of ``config.json``.
        tensors: the checkpoint's tensors by official name, unquantised.
    """

    rules: Rules
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def w(self, name: str) -> Tensor:
        """Take a tensor, bfloat16 values as float32."""
        return self.tensors[name].float()

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a weight that releases quantise."""
        return r((qdq8(x, 128) if self.rules.activations else x) @ self.w(name).T)

    def turned(self, x: Tensor, positions: Tensor, ratio: int, sign: int = 1) -> Tensor:
        """Rotate the tail of ``x[T, ..., D]``, unrounded."""
        c = self.config
        theta = c["compress_rope_theta"] if ratio else c["rope_theta"]
        yarn = c.get("rope_scaling") if ratio or self.rules.window_yarn else None
        keep = r if self.rules.turn_rounded else _same
        y, width = x.clone(), c["qk_rope_head_dim"]
        for i, frequency in enumerate(rope_frequencies(width, theta, yarn)):
            angle = positions.float() * torch.tensor(frequency)
            cos, sin = (keep(f(angle)).reshape(-1, *[1] * (x.dim() - 2)) for f in (torch.cos, torch.sin))
            u, v = (x[..., x.shape[-1] - width + 2 * i + k] for k in (0, 1))
            y[..., x.shape[-1] - width + 2 * i] = u * cos - sign * v * sin
            y[..., x.shape[-1] - width + 2 * i + 1] = sign * u * sin + v * cos
        return y

    def entry(self, x: Tensor, norm: str, positions: Tensor, ratio: int, *, index_key: bool = False) -> Tensor:
        """Norm, rotate and round what becomes a window row, a compressed entry or an index key."""
        normed = _norm(x, self.w(norm), self.config["rms_norm_eps"])
        turned = self.turned(r(normed) if self.rules.between else normed, positions, ratio)
        if index_key:
            return self.index_row(r(turned))
        plain = x.shape[-1] - self.config["qk_rope_head_dim"]
        head, tail = turned[..., :plain], r(turned[..., plain:])
        if self.rules.kv == "none":
            return r(turned)
        return torch.cat([qdq8(head if self.rules.kv == "fp8 of wide" else r(head)), tail], -1)

    def index_row(self, x: Tensor) -> Tensor:
        """Rotate and round index queries or keys."""
        if self.rules.hadamard:
            x = r(x @ hadamard_matrix(x.shape[-1]))
        largest = x.abs().amax(-1, keepdim=True)
        if self.rules.index == "fp4":
            return qdq4(x)
        if self.rules.index == "fp8":
            scale = largest.clamp(min=1e-4) / 448
            return (nearest((x / scale).clamp(-448, 448), E4M3_VALUES) * scale).float()
        if self.rules.index == "int8":
            scale = largest / 127
            return torch.round(x / scale).nan_to_num(0.0) * scale.half().float()
        return x

    def compress(self, prefix: str, x: Tensor, ratio: int, *, index_key: bool = False) -> Tensor:
        """Pool a sequence into entries."""
        keep = r if self.rules.pooling == "rounded" else _same
        values = keep(x @ self.w(prefix + "wkv.weight").T)
        logits = keep(x @ self.w(prefix + "wgate.weight").T)
        logits = logits + self.w(prefix + "ape")[torch.arange(len(x)) % ratio]
        pooled, half = [], values.shape[-1] // 2
        for j in range(len(x) // ratio):
            own = slice(j * ratio, (j + 1) * ratio)
            v, s = values[own], logits[own]
            if ratio == 4:
                before = slice((j - 1) * ratio, j * ratio) if j else slice(0, 0)
                v = torch.cat([values[before, :half], v[:, half:]])
                s = torch.cat([logits[before, :half], s[:, half:]])
            pooled.append(r(r(r(s.softmax(0)) * v).sum(0)) if keep is r else pool_slots(v, s))
        if not pooled:
            return values.new_zeros(0, self.w(prefix + "norm.weight").shape[0])
        entries = torch.stack(pooled)
        entries = entries if self.rules.pooling == "wide" else r(entries)
        starts = torch.arange(len(entries)) * ratio
        return self.entry(entries, prefix + "norm.weight", starts, ratio, index_key=index_key)

    def entry_scores(self, prefix: str, x: Tensor, low: Tensor) -> Tensor:
        """Score every entry for every token of a ratio-4 layer: f32[T,C]."""
        c = self.config
        heads, width = c["index_n_heads"], c["index_head_dim"]
        keep = r if self.rules.scores_rounded else _same
        q = self.linear(low, prefix + "wq_b.weight").reshape(len(x), heads, width)
        q = self.index_row(r(self.turned(q, torch.arange(len(x)), 4)))
        keys = self.compress(prefix + "compressor.", x, 4, index_key=True)
        weights = keep(r(x @ self.w(prefix + "weights_proj.weight").T) * (width**-0.5 * heads**-0.5))
        products = keep(torch.einsum("thj,cj->thc", q, keys)).clamp(min=0)
        return keep(torch.einsum("th,thc->tc", weights, products))

    def attention(self, layer: int, x: Tensor, picks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Attend within one sequence.

        Args:
            layer: which.
            x: f32[T,H]. Normed input.
            picks: i64[T,P]. Entries to read in a ratio-4 layer instead of the best.

        Returns:
            (output f32[T,H], entry scores f32[T,C] in a ratio-4 layer).
        """
        c, prefix = self.config, f"layers.{layer}.attn."
        ratio, eps = c["compress_ratios"][layer], c["rms_norm_eps"]
        tokens, heads, width = len(x), c["num_attention_heads"], c["head_dim"]
        t = torch.arange(tokens)
        low = r(_norm(self.linear(x, prefix + "wq_a.weight"), self.w(prefix + "q_norm.weight"), eps))
        q = self.linear(low, prefix + "wq_b.weight").reshape(tokens, heads, width)
        q = r(self.turned(self.query(q), t, ratio))
        keys = self.entry(self.linear(x, prefix + "wkv.weight"), prefix + "kv_norm.weight", t, ratio)
        seen = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - c["sliding_window"])
        scores = None
        if ratio:
            entries = self.compress(prefix + "compressor.", x, ratio)
            complete = torch.arange(len(entries))[None, :] < ((t + 1) // ratio)[:, None]
            if ratio == 4:
                scores = self.entry_scores(prefix + "indexer.", x, low).masked_fill(~complete, -math.inf)
                picks = select_largest(scores, c["index_topk"])[0] if picks is None else picks
                chosen = torch.zeros(tokens, len(entries) + 1, dtype=torch.bool)
                complete = chosen.scatter(1, torch.where(picks < 0, len(entries), picks), True)[:, :-1]
            keys, seen = torch.cat([keys, entries]), torch.cat([seen, complete], 1)
        sink = self.w(prefix + "attn_sink")
        o = torch.stack([self.attend(q[:, h], keys, seen, sink[h]) for h in range(heads)], 1)
        o = r(self.turned(o, t, ratio, sign=-1)).reshape(tokens, c["o_groups"], -1)
        down = self.w(prefix + "wo_a.weight").reshape(c["o_groups"], c["o_lora_rank"], -1)
        o = qdq8(o, 128) if self.rules.wo_a_activations else o
        z = torch.cat([r(o[:, g] @ down[g].T) for g in range(c["o_groups"])], 1)
        return self.linear(z, prefix + "wo_b.weight"), scores

    def query(self, q: Tensor) -> Tensor:
        """Norm every query head."""
        eps = self.config["rms_norm_eps"]
        if self.rules.query_norm == "all":
            return r(q * r(torch.rsqrt(r(r(r(q * q).mean(-1, keepdim=True)) + eps))))
        factor = torch.rsqrt((q * q).mean(-1, keepdim=True) + eps)
        return r(q * (r(factor) if self.rules.query_norm == "factor" else factor))

    def attend(self, q: Tensor, keys: Tensor, seen: Tensor, sink: Tensor) -> Tensor:
        """Attend with one head."""
        scale, rule = q.shape[-1] ** -0.5, self.rules.probabilities
        scores = r(r(q @ keys.T) * scale) if rule == "normalised" else q @ keys.T * scale
        scores = scores.masked_fill(~seen, -math.inf)
        top = scores.amax(-1, keepdim=True)
        if rule != "unnormalised":
            top = torch.maximum(top, sink)
        p = torch.exp(scores - top)
        total = p.sum(-1, keepdim=True) + torch.exp(sink - top)
        if rule == "normalised":
            return r(r(p / total) @ keys)
        return r((r(p) if rule == "unnormalised" else p) @ keys / total)

    def experts(self, layer: int, x: Tensor, token_ids: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the mixture of experts: (output f32[T,H], selection scores f32[T,E])."""
        c, prefix, rules = self.config, f"layers.{layer}.ffn.", self.rules
        keep = r if rules.router_rounded else _same
        logits = keep(x @ self.w(prefix + "gate.weight").T)
        scores = keep(torch.sqrt(keep(torch.logaddexp(logits, torch.zeros(())))))
        scores = scores if rules.router_rounded else router_scores(logits)
        chosen_by = scores
        if layer < c["num_hash_layers"]:
            ids = self.tensors[prefix + "gate.tid2eid"][token_ids]
        else:
            chosen_by = scores + self.w(prefix + "gate.bias")
            ids = select_largest(chosen_by, c["num_experts_per_tok"])[0] if ids is None else ids
        chosen = scores.gather(-1, ids)
        factor = c["routed_scaling_factor"]
        weights = keep(chosen / keep(chosen.sum(-1, keepdim=True)))
        weights = weights if rules.weigh == "on the sum" else keep(weights * factor)
        outs = torch.stack([self.routed(prefix, x[t], ids[t], weights[t]) for t in range(len(x))])
        if rules.weigh == "on the sum":
            outs = outs * factor
        shared = self.expert(f"{prefix}shared_experts.", x, c["swiglu_limit"] if rules.clamp_shared else None)
        return r((r(outs) if rules.steps_rounded else outs) + shared), chosen_by

    def routed(self, prefix: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum the weighted experts of one token, unrounded: f32[H]."""
        total = torch.zeros_like(x)
        for e, weight in zip(ids.tolist(), weights, strict=True):
            if self.rules.weigh == "inside":
                total = total + self.expert(f"{prefix}experts.{e}.", x[None], self.config["swiglu_limit"], weight)[0]
            else:
                out = self.expert(f"{prefix}experts.{e}.", x[None], self.config["swiglu_limit"])[0] * weight
                total = total + (r(out) if self.rules.steps_rounded else out)
        return total

    def expert(self, prefix: str, x: Tensor, limit: float | None, weight: Tensor | float = 1.0) -> Tensor:
        """Run one expert: f32[T,H]."""
        keep = r if self.rules.steps_rounded else _same
        gate, up = self.linear(x, prefix + "w1.weight"), self.linear(x, prefix + "w3.weight")
        if limit is not None:
            gate, up = keep(gate.clamp(max=limit)), keep(up.clamp(-limit, limit))
        return self.linear(r(keep(keep(gate * torch.sigmoid(gate)) * up) * weight), prefix + "w2.weight")

    def mixes(self, layer: int, kind: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the weights of one mHC, in float32."""
        c = self.config
        flat = streams.flatten(1)
        m = flat @ self.w(f"layers.{layer}.hc_{kind}_fn").T
        m = m * torch.rsqrt((flat * flat).mean(-1, keepdim=True) + c["rms_norm_eps"])
        scale, base = (self.w(f"layers.{layer}.hc_{kind}_{part}") for part in ("scale", "base"))
        return mix_from_logits(m, scale, base, c["hc_mult"], c["hc_sinkhorn_iters"], c["hc_eps"])

    def enter(self, layer: int, kind: str, streams: Tensor) -> Tensor:
        """Compute what a sublayer reads: normed, f32[T,H]."""
        pre, _, _ = self.mixes(layer, kind, streams)
        joined = r((pre[:, :, None] * streams).sum(1))
        return r(_norm(joined, self.w(f"layers.{layer}.{kind}_norm.weight"), self.config["rms_norm_eps"]))

    def leave(self, layer: int, kind: str, streams: Tensor, y: Tensor) -> Tensor:
        """Mix the streams and add a sublayer's output: f32[T,M,H]."""
        _, post, comb = self.mixes(layer, kind, streams)
        if self.rules.streams_rounded:
            added = r(r(post)[:, :, None] * y[:, None])
            return r(added + r(torch.einsum("tjk,tjh->tkh", r(comb), streams)))
        return r(post[:, :, None] * y[:, None] + torch.einsum("tjk,tjh->tkh", comb, streams))

    def logits(self, streams: Tensor) -> Tensor:
        """Compute the logits of the final streams: f32[T,V]."""
        c = self.config
        flat = streams.flatten(1)
        m = flat @ self.w("hc_head_fn").T * torch.rsqrt((flat * flat).mean(-1, keepdim=True) + c["rms_norm_eps"])
        p = head_mix(m, self.w("hc_head_scale"), self.w("hc_head_base"), c["hc_eps"])
        hidden = r(_norm(r((p[:, :, None] * streams).sum(1)), self.w("norm.weight"), c["rms_norm_eps"]))
        out = hidden @ self.w("head.weight").T
        return r(out) if self.rules.head_rounded else out
