"""What the ranks of a test of the collectives run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from purestep.model.ranks import Ranks, join_ranks
from purestep.ops import collectives
from purestep.state.parallel import Parallel
from torch import Tensor

__all__ = ["collect", "joined", "late", "mesh_of"]


@cache
def joined(parallel: Parallel) -> Ranks:
    """Join a layout once; ranks keep their groups for later calls."""
    return join_ranks(parallel)


def collect(
    parallel: Parallel, where: str, name: str, x: Tensor, options: Sequence[object] = ()
) -> tuple[Tensor, Tensor]:
    """Run one collective and return its input afterwards and its output."""
    group = getattr(joined(parallel), where)
    given = x.clone()
    out = getattr(collectives, name)(given, group, *options)
    return given, out


def late(parallel: Parallel, x: Tensor, comes: bool) -> Tensor:
    """Reduce, unless this rank has decided not to."""
    return collectives.all_reduce(x, joined(parallel).world) if comes else x


def mesh_of(parallel: Parallel) -> tuple[int, int, int, int, tuple[str, ...], list[list[int]]]:
    """Tell where a rank stands."""
    ranks = joined(parallel)
    names = tuple(ranks.mesh.mesh_dim_names)
    return ranks.world.rank, ranks.replica, ranks.attn.rank, ranks.attn.size, names, ranks.mesh.mesh.tolist()


def same_rank() -> int:
    """Tell which rank this is."""
    return torch.distributed.get_rank()
