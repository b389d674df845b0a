"""Values between ranks: pickled, as bytes in the same collectives as everything else, with their time-outs."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from ..ops.collectives import Group, all_gather, broadcast

__all__ = ["broadcast_value", "gather_values"]


def broadcast_value(value: Any, group: Group) -> Any:
    """Take over a value of rank 0.

    Args:
        value: there, anything that can be pickled; elsewhere nothing looks at it.
        group: who takes part; they trust each other.
    Returns:
        The value.
    Raises:
        RankError: another rank is lost or late.
    """
    mine = _packed(value) if group.rank == 0 else torch.zeros(0, dtype=torch.uint8)
    length = int(broadcast(torch.tensor([len(mine)]), group))
    return _unpacked(broadcast(mine if group.rank == 0 else torch.zeros(length, dtype=torch.uint8), group))


def gather_values(value: Any, group: Group) -> list[Any]:
    """Hear a value of every rank.

    Args:
        value: anything that can be pickled.
        group: who takes part; they trust each other.
    Returns:
        The values in order of rank.
    Raises:
        RankError: another rank is lost or late.
    """
    mine = _packed(value)
    lengths: list[int] = all_gather(torch.tensor([len(mine)]), group).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = mine
    rows = all_gather(padded, group).view(group.size, -1)
    return [_unpacked(row[:n]) for row, n in zip(rows, lengths, strict=True)]


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
