"""What the ranks of a test of dispatch and combine run."""

from __future__ import annotations

import attrs
import purestep as ps
import torch
from kit.rank_collectives import joined
from purestep.ops.expert_ranks import Choice, run_fixed, run_variable
from torch import Tensor

__all__ = ["Routed", "exchange"]


@attrs.frozen(eq=False)
class Routed:
    """Rows of one rank, with distinct experts for each."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def exchange(
    parallel: ps.Parallel, rows: Routed, place: Tensor, capacity: int | None, kind: str
) -> tuple[Tensor, Tensor]:
    """Send this rank's rows through the experts of all ranks; return the sums, and the rows afterwards."""
    group = joined(parallel).world
    per_rank = len(place) // group.size
    holder = torch.empty_like(place).scatter_(0, place, torch.arange(len(place)))

    def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert bool(((ids >= 0) & (ids < per_rank)).all())
        number = holder[group.rank * per_rank + ids] + 1 if kind == "numbered" else torch.ones_like(ids)
        return (weights * number).sum(-1, keepdim=True) * x

    choice = Choice(places=place[rows.ids], weights=rows.weights, per_rank=per_rank)
    x = rows.x.clone()
    if capacity is None:
        return run_variable(x, choice, experts, group), x
    return run_fixed(x, choice, experts, group, capacity), x
