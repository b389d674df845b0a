"""The relay: the token sampled last, by row of the request table.

The next step reads its input from here, under whatever row order it then has; a batch row is never an identity.

Source: SGLang 0.5.23 ``managers/overlap_utils.py``; decode-path sheet 8.5.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from ..state.batch import ScheduleBatch
from ..state.decode import DecodeState
from ..state.errors import ShapeError

__all__ = ["relay"]


def relay(state: DecodeState, batch: ScheduleBatch, ids: Tensor) -> DecodeState:
    """Write the sampled ids where the next step looks for its inputs.

    Args:
        state: after the forward.
        batch: the step.
        ids: i64[B]. Sampled tokens, by batch row.
    Returns:
        The state with ``relay[row of request] = id``; all other entries unchanged.
    Raises:
        ShapeError: not one i64 id per batch row.
    """
    if ids.dtype is not torch.int64 or ids.shape != (len(batch.request_ids),):
        raise ShapeError(
            f"relay: expected ids i64[{len(batch.request_ids)}], one per batch row, got {ids.dtype} {tuple(ids.shape)}",
            field="ids",
            expected=(len(batch.request_ids),),
            got=tuple(ids.shape),
        )
    rows = torch.from_numpy(batch.req_pool_indices).to(ids.device)
    with state.relay.write({"token_ids": rows}) as write:
        write.tensors["token_ids"].index_copy_(0, rows, ids)
    return attrs.evolve(state, relay=write.handle)
