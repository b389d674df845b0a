"""A layout's ranks as this process sees them: which it is, and whom it exchanges what with.

Source: SGLang 0.5.23 ``layers/dp_attention.py`` (the groups); decode-path sheet 7.2.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import attrs
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from ..ops.collectives import Group
from ..state.errors import ConfigError, RankError
from ..state.parallel import Parallel

__all__ = ["Ranks", "join_ranks"]


@attrs.frozen(eq=False, kw_only=True)
class Ranks:
    """Where this process stands in a layout; by default alone.

    Attributes:
        parallel: the layout.
        world: all ranks, in order.
        attn: the ranks of this replica.
        mesh: torch's view of them, axes "dp" and "tp"; None where there is one rank.
    """

    parallel: Parallel = attrs.field(factory=Parallel)
    world: Group = attrs.field(factory=Group)
    attn: Group = attrs.field(factory=Group)
    mesh: Any = None

    @property
    def replica(self) -> int:
        """Which of the attention's replicas this is."""
        return self.world.rank // self.parallel.tp

    @property
    def context(self) -> Group:
        """The ranks that the caches of a request are dealt to."""
        return self.attn if self.parallel.dcp > 1 else Group()

    @property
    def head(self) -> Group:
        """The ranks that the head is split over."""
        return self.attn if self.parallel.dp_lm_head else self.world


def join_ranks(parallel: Parallel, device: str = "cpu") -> Ranks:
    """Take this process's place in a layout. Every rank calls this, at the same point.

    Args:
        parallel: the layout.
        device: type of the device that the tensors of collectives lie on.
    Returns:
        The place; its process groups wait ``parallel.timeout_s`` at most.
    Raises:
        ConfigError: this process is not one of as many as the layout has ranks.
        RankError: the others did not come.
    """
    if parallel.ranks == 1:
        return Ranks(parallel=parallel)
    found = distributed.get_world_size() if distributed.is_initialized() else None
    if found != parallel.ranks:
        got = "no process group" if found is None else f"{found} processes"
        raise ConfigError(
            f"Parallel(tp={parallel.tp}, dp={parallel.dp}): expected {parallel.ranks} processes, got {got}; start "
            f"torchrun --nproc-per-node {parallel.ranks}, and call torch.distributed.init_process_group first",
            field="parallel",
            expected=parallel.ranks,
            got=found,
        )
    rank, limit = distributed.get_rank(), timedelta(seconds=parallel.timeout_s)
    grid = torch.arange(parallel.ranks).unflatten(0, (parallel.dp, parallel.tp))
    try:
        world = distributed.new_group(timeout=limit)
        attn, _ = distributed.new_subgroups_by_enumeration(grid.tolist(), timeout=limit)
        peers, _ = distributed.new_subgroups_by_enumeration(grid.T.tolist(), timeout=limit)
    except RuntimeError as error:
        raise RankError(
            f"rank {rank}: expected {parallel.ranks} ranks to join within {parallel.timeout_s:g} seconds, got: "
            f"{str(error).splitlines()[0]}; start all ranks together",
            field="parallel",
            expected=parallel.ranks,
            got=str(error),
        ) from error
    mesh = DeviceMesh.from_group([peers, attn], device, mesh=grid, mesh_dim_names=("dp", "tp"))
    return Ranks(
        parallel=parallel,
        world=Group(size=parallel.ranks, rank=rank, name=world.group_name),
        attn=Group(size=parallel.tp, rank=rank % parallel.tp, name=attn.group_name),
        mesh=mesh,
    )
