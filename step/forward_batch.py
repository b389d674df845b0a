"""From the prepared step to what the model sees.

Source: SGLang 0.5.23 ``model_executor/forward_batch_info.py`` (``ForwardBatch.init_new``); decode-path sheet 2.2, 3.
Upstream writes two fields back into the schedule batch; nothing is written back here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from ..state.batch import ForwardBatch, ScheduleBatch
from ..state.decode import DecodeState
from ..state.errors import ConfigError
from ..state.ids import Layout, PlainLayout, VirtualLoc
from ..state.shares import RowShares
from ..state.table import read_table
from .ascend import ascend_metadata
from .metadata import attention_metadata, token_positions

__all__ = ["forward_batch"]


def forward_batch(
    state: DecodeState,
    batch: ScheduleBatch,
    *,
    layout: Layout | None = None,
    rowwise: bool = False,
    bucket: int | None = None,
    shares: RowShares | None = None,
) -> ForwardBatch:
    """Build the model's view of a prepared step.

    Args:
        state: after ``prepare_decode`` or ``prepare_extend``.
        batch: what that returned.
        layout: id space of the write locations; default the plain one, where a slot is a pool row.
        rowwise: as in ``attention_metadata``; what a model with ``numerics.invariant`` needs.
        bucket: rows to pad a decode to, for caches that Ascend kernels read; what the model computes with is then as
            long as the bucket, and what says which requests run is not.
        shares: what every replica brings to the step, over several ranks (``announce_step``).
    Returns:
        Index tensors on the model's device; ``positions == seq_lens - 1`` in a decode.
    Raises:
        ConfigError: a bucket that the step does not fit, or for other caches.
    """
    if bucket is not None and not state.kv.layout.is_paged:
        raise ConfigError(
            f"bucket: expected None for caches of the {state.kv.layout.form} form, got {bucket}",
            field="bucket",
            expected=None,
            got=bucket,
        )
    device = state.kv.device
    tokens = token_positions(batch)
    with read_table(state.table) as tables:
        if state.kv.layout.is_paged:
            metadata = ascend_metadata(batch, tables, state.kv.layout, device, bucket=bucket)
        else:
            metadata = attention_metadata(
                batch, tokens, tables, state.kv.layout, state.config.sliding_window, device, rowwise=rowwise
            )
    pool_rows = torch.from_numpy(batch.req_pool_indices).to(device)
    if batch.input_ids is None:
        input_ids = state.relay.index_select(0, pool_rows)
    else:
        input_ids = torch.from_numpy(batch.input_ids).to(device)
    layout = layout or PlainLayout(page_size=state.table.sizes.page_size)
    virtual = torch.from_numpy(batch.out_cache_loc).to(device)
    seq_lens = torch.from_numpy(batch.seq_lens).to(device)
    last_rows = batch.extend_lens.cumsum() - 1 if bucket is None else np.arange(bucket)
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        batch_size=len(batch.request_ids),
        input_ids=_padded(input_ids, bucket),
        req_pool_indices=pool_rows,
        seq_lens=seq_lens,
        seq_lens_cpu=batch.seq_lens,
        seq_lens_sum=batch.seq_lens_sum,
        orig_seq_lens=torch.from_numpy(batch.orig_seq_lens).to(device),
        positions=_padded(torch.from_numpy(tokens[1]).to(device), bucket),
        out_cache_loc=layout.kernel(VirtualLoc(ids=virtual)).ids,
        out_cache_loc_virtual=virtual if layout.is_translating else None,
        last_rows=torch.from_numpy(last_rows).to(device),
        metadata=metadata,
        shares=shares,
    )


def _padded(numbers: torch.Tensor, bucket: int | None) -> torch.Tensor:
    return numbers if bucket is None else F.pad(numbers, (0, bucket - len(numbers)))
