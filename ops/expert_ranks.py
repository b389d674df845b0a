"""Rows on their way to the ranks that hold their experts, and back.

A row goes once to every rank that holds any of its experts, with all its choices; the rank runs those that it holds and
sends one weighted sum back. What is sent to a rank is one run of rows, in order of token.

Two forms: as many rows as there are, which the host has to count, or a fixed number of places for every rank, where the
shapes follow from the capacity alone and rows that fill up have no weight.

Source: DeepEP's two modes as in SGLang 0.5.23 ``layers/moe/token_dispatcher``; decode-path sheet 6.2, 6.3.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from .collectives import Group, all_to_all

__all__ = ["Choice", "destinations", "run_fixed", "run_variable", "send_order", "send_places"]

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows float[T,H], experts of this rank i64[T,K], weights f32[T,K]) -> weighted sums f32[T,H]."""


@attrs.frozen(eq=False, kw_only=True)
class Choice:
    """What rows have chosen.

    Attributes:
        places: i64[T,K]. Places of the experts; rank r holds places ``r * per_rank`` and up.
        weights: f32[T,K].
        per_rank: experts of one rank.
    """

    places: Tensor
    weights: Tensor
    per_rank: int

    def packed(self) -> Tensor:
        """Put both into integers, so that they travel in one piece: i32[T,2*K]."""
        return torch.cat((self.places.to(torch.int32), self.weights.contiguous().view(torch.int32)), dim=-1)

    def unpacked(self, packed: Tensor) -> Choice:
        """Read what ``packed`` wrote."""
        places, weights = packed.chunk(2, dim=-1)
        return attrs.evolve(self, places=places.long(), weights=weights.contiguous().view(torch.float32))

    def held_by(self, rank: int) -> tuple[Tensor, Tensor]:
        """Find the choices that a rank holds: (its experts i64[T,K], bool[T,K])."""
        local = self.places - rank * self.per_rank
        return local, (local >= 0) & (local < self.per_rank)


def destinations(places: Tensor, per_rank: int, n_ranks: int) -> Tensor:
    """Find the ranks that rows go to.

    Args:
        places: i64[T,K].
        per_rank: experts of one rank.
        n_ranks: ranks.
    Returns:
        bool[T,B], B ranks.
    """
    ranks = torch.arange(n_ranks, device=places.device)
    return (places.unsqueeze(-1) // per_rank == ranks).any(1)


def send_order(goes: Tensor) -> tuple[Tensor, Tensor]:
    """Order rows for sending: rank by rank, in order of token.

    Args:
        goes: bool[T,B], of ``destinations``.
    Returns:
        (rows i64[A], counts i64[B]): the token of every row sent, and how many go to each rank.
    """
    return goes.T.nonzero()[:, 1], goes.sum(0)


def send_places(goes: Tensor, capacity: int) -> Tensor:
    """Give every row its place among as many as any rank may send to another.

    Args:
        goes: bool[T,B], of ``destinations``; at most ``capacity`` rows.
        capacity: places for each rank.
    Returns:
        i64[T,B]. Places in a buffer of ``B * capacity`` rows; one behind its end for what does not go there.
    """
    n_ranks = goes.shape[1]
    first = torch.arange(n_ranks, device=goes.device) * capacity
    return torch.where(goes, first + goes.cumsum(0) - 1, n_ranks * capacity)


def run_variable(x: Tensor, choice: Choice, experts: Experts, group: Group) -> Tensor:
    """Run rows through the experts of all ranks; the host reads how many rows go where.

    Args:
        x: float[T,H].
        choice: of the rows.
        experts: of this rank.
        group: ranks that hold experts.
    Returns:
        f32[T,H]. Sums over ranks in order of rank.
    """
    rows, counts = send_order(destinations(choice.places, choice.per_rank, group.size))
    sent, received = counts.tolist(), all_to_all(counts, group).tolist()
    got = all_to_all(x.index_select(0, rows), group, received, sent)
    chosen = choice.unpacked(all_to_all(choice.packed().index_select(0, rows), group, received, sent))
    local, is_here = chosen.held_by(group.rank)
    # One row for every choice that this rank holds, so that no expert runs for a choice of another rank.
    at, column = is_here.nonzero(as_tuple=True)
    one = experts(got.index_select(0, at), local[at, column].unsqueeze(1), chosen.weights[at, column].unsqueeze(1))
    sums = torch.zeros_like(got, dtype=torch.float32).index_add_(0, at, one)
    back = all_to_all(sums, group, sent, received)
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, rows, back)


def run_fixed(x: Tensor, choice: Choice, experts: Experts, group: Group, capacity: int) -> Tensor:
    """Run rows through the experts of all ranks with shapes that follow from the capacity.

    Args:
        x: float[T,H], at most ``capacity`` rows.
        choice: of the rows.
        experts: of this rank.
        group: ranks that hold experts.
        capacity: places for the rows of one rank on another.
    Returns:
        f32[T,H]. Sums over ranks in order of rank.
    """
    goes = destinations(choice.places, choice.per_rank, group.size)
    places, n_places = send_places(goes, capacity), group.size * capacity
    got = all_to_all(_spread(x, places, n_places), group)
    chosen = choice.unpacked(all_to_all(_spread(choice.packed(), places, n_places), group))
    local, is_here = chosen.held_by(group.rank)
    sums = experts(got, torch.where(is_here, local, 0), torch.where(is_here, chosen.weights, 0))
    back = all_to_all(sums, group)
    padded = torch.cat((back, back.new_zeros((1, back.shape[1]))))
    return padded.index_select(0, places.flatten()).unflatten(0, places.shape).sum(1)


def _spread(x: Tensor, places: Tensor, n_places: int) -> Tensor:
    """Write every row to its places; the last row of the buffer takes what goes nowhere, and is cut off."""
    buffer = x.new_zeros((n_places + 1, x.shape[1]))
    rows = x.unsqueeze(1).expand(-1, places.shape[1], -1).flatten(0, 1)
    return buffer.index_copy_(0, places.flatten(), rows)[:n_places]
