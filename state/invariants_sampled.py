"""What the choice of tokens must be, given logits, masks and parameters; decode-path sheet 8.1, 8.2, 9.9 (S02-S09).

All arithmetic is done anew here in float64, row by row, and shares nothing with the sampler: penalties, held-back stop
tokens, mask, bias, temperature, truncation, and the noise of (seed, position, token id). Where rounding could decide
(a mass at its limit, two scores that nearly tie) both outcomes are accepted.

Source: MurmurHash3 (x86, 32 bit) by A. Appleby, public domain description; the rest is the sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .batch import StepOutput
from .decode import DecodeState
from .sampling import SamplingRow, SamplingState, row_of
from .violations import Found

__all__ = ["SAMPLED", "Draw", "read_draws"]

Floats = NDArray[np.float64]

SLACK: Final = 1e-5
"""What rounding may do to a probability mass, or to a logit of size 1."""


@attrs.frozen(eq=False, kw_only=True)
class Draw:
    """One row's choice and everything that it follows from.

    Attributes:
        row: the request's sampling row before the step.
        logits: f64[V]. Of the row's last token.
        position: of that token.
        stops: ids that end the request, the model's own included.
        allowed: bool[V]. What the mask leaves, or None without a mask.
        token: what was chosen.
    """

    row: SamplingRow
    logits: Floats
    position: int
    stops: tuple[int, ...]
    allowed: NDArray[np.bool_] | None
    token: int

    @property
    def name(self) -> str:
        """How messages call the row."""
        return f"request {self.row.request_id}"

    @property
    def holds_back(self) -> bool:
        """Whether stop tokens are held back."""
        return self.row.n_outputs < self.row.params.min_new_tokens

    def adjusted(self) -> Floats:
        """Return the logits that the choice is made from: f64[V]."""
        params, x = self.row.params, self.logits.copy()
        if self.row.output_counts is not None and self.row.prompt_seen is not None:
            counts = self.row.output_counts.cpu().numpy()
            seen = self.row.prompt_seen.cpu().numpy() | (counts > 0)
            x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            x[seen] = np.where(x < 0, x * params.repetition_penalty, x / params.repetition_penalty)[seen]
        if self.holds_back:
            x[list(self.stops)] = -np.inf
        if self.allowed is not None:
            x[~self.allowed] = -np.inf
            if np.isneginf(x).all():
                x[int(self.allowed.argmax())] = 0.0
        for token, bias in params.logit_bias:
            x[token] += bias
        return x

    def probs(self) -> Floats:
        """Return the distribution before truncation: f64[V]."""
        x = self.adjusted()
        weights: Floats = np.exp((x - x.max()) / self.row.params.temperature)
        return weights / weights.sum()

    def kept(self, slack: float) -> NDArray[np.bool_]:
        """Tell which tokens truncation leaves: bool[V].

        Args:
            slack: how much further every limit is set; negative for what surely stays.
        """
        params, probs = self.row.params, self.probs()
        order = np.argsort(-probs, kind="stable")
        mass_before = np.concatenate(([0.0], np.cumsum(probs[order])[:-1]))
        is_kept = np.ones(len(order), bool)
        if params.top_k > 0:
            # Tokens as likely as the last one within the limit could have been in its place.
            last = probs[order[min(params.top_k, len(order)) - 1]]
            is_kept &= probs[order] >= last * (1 - slack)
        if params.top_p < 1:
            is_kept &= mass_before <= params.top_p + slack
        is_kept &= probs[order] >= params.min_p * probs.max() * (1 - slack)
        is_kept[0] = True
        found = np.zeros(len(order), bool)
        found[order] = is_kept
        return found

    def scores(self) -> Floats:
        """Return log-probability plus noise of every token: f64[V]."""
        with np.errstate(divide="ignore"):
            logs: Floats = np.log(self.probs())
        return logs + _noise(self.row.seed, self.position, len(logs))


def _noise(seed: int, position: int, count: int) -> Floats:
    """Return the Gumbel noise of token ids ``0..count-1``."""
    tokens = np.arange(count, dtype=np.uint64)
    words: list[int | NDArray[np.uint64]] = [seed & 0xFFFFFFFF, seed >> 32, position, tokens]
    low = np.uint64(0xFFFFFFFF)

    def rotated(x: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
        return ((x << np.uint64(n)) | (x >> np.uint64(32 - n))) & low

    h = np.zeros(count, np.uint64)
    for word in words:
        k = (np.zeros(count, np.uint64) + np.asarray(word, np.uint64)) * np.uint64(0xCC9E2D51) & low
        h ^= rotated(k, 15) * np.uint64(0x1B873593) & low
        h = (rotated(h, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & low
    h ^= np.uint64(4 * len(words))
    h = (h ^ (h >> np.uint64(16))) * np.uint64(0x85EBCA6B) & low
    h = (h ^ (h >> np.uint64(13))) * np.uint64(0xC2B2AE35) & low
    h ^= h >> np.uint64(16)
    with np.errstate(divide="ignore"):
        logs = np.log(h.astype(np.float64) / 0xFFFFFFFF)
    return -np.log(-np.clip(logs, np.finfo(np.float64).min, -(2.0**-32)))


def read_draws(
    prepared: DecodeState, logits: Tensor, mask: Mapping[int, Tensor] | None, out: StepOutput
) -> tuple[Draw, ...]:
    """Gather what each row's choice follows from.

    Args:
        prepared: the state after the preparation of the step.
        logits: f32[B,V]. Of each row's last token.
        mask: as the step was given it.
        out: what the step returned.
    """
    batch = prepared.launched
    assert batch is not None, "a prepared state has a launched batch"
    found = []
    for i, request_id in enumerate(out.request_ids[: len(out.next_token_ids)]):
        row = row_of(prepared.sampling, request_id)
        words = None if mask is None else mask.get(request_id)
        vocab_size = logits.shape[1]
        found.append(
            Draw(
                row=row,
                logits=logits[i].cpu().double().numpy(),
                position=int(batch.seq_lens[i]) - 1,
                stops=(*row.params.stop_token_ids, *prepared.config.eos_token_id),
                allowed=None if words is None else _unpacked(words, vocab_size),
                token=out.next_token_ids[i],
            )
        )
    return tuple(found)


def _unpacked(words: Tensor, vocab_size: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(words.cpu().reshape(-1).numpy().astype("<i4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)


_Draws = Sequence[Draw]


def mask_obeyed(draws: _Draws, before: SamplingState, after: SamplingState) -> Found:
    """S02: a masked token is never chosen while the mask allows any, whatever the bias."""
    for draw in draws:
        if draw.allowed is not None and draw.allowed.any() and not draw.allowed[draw.token]:
            yield draw.name, f"expected an allowed token, got {draw.token}"


def greedy_is_largest(draws: _Draws, before: SamplingState, after: SamplingState) -> Found:
    """S03: a greedy row takes its largest logit, of exact ties the lowest id, whatever seed and other rows."""
    for draw in draws:
        if not draw.row.params.is_greedy:
            continue
        x = draw.adjusted()
        best = int(x.argmax())
        is_exact = not draw.row.params.has_penalties and not draw.row.params.logit_bias
        slack = 0.0 if is_exact else SLACK * max(1.0, abs(x[best]))
        if x[draw.token] < x[best] - slack or (is_exact and draw.token != best):
            yield draw.name, f"expected token {best} with {x[best]:.6g}, got {draw.token} with {x[draw.token]:.6g}"


def limits_obeyed(draws: _Draws, before: SamplingState, after: SamplingState) -> Found:
    """S04: a drawn token has a rank below top-k, at most top-p before it, and at least min-p of the likeliest."""
    for draw in draws:
        if not draw.row.params.is_greedy and not draw.kept(SLACK)[draw.token]:
            yield draw.name, f"expected a token within top-k, top-p and min-p, got {draw.token}"


def noise_decides(draws: _Draws, before: SamplingState, after: SamplingState) -> Found:
    """S05: a drawn token has the largest log-probability plus noise of (seed, position, id): no other row counts."""
    for draw in draws:
        if draw.row.params.is_greedy:
            continue
        scores = draw.scores()
        sure = np.where(draw.kept(-SLACK), scores, -np.inf)
        best = int(sure.argmax())
        slack = SLACK * (1 + float(np.abs(draw.adjusted()[[best, draw.token]]).max()) / draw.row.params.temperature)
        if not scores[draw.token] >= sure[best] - slack:
            yield (
                draw.name,
                f"expected token {best} of seed {draw.row.seed}, position {draw.position}, got {draw.token}",
            )


def stops_wait(draws: _Draws, before: SamplingState, after: SamplingState) -> Found:
    """S06: no stop token is chosen before ``min_new_tokens``, unless a mask leaves nothing else."""
    for draw in draws:
        others = np.ones(len(draw.logits), bool) if draw.allowed is None else draw.allowed.copy()
        others[list(draw.stops)] = False
        if draw.holds_back and draw.token in draw.stops and others.any():
            yield draw.name, f"expected no stop token before {draw.row.params.min_new_tokens} outputs, got {draw.token}"


def parameters_kept(draws: _Draws, before: SamplingState, after: SamplingState) -> Found:
    """S09: sampling changes no parameter and no seed; it counts one output for its own rows and nothing for others."""
    tokens = {draw.row.request_id: draw.token for draw in draws}
    if tuple(row.request_id for row in before.rows) != tuple(row.request_id for row in after.rows):
        yield "sampling", "expected the rows of the same requests"
        return
    for old, new in zip(before.rows, after.rows, strict=True):
        name, token = f"request {old.request_id}", tokens.get(old.request_id)
        if (old.params, old.seed) != (new.params, new.seed):
            yield name, "expected its parameters and its seed to stay"
        if new.n_outputs != old.n_outputs + (token is not None):
            yield name, f"expected {old.n_outputs + (token is not None)} outputs, got {new.n_outputs}"
        if old.output_counts is not None and new.output_counts is not None:
            change = (new.output_counts - old.output_counts).cpu().numpy()
            expected = np.zeros_like(change)
            if token is not None:
                expected[token] = 1
            if not np.array_equal(change, expected):
                yield name, f"expected one more count of {token}" if token is not None else "expected the same counts"


SAMPLED: Final[Mapping[str, Callable[[_Draws, SamplingState, SamplingState], Found]]] = {
    "S02": mask_obeyed,
    "S03": greedy_is_largest,
    "S04": limits_obeyed,
    "S05": noise_decides,
    "S06": stops_wait,
    "S09": parameters_kept,
}
"""Predicates over (draws, sampling before, sampling after), by id."""
