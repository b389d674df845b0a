"""Moving whole rows between replicas: everybody's rows to everybody, and sums back to their owner.

Source: SGLang 0.5.23 ``layers/dp_attention.py`` (``dp_gather``, ``dp_scatter``); decode-path sheet 1.11, 7.2.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..ops.collectives import all_gather, all_reduce, reduce_scatter
from ..state.errors import ConfigError
from ..state.shares import RowShares, local_rows
from .ranks import Ranks

__all__ = ["gather_rows", "own_share", "require_shares", "return_rows", "share_rows", "sum_gather"]


def require_shares(shares: RowShares | None) -> RowShares:
    """Return what every replica brings.

    Raises:
        ConfigError: nobody has told this forward.
    """
    if shares is None:
        raise ConfigError(
            "forward: expected to know the rows of every replica, got nothing; over several replicas use decode_step "
            "or extend_step, or give forward_batch the shares of announce_step",
            field="shares",
            expected="RowShares",
        )
    return shares


def gather_rows(x: Tensor, shares: RowShares, ranks: Ranks) -> Tensor:
    """Bring the token rows of all replicas to every rank; rows that pad are zero.

    Args:
        x: float[T,...]. This replica's rows, the same on each of its ranks.
        shares: what every replica brings.
        ranks: this rank's place.
    Returns:
        float[A,...], replica by replica, each padded as ``shares.padded`` says.
    """
    if shares.mode == "sum_len":
        return sum_gather(x, sum(shares.padded[: ranks.replica]), sum(shares.padded), ranks)
    chunk = shares.padded[0] // shares.tp
    start = min(ranks.attn.rank * chunk, x.shape[0])
    return all_gather(_padded(x[start : start + chunk], chunk), ranks.world)


def return_rows(y: Tensor, shares: RowShares, ranks: Ranks) -> Tensor:
    """Sum what all ranks have computed for the gathered rows, and keep this replica's.

    Args:
        y: float[A,...]. This rank's part of every sum.
        shares: what every replica brings.
        ranks: this rank's place.
    Returns:
        float[T,...], the same on each of the replica's ranks.
    """
    n_rows = shares.tokens[ranks.replica]
    if shares.mode == "sum_len":
        return all_reduce(y, ranks.world).narrow(0, sum(shares.padded[: ranks.replica]), n_rows)
    return all_gather(reduce_scatter(y, ranks.world), ranks.attn)[:n_rows]


def sum_gather(x: Tensor, start: int, length: int, ranks: Ranks) -> Tensor:
    """Bring rows of all replicas to every rank, each at its replica's place: a sum of buffers that do not overlap.

    Args:
        x: float[T,...]. This replica's rows, the same on each of its ranks; its first rank alone sends them.
        start: place of its first row.
        length: rows in all.
        ranks: this rank's place.
    Returns:
        float[A,...].
    """
    buffer = x.new_zeros((length, *x.shape[1:]))
    if ranks.attn.rank == 0:
        buffer[start : start + x.shape[0]] = x
    return all_reduce(buffer, ranks.world)


def own_share(x: Tensor, ranks: Ranks) -> Tensor:
    """Take the rows that this rank sends for its replica.

    Args:
        x: float[T,...]. The replica's rows.
        ranks: this rank's place.
    Returns:
        float[A,...], without padding.
    """
    start, stop, _ = local_rows(x.shape[0], ranks.attn.rank, ranks.attn.size)
    return x[start:stop]


def share_rows(own: Tensor, n_rows: int, ranks: Ranks) -> Tensor:
    """Bring the shares of a replica's ranks together again.

    Args:
        own: float[A,...]. The rows of ``own_share``.
        n_rows: T.
        ranks: this rank's place.
    Returns:
        float[T,...].
    """
    *_, chunk = local_rows(n_rows, ranks.attn.rank, ranks.attn.size)
    return all_gather(_padded(own, chunk), ranks.attn)[:n_rows]


def _padded(x: Tensor, length: int) -> Tensor:
    missing = length - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
