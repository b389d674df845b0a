"""The relay: the token sampled last, by row of the request table.

The next step reads its input from here, under whatever row order it then has; a batch row is never an identity. It is
one number a row, so every version is a tensor of its own.

Source: SGLang 0.5.23 ``managers/overlap_utils.py``; decode-path sheet 8.5.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from ..state.batch import ScheduleBatch
from ..state.decode import DecodeState, Request
from ..state.errors import ShapeError

__all__ = ["put_token", "relay"]


def relay(state: DecodeState, batch: ScheduleBatch, ids: Tensor) -> DecodeState:
    """Write the sampled ids where the next step looks for its inputs.

    Args:
        state: after the forward.
        batch: the step.
        ids: i64[B]. Sampled tokens, one per row of ``batch.sample_rows`` (all rows, unless a limit left tokens unfed).
    Returns:
        The state with ``relay[row of request] = id``; all other entries unchanged.
    Raises:
        ShapeError: not one i64 id per row that samples.
    """
    expected = (len(batch.sample_rows),)
    if ids.dtype is not torch.int64 or ids.shape != expected:
        raise ShapeError(
            f"relay: expected ids i64[{expected[0]}], one per row that samples, got {ids.dtype} {tuple(ids.shape)}",
            field="ids",
            expected=expected,
            got=tuple(ids.shape),
        )
    rows = torch.from_numpy(batch.req_pool_indices[batch.sample_rows]).to(ids.device)
    return attrs.evolve(state, relay=state.relay.index_copy(0, rows, ids))


def put_token(token_ids: Tensor, request: Request) -> Tensor:
    """Write the pending token of one request into the relay, where a request gets a row or is cut.

    Args:
        token_ids: i64[B+1]. The relay.
        request: what the request is now.
    Returns:
        Another relay; the same one when no sampled token waits to be fed or the request has no row.
    """
    if request.is_parked or not request.has_pending:
        return token_ids
    changed = token_ids.clone()
    changed[request.row] = request.tokens[-1]
    return changed
