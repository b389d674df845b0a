"""Where a history can be cut without recomputing it, and what a request is after a cut.

A *reuse point* is the end of what is cached, or a multiple of the page size and of 128 whose window pages still live.
There no page and no group of a compressor is partly filled, so another history can take over from it; only the C128
page that spans it may be. Tokens between a reuse point and the place wanted are fed again.

Source: none; prefix matching upstream (SGLang 0.5.23, radix cache) takes multiples of 2,048 only. The reach of windows
and rings is that of the decode-path sheet, 4.5 and 4.8.
"""

from __future__ import annotations

from math import lcm
from operator import index

import attrs
import numpy as np

from ..state.capacity import C128_RATIO
from ..state.decode import DecodeState, Request
from ..state.errors import RequestError
from ..state.sampling import TokenHistory, count_history
from .allocate import MIN_KEPT

__all__ = ["checked_length", "cut_history", "cut_record", "reuse_point"]


def checked_length(request: Request, n: int, field: str) -> int:
    """Check a number of tokens of a request.

    Raises:
        RequestError: not an integer between 0 and the number of its tokens.
    """
    most = len(request.tokens)
    try:
        length = -1 if isinstance(n, bool) else index(n)
    except TypeError:
        length = -1
    if not 0 <= length <= most:
        raise RequestError(
            f"{field}: expected 0..{most}, the tokens of request {request.request_id}, got {n!r}",
            field=field,
            expected=f"0..{most}",
            got=n,
        )
    return length


def reuse_point(state: DecodeState, request: Request, n: int) -> int:
    """Find how many of a request's first ``n`` tokens another history can take over from its caches.

    Args:
        state: the state.
        request: an open request.
        n: tokens wanted.
    Returns:
        All that are cached if they are among the n; else the largest multiple of the page size and of 128 up to n whose
        window pages still live; 0 if there is none.
    """
    if n >= request.kv_len:
        return request.kv_len
    step = lcm(state.table.sizes.page_size, C128_RATIO)
    point = n // step * step
    reach = max(state.config.sliding_window - 1, MIN_KEPT)
    return point if request.evicted_len <= max(0, point - reach) else 0


def cut_record(request: Request, n: int, point: int) -> Request:
    """Make the record of a request that has a request's first ``n`` tokens, the first ``point`` of them cached."""
    n_outputs = int(np.searchsorted(request.output_positions.numpy(), n))
    return attrs.evolve(
        request,
        tokens=request.tokens.truncate(n),
        output_positions=request.output_positions.truncate(n_outputs),
        kv_len=point,
        evicted_len=request.evicted_len if point else 0,
        kept_len=n,
        decode_count=0,
        finished=None,
    )


def cut_history(state: DecodeState, cut: Request) -> TokenHistory:
    """Count what a cut request has read and said, for its penalties."""
    is_output = np.zeros(len(cut.tokens), bool)
    is_output[cut.output_positions.numpy()] = True
    tokens = cut.tokens.numpy()
    return count_history(
        tokens[~is_output], tokens[is_output], vocab_size=state.config.vocab_size, device=state.kv.device
    )
