"""Four thousand forced decode steps end where one prefill ends, and keep nothing on the way."""

from __future__ import annotations

import attrs
import purestep as ps
import pytest
import torch
from kit.models import tiny_model
from kit.steps import ENDLESS, ids_of
from purestep.model.loading import build_model

N = 4000


def decode_all(model: ps.Model, ids: list[int], page_size: int) -> tuple[ps.DecodeState, torch.Tensor]:
    """Feed every token by a decode step of its own: (state, logits f32[T,V])."""
    state = ps.init_state(model, ps.Capacity(1, len(ids), len(ids)), page_size=page_size)
    state, request = ps.open_request(state, ENDLESS)
    rows = []
    for token in ids:
        state, out = ps.decode_step(model, state, only=[request], force={request: token})
        rows.append(out.logits)
    return state, torch.cat(rows)


def prefill(model: ps.Model, ids: list[int]) -> torch.Tensor:
    """Feed every token in one piece: f32[T,V]."""
    state = ps.init_state(model, ps.Capacity(1, len(ids), len(ids)))
    state, request = ps.open_request(state, ENDLESS)
    return ps.extend_step(model, state, {request: ids}, sample=False, logits="all")[1].logits


def invariant(model: ps.Model) -> ps.Model:
    """The same weights with row-independent arithmetic."""
    numerics = attrs.evolve(model.numerics, invariant=True)
    return build_model(model.config, model.params, dtype=model.dtype, numerics=numerics)


def test_four_thousand_steps_equal_one_prefill() -> None:
    """CMP-05: 4,000 decode steps give every logits row the bits of one prefill, and save nothing on the way."""
    model, ids = invariant(tiny_model((0, 4, 128), index_topk=64)), ids_of(N)
    state, decoded = decode_all(model, ids, page_size=32)
    assert torch.equal(decoded, prefill(model, ids))
    assert ps.invariants.check(state) == ()
    assert state.kv.handle.saved_bytes() == state.table.handle.saved_bytes() == 0


@pytest.mark.slow
def test_four_thousand_steps_of_the_embedded_model_equal_one_prefill() -> None:
    """The same for the embedded checkpoint in float32."""
    model = ps.load_model("tiny", dtype="float32", numerics=ps.Numerics(invariant=True))
    ids = ids_of(N, model.config.vocab_size)
    assert torch.equal(decode_all(model, ids, page_size=128)[1], prefill(model, ids))
