"""Collectives as pure functions: what goes in stays as it is, what comes out is new, and one rank calls nothing.

Every rank of a group calls the same functions in the same order; an idle rank brings a tensor without rows.

Source: ``torch.distributed._functional_collectives``; decode-path sheet 1.11, 7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import GroupName

from ..state.errors import RankError

__all__ = ["Group", "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]


@attrs.frozen(kw_only=True)
class Group:
    """The ranks that take part in a collective; by default this one alone.

    Attributes:
        size: how many.
        rank: this rank's place among them.
        name: of ``torch.distributed``'s process group.
    """

    size: int = 1
    rank: int = 0
    name: GroupName = attrs.field(default=GroupName(""), converter=GroupName)


def all_reduce(x: Tensor, group: Group, op: Literal["sum", "min", "max"] = "sum") -> Tensor:
    """Combine equally shaped tensors element by element.

    Args:
        x: float[...] or i64[...].
        group: who takes part.
        op: how.
    Returns:
        The combination, bit for bit the same on every rank.
    Raises:
        RankError: another rank is lost or late.
    """
    if group.size == 1:
        return x
    return _run("all_reduce", group, lambda: functional.all_reduce(x.contiguous(), op, group.name))


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Join equally shaped tensors along axis 0, in order of rank.

    Args:
        x: float[T,...].
        group: who takes part.
    Returns:
        float[B*T,...], B ranks.
    Raises:
        RankError: another rank is lost or late.
    """
    if group.size == 1:
        return x
    return _run("all_gather", group, lambda: functional.all_gather_single(x.contiguous(), 0, group.name))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum equally shaped tensors and keep this rank's part of axis 0.

    Args:
        x: float[B*T,...], B ranks.
        group: who takes part.
    Returns:
        float[T,...].
    Raises:
        RankError: another rank is lost or late.
    """
    if group.size == 1:
        return x
    return _run("reduce_scatter", group, lambda: functional.reduce_scatter_single(x.contiguous(), "sum", 0, group.name))


def all_to_all(
    x: Tensor, group: Group, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
) -> Tensor:
    """Send a run of rows to every rank, and join what the ranks send here, in order of rank.

    Args:
        x: float[T,...]. Runs in order of the rank that they go to.
        group: who takes part.
        received: rows that come from each rank; by default runs have one length.
        sent: rows that go to each rank.
    Returns:
        float[A,...].
    Raises:
        RankError: another rank is lost or late.
    """
    if group.size == 1:
        return x
    into = None if received is None else list(received)
    outof = None if sent is None else list(sent)
    return _run("all_to_all", group, lambda: functional.all_to_all_single(x.contiguous(), into, outof, group.name))


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """Take over the tensor of one rank.

    Args:
        x: float[...]. Equally shaped everywhere.
        group: who takes part.
        source: place of the rank in the group.
    Returns:
        The tensor of ``source``.
    Raises:
        RankError: another rank is lost or late.
    """
    if group.size == 1:
        return x
    return _run("broadcast", group, lambda: functional.broadcast(x.contiguous(), source, group.name))


def _run(what: str, group: Group, collective: Callable[[], Tensor]) -> Tensor:
    try:
        return torch.ops._c10d_functional.wait_tensor(_plain(collective()))
    except RuntimeError as error:
        raise RankError(
            f"{what}: rank {group.rank} of {group.size} expected the others, got: {str(error).splitlines()[0]}; a rank "
            "is lost, late or has decided otherwise: look at what the others say, and start all of them anew",
            field=what,
            expected=group.size,
            got=str(error),
        ) from error


def _plain(x: Tensor) -> Tensor:
    return x.elem if isinstance(x, functional.AsyncCollectiveTensor) else x
