"""Builds purestep models from tiny checkpoints and runs token sequences through the paged path in many ways."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import purestep as ps
import torch
from kit.checkpoints import write_checkpoint
from torch import Tensor

__all__ = ["GREEDY", "engine_model", "feed_in_chunks", "random_ids"]

GREEDY = ps.SamplingParams(temperature=0, ignore_eos=True)


def engine_model(config: Mapping[str, Any], tensors: Mapping[str, Tensor], **options: Any) -> ps.Model:
    """Load a checkpoint that is in memory, through files like any other."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, config, tensors)
        return ps.load_model(folder, **options)


def random_ids(n: int, vocab: int, seed: int = 0) -> list[int]:
    """Draw token ids without touching a global generator."""
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def feed_in_chunks(
    model: ps.Model, ids: Sequence[int], chunks: Sequence[int], *, page_size: int = 128, state: Any = None
) -> Tensor:
    """Feed ``ids`` to one request, chunk by chunk, and return f32[T,V].

    The chunks of 1 at the end are forced decodes; an earlier one is an extend, because a decode would leave a pending
    token that the next chunk had to feed first.
    """
    n_decodes = next((n for n, size in enumerate(reversed(chunks)) if size != 1), len(chunks))
    if state is None:
        state = ps.init_state(model, ps.Capacity(requests=1, tokens=len(ids), context=len(ids)), page_size=page_size)
    state, request_id = ps.open_request(state, GREEDY)
    rows, start = [], 0
    for number, size in enumerate(chunks):
        part = list(ids[start : start + size])
        if number >= len(chunks) - n_decodes:
            state, out = ps.decode_step(model, state, only=[request_id], force={request_id: part[0]})
        else:
            state, out = ps.extend_step(model, state, {request_id: part}, sample=False, logits="all")
        rows.append(out.logits)
        start += size
    assert start == len(ids), "chunks cover the sequence"
    return torch.cat(rows)
