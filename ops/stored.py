"""The operators that meet large weights, for weights that stay as a release stores them.

A stored weight is expanded where it is used and nowhere kept: whole in the plain versions, tile by tile in the fast
ones, and of the routed experts only those that were hit. So the plain versions give the bits that they give on weights
expanded beforehand. Weights that are plain tensors go to the operators for those.

Source: none beyond the operators that these wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from . import experts as plain
from . import fused, invariant, tiles
from . import linear as product
from .experts import PLAIN, ExpertMath, inner_rows, run_sorted
from .formats import Fp4Weight, Fp8Weight, StoredWeight, expand, is_stored, one_of

__all__ = ["StoredKernels", "fused_kernels", "invariant_kernels", "reference_kernels"]

Weight = Tensor | StoredWeight


@attrs.frozen(eq=False, kw_only=True)
class StoredKernels:
    """The operators of a kernel table that take stored weights; signatures are those of ``ops.dispatch.Ops``."""

    linear: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    expert: Callable[..., Tensor]


def _expanding(multiply: Callable[..., Tensor]) -> Callable[[Tensor, Weight], Tensor]:
    def linear(x: Tensor, w: Weight) -> Tensor:
        return multiply(x, expand(w, x.dtype) if is_stored(w) else w)

    return linear


def _expanding_groups(multiply: Callable[..., Tensor]) -> Callable[[Tensor, Weight], Tensor]:
    def grouped_linear(x: Tensor, w: Weight) -> Tensor:
        return multiply(x, expand(w, x.dtype).unflatten(0, (x.shape[-2], -1)) if is_stored(w) else w)

    return grouped_linear


_MULTIPLY: Final[Mapping[str, Callable[[Tensor, Weight], Tensor]]] = {
    "reference": _expanding(product.linear),
    "fused": tiles.linear,
    "invariant": _expanding(invariant.linear),
}


def _shared(multiply: Callable[[Tensor, Weight], Tensor]) -> Callable[..., Tensor]:
    def expert(x: Tensor, w13: Weight, w2: Weight, limit: float | None, *, how: ExpertMath = PLAIN) -> Tensor:
        return multiply(inner_rows(multiply(x, w13), None, limit, how), w2)

    return expert


def _routed(name: str, unstored: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def experts(
        x: Tensor, ids: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float, *, how: ExpertMath = PLAIN
    ) -> Tensor:
        if not (is_stored(w13) and is_stored(w2)):
            return unstored(x, ids, weights, w13, w2, limit, how=how)
        return torch.ops.purestep.experts_stored(x, ids, weights, *w13, *w2, limit, name, *attrs.astuple(how))

    return experts


class _Stack:
    """A stack of stored weights, taken apart one at a time."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.stack = Fp4Weight(codes, scales) if codes.dtype is torch.uint8 else Fp8Weight(codes, scales)

    def __len__(self) -> int:
        return self.stack.codes.shape[0]

    def __getitem__(self, index: int) -> StoredWeight:
        return one_of(self.stack, index)


def _experts_stored(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    limit: float,
    kernels: str,
    after: bool,
    steps: bool,
    inner: bool,
) -> Tensor:
    how = ExpertMath(weighs_after=after, rounds_steps=steps, rounds_inner=inner)
    return run_sorted(x, ids, weights, _Stack(w13, s13), _Stack(w2, s2), limit, _MULTIPLY[kernels], how)


_LIBRARY = torch.library.Library("purestep", "FRAGMENT")
_LIBRARY.define(
    "experts_stored(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor s13, Tensor w2, Tensor s2, float limit, "
    "str kernels, bool after, bool steps, bool inner) -> Tensor"
)
_LIBRARY.impl("experts_stored", _experts_stored, "CompositeExplicitAutograd")
torch.library.register_fake(
    "purestep::experts_stored", lambda x, *_: torch.empty_like(x, dtype=torch.float32, device=x.device)
)


reference_kernels: Final = StoredKernels(
    linear=_MULTIPLY["reference"],
    grouped_linear=_expanding_groups(product.grouped_linear),
    experts=_routed("reference", plain.experts_sorted),
    expert=_shared(_MULTIPLY["reference"]),
)

fused_kernels: Final = StoredKernels(
    linear=tiles.linear,
    grouped_linear=tiles.grouped_linear,
    experts=_routed("fused", fused.experts_sorted),
    expert=_shared(tiles.linear),
)

_invariant_routed: Callable[..., Any] = invariant.by_rows(_routed("invariant", invariant.experts_sorted), 3)
_invariant_shared: Callable[..., Any] = invariant.by_rows(_shared(_MULTIPLY["reference"]), 1)

invariant_kernels: Final = StoredKernels(
    linear=_MULTIPLY["invariant"],
    grouped_linear=_expanding_groups(invariant.grouped_linear),
    experts=_invariant_routed,
    expert=_invariant_shared,
)
