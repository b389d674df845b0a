"""The record of a step's inner stages, one row per fed token, and the name of one such token."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from .values import value

__all__ = ["Captured", "FedToken"]


@attrs.frozen(kw_only=True)
class FedToken:
    """One token at one stage of a step: what an edit is told about its row.

    Attributes:
        request_id: whose token.
        position: where in the request, from 0.
        layer: 0 to L-1, or None outside the layers.
        stage: name without layer.
    """

    request_id: int
    position: int
    layer: int | None
    stage: str


@value
@attrs.frozen(eq=False, kw_only=True)
class Captured:
    """What a step computed on the way, aligned to the tokens that it was fed.

    Attributes:
        request_ids: of every fed token.
        positions: of every fed token within its request, from 0.
        stages: full stage name -> tensor with one row per fed token, in memory of its own.
        logits: f32[X,V]. The logits that the step returned.
        logit_rows: the token rows that they belong to.
    """

    request_ids: tuple[int, ...]
    positions: tuple[int, ...]
    stages: Mapping[str, Tensor]
    logits: Tensor
    logit_rows: tuple[int, ...]

    def relabel(self, names: Mapping[int, int]) -> Captured:
        """Give requests other ids, so that a record can be replayed for them.

        Args:
            names: old id -> new id; ids left out stay.
        Returns:
            The record under the new ids; tensors are shared.
        """
        return attrs.evolve(self, request_ids=tuple(names.get(i, i) for i in self.request_ids))
