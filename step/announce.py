"""What the ranks of a layout tell each other before a step, so that all of them do the same.

Every rank says how many rows it brings and what it is about to do. From then on everybody decides from what everybody
knows: who is idle, how rows are gathered, whether logits are exchanged. A rank that could not begin, that runs another
model, or whose requests are not those of its replica is found here, instead of being waited for in the middle of a
layer.

Source: SGLang 0.5.23 ``managers/scheduler_components/dp_attn.py`` (the gathered counts); decode-path sheet 1.11, 8.3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from ..model.model import Model
from ..model.ranks import Ranks
from ..ops.collectives import all_gather, all_reduce
from ..state.batch import ScheduleBatch
from ..state.decode import DecodeState, find_request
from ..state.errors import CapacityError, RankError
from ..state.shares import RowShares

__all__ = ["CANNOT_BEGIN", "agreement", "announce_step", "runs_elsewhere", "told_to_ranks"]

CANNOT_BEGIN: Final = "begin"
"""The field of the error about a rank whose step was refused: all others may go on without it."""

_GOES: Final = 1
_FAILED: Final = 0


def announce_step(
    model: Model,
    state: DecodeState,
    batch: ScheduleBatch,
    *,
    logits: Literal["last", "all", "none"] = "last",
    mask: Mapping[int, Tensor] | None = None,
) -> RowShares | None:
    """Tell all ranks what this one brings to a step, and hear what they bring.

    Args:
        model: the model; all its ranks call this together.
        state: the prepared state.
        batch: the prepared step; without rows on an idle replica.
        logits: as in ``forward``.
        mask: as in ``decode_step``.
    Returns:
        The rows of every replica; None on one rank, where nobody is to be told.
    Raises:
        RankError: another rank is lost or late, could not begin its step, runs another model, or is about to do
            something else with the requests of this replica.
        CapacityError: rows of one rank are more than the layout's capacity for an exchange. All ranks find so.
    """
    ranks = model.ranks
    if ranks.world.size == 1:
        return None
    n_tokens = int(batch.extend_lens.sum())
    n_logits = {"last": len(batch.request_ids), "all": n_tokens, "none": 0}[logits]
    is_extend = bool(n_tokens) and not batch.forward_mode.is_decode()
    said = (_GOES, n_tokens, n_logits, int(is_extend), _batch_digest(state, batch, logits, mask), _model_digest(model))
    heard = _exchange(model, said)
    _check_heard(ranks, heard)
    of_replicas = heard[:: ranks.parallel.tp]
    shares = RowShares(
        tokens=tuple(row[1] for row in of_replicas),
        logits=tuple(row[2] for row in of_replicas),
        is_extend=any(row[3] for row in of_replicas),
        tp=ranks.parallel.tp,
    )
    _check_capacity(ranks, shares)
    return shares


def runs_elsewhere(shares: RowShares | None) -> bool:
    """Tell whether any replica runs anything."""
    return shares is not None and sum(shares.tokens) > 0


@contextmanager
def told_to_ranks(model: Model) -> Iterator[None]:
    """Let the other ranks know when this one cannot begin its step, so that they do not wait for it."""
    try:
        yield
    except Exception:
        if model.ranks.world.size > 1:
            _exchange(model, (_FAILED, 0, 0, 0, 0, 0))
        raise


def agreement(ranks: Ranks, *, is_constrained: bool) -> Callable[[Tensor], Tensor] | None:
    """Say how the ranks of a replica agree on sampled tokens.

    Equal logits and seeds give equal tokens, so by default nothing is exchanged. Where it is, the smallest token wins,
    among the ranks of the replica and never among replicas, which run other requests.

    Args:
        ranks: this rank's place.
        is_constrained: whether any row is masked.
    Returns:
        i64[B] -> i64[B], or None.
    """
    if ranks.attn.size == 1 or not (ranks.parallel.sync_token_ids or is_constrained):
        return None
    return lambda ids: all_reduce(ids, ranks.attn, "min")


def _exchange(model: Model, said: tuple[int, ...]) -> list[list[int]]:
    mine = torch.tensor([said], dtype=torch.int64, device=model.device)
    heard: list[list[int]] = all_gather(mine, model.ranks.world).tolist()
    return heard


def _check_heard(ranks: Ranks, heard: list[list[int]]) -> None:
    mine, tp = heard[ranks.world.rank], ranks.parallel.tp
    failed = [rank for rank, row in enumerate(heard) if row[0] == _FAILED]
    if failed:
        raise _differing(ranks, failed, "to begin the step", "could not; their own errors say why", CANNOT_BEGIN)
    strangers = [rank for rank, row in enumerate(heard) if row[5] != mine[5]]
    if strangers:
        raise _differing(ranks, strangers, "to run the same model, numerics and layout", "run another")
    for replica in range(ranks.parallel.dp):
        group = range(replica * tp, (replica + 1) * tp)
        others = [rank for rank in group if heard[rank][1:5] != heard[group[0]][1:5]]
        if others:
            words = f"to step the requests of replica {replica} as rank {group[0]} does"
            raise _differing(ranks, others, words, "run other requests, tokens, slots or masks")


def _differing(ranks: Ranks, others: list[int], expected: str, got: str, field: str = "ranks") -> RankError:
    return RankError(
        f"step: rank {ranks.world.rank} expected all ranks {expected}, but ranks {others} {got}; nothing was changed: "
        "call every rank of a replica with the same state and arguments",
        field=field,
        expected=expected,
        got=others,
    )


def _check_capacity(ranks: Ranks, shares: RowShares) -> None:
    capacity = ranks.parallel.capacity
    most = max(shares.rounded) // shares.tp
    if capacity is not None and not shares.is_extend and most > capacity:
        raise CapacityError(
            f"step: one rank brings {most} rows, but Parallel(capacity={capacity}) has room for {capacity}; "
            "nothing was changed: run fewer requests, or raise it",
            field="capacity",
            expected=f"<= {capacity}",
            got=most,
        )


def _model_digest(model: Model) -> int:
    numbers = (model.config, model.numerics, model.ranks.parallel, model.ops.name, model.dtype, model.fingerprint)
    return _digest(repr(numbers).encode())


def _batch_digest(state: DecodeState, batch: ScheduleBatch, logits: str, mask: Mapping[int, Tensor] | None) -> int:
    """Summarise what a step does, the tokens that it feeds and the slots that it writes included."""
    arrays = (batch.req_pool_indices, batch.prefix_lens, batch.seq_lens, batch.sample_rows, batch.out_cache_loc)
    fed = batch.input_ids
    if fed is None:
        fed = np.array([find_request(state, i).tokens[-1] for i in batch.request_ids], np.int64)
    head = repr((batch.forward_mode.value, batch.request_ids, logits, sorted(mask or ())))
    return _digest(head.encode(), *(array.tobytes() for array in (*arrays, fed)))


def _digest(*parts: bytes) -> int:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(found.digest(), "little", signed=True)
