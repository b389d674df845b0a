"""What holds for the inner stages of a layer, as tensors; decode-path sheet 6, 9.8.

``MIXED`` is about the mixing weights of mHC, ``ROUTED`` about the router, ``DISPATCHED`` about sorting rows by expert,
``COMBINED`` about what comes back, ``PERMUTED`` about any function of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

from .violations import Found, listed

__all__ = ["COMBINED", "DISPATCHED", "MIXED", "PERMUTED", "ROUTED", "Combination", "Mix", "Routing"]

TOLERANCE: Final = 1e-4


@attrs.frozen(eq=False, kw_only=True)
class Mix:
    """One sublayer's mixing weights.

    Attributes:
        pre: f32[T,M]. What the sublayer reads of each stream.
        post: f32[T,M]. What each stream takes of its output.
        comb: f32[T,M,M]. How streams mix: [from, to].
        eps: of the normalisations.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor
    eps: float = 1e-6


def columns_sum_to_one(mix: Mix) -> Found:
    """M01: entries are positive, columns sum to 1 up to the eps; rows only nearly, as they were normalised before."""
    if bool((mix.comb <= 0).any()):
        yield "comb", f"expected positive entries, got {float(mix.comb.min()):.3g}"
    worst = float((mix.comb.sum(-2) - 1).abs().max()) if mix.comb.numel() else 0.0
    if not worst <= 3 * mix.eps + 1e-6:
        yield "comb", f"expected columns that sum to 1 within {3 * mix.eps + 1e-6:.1e}, got a difference of {worst:.3g}"
    worst = float((mix.comb.sum(-1) - 1).abs().max()) if mix.comb.numel() else 0.0
    if not worst <= 0.5:
        yield "comb", f"expected rows that sum to nearly 1, got a difference of {worst:.3g}"


def weights_in_range(mix: Mix) -> Found:
    """M02: ``pre`` lies between eps and 1 + eps, ``post`` between 0 and 2."""
    for name, weights, low, high in (("pre", mix.pre, mix.eps, 1 + mix.eps), ("post", mix.post, 0.0, 2.0)):
        outside = weights[~((weights >= low) & (weights <= high + 1e-6))]
        if len(outside):
            yield name, f"expected weights in [{low:g}, {high:g}], got {listed(outside.tolist())}"


MIXED: Final[Mapping[str, Callable[[Mix], Found]]] = {"M01": columns_sum_to_one, "M02": weights_in_range}
"""Predicates over mixing weights, by id."""


@attrs.frozen(eq=False, kw_only=True)
class Routing:
    """What a router decided.

    Attributes:
        ids: i64[T,K]. Experts chosen.
        weights: f32[T,K]. Their weights.
        logits: f32[T,E]. The router's scores before anything else.
        factor: what the weights of a token sum to.
        bias: f32[E]. Added for the choice alone; None in hash layers.
        token_ids: i64[T]. The tokens, for hash layers.
    """

    ids: Tensor
    weights: Tensor
    logits: Tensor
    factor: float
    bias: Tensor | None = None
    token_ids: Tensor | None = None

    def scores(self) -> Tensor:
        """Return the unbiased scores f64[T,E]."""
        return torch.nn.functional.softplus(self.logits.double()).sqrt()


def experts_distinct(routing: Routing) -> Found:
    """M04: a token's experts exist and differ; its weights are not negative and sum to the factor."""
    ids, n_experts = routing.ids, routing.logits.shape[1]
    wrong = ((ids < 0) | (ids >= n_experts)).any(1)
    ordered = ids.sort(dim=1).values
    wrong |= (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if bool(wrong.any()):
        yield (
            "ids",
            f"expected distinct experts below {n_experts}, not so in rows {listed(wrong.nonzero()[:, 0].tolist())}",
        )
    sums = routing.weights.double().sum(1)
    wrong = (routing.weights < 0).any(1) | ((sums - routing.factor).abs() > TOLERANCE * routing.factor)
    if bool(wrong.any()):
        rows = listed(wrong.nonzero()[:, 0].tolist())
        yield "weights", f"expected weights of at least 0 that sum to {routing.factor:g}, not so in rows {rows}"


def bias_only_chooses(routing: Routing) -> Found:
    """M05: the largest biased scores are chosen, and weights come from the scores without the bias."""
    scores = routing.scores()
    inside = routing.ids.clamp(0, scores.shape[1] - 1)
    picked = scores.gather(1, inside)
    expected = picked / picked.sum(1, keepdim=True) * routing.factor
    wrong = ((routing.weights - expected).abs() > TOLERANCE * routing.factor).any(1)
    if bool(wrong.any()):
        rows = listed(wrong.nonzero()[:, 0].tolist())
        yield "weights", f"expected the chosen experts' own scores, normalised, not so in rows {rows}"
    if routing.bias is None:
        return
    biased = scores + routing.bias.double()
    lowest = biased.gather(1, inside).amin(1, keepdim=True)
    others = biased.scatter(1, inside, -torch.inf)
    wrong = (others > lowest + TOLERANCE).any(1)
    if bool(wrong.any()):
        rows = listed(wrong.nonzero()[:, 0].tolist())
        yield "ids", f"expected the largest scores with the bias, not so in rows {rows}"


def hash_by_token(routing: Routing) -> Found:
    """M06: in a hash layer equal tokens have equal experts, whatever their hidden state."""
    if routing.token_ids is None:
        return
    first: dict[int, list[int]] = {}
    for token, ids in zip(routing.token_ids.tolist(), routing.ids.tolist(), strict=True):
        if first.setdefault(token, ids) != ids:
            yield f"token {token}", f"expected experts {first[token]}, got {ids}"


ROUTED: Final[Mapping[str, Callable[[Routing], Found]]] = {
    "M04": experts_distinct,
    "M05": bias_only_chooses,
    "M06": hash_by_token,
}
"""Predicates over a router's decision, by id."""


def rows_counted(ids: Tensor, order: Tensor, counts: Tensor) -> Found:
    """M07: each of the T*K rows goes to its expert once: the order is a permutation, counts add up."""
    flat = ids.flatten()
    if order.sort().values.tolist() != list(range(len(flat))):
        yield "order", f"expected a permutation of {len(flat)} rows, got {listed(order.tolist())}"
        return
    expected = torch.bincount(flat, minlength=len(counts))
    if expected.tolist() != counts.tolist():
        yield "counts", f"expected {listed(expected.tolist())} rows for the experts, got {listed(counts.tolist())}"
    by_expert = flat[order]
    if bool((by_expert[1:] < by_expert[:-1]).any()):
        yield "order", "expected rows sorted by expert"


DISPATCHED: Final[Mapping[str, Callable[[Tensor, Tensor, Tensor], Found]]] = {"M07": rows_counted}
"""Predicates over (ids i64[T,K], order: rows t*K+k sorted by expert, rows per expert), by id."""


@attrs.frozen(eq=False, kw_only=True)
class Combination:
    """What the experts gave and what became of it.

    Attributes:
        weights: f32[T,K]. Of each token's experts.
        outputs: float[T,K,H]. Of each token's experts, in the order of the weights.
        routed: float[T,H]. What came back for each token.
        shared: float[T,H]. The shared expert's output.
        total: float[T,H]. What the sublayer returned.
    """

    weights: Tensor
    outputs: Tensor
    routed: Tensor
    shared: Tensor
    total: Tensor


def combined_in_order(facts: Combination) -> Found:
    """M08: a token gets the weighted sum of its own experts; with experts that return their input, (sum w) * x."""
    expected = (facts.weights.double().unsqueeze(-1) * facts.outputs.double()).sum(1)
    yield from _close("routed", facts.routed, expected, "the weighted sum of their experts")


def shared_added_once(facts: Combination) -> Found:
    """M12: the shared expert is added once to each token, without the routing factor."""
    yield from _close(
        "total", facts.total, facts.routed.double() + facts.shared.double(), "routed and shared, once each"
    )


def _close(where: str, found: Tensor, expected: Tensor, what: str) -> Found:
    wrong = ((found.double() - expected).abs() > TOLERANCE * (1 + expected.abs())).flatten(1).any(1)
    if bool(wrong.any()):
        yield where, f"expected {what}, not so in rows {listed(wrong.nonzero()[:, 0].tolist())}"


COMBINED: Final[Mapping[str, Callable[[Combination], Found]]] = {"M08": combined_in_order, "M12": shared_added_once}
"""Predicates over the experts' outputs, by id."""


def rows_follow(order: Tensor, out: Tensor, of_permuted: Tensor) -> Found:
    """B04, M03: a function of rows gives permuted rows for permuted rows."""
    yield from _close("rows", of_permuted, out[order].double(), "the rows of the inputs given, wherever they stand")


PERMUTED: Final[Mapping[str, Callable[[Tensor, Tensor, Tensor], Found]]] = {"B04": rows_follow, "M03": rows_follow}
"""Predicates over (order i64[T], what came of rows x, what came of x[order]), by id."""
