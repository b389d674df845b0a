"""The pieces of the oracle: each formula once, in the slowest form that leaves no doubt.

Nothing here is shared with the package under test. Letters of shape tokens: T tokens, M streams, D head width, E
experts, K chosen experts, V vocabulary; ``...`` stands for any leading axes.

Source: DeepSeek-V4 release, ``inference/model.py`` and ``inference/kernel.py``; sampling order and noise: SGLang,
``srt/layers/sampler.py``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "E2M1_VALUES",
    "E4M3_VALUES",
    "Draw",
    "clamped_swiglu",
    "gumbel_noise",
    "hadamard_matrix",
    "head_mix",
    "mix_from_logits",
    "murmur_hash",
    "nearest",
    "oracle_draw",
    "oracle_sample",
    "penalised_logits",
    "pool_overlapping",
    "pool_plain",
    "pool_slots",
    "qdq4",
    "qdq8",
    "rms_norm",
    "rope_frequencies",
    "rotate_pairs",
    "router_scores",
    "router_weights",
    "select_largest",
    "sinkhorn",
]

_U32 = 0xFFFFFFFF
_GREEDY_BELOW = 1e-6


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide the last axis by its root mean square; multiply by ``weight`` if there is one."""
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def sinkhorn(z: Tensor, iters: int, eps: float) -> Tensor:
    """Turn ``z[..., from, to]`` into an almost doubly stochastic matrix; the last step normalises columns."""
    c = torch.exp(z - z.amax(-1, keepdim=True))
    c = c / c.sum(-1, keepdim=True) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def mix_from_logits(
    m: Tensor, scale: Tensor, base: Tensor, streams: int, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the ``(2+M)*M`` numbers of one mHC into ``pre[..., M]``, ``post[..., M]`` and ``comb[..., from, to]``."""
    n = streams
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    z = (m[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(*m.shape[:-1], n, n)
    return pre, post, sinkhorn(z, iters, eps)


def head_mix(m: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """Weights of the streams in front of the vocabulary head: a sigmoid each, no normalisation."""
    return torch.sigmoid(m * scale[0] + base) + eps


def rope_frequencies(width: int, theta: float, scaling: Mapping[str, Any] | None = None) -> list[float]:
    """Angle per position of each of the ``width / 2`` pairs, with YaRN if ``scaling`` is given."""
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if scaling is None:
        return plain
    original = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return width * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

    low: float = max(math.floor(pair_that_turns(scaling["beta_fast"])), 0)
    high: float = min(math.ceil(pair_that_turns(scaling["beta_slow"])), width - 1)
    if low == high:
        high += 0.001
    mixed = []
    for i, f in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        mixed.append(f * (1 - ramp) + f / scaling["factor"] * ramp)
    return mixed


def rotate_pairs(x: Tensor, positions: Tensor, frequencies: Sequence[float], sign: int = 1) -> Tensor:
    """Rotate the last ``2 * len(frequencies)`` channels of ``x[T, ..., D]`` in neighbouring pairs.

    The angle is ``sign * position * frequency``, formed in the dtype of ``x``.
    """
    width = 2 * len(frequencies)
    y = x.clone()
    for i, frequency in enumerate(frequencies):
        angle = sign * positions.to(x.dtype) * torch.tensor(frequency, dtype=x.dtype)
        cos, sin = (f(angle).reshape(-1, *[1] * (x.dim() - 2)) for f in (torch.cos, torch.sin))
        at = x.shape[-1] - width + 2 * i
        y[..., at] = x[..., at] * cos - x[..., at + 1] * sin
        y[..., at + 1] = x[..., at] * sin + x[..., at + 1] * cos
    return y


def pool_slots(values: Tensor, logits: Tensor) -> Tensor:
    """Average ``values[slots, D]`` with one softmax over the slots per channel."""
    weights = torch.exp(logits - logits.amax(0))
    return (weights * values).sum(0) / weights.sum(0)


def pool_plain(values: Tensor, logits: Tensor, ratio: int) -> Tensor:
    """Pool every whole block of ``ratio`` tokens of ``[T, D]`` into one entry."""
    entries = [
        pool_slots(values[j * ratio : (j + 1) * ratio], logits[j * ratio : (j + 1) * ratio])
        for j in range(len(values) // ratio)
    ]
    return torch.stack(entries) if entries else values[:0]


def pool_overlapping(values: Tensor, logits: Tensor, ratio: int = 4) -> Tensor:
    """Pool ``[T, 2*D]``: the first halves of the previous block together with the second halves of this block."""
    width = values.shape[-1] // 2
    entries = []
    for j in range(len(values) // ratio):
        before = range((j - 1) * ratio, j * ratio) if j else range(0)
        own = range(j * ratio, (j + 1) * ratio)
        slots = [(values[t, :width], logits[t, :width]) for t in before]
        slots += [(values[t, width:], logits[t, width:]) for t in own]
        entries.append(pool_slots(torch.stack([v for v, _ in slots]), torch.stack([s for _, s in slots])))
    return torch.stack(entries) if entries else values[:0, :width]


def router_scores(logits: Tensor) -> Tensor:
    """Square root of softplus."""
    return torch.sqrt(torch.logaddexp(logits, torch.zeros_like(logits)))


def router_weights(scores: Tensor, ids: Tensor, factor: float) -> Tensor:
    """Unbiased scores of the chosen experts ``[T, K]``, normalised to sum to ``factor``."""
    chosen = scores.gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * factor


def select_largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Pick the ``k`` largest of each row, the lowest index winning a tie.

    Args:
        scores: float[T,E]. ``-inf`` marks what may not be picked.
        k: how many.

    Returns:
        i64[T,K] in ascending order and, where fewer than ``k`` may be picked, -1 at the end; and float[T]: how far the
        last one picked lies above the best one left out (``inf`` where nothing is left out).
    """
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    ids = torch.full((len(scores), k), -1, dtype=torch.int64)
    margin = torch.full((len(scores),), math.inf, dtype=scores.dtype)
    for t in range(len(scores)):
        possible = int((ordered[t] > -math.inf).sum())
        taken = min(k, possible)
        ids[t, :taken] = order[t, :taken].sort().values
        if taken < possible:
            margin[t] = ordered[t, taken - 1] - ordered[t, taken]
    return ids, margin


def clamped_swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float | None) -> Tensor:
    """One expert: ``w2 . (silu(min(w1 . x, limit)) * clamp(w3 . x, -limit, limit))``; None: no clamps."""
    gate, up = x @ w1.T, x @ w3.T
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up) @ w2.T


def _e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_VALUES = tuple(_e4m3_value(code) for code in range(127))
"""Non-negative finite numbers of e4m3, by code (code 127 is NaN)."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Non-negative numbers of e2m1, by code."""


def nearest(x: Tensor, values: Sequence[float]) -> Tensor:
    """Round to the nearest of ``±values``; halfway goes to the even code."""
    table = torch.tensor(values, dtype=torch.float64)
    distance = (x.abs().double()[..., None] - table).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = torch.arange(len(table)) % 2 == 0
    # Among at most two candidates, 2 marks the even code and 1 the odd one.
    code = (nearest.long() + (nearest & even).long()).argmax(-1)
    return torch.copysign(table[code], x.double())


def _power_of_two_scale(largest: Tensor, top: float) -> Tensor:
    """Smallest power of two that brings ``largest`` down to ``top`` or less."""
    fraction, exponent = torch.frexp(largest.double() / top)
    return torch.ldexp(torch.ones_like(fraction), torch.where(fraction == 0.5, exponent - 1, exponent))


def _qdq(x: Tensor, group: int, values: Sequence[float], floor: float) -> Tensor:
    pieces = []
    for piece in torch.split(x, group, dim=-1):
        scale = _power_of_two_scale(piece.abs().amax(-1, keepdim=True).clamp(min=floor), values[-1])
        pieces.append(nearest((piece.double() / scale).clamp(-values[-1], values[-1]), values) * scale)
    return torch.cat(pieces, -1).to(x.dtype)


def qdq8(x: Tensor, group: int = 64) -> Tensor:
    """Round to e4m3 with one power-of-two scale per ``group`` channels and back (a last shorter group is one too)."""
    return _qdq(x, group, E4M3_VALUES, 1e-4)


def qdq4(x: Tensor, group: int = 32) -> Tensor:
    """Round to e2m1 with one power-of-two scale per ``group`` channels and back (a last shorter group is one too)."""
    return _qdq(x, group, E2M1_VALUES, 6 * 2.0**-126)


def hadamard_matrix(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Walsh-Hadamard matrix in natural order, orthonormal: sign ``(-1)^popcount(i & j)``."""
    if size & (size - 1):
        raise ValueError(f"hadamard_matrix: expected a power of two, got {size}")
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    scale: float = size**-0.5
    return torch.tensor(signs, dtype=dtype) * scale


def _rotate_left(x: int, bits: int) -> int:
    return (x << bits | x >> (32 - bits)) & _U32


def murmur_hash(words: Iterable[int], state: int = 0) -> int:
    """Return murmur3 (32 bit) of a sequence of 32-bit words."""
    count = 0
    for word in words:
        k = _rotate_left(word * 0xCC9E2D51 & _U32, 15) * 0x1B873593 & _U32
        state = (_rotate_left(state ^ k, 13) * 5 + 0xE6546B64) & _U32
        count += 1
    state ^= 4 * count
    state = (state ^ state >> 16) * 0x85EBCA6B & _U32
    state = (state ^ state >> 13) * 0xC2B2AE35 & _U32
    return state ^ state >> 16


def gumbel_noise(seed: int, position: int, token_id: int) -> float:
    """Return the noise of one token: a function of seed, position and token id and of nothing else."""
    h = murmur_hash((seed & _U32, seed >> 32 & _U32, position & _U32, token_id & _U32))
    u = h / _U32
    log_u = math.log(u) if u > 0 else -sys.float_info.max
    return -math.log(-min(log_u, -(2.0**-32)))


def penalised_logits(
    logits: Sequence[float],
    *,
    counts: Mapping[int, int] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    banned: Iterable[int] = (),
    allowed: Iterable[int] | None = None,
    logit_bias: Mapping[int, float] | None = None,
) -> list[float]:
    """Apply, in this order: additive penalties, banned tokens, repetition penalty, grammar mask, bias.

    Args:
        logits: one row, by token id.
        counts: how often each token was seen; every token in it with a count above 0 is penalised.
        repetition_penalty: divides positive logits of seen tokens and multiplies negative ones.
        frequency_penalty: subtracted once per occurrence.
        presence_penalty: subtracted once if seen.
        banned: tokens that may not come now (stop tokens before ``min_new_tokens``).
        allowed: token ids that the grammar allows; None allows all.
        logit_bias: added last, so that it cannot bring back what the mask removed.
    """
    row = list(logits)
    seen = {token: count for token, count in (counts or {}).items() if count > 0}
    for token, count in seen.items():
        row[token] -= frequency_penalty * count + presence_penalty
    for token in banned:
        row[token] = -math.inf
    for token in seen:
        row[token] = row[token] * repetition_penalty if row[token] < 0 else row[token] / repetition_penalty
    if allowed is not None:
        keep = set(allowed)
        row = [x if token in keep else -math.inf for token, x in enumerate(row)]
    for token, bias in (logit_bias or {}).items():
        row[token] += bias
    return row


class Draw(NamedTuple):
    """What one draw did.

    Attributes:
        token_id: the choice.
        kept: token ids that survived top-k, top-p and min-p, most probable first.
        logprobs: natural logarithm of each token's probability after temperature, before truncation, by token id.
        margin: distance of the nearest decision (top-k rank, top-p mass, min-p bound, winning score) from going the
            other way. A comparison with float32 arithmetic means nothing where it is about 1e-6.
    """

    token_id: int
    kept: tuple[int, ...]
    logprobs: tuple[float, ...]
    margin: float


def oracle_draw(
    logits: Tensor | Sequence[float],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 42,
    position: int = 0,
    **penalties: Any,
) -> Draw:
    """Sample one token of one row in float64, step by step.

    Args:
        logits: float[V].
        temperature: below 1e-6 means greedy (the largest logit, the lowest id on a tie).
        top_k: 0 or -1 keeps all.
        top_p: a rank is dropped if the mass strictly before it exceeds this.
        min_p: a token is dropped if its probability is below this times the largest.
        seed: of the request.
        position: logical position that the row's logits stand at (sequence length - 1).
        penalties: arguments of :func:`penalised_logits`.
    """
    row = penalised_logits([float(x) for x in logits], **penalties)
    greedy = temperature < _GREEDY_BELOW
    scaled = [x / (1.0 if greedy else temperature) for x in row]
    largest = max(scaled)
    total = sum(math.exp(x - largest) for x in scaled)
    logprobs = tuple(x - largest - math.log(total) for x in scaled)
    probs = [math.exp(x) for x in logprobs]
    ranked = sorted(range(len(probs)), key=lambda token: (-logprobs[token], token))

    rank_limit = 1 if greedy else top_k if top_k > 0 else len(ranked)
    mass_limit = top_p if not greedy and top_p < 1 else math.inf
    floor = logprobs[ranked[0]] + math.log(min_p) if not greedy and min_p > 0 else -math.inf
    kept, mass, margins = [], 0.0, [math.inf]
    for rank, token in enumerate(ranked):
        if probs[token] == 0:
            break
        if rank:
            margins += [abs(mass - mass_limit), abs(logprobs[token] - floor)]
        if rank == rank_limit:
            margins.append(logprobs[ranked[rank - 1]] - logprobs[token])
            break
        if mass <= mass_limit and logprobs[token] >= floor:
            kept.append(token)
        mass += probs[token]

    scores = {token: logprobs[token] + gumbel_noise(seed, position, token) for token in kept}
    order = sorted(kept, key=lambda token: (-scores[token], token))
    if len(order) > 1:
        margins.append(scores[order[0]] - scores[order[1]])
    return Draw(order[0], tuple(kept), logprobs, min(margins))


def oracle_sample(logits: Tensor | Sequence[float], **arguments: Any) -> int:
    """Return the token id that :func:`oracle_draw` chooses."""
    return oracle_draw(logits, **arguments).token_id
