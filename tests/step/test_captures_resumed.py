"""Records and hooks of requests that were retracted, begin on another's prefix, or are fed in limited chunks."""

from __future__ import annotations

from typing import Any

import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of
from purestep.model.loading import build_model
from purestep.model.stages import stage_layers

PLAIN = tiny_model((0, 4, 128), window=16, index_topk=8, experts=4)
MODEL = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))
CHOICES = ("attn.picks", "ffn.expert_ids")
LAYERS = range(MODEL.config.num_hidden_layers)


def fed(state: ps.DecodeState, request: int, chunk: Any, **how: Any) -> tuple[ps.DecodeState, list[ps.Captured], int]:
    """Feed a request in limited chunks until it samples: (state, a record of every step, what it sampled)."""
    records = []
    while True:
        state, out = ps.extend_step(MODEL, state, {request: chunk}, limit=128, logits="all", **how)
        chunk = ()
        if out.captured is not None:
            records.append(out.captured)
        if out.request_ids:
            return state, records, out.next_token_ids[0]


def talked(n: int, steps: int, **how: Any) -> tuple[ps.DecodeState, int]:
    """A request that was fed a prompt of n tokens and has said some."""
    state, request = ps.open_request(fresh(MODEL, 3, context=420), ENDLESS)
    state, _, _ = fed(state, request, ids_of(n), **how)
    for _ in range(steps):
        state, _ = ps.decode_step(MODEL, state, only=[request], **how)
    return state, request


@examples(6)
@given(n=st.sampled_from((5, 127, 129, 200, 300)), steps=st.integers(0, 4), way=st.sampled_from(("retract", "prefix")))
def test_records_are_whole_after_a_retraction_and_on_a_prefix(n: int, steps: int, way: str) -> None:
    """RES-03: a row for every fed token in every layer of experts, hash layers too, as of one prefill, replayable."""
    state, request = talked(n, steps)
    tokens = ps.find_request(state, request).tokens.tolist()
    rest: list[int] = []
    if way == "retract":
        state = ps.retract_request(state, request)
    else:
        point = (len(tokens) - 1) // 128 * 128
        state, request = ps.fork_request(state, request, at=point, as_prompt=True)
        rest = tokens[point:]
    start = ps.find_request(state, request).kv_len
    _, records, said = fed(state, request, rest, capture=CHOICES)
    assert [position for record in records for position in record.positions] == [*range(start, len(tokens))]
    whole, only = ps.open_request(fresh(MODEL, 1, context=420), ENDLESS)
    _, out = ps.extend_step(MODEL, whole, {only: tokens}, logits="all", capture=CHOICES)
    for layer in LAYERS:
        name = f"{layer}.ffn.expert_ids"
        rows = torch.cat([record.stages[name] for record in records])
        assert torch.equal(rows, out.captured.stages[name][start:])
    replay = [record.relabel({request: only}) for record in records]
    _, again = ps.extend_step(MODEL, whole, {only: tokens}, logits="all", replay=replay)
    assert torch.equal(again.logits, out.logits)
    assert again.next_token_ids == out.next_token_ids == (said,)


@pytest.mark.parametrize("stage", ["ffn.expert_ids", "attn.input"])
@pytest.mark.parametrize(("n", "steps"), [(5, 3), (128, 1), (300, 4)])
def test_hooks_are_called_for_every_token_that_is_fed_again(stage: str, n: int, steps: int) -> None:
    """RES-09: prompt + generated - 1 calls a layer, in chunks and decodes; after a retraction the same calls again."""
    calls: list[tuple[int | None, int, list[float]]] = []

    def note(x: torch.Tensor, token: ps.FedToken) -> torch.Tensor:
        calls.append((token.layer, token.position, x.flatten().tolist()))
        return x

    edit = {0: {f"{layer}.{stage}": note for layer in stage_layers(MODEL.config, stage)}}
    state, request = talked(n, steps, edit=edit)
    first, n_fed = sorted(calls), n + steps
    for layer in stage_layers(MODEL.config, stage):
        assert [position for at, position, _ in first if at == layer] == [*range(n_fed)]
    calls.clear()
    state, _, _ = fed(ps.retract_request(state, request), request, (), edit=edit)
    again = sorted(calls)
    assert [one for one in again if one[1] < n_fed] == first
    assert {position for _, position, _ in again} == {*range(n_fed + 1)}
