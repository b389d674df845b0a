"""How many rows every replica brings to a step: what all ranks decide from, and nothing else.

A replica's rows are dealt to its ranks in chunks of one length, the last of them padded, so that one rank alone sends
each row.

Source: SGLang 0.5.23 ``layers/dp_attention.py``; decode-path sheet 1.11, 7.2.
"""

from __future__ import annotations

from typing import Literal

import attrs

from .parallel import Parallel
from .values import value

__all__ = ["PaddingMode", "RowShares", "can_exchange_logits", "local_rows", "padding_mode"]

PaddingMode = Literal["max_len", "sum_len"]
"""Gathered rows: every replica padded to the longest, or one behind the other."""


def padding_mode(counts: tuple[int, ...], *, is_extend: bool) -> PaddingMode:
    """Choose how rows are gathered; every rank finds the same from the same counts.

    Args:
        counts: rows of every replica, rounded up to a multiple of its ranks.
        is_extend: whether any replica feeds prompts.
    Returns:
        The mode; the cheaper one where nobody feeds prompts.
    """
    if is_extend and len(counts) > 1:
        return "sum_len"
    return "max_len" if 2 * sum(counts) >= max(counts) * len(counts) else "sum_len"


def local_rows(n_rows: int, rank: int, ranks: int) -> tuple[int, int, int]:
    """Deal the rows of a replica to its ranks.

    Args:
        n_rows: real rows.
        rank: of the replica's ranks.
        ranks: of the replica.
    Returns:
        (start, stop, chunk): the rank's real rows, and the length that they are padded to.
    """
    chunk = -(-n_rows // ranks)
    start = min(rank * chunk, n_rows)
    return start, min(start + chunk, n_rows), chunk


@value
@attrs.frozen(eq=False, kw_only=True)
class RowShares:
    """What every replica brings to a step.

    Attributes:
        tokens: token rows of every replica.
        logits: rows of every replica that enter the head.
        is_extend: whether any replica feeds prompts.
        tp: ranks of a replica.
    """

    tokens: tuple[int, ...]
    logits: tuple[int, ...]
    is_extend: bool
    tp: int

    @property
    def rounded(self) -> tuple[int, ...]:
        """Token rows of every replica, rounded up to a multiple of its ranks."""
        return tuple(-(-n // self.tp) * self.tp for n in self.tokens)

    @property
    def mode(self) -> PaddingMode:
        """How token rows are gathered."""
        return padding_mode(self.rounded, is_extend=self.is_extend)

    @property
    def padded(self) -> tuple[int, ...]:
        """Token rows of every replica as gathered."""
        counts = self.rounded
        return (max(counts),) * len(counts) if self.mode == "max_len" else counts


def can_exchange_logits(parallel: Parallel, counts: tuple[int, ...], *, n_shards: int, n_rows: int) -> bool:
    """Tell whether one all-to-all may replace gathering the vocabulary and handing back the rows.

    Args:
        parallel: the layout.
        counts: rows of every replica that enter the head.
        n_shards: ranks that the head is split over.
        n_rows: rows that this rank has logits of.
    Returns:
        The same on every rank, since all of this is shared.
    """
    is_on = parallel.lm_head_all_to_all and parallel.dp > 1 and parallel.tp == 1 and not parallel.dp_lm_head
    is_equal = len(counts) == parallel.ranks and len(set(counts)) == 1
    return is_on and n_shards == parallel.ranks and is_equal and counts[0] > 0 and n_rows == counts[0] * parallel.ranks
