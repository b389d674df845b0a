"""A limit feeds long texts in chunks beside decoding rows, and changes nothing but who samples when."""

from __future__ import annotations

from typing import Any

import numpy as np
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of, run_alone
from purestep.model.loading import build_model

PLAIN = tiny_model()
MODEL = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))


def two_requests(first: ps.SamplingParams = ENDLESS) -> ps.DecodeState:
    """A state with a request that decodes (0) and one that has nothing yet (1)."""
    state, a = ps.open_request(fresh(MODEL, 3, context=700), first)
    state, _ = ps.open_request(state, ENDLESS)
    return ps.extend_step(MODEL, state, {a: [5, 6, 7]})[0]


@examples(6)
@given(n=st.sampled_from((1, 127, 128, 129, 300, 511, 512)), limit=st.sampled_from((128, 130, 200, 256, 1000)))
def test_a_limited_text_is_fed_beside_a_decoding_row(n: int, limit: int) -> None:
    """Fed in limited chunks beside a decoding request, a text ends in the bits of one piece, and samples once, then."""
    ids = ids_of(n, VOCAB)
    state, chunk, rows, lengths = two_requests(), ids, [], [0]
    while 1 not in rows:
        state, out = ps.extend_step(MODEL, state, {0: (), 1: chunk}, limit={1: limit})
        assert ps.invariants.check(state) == ()
        chunk, rows = [], list(out.request_ids)
        assert len(out.next_token_ids) == len(rows) == len(out.logits)
        lengths.append(ps.find_request(state, 1).kv_len)
        assert 0 in rows
        assert lengths[-1] - lengths[-2] <= limit
        assert lengths[-1] == n or lengths[-1] % 128 == 0
    assert torch.equal(out.logits[1], run_alone(MODEL, ids, 0, context=700)[1][0])
    text = run_alone(MODEL, [5, 6, 7], len(lengths), context=700)[0]
    assert ps.find_request(state, 0).outputs.tolist() == text[: len(lengths)]
    state, out = ps.decode_step(MODEL, state)
    assert out.request_ids == (0, 1)


def test_a_resumed_request_is_fed_in_chunks() -> None:
    """A retracted request resumes under a limit and goes on with the tokens that it would have sampled."""
    ids = ids_of(400, VOCAB)
    state, request = ps.open_request(fresh(MODEL, 1, context=700), ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {request: ids})
    for _ in range(3):
        state, _ = ps.decode_step(MODEL, state)
    state, n_steps = ps.retract_request(state, request), 0
    while ps.find_request(state, request).n_unfed != 1 or n_steps == 0:
        state, _ = ps.extend_step(MODEL, state, {request: ()}, limit=128)
        n_steps += 1
    assert n_steps == 4
    assert ps.find_request(state, request).outputs.tolist() == run_alone(MODEL, ids, 4, context=700)[0]


def test_limits_may_be_named_by_any_integer() -> None:
    """Integers of numpy and torch name requests and limits as Python's do."""
    for limit in ({torch.tensor(1): 128}, {1: np.int64(128)}, np.int64(128)):
        state, _ = ps.extend_step(MODEL, two_requests(), {1: ids_of(300)}, limit=limit)
        assert ps.find_request(state, 1).kv_len == 128


def test_a_step_in_which_nothing_samples() -> None:
    """Where every request has tokens left over, the step gives no rows and nothing is pending."""
    state = two_requests()
    state, out = ps.extend_step(
        MODEL, state, {1: ids_of(300)}, limit=128, mask={1: torch.full((1,), -1, dtype=torch.int32)}
    )
    assert out.request_ids == out.next_token_ids == ()
    assert out.logits.shape == (0, VOCAB)
    assert ps.find_request(state, 1).n_unfed == 172
    _, out = ps.decode_step(MODEL, state)
    assert out.request_ids == (0, 1)


@pytest.mark.parametrize("limit", [0, 127, -1, 1.5, True, {1: 0}, {7: 128}, {1: "x"}, "all"])
def test_bad_limits_are_request_errors(limit: Any) -> None:
    """A limit below 128, of another request or of another type is a RequestError, and nothing has changed."""
    state = two_requests()
    mark = ps.invariants.digest(state)
    with pytest.raises(ps.RequestError, match="limit"):
        ps.extend_step(MODEL, state, {1: [1, 2]}, limit=limit)
    assert ps.invariants.digest(state) == mark
