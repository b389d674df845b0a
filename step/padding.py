"""A decode padded to fixed shapes, so that one graph serves every step of its bucket.

Rows beyond the step's own are idle: they write to the sinks, see nothing and their logits are dropped. Every row closes
a group: one that does not really close reads the dummy and writes its entry to the sink. Only where no row closes a
group of 128, which is most often, none is closed: 128 members a row are much to read for nothing. Tables are as wide as
the bucket's context; what lies beyond a row's own length is the sink with a false mask, as in any table.

Source: none; the idea is that of padded batches in captured decode graphs.
"""

from __future__ import annotations

from functools import cache
from operator import index
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..state.batch import CompressorMetadata, ForwardBatch, SingleMetadata
from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO
from ..state.errors import ConfigError
from ..state.kv import KVLayout

__all__ = ["Bucket", "as_buckets", "pad_decode"]


@attrs.frozen(kw_only=True, order=True)
class Bucket:
    """Shapes of one graph.

    Attributes:
        rows: requests of a step, at most.
        context: tokens of each of them after the step, at most.
    """

    rows: int
    context: int

    def holds(self, rows: int, context: int) -> bool:
        """Tell whether a decode of so many requests, the longest of so many tokens after it, fits."""
        return rows <= self.rows and context <= self.context


def as_buckets(given: Any, most: int) -> tuple[Bucket, ...]:
    """Return buckets in rising order of cost, each once.

    Args:
        given: buckets, or pairs (rows, context).
        most: positions that the model has.
    Raises:
        ConfigError: none, or one that holds nothing, or more than there is.
    """
    try:
        pairs = [(one.rows, one.context) if isinstance(one, Bucket) else tuple(one) for one in given]
        found = sorted({Bucket(rows=_whole(rows), context=_whole(context)) for rows, context in pairs})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"buckets: expected pairs (rows, context) such as ((1, 2048), (16, 2048)), got {given!r}",
            field="buckets",
            got=given,
        ) from error
    if not found or found[0].rows < 1 or min(one.context for one in found) < 1:
        raise ConfigError(
            f"buckets: expected at least one pair (rows, context) of numbers above 0, got {given!r}",
            field="buckets",
            expected=">= 1",
            got=given,
        )
    longest = max(one.context for one in found)
    if longest > most:
        raise ConfigError(
            f"buckets: expected contexts of at most the model's {most} positions, got {longest}; shorten it",
            field="buckets",
            expected=f"<= {most}",
            got=longest,
        )
    return tuple(found)


def _whole(number: Any) -> int:
    if isinstance(number, bool):
        raise TypeError("True is no number of rows")
    return index(number)


def pad_decode(view: ForwardBatch, bucket: Bucket, layout: KVLayout, window: int) -> ForwardBatch:
    """Pad a decode to the shapes of a bucket.

    Args:
        view: of a decode; at least one row, and every row one token.
        bucket: that it fits.
        layout: of the caches, read by rows and not by pages.
        window: W.
    Returns:
        The step with ``bucket.rows`` rows, each as long as the bucket says where a host number is asked; what says
        which requests run is left out.
    """
    meta, more = view.metadata, bucket.rows - view.batch_size
    lengths = view.seq_lens_cpu
    compressors = {
        ratio: _padded_compressor(plan, lengths, bucket, layout, ratio) for ratio, plan in meta.compressors.items()
    }
    assert meta.singles is not None, "a row of one token has tables of its own"
    return attrs.evolve(
        view,
        input_ids=_longer(view.input_ids, more),
        positions=_longer(view.positions, more),
        seq_lens_cpu=np.full(bucket.rows, bucket.context),
        last_rows=torch.arange(bucket.rows, device=view.last_rows.device),
        metadata=attrs.evolve(
            meta,
            swa_loc=_longer(meta.swa_loc, more),
            compressors=compressors,
            singles=_padded_singles(meta.singles, more, bucket.context, layout, window),
        ),
    )


def _longer(numbers: Tensor, more: int) -> Tensor:
    """Append zeros, which are the sinks."""
    return F.pad(numbers, (0, more)) if more else numbers


def _padded_singles(singles: SingleMetadata, more: int, context: int, layout: KVLayout, window: int) -> SingleMetadata:
    def table(pages: Tensor, width: int) -> Tensor:
        return F.pad(pages, (0, width - pages.shape[1], 0, more))

    older = window - singles.window_loc.shape[1]
    n_c4, n_c128 = context // C4_RATIO, context // C128_RATIO
    return SingleMetadata(
        rows=None,
        window_loc=F.pad(singles.window_loc, (older, 0, 0, more)),
        window_mask=F.pad(singles.window_mask, (older, 0, 0, more)),
        c4_pages=table(singles.c4_pages, -(-n_c4 // layout.sizes.c4_page)),
        c4_visible=_longer(singles.c4_visible, more),
        c128_pages=table(singles.c128_pages, -(-n_c128 // C128_PAGE)),
        c128_visible=_longer(singles.c128_visible, more),
        n_c4=n_c4,
        n_c128=n_c128,
    )


def _padded_compressor(
    plan: CompressorMetadata, lengths: NDArray[np.int64], bucket: Bucket, layout: KVLayout, ratio: int
) -> CompressorMetadata:
    """Let every row close: the rows that really do keep their slots, the others get dummies and the sink."""
    n_rows, device = bucket.rows, plan.out_loc.device
    more = n_rows - len(lengths)
    n_old = (2 * ratio if ratio == C4_RATIO else ratio) - 1
    every, none, members = _constants(n_rows, n_old, device)
    if ratio == C128_RATIO and not layout.is_online and not len(plan.out_loc):
        return attrs.evolve(
            plan,
            phase=_longer(plan.phase, more),
            first_pos=none,
            keep=every,
            state_loc=_longer(plan.state_loc, more),
        )
    closing = torch.from_numpy((lengths % ratio == 0).nonzero()[0]).to(device)
    state = "c4_state" if ratio == C4_RATIO else "c128_state"
    common = {
        "phase": _longer(plan.phase, more),
        "out_loc": none.index_copy(0, closing, plan.out_loc),
        "first_pos": none.index_copy(0, closing, plan.first_pos),
        "keep": every,
    }
    if layout.is_online and ratio == C128_RATIO:
        open_rows = torch.from_numpy((lengths % ratio != 0).nonzero()[0]).to(device)
        rows = torch.cat((closing, open_rows))
        return CompressorMetadata(
            **common,
            history=torch.full_like(none, layout.dummy(state)).index_copy(0, rows, plan.history),
            members=every.unsqueeze(-1),
            state_loc=none.index_copy(0, open_rows, plan.state_loc),
        )
    history = torch.full((n_rows, n_old), layout.dummy(state), device=device)
    return CompressorMetadata(
        **common,
        history=history.index_copy(0, closing, plan.history.view(-1, n_old)).flatten(),
        members=members,
        state_loc=_longer(plan.state_loc, more),
    )


@cache
def _constants(n_rows: int, n_old: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Make what every step of a bucket has: its rows, as many zeros, the members of groups that all close."""
    every, none = torch.arange(n_rows, device=device), torch.zeros(n_rows, dtype=torch.int64, device=device)
    old = torch.arange(n_rows * n_old, device=device).view(n_rows, n_old)
    return every, none, torch.cat((old, n_rows * n_old + every.unsqueeze(-1)), dim=1)
