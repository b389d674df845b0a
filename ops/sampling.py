"""From logits to token ids: penalties, mask, bias, truncation, choice.

The order: additive penalties and held-back stop tokens, repetition penalty, mask, bias, choice. A row's id is a
function of its own logits, parameters, seed and position, bit for bit, whatever rows stand beside it. Hence only
operations whose rounding cannot depend on the number of rows: elementwise ones, and softmax, cumulative sums, maxima
and counts along a row (a plain sum over a long row is split among threads when the row is alone). Probabilities are
f64, so that a tiny temperature overflows nothing and a mass near its limit is not a matter of luck.

Source: SGLang ``srt/layers/sampler.py`` and ``srt/sampling/``; here the greedy choice and the noise column are the same
in every path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from .noise import gumbel_noise
from .selection import top_indices

__all__ = [
    "apply_bias",
    "apply_mask",
    "apply_penalties",
    "ban_tokens",
    "choose",
    "drop_improbable",
    "filter_distribution",
    "map_rows",
    "pick_greedy",
    "probs_from_logits",
    "sample_tokens",
    "token_logprobs",
    "truncate_ranks",
    "unpack_mask",
]

_MASK_BITS: Final = 32  # tokens in one word of a packed mask


def map_rows(x: Tensor, rows: Sequence[int], op: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``op`` to some rows of ``x`` and keep the others.

    Args:
        x: float[B,V].
        rows: the rows, each once, in any order; known on the host.
        op: a function of float[K,V], the K rows in the order of ``rows``, to the same shape.
    Returns:
        float[B,V].
    Aliasing: ``x`` itself if there are no rows.
    Source: none; plain indexing.
    """
    if not rows:
        return x
    if list(rows) == list(range(x.shape[0])):
        return op(x)
    index = torch.tensor(rows, dtype=torch.int64, device=x.device)
    return x.index_copy(0, index, op(x.index_select(0, index)))


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_seen: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Make tokens that came before less likely.

    ``x -= frequency * count + presence * [count > 0]``, then ``x * repetition if x < 0 else x / repetition`` for tokens
    of prompt and output. A finite logit stays finite.

    Args:
        logits: f32[B,V].
        output_counts: i32[B,V]. How often each token was sampled.
        prompt_seen: bool[B,V]. Which tokens the prompt holds.
        frequency: f32[B].
        presence: f32[B].
        repetition: f32[B]. Above 0.
    Returns:
        f32[B,V].
    Source: SGLang ``srt/sampling/penaltylib``.
    """
    was_sampled = output_counts > 0
    x = logits - (frequency[:, None] * output_counts + presence[:, None] * was_sampled)
    factor = repetition[:, None]
    limit = torch.finfo(x.dtype).max
    # An extreme factor must neither ban a token nor make an infinity that turns the whole row into NaN.
    scaled = torch.where(x < 0, x * factor, x / factor).clamp(-limit, limit)
    return torch.where((was_sampled | prompt_seen) & x.isfinite(), scaled, x)


def ban_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Set single logits to minus infinity.

    Args:
        logits: f32[B,V].
        rows: i64[K].
        token_ids: i64[K]. Logit ``[rows[k], token_ids[k]]`` is banned.
    Returns:
        f32[B,V].
    Source: SGLang ``srt/sampling/penaltylib/min_new_tokens.py``.
    """
    return logits.index_put((rows, token_ids), logits.new_full((), -math.inf))


def unpack_mask(packed: Tensor, vocab_size: int) -> Tensor:
    """Unpack 32 tokens a word, lowest bit first.

    Args:
        packed: i32[B,K]. K = ceil(V / 32); bits beyond V are ignored.
        vocab_size: V.
    Returns:
        bool[B,V]. True where the bit is 1.
    Source: llguidance and xgrammar, token bit masks.
    """
    shifts = torch.arange(_MASK_BITS, dtype=torch.int32, device=packed.device)
    bits = (packed[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def apply_mask(logits: Tensor, packed: Tensor) -> Tensor:
    """Set the logits of tokens that are not allowed to minus infinity.

    The mask outranks every other rule: where it leaves no token above minus infinity (its only tokens are held back,
    say), its lowest token gets logit 0 and will be chosen. A mask without any bit leaves token 0.

    Args:
        logits: f32[B,V].
        packed: i32[B,K]. As in ``unpack_mask``; 1 = allowed.
    Returns:
        f32[B,V].
    Source: SGLang ``srt/constrained``; the rule for rows without a choice is purestep's own.
    """
    allowed = unpack_mask(packed, logits.shape[1])
    masked = logits.masked_fill(~allowed, -math.inf)
    lowest = allowed.int().argmax(dim=1, keepdim=True)
    has_none = masked.amax(dim=1, keepdim=True) == -math.inf
    return masked.scatter(1, lowest, torch.where(has_none, 0.0, masked.gather(1, lowest)))


def apply_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """Add to single logits; a banned one stays banned.

    Args:
        logits: f32[B,V].
        rows: i64[K].
        token_ids: i64[K]. No pair (row, token) twice.
        bias: f32[K]. Finite.
    Returns:
        f32[B,V].
    Source: SGLang ``srt/sampling/sampling_batch_info.py``.
    """
    return logits.index_put((rows, token_ids), bias, accumulate=True)


def pick_greedy(logits: Tensor) -> Tensor:
    """Take the largest logit of each row, the lowest id on a tie.

    Args:
        logits: f32[B,V].
    Returns:
        i64[B]. Id 0 for a row of nothing but minus infinity; the id of a NaN for a row with one.
    Source: SGLang ``srt/layers/sampler.py``, all-greedy branch.
    """
    return logits.argmax(dim=-1)


def probs_from_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide by the temperature and normalise.

    Args:
        logits: f32[B,V]. Some logit of each row above minus infinity.
        temperature: f64[B]. Above 0, however small.
    Returns:
        f64[B,V]. Exactly 0 where the logit is minus infinity.
    Source: SGLang ``srt/layers/sampler.py``.
    """
    wide = logits.double()
    # Less the maximum first: the differences of f32 numbers keep their digits when a tiny temperature blows them up.
    return ((wide - wide.amax(dim=-1, keepdim=True)) / temperature[:, None]).softmax(dim=-1)


def truncate_ranks(probs: Tensor, top_k: Tensor, top_p: Tensor, n_ranks: int) -> Tensor:
    """Keep the ranks below ``top_k`` before which the mass is at most ``top_p``.

    Ranks go by falling probability, the lower id first among equals. Rank 0 always stays.

    Args:
        probs: f64[B,V]. Normalised; the mass is measured on them as they come.
        top_k: i64[B]. 0 and below: keep all.
        top_p: f64[B]. 1: keep all.
        n_ranks: ranks to look at: the largest ``top_k``, or V if some row keeps all. More only costs time.
    Returns:
        f64[B,V]. 0 where dropped, else unchanged.
    Source: SGLang ``srt/layers/sampler.py``, ``top_k_top_p_min_p_sampling_from_probs_torch``.
    """
    ranked = probs.topk(n_ranks, dim=1).values
    # Shifted, not "cumulative sum less own probability": that difference rounds.
    mass_before = torch.cat([torch.zeros_like(ranked[:, :1]), ranked.cumsum(dim=1)[:, :-1]], dim=1)
    # A mass may round to just above 1, so at top_p = 1 nothing may be compared.
    mass_limit = top_p.masked_fill(top_p >= 1, math.inf)[:, None]
    rank_limit = top_k.masked_fill(top_k <= 0, n_ranks)[:, None]
    is_kept = (torch.arange(n_ranks, device=probs.device) < rank_limit) & (mass_before <= mass_limit)
    n_kept = is_kept.sum(dim=1, keepdim=True)
    # topk leaves the order among equals open, so its values decide how many stay and the ids decide which.
    smallest = ranked.gather(1, n_kept - 1)
    above, tied = probs > smallest, probs == smallest
    n_tied = n_kept - above.sum(dim=1, keepdim=True)
    return probs.masked_fill(~(above | (tied & (tied.cumsum(dim=1) <= n_tied))), 0.0)


def drop_improbable(probs: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens that are less likely than ``min_p`` times the likeliest.

    Args:
        probs: f64[B,V].
        min_p: f64[B]. From 0 to 1.
    Returns:
        f64[B,V]. 0 where dropped, else unchanged.
    Source: SGLang ``srt/layers/sampler.py``, min-p branch.
    """
    floor = min_p[:, None] * probs.amax(dim=-1, keepdim=True)
    return probs.masked_fill(probs < floor, 0.0)


def filter_distribution(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Turn logits into the distribution that a stochastic row is drawn from, short of its normalisation.

    Temperature, softmax, top-k, top-p, min-p, all limits measured on the softmax as it is.

    Args:
        logits: f32[B,V].
        temperature: f64[B]. Above 0.
        top_k: i64[B].
        top_p: f64[B].
        min_p: f64[B].
    Returns:
        f64[B,V]. Exactly 0 for rejected tokens, the softmax for the others.
    Source: SGLang ``srt/layers/sampler.py``.
    """
    probs = probs_from_logits(logits, temperature)
    return drop_improbable(truncate_ranks(probs, top_k, top_p, n_ranks=logits.shape[1]), min_p)


def choose(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token a row: the largest ``log p + g`` with Gumbel noise of (seed, position, token id).

    Args:
        probs: f64[B,V]. Need not be normalised: a common factor moves all scores alike.
        seeds: i64[B].
        positions: i64[B].
    Returns:
        i64[B]. Never a token of probability 0 if there is another.
    Source: SGLang ``srt/layers/sampler.py``, ``multinomial_with_seed``.
    """
    token_ids = torch.arange(probs.shape[1], device=probs.device)
    return (probs.log() + gumbel_noise(seeds, positions, token_ids)).argmax(dim=-1)


def sample_tokens(
    logits: Tensor,
    positions: Tensor,
    *,
    seeds: Sequence[int],
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> Tensor:
    """Choose one token a row; each row's parameters are known on the host, so each row pays only for what it uses.

    Args:
        logits: f32[B,V]. After penalties, mask and bias.
        positions: i64[B]. Position of the token that the logits follow.
        seeds: B numbers, 0 <= seed < 2**64.
        temperature: B numbers; 0 is greedy.
        top_k: B numbers; 0 and below keep all, 1 is greedy.
        top_p: B numbers in (0, 1].
        min_p: B numbers in [0, 1].
    Returns:
        i64[B].
    Source: SGLang ``srt/layers/sampler.py``.
    """
    ids = pick_greedy(logits)
    drawn = [row for row, (t, k) in enumerate(zip(temperature, top_k, strict=True)) if t > 0 and k != 1]
    if not drawn:
        return ids
    device, vocab_size = logits.device, logits.shape[1]

    def column(numbers: Sequence[float], rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor([numbers[row] for row in rows], dtype=dtype, device=device)

    index = torch.tensor(drawn, device=device)
    probs = probs_from_logits(logits.index_select(0, index), column(temperature, drawn, torch.float64))
    ranks = [min(k, vocab_size) if k > 0 else vocab_size for k in top_k]
    place = {row: at for at, row in enumerate(drawn)}
    cut = [row for row in drawn if ranks[row] < vocab_size or top_p[row] < 1]
    if cut:
        limits = column(ranks, cut, torch.int64), column(top_p, cut, torch.float64), max(ranks[row] for row in cut)
        probs = map_rows(probs, [place[row] for row in cut], lambda some: truncate_ranks(some, *limits))
    if any(min_p[row] > 0 for row in drawn):
        probs = drop_improbable(probs, column(min_p, drawn, torch.float64))
    # An i64 holds all 64 bits of a seed, the larger half of them as negative numbers.
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    return ids.index_copy(0, index, choose(probs, column(signed, drawn, torch.int64), positions.index_select(0, index)))


def token_logprobs(logits: Tensor, ids: Tensor, n_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-probabilities of chosen tokens and of the likeliest ones.

    They are the model's own: before penalties, mask, bias, temperature and truncation.

    Args:
        logits: f32[B,V]. Unmodified.
        ids: i64[B]. The chosen tokens.
        n_top: how many of the likeliest, at most V.
    Returns:
        (chosen f32[B], top_ids i64[B,K], top_logprobs f32[B,K]) with K = n_top, best first, the lower id first among
        equals. Minus infinity where the logit is; NaN only in a row whose logits hold NaN or plus infinity.
    Source: SGLang ``srt/layers/sampler.py``, log-probabilities before the choice is synchronised.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, ids[:, None]).squeeze(1)
    if n_top == 0:
        return chosen, ids.new_empty((ids.shape[0], 0)), chosen.new_empty((ids.shape[0], 0))
    # Cloned, because a slice would keep all V indices alive.
    top_ids = top_indices(logprobs, n_top).clone()
    return chosen, top_ids, logprobs.gather(1, top_ids)
