"""Where experts lie: how often each was chosen, and an order of places that spreads the choices over ranks.

Source: the greedy part of EPLB (github.com/deepseek-ai/EPLB), without its copies of experts; decode-path sheet 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..state.config import Config

__all__ = ["balanced_placement", "expert_load"]


def expert_load(config: Config, stages: Mapping[str, Tensor]) -> NDArray[np.int64]:
    """Count how often every expert was chosen.

    Args:
        config: the model's numbers.
        stages: what a step captured with ``capture=["ffn.expert_ids"]``.
    Returns:
        i64[L,E]. Zero in layers that were not captured.
    """
    load = np.zeros((config.num_hidden_layers, config.n_routed_experts), np.int64)
    for layer in range(config.num_hidden_layers):
        ids = stages.get(f"{layer}.ffn.expert_ids")
        if ids is not None:
            load[layer] = torch.bincount(ids.flatten(), minlength=config.n_routed_experts).cpu().numpy()
    return load


def balanced_placement(load: NDArray[np.int64], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Deal the experts of every layer to ranks so that their loads are near each other.

    The most chosen expert goes first, each to the rank with the least load that still has a place.

    Args:
        load: i64[L,E].
        ranks: that the experts are dealt to; a divisor of E.
    Returns:
        ``Parallel(placement=...)``.
    """
    return tuple(_balanced(row, ranks) for row in load.tolist())


def _balanced(load: list[int], ranks: int) -> tuple[int, ...]:
    room = len(load) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        open_ranks = [rank for rank in range(ranks) if len(held[rank]) < room]
        held[min(open_ranks, key=lambda rank: sum(load[e] for e in held[rank]))].append(expert)
    place = [0] * len(load)
    for rank, experts in enumerate(held):
        for i, expert in enumerate(sorted(experts)):
            place[expert] = rank * room + i
    return tuple(place)
