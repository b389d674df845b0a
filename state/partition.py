"""The law of conservation: every page of a pool is free or named, and never both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .violations import Found, listed

__all__ = ["count_names", "partition"]

Ints = NDArray[np.int64]


def partition(kind: str, free: Ints, named: Ints, count: int) -> Found:
    """Find pages of ``1..count`` that are both free and named, or neither.

    Args:
        kind: what is counted, for messages.
        free: i64[P]. The free list.
        named: i64[P]. Pages that requests name, repeats allowed.
        count: pages of the pool without the sink.
    """
    where = f"{kind}s"
    is_free, is_named = _flags(free, count), _flags(named, count)
    both = np.flatnonzero(is_free & is_named)
    if len(both):
        yield where, f"expected no {kind} both free and in use, got {listed(both)}"
    lost = np.flatnonzero(~is_free[1:] & ~is_named[1:]) + 1
    if len(lost):
        yield where, f"expected free + used = {count}, but nobody has {listed(lost)}"
    given = np.concatenate((free, named))
    stray = given[(given < 1) | (given > count)]
    if len(stray):
        yield where, f"expected {kind}s in 1..{count}, got {listed(np.unique(stray))}"


def _flags(pages: Ints, count: int) -> NDArray[np.bool_]:
    """Mark those of the pages ``1..count`` that are listed; bool[P]."""
    found = np.zeros(count + 1, bool)
    found[pages[(pages >= 1) & (pages <= count)]] = True
    return found


def count_names(names: list[Ints], count: int) -> Ints:
    """Count by how many holders each of the pages ``0..count`` is named; repeats within a holder count."""
    joined = np.concatenate(names) if names else np.empty(0, np.int64)
    inside = joined[(joined >= 0) & (joined <= count)]
    return np.bincount(inside, minlength=count + 1).astype(np.int64)
