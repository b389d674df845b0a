"""The token ids of one request as an immutable sequence that is cheap to append to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, Final, TypeAlias, overload

import attrs
import numpy as np
from numpy.typing import NDArray

from .errors import RequestError

__all__ = ["TokenLog"]

_CHUNK: Final = 64
"""Ids in a full chunk: an append copies fewer than this many, and one pointer for every chunk once per chunk."""

Ids: TypeAlias = NDArray[np.int64]


@attrs.frozen(eq=False, kw_only=True, repr=False)
class TokenLog:
    """An append-only sequence of token ids.

    Full chunks are read-only arrays that all longer logs share; the last few ids are a tuple. The split follows from
    the length alone, so logs of equal content have equal parts. Ids are not checked against any vocabulary.

    It is an opaque leaf of a pytree: as a tree, its structure would change with its length, and a tree map over a
    state's tensors has no business in a request's history.
    """

    chunks: tuple[Ids, ...] = ()
    tail: tuple[int, ...] = ()

    @classmethod
    def of(cls, ids: Sequence[int] | Ids) -> TokenLog:
        """Make a log that holds ``ids``."""
        return cls().extend(ids)

    def append(self, token_id: int) -> TokenLog:
        """Add one id at the end."""
        tail = (*self.tail, index(token_id))
        if len(tail) < _CHUNK:
            return TokenLog(chunks=self.chunks, tail=tail)
        return TokenLog(chunks=(*self.chunks, _frozen_chunk(tail)))

    def extend(self, ids: Sequence[int] | Ids) -> TokenLog:
        """Add ids at the end, in order; the same as appending one after the other."""
        rest = np.concatenate((np.asarray(self.tail, np.int64), np.asarray(ids, np.int64)))
        n_full = len(rest) // _CHUNK * _CHUNK
        full = tuple(_frozen_chunk(rest[start : start + _CHUNK]) for start in range(0, n_full, _CHUNK))
        return TokenLog(chunks=(*self.chunks, *full), tail=tuple(rest[n_full:].tolist()))

    def truncate(self, n: int) -> TokenLog:
        """Keep the first ``n`` ids.

        Raises:
            RequestError: when there are fewer than ``n``, or ``n`` is negative.
        """
        if not 0 <= n <= len(self):
            raise RequestError(
                f"TokenLog.truncate: expected 0..{len(self)}, got {n}; cut at a length that it has reached",
                field="n",
                expected=f"0..{len(self)}",
                got=n,
            )
        n_chunks = n // _CHUNK
        return TokenLog(chunks=self.chunks[:n_chunks], tail=tuple(self.span(n_chunks * _CHUNK, n).tolist()))

    def replace_last(self, token_id: int) -> TokenLog:
        """Put another id in the place of the last one.

        Raises:
            RequestError: when the log is empty.
        """
        if not len(self):
            raise RequestError(
                "TokenLog.replace_last: expected at least one token, got an empty log; append instead",
                field="token_id",
                expected="a log with a last token",
                got=0,
            )
        return self.truncate(len(self) - 1).append(token_id)

    def numpy(self) -> Ids:
        """Copy all ids to a new int64 array."""
        return self.span(0, len(self))

    def tolist(self) -> list[int]:
        """Copy all ids to a new list of Python integers."""
        ids: list[int] = self.numpy().tolist()
        return ids

    def __len__(self) -> int:
        return len(self.chunks) * _CHUNK + len(self.tail)

    def __iter__(self) -> Iterator[int]:
        for chunk in self.chunks:
            yield from chunk.tolist()
        yield from self.tail

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Ids: ...
    def __getitem__(self, at: int | slice) -> int | Ids:
        """Read one id, or copy a slice to a new int64 array; only the chunks that it touches are read."""
        # A range knows Python's rules for negative numbers, bounds and steps, and raises the IndexError of sequences.
        at_positions = range(len(self))[at]
        if isinstance(at_positions, int):
            chunk, offset = divmod(at_positions, _CHUNK)
            return int(self.chunks[chunk][offset]) if chunk < len(self.chunks) else self.tail[offset]
        if not at_positions:
            return np.empty(0, np.int64)
        first, last = sorted((at_positions[0], at_positions[-1]))
        return self.span(first, last + 1)[:: at_positions.step].copy()

    def span(self, start: int, stop: int) -> Ids:
        """Copy the ids of positions ``[start, stop)``, which must exist, to a new array: a slice without its rules."""
        n_chunked = len(self.chunks) * _CHUNK
        if start >= n_chunked:  # what a decode reads
            return np.asarray(self.tail[start - n_chunked : stop - n_chunked], np.int64)
        first = start // _CHUNK
        parts = self.chunks[first : -(-stop // _CHUNK)]
        if stop > n_chunked:
            parts = (*parts, np.asarray(self.tail, np.int64))
        base = first * _CHUNK
        # Concatenating copies, also a single part: what is handed out never aliases a chunk.
        return np.concatenate(parts)[start - base : stop - base] if parts else np.empty(0, np.int64)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLog):
            return NotImplemented
        if len(self) != len(other) or self.tail != other.tail:
            return False
        pairs = zip(self.chunks, other.chunks, strict=True)
        return all(mine is theirs or np.array_equal(mine, theirs) for mine, theirs in pairs)

    def __hash__(self) -> int:
        return hash((len(self), self.tail))

    def __repr__(self) -> str:
        return f"TokenLog(len={len(self)}, last={self[len(self) - 4 if len(self) > 4 else 0 :].tolist()})"

    def __copy__(self) -> TokenLog:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> TokenLog:
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return TokenLog.of, (self.numpy(),)


def _frozen_chunk(ids: Sequence[int] | Ids) -> Ids:
    chunk = np.array(ids, np.int64)
    chunk.setflags(write=False)
    return chunk
