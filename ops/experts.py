"""The gated expert network, and two routes from routed rows to their weighted sum.

``experts_dense`` has static shapes and can be differentiated; ``experts_sorted`` touches only the experts that were
hit.

Source: DeepSeek-V4 ``inference/model.py``, ``Expert`` and ``MoE``; model sheet 2.10, decode-path sheet 6.1-6.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import attrs
import torch
from torch import Tensor

from .activations import silu
from .linear import linear
from .quantize import round_fp8

__all__ = [
    "ACTIVATION_GROUP",
    "PLAIN",
    "ExpertMath",
    "Stack",
    "expert",
    "experts_dense",
    "experts_sorted",
    "gate_up",
    "inner_rows",
    "run_sorted",
    "sorted_operator",
    "summed",
]

ACTIVATION_GROUP: Final = 128
"""Channels that share a scale in rows that meet a quantised weight."""


class Stack(Protocol):
    """The weights of a layer's experts, one to be taken at a time: a tensor, or something in its place."""

    def __len__(self) -> int:
        """Count the experts."""

    def __getitem__(self, index: int, /) -> Any:
        """Take the weight of one expert, as the matrix product wants it."""


@attrs.frozen(kw_only=True)
class ExpertMath:
    """Where a mixture weighs its experts and where it rounds.

    Attributes:
        weighs_after: routing weights multiply what comes out of an expert, not what its down projection reads.
        rounds_steps: round every step of the SwiGLU, every weighted expert and their sum to the dtype of the rows.
        rounds_inner: round what the down projection reads through e4m3.
    """

    weighs_after: bool = False
    rounds_steps: bool = False
    rounds_inner: bool = False


_ANY: Final = "CompositeExplicitAutograd"
"""Whatever the device of the tensors."""

PLAIN: Final = ExpertMath()
"""What the official code does with unquantised weights."""


def gate_up(hidden: Tensor, limit: float | None, *, rounding: bool = False) -> Tensor:
    """Apply the clamped SwiGLU to stacked gate and up projections.

    ``silu(min(g, limit)) * clamp(u, -limit, limit)``.

    Args:
        hidden: float[...,2*F]. Gate half, up half.
        limit: clamp, or None for none.
        rounding: round every step to the dtype of ``hidden``.
    Returns:
        f32[...,F].
    Rounding: f32.
    """
    gate, up = (hidden if rounding else hidden.float()).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (silu(gate.float()).to(gate.dtype) * up).float()


def inner_rows(hidden: Tensor, weights: Tensor | None, limit: float | None, how: ExpertMath) -> Tensor:
    """Compute what the down projections read.

    Args:
        hidden: float[...,2*F]. Gate half, up half.
        weights: f32[...,1]. Routing weights; None for the shared expert.
        limit: clamp, or None for none.
        how: where to weigh and round.
    Returns:
        float[...,F] in the dtype of ``hidden``.
    """
    inner = gate_up(hidden, limit, rounding=how.rounds_steps)
    if weights is not None and not how.weighs_after:
        inner = inner * weights
    inner = inner.to(hidden.dtype)
    return round_fp8(inner, ACTIVATION_GROUP) if how.rounds_inner else inner


def summed(out: Tensor, weights: Tensor, axis: int, how: ExpertMath) -> Tensor:
    """Sum what came out of the experts of every row: float[...,K,H] and f32[...,K,1] -> f32[...,H]."""
    if how.weighs_after:
        weighted = out.float() * weights
        out = weighted.to(out.dtype) if how.rounds_steps else weighted
    total = out.sum(axis, dtype=torch.float32)
    return total.to(out.dtype).float() if how.rounds_steps else total


def expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float | None, *, how: ExpertMath = PLAIN) -> Tensor:
    """Run one (shared) expert on every row.

    Args:
        x: float[...,H].
        w13: float[2*F,H].
        w2: float[H,F].
        limit: clamp of the SwiGLU, or None.
        how: where to round.
    Returns:
        float[...,H] in the dtype of ``x``.
    """
    return linear(inner_rows(linear(x, w13), None, limit, how), w2)


def experts_dense(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, *, how: ExpertMath = PLAIN
) -> Tensor:
    """Run every expert on every row and keep what was routed: static shapes, for differentiation and tracing.

    Args:
        x: float[...,H].
        ids: i64[...,K].
        weights: f32[...,K]. Applied before the down projection, unless ``how`` says otherwise.
        w13: float[E,2*F,H].
        w2: float[E,H,F].
        limit: clamp of the SwiGLU.
        how: where to weigh and round.
    Returns:
        f32[...,H].
    """
    n_experts = w13.shape[0]
    table = torch.zeros((*ids.shape[:-1], n_experts), dtype=torch.float32, device=x.device).scatter(-1, ids, weights)
    hidden = linear(x, w13.flatten(0, 1)).unflatten(-1, (n_experts, -1))
    inner = inner_rows(hidden, table.unsqueeze(-1), limit, how)
    if how is PLAIN:
        return linear(inner.flatten(-2), w2.movedim(0, 1).flatten(1)).float()
    out = torch.einsum("...ef,ehf->...eh", inner.to(w2.dtype), w2).to(x.dtype)
    return summed(out, table.unsqueeze(-1), -2, how)


def run_sorted(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Stack,
    w2: Stack,
    limit: float,
    multiply: Callable[..., Tensor],
    how: ExpertMath = PLAIN,
) -> Tensor:
    """Do the work of ``experts_sorted`` with a given matrix product.

    Rows are expanded token-major, sorted by expert (stable), run expert by expert, put back and summed over the K
    choices of each token in the order of its choices.
    """
    if not ids.numel():
        return torch.zeros_like(x, dtype=torch.float32)
    n_rows, n_chosen = ids.shape
    order = torch.argsort(ids.flatten(), stable=True)
    counts = torch.bincount(ids.flatten(), minlength=len(w13)).tolist()
    hit = [(e, n) for e, n in enumerate(counts) if n]
    rows = x.index_select(0, order // n_chosen).split([n for _, n in hit])
    hidden = torch.cat([multiply(part, w13[e]) for (e, _), part in zip(hit, rows, strict=True)])
    hidden = inner_rows(hidden, weights.flatten().index_select(0, order).unsqueeze(-1), limit, how)
    parts = hidden.split([n for _, n in hit])
    out = torch.cat([multiply(part, w2[e]) for (e, _), part in zip(hit, parts, strict=True)])
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return summed(out.index_select(0, place).unflatten(0, (n_rows, n_chosen)), weights.unsqueeze(-1), 1, how)


_LIBRARY = torch.library.Library("purestep", "DEF")


def sorted_operator(
    name: str, multiply: Callable[..., Tensor], stack: str = "Tensor", keys: Sequence[str] = (_ANY,)
) -> Callable[..., Tensor]:
    """Make ``run_sorted`` with a given matrix product one opaque operator: it reads its routing on the host.

    Args:
        name: of the operator.
        multiply: (rows, weight of one expert) -> rows in their dtype.
        stack: what a schema calls the weights of a layer's experts.
        keys: of the dispatcher, under which it is found.
    Returns:
        A function with the signature of ``experts_sorted``.
    """

    def run(x: Tensor, ids: Tensor, weights: Tensor, w13: Any, w2: Any, limit: float, *flags: bool) -> Tensor:
        after, steps, inner = flags
        how = ExpertMath(weighs_after=after, rounds_steps=steps, rounds_inner=inner)
        return run_sorted(x, ids, weights, w13, w2, limit, multiply, how)

    _LIBRARY.define(
        f"{name}(Tensor x, Tensor ids, Tensor weights, {stack} w13, {stack} w2, float limit, bool after, bool steps, "
        "bool inner) -> Tensor"
    )
    for key in keys:
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"purestep::{name}", lambda x, *_: torch.empty_like(x, dtype=torch.float32))
    operator = getattr(torch.ops.purestep, name)

    def experts(
        x: Tensor, ids: Tensor, weights: Tensor, w13: Any, w2: Any, limit: float, *, how: ExpertMath = PLAIN
    ) -> Tensor:
        found: Tensor = operator(x, ids, weights, w13, w2, limit, *attrs.astuple(how))
        return found

    return experts


_sorted: Final = sorted_operator("experts_sorted", linear)


def experts_sorted(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, *, how: ExpertMath = PLAIN
) -> Tensor:
    """Run the experts that were hit, each on its own rows: dispatch by expert-sorted rows, experts, combine.

    An opaque operator: nothing above it reads its routing.

    Args:
        x: float[T,H].
        ids: i64[T,K].
        weights: f32[T,K]. Applied before the down projection, unless ``how`` says otherwise.
        w13: float[E,2*F,H].
        w2: float[E,H,F].
        limit: clamp of the SwiGLU.
        how: where to weigh and round.
    Returns:
        f32[T,H].
    Rounding: expert outputs in the dtype of ``x``, their sum in f32.
    """
    return _sorted(x, ids, weights, w13, w2, limit, how=how)
