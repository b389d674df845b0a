"""How much a state can hold, and how its pools follow from that."""

from __future__ import annotations

from math import ceil
from typing import Any

import attrs

from .errors import ConfigError

__all__ = ["C4_RATIO", "C128_PAGE", "C128_RATIO", "Capacity", "PoolSizes"]

C4_RATIO = 4
"""Tokens per entry of the overlapping compressor; page sizes are multiples of it."""

C128_RATIO = 128
"""Tokens per entry of the non-overlapping compressor."""

C128_PAGE = 16
"""Entries per page of the C128 pool: one page covers 2048 tokens of one request."""


def _positive(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        where = f"{type(instance).__name__}.{attribute.name}"
        raise ConfigError(
            f"{where}: expected a positive integer, got {value!r}",
            field=attribute.name,
            expected="positive int",
            got=value,
        )


@attrs.frozen
class Capacity:
    """What a state has room for.

    Attributes:
        requests: requests that may be open at once.
        tokens: tokens of all requests together that may own a slot (rounded up to whole pages).
        context: longest request, in tokens.
        swa_tokens: rows of the sliding-window pool; None gives every token one, so that windows never run out first.
        c128_pages: pages of the C128 pool; None gives what ``tokens`` and ``requests`` can need at most.
    """

    requests: int = attrs.field(validator=_positive)
    tokens: int = attrs.field(validator=_positive)
    context: int = attrs.field(validator=_positive)
    swa_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive), kw_only=True)
    c128_pages: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive), kw_only=True)


@attrs.frozen(kw_only=True)
class PoolSizes:
    """Numbers of pages and rows of every pool, derived once from a ``Capacity``.

    Page 0 of every pool is a sink that nobody owns, and so is row 0 of the request table.

    Attributes:
        page_size: tokens per full and window page.
        requests: rows 1..requests of the request table.
        context: columns of the request table.
        pages: full pages 1..pages.
        swa_pages: window pages 1..swa_pages.
        c128_pages: C128 pages 1..c128_pages.
    """

    page_size: int
    requests: int
    context: int
    pages: int
    swa_pages: int
    c128_pages: int

    @classmethod
    def of(cls, capacity: Capacity, page_size: int) -> PoolSizes:
        """Derive pool sizes.

        Args:
            capacity: what the caller asked for.
            page_size: tokens per page, a multiple of 4.
        Raises:
            ConfigError: page size not a positive multiple of 4.
        """
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1 or page_size % C4_RATIO:
            raise ConfigError(
                f"page_size: expected a positive multiple of {C4_RATIO} (whole C4 groups), got {page_size!r}",
                field="page_size",
                expected=f"multiple of {C4_RATIO}",
                got=page_size,
            )
        pages = ceil(capacity.tokens / page_size)
        swa_pages = pages if capacity.swa_tokens is None else ceil(capacity.swa_tokens / page_size)
        # Besides the pages that its own tokens fill, a request may hold one that it is filling and, if it is a fork,
        # its copy of the one that was being filled where it began.
        most = 2 * capacity.requests + pages * page_size // (C128_RATIO * C128_PAGE)
        return cls(
            page_size=page_size,
            requests=capacity.requests,
            context=capacity.context,
            pages=pages,
            swa_pages=swa_pages,
            c128_pages=most if capacity.c128_pages is None else capacity.c128_pages,
        )

    @property
    def c4_page(self) -> int:
        """C4 entries per full page."""
        return self.page_size // C4_RATIO

    @property
    def sidecar_width(self) -> int:
        """C128 pages that one request can name."""
        return max(1, ceil(self.context / (C128_RATIO * C128_PAGE)))
