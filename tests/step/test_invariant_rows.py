"""Row-independent arithmetic: the same bits alone, in any batch, in any row, in any chunks."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import GREEDY, engine_model, feed_in_chunks, random_ids
from kit.steps import examples
from purestep.state.kv import CACHE_FORMS

FP8_KEYS = attrs.evolve(ps.Numerics.official(), indexer_qdq="fp8", invariant=True)
NUMERICS: dict[str, ps.Numerics] = {
    "float32 plain": ps.Numerics(invariant=True),
    "float32 online": ps.Numerics(invariant=True),
    "bfloat16 plain": ps.Numerics(invariant=True, kv_qdq=True),
    "bfloat16 fp8": FP8_KEYS,
    "bfloat16 fp8-online": FP8_KEYS,
    "bfloat16 fp4": attrs.evolve(ps.Numerics.official(), invariant=True),
    "float32 fp4-online": attrs.evolve(ps.Numerics.official(), invariant=True),
    "bfloat16 transformers": attrs.evolve(ps.Numerics.transformers(), invariant=True),
    "bfloat16 sglang": attrs.evolve(ps.Numerics.sglang(), invariant=True),
    "bfloat16 vllm-ascend": attrs.evolve(ps.Numerics.vllm_ascend(), invariant=True),
}
"""Dtype and form of caches, or whose numerics -> numerics."""


@cache
def model_of(name: str) -> ps.Model:
    """Make a model of the dtype and the numerics of a case."""
    dtype = name.split()[0]
    config = tiny_config(index_topk=6, torch_dtype=dtype)
    tensors = random_tensors(config, seed=11, storage=getattr(torch, dtype))
    return engine_model(config, tensors, numerics=NUMERICS[name])


def empty(name: str, requests: int, page_size: int) -> ps.DecodeState:
    """Build an empty state with the caches of a case."""
    form: Any = name.split()[1]
    capacity = ps.Capacity(requests, requests * 256, 256)
    caches = form if form in CACHE_FORMS else None
    return ps.init_state(model_of(name), capacity, page_size=page_size, caches=caches)


N = 150
IDS = [random_ids(N, 64, seed=i) for i in range(4)]


@cache
def solo(name: str) -> list[torch.Tensor]:
    """Compute the logits of every prompt fed alone, whole."""
    return [feed_in_chunks(model_of(name), ids, [N], state=empty(name, 1, 128)) for ids in IDS]


@pytest.mark.parametrize("name", NUMERICS)
@examples(3)
@given(data=st.data())
def test_company_and_chunks_change_no_bit(name: str, data: st.DataObject) -> None:
    """Mates, row places, chunk borders and page sizes leave every row's logits equal to the solo run, bit for bit."""
    model = model_of(name)
    n_rows = data.draw(st.integers(1, 4))
    page_size = data.draw(st.sampled_from([4, 12, 32, 128]))
    state = empty(name, 4, page_size)
    requests = []
    for _ in range(n_rows):
        state, request = ps.open_request(state, GREEDY)
        requests.append(request)
    fed = dict.fromkeys(requests, 0)
    for turn in range(6):
        rows = data.draw(st.permutations([r for r in requests if fed[r] < N]))
        if not rows:
            break
        if turn > 2:
            state, out = ps.decode_step(
                model, state, only=rows, force={r: IDS[requests.index(r)][fed[r]] for r in rows}
            )
            sizes = dict.fromkeys(rows, 1)
        else:  # a decode leaves a pending token behind, so chunks come first
            sizes = {r: min(data.draw(st.sampled_from([1, 2, 3, 17, 40, 129])), N - fed[r]) for r in rows}
            chunk = {r: IDS[requests.index(r)][fed[r] : fed[r] + n] for r, n in sizes.items()}
            state, out = ps.extend_step(model, state, chunk, sample=False, logits="all")
        got = dict(zip(rows, out.logits.split([sizes[r] for r in rows]), strict=True))
        for request, logits in got.items():
            expected = solo(name)[requests.index(request)][fed[request] : fed[request] + sizes[request]]
            assert torch.equal(logits, expected)
            fed[request] += sizes[request]


def test_fused_kernels_are_refused() -> None:
    """Kernels that cannot promise row independence are refused at load."""
    config = tiny_config()
    with pytest.raises(ps.ConfigError, match="row-independent"):
        engine_model(config, random_tensors(config, 0), numerics=ps.Numerics(invariant=True), kernels="fused")
