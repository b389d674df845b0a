"""Joining the processes that torchrun has started."""

from __future__ import annotations

import os
from datetime import timedelta

from torch import distributed

from ..state.errors import ConfigError
from ..state.parallel import Parallel

__all__ = ["join_processes", "rank_here"]

BACKEND = "gloo"
"""What carries collectives between CPUs; the command line runs on CPUs."""


def join_processes(parallel: Parallel) -> None:
    """Join the process group of a layout; for one rank there is none.

    Args:
        parallel: the layout.
    Raises:
        ConfigError: torchrun has not started this process, or not as many as the layout has ranks.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world != str(parallel.ranks):
        raise ConfigError(
            f"serve: tp={parallel.tp} and dp={parallel.dp} need {parallel.ranks} processes, got {world}; start "
            f"torchrun --nproc-per-node {parallel.ranks} -m purestep serve --tp {parallel.tp} --dp {parallel.dp} ...",
            field="tp",
            expected=parallel.ranks,
            got=world,
        )
    if parallel.ranks > 1:
        distributed.init_process_group(BACKEND, timeout=timedelta(seconds=parallel.timeout_s))


def rank_here() -> int:
    """Return which rank torchrun started this process as; 0 without it."""
    return int(os.environ.get("RANK", "0"))
