"""The paged engine and the cache-free function against the plain oracle and against transformers."""

from __future__ import annotations

from typing import Any

import purestep as ps
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.checkpoints import peer_logits, peer_model, random_tensors
from kit.configs import configs, tiny_config
from kit.engine import GREEDY, engine_model, feed_in_chunks, random_ids
from oracle.model import comparable_rows, oracle_logits
from torch import Tensor

TOLERANCE = 5e-5  # float32, logits of scale 1-5: what two orders of summation differ by
BORDERS = (1, 3, 4, 5, 8, 127, 128, 129, 255, 257, 1100)

STACKS = {
    "all kinds": dict(ratios=(0, 4, 128, 4), hash_layers=1, index_topk=512),
    "compressing first": dict(ratios=(128, 128, 4), hash_layers=2, index_topk=512),
    "window only": dict(ratios=(0, 0), hash_layers=0),
    "small window, no yarn": dict(ratios=(4, 0, 128), hash_layers=3, window=8, index_topk=512, yarn_factor=None),
}


@pytest.mark.parametrize("name", STACKS)
def test_borders(name: str) -> None:
    """Whole prefill up to every border length, then forced decode over it, equal the oracle and transformers."""
    config = tiny_config(**STACKS[name])
    tensors = random_tensors(config, seed=3)
    model = engine_model(config, tensors)
    ids = random_ids(BORDERS[-1], config["vocab_size"])
    expected = oracle_logits(config, tensors, ids)
    assert 1 < expected.std() < 5
    _near(peer_logits(peer_model(config, tensors), ids), expected)
    _near(ps.forward_sequence(model, torch.tensor(ids)), expected)
    for length in BORDERS:
        ahead = 3 if length + 3 <= len(ids) else 0
        got = feed_in_chunks(model, ids[: length + ahead], [length] + [1] * ahead, page_size=32)
        _near(got, expected[: length + ahead])


def test_three_hundred_decode_steps() -> None:
    """Decoding token by token from the first one stays with the oracle for 400 steps, on small pages too."""
    config = tiny_config(**STACKS["all kinds"])
    tensors = random_tensors(config, seed=5)
    model = engine_model(config, tensors)
    ids = random_ids(400, config["vocab_size"], seed=1)
    expected = oracle_logits(config, tensors, ids)
    for page_size in (4, 128):
        _near(feed_in_chunks(model, ids, [1] * len(ids), page_size=page_size), expected)


@settings(max_examples=15)
@given(config=configs(), seed=st.integers(0, 99), data=st.data())
def test_random_chunks(config: dict[str, Any], seed: int, data: st.DataObject) -> None:
    """Any chunking of any prompt on any page size gives the oracle's logits wherever selections have a margin."""
    tensors = random_tensors(config, seed)
    model = engine_model(config, tensors)
    n = data.draw(st.integers(1, 150))
    chunks = []
    while sum(chunks) < n:
        chunks.append(min(data.draw(st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 31, 127, 128])), n - sum(chunks)))
    ids = random_ids(n, config["vocab_size"], seed)
    trace: dict[str, Any] = {}
    expected = oracle_logits(config, tensors, ids, trace=trace)
    kept = comparable_rows(trace)
    got = feed_in_chunks(model, ids, chunks, page_size=data.draw(st.sampled_from([4, 8, 12, 128])))
    _near(got[kept], expected[kept])
    _near(ps.forward_sequence(model, torch.tensor(ids))[kept], expected[kept])


def test_ragged_rows_in_changing_order() -> None:
    """Requests of very different lengths, shuffled at every step, each keep their own oracle's logits."""
    config = tiny_config(**STACKS["all kinds"])
    tensors = random_tensors(config, seed=7)
    model = engine_model(config, tensors)
    lengths = (3, 5, 9, 130, 257)
    ids = [random_ids(n + 30, config["vocab_size"], seed=n) for n in lengths]
    expected = [oracle_logits(config, tensors, row) for row in ids]
    state = ps.init_state(model, ps.Capacity(requests=5, tokens=1024, context=512), page_size=8)
    requests = []
    for _ in lengths:
        state, request = ps.open_request(state, GREEDY)
        requests.append(request)
    state, out = ps.extend_step(model, state, {r: row[:n] for r, row, n in zip(requests, ids, lengths, strict=True)})
    for row, n, logits in zip(expected, lengths, out.logits, strict=True):
        _near(logits, row[n - 1])
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        order = torch.randperm(5, generator=generator).tolist()[: 2 + step % 4]
        order = list(range(5)) if step % 5 == 0 else order
        fed = {
            requests[i]: ids[i][len(_tokens(state, requests[i]))] for i in order if _left(state, requests[i], ids[i])
        }
        if not fed:
            continue
        state, out = ps.decode_step(model, state, only=list(fed), force=fed)
        for request, logits in zip(out.request_ids, out.logits, strict=True):
            i = requests.index(request)
            _near(logits, expected[i][len(_tokens(state, request)) - 1])


def _tokens(state: ps.DecodeState, request: int) -> list[int]:
    """Tokens fed so far."""
    record = next(r for r in state.requests if r.request_id == request)
    return record.tokens.tolist()[: record.kv_len]


def _left(state: ps.DecodeState, request: int, ids: list[int]) -> bool:
    return len(_tokens(state, request)) < len(ids)


def test_bfloat16_follows_float32() -> None:
    """A bfloat16 model with official roundings stays close to the float32 oracle of the same weights."""
    config = tiny_config(
        ratios=(0, 4, 128), index_topk=512, head_dim=80, rope_dim=16, torch_dtype="bfloat16", index_dim=32
    )
    tensors = random_tensors(config, seed=2, storage=torch.bfloat16)
    model = engine_model(config, tensors)
    assert model.dtype is torch.bfloat16
    assert model.numerics == ps.Numerics.official()
    ids = random_ids(140, config["vocab_size"])
    got = feed_in_chunks(model, ids, [100] + [1] * 40)
    expected = oracle_logits(config, tensors, ids, kv_qdq=True, indexer_hadamard=True, indexer_qdq=True)
    error = (got - expected).abs()
    # bf16 has 8 bits: activations of scale 1 carry 2^-9 each; over three layers that adds up to a few percent.
    assert error.mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize("switch", ["kv_qdq", "indexer_hadamard", "indexer_qdq", "clamp_shared_expert"])
def test_numeric_switches(switch: str) -> None:
    """Every rounding switch does in the engine what it does in the oracle."""
    config = tiny_config(ratios=(0, 4, 128), index_topk=4, head_dim=80, rope_dim=16, index_dim=32)
    tensors = random_tensors(config, seed=4)
    value = switch != "clamp_shared_expert"
    numerics = ps.Numerics(**{switch: value})
    model = engine_model(config, tensors, numerics=numerics)
    ids = random_ids(140, config["vocab_size"])
    trace: dict[str, Any] = {}
    expected = oracle_logits(config, tensors, ids, trace=trace, **{switch: value})
    kept = comparable_rows(trace)
    got = feed_in_chunks(model, ids, [101] + [1] * 39)
    # A value next to a rounding border may fall to either side; allow a few such rows.
    bad = ((got - expected).abs().amax(-1) > TOLERANCE)[kept].float().mean()
    assert kept.sum() > 20
    assert bad < 0.1


def _near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
