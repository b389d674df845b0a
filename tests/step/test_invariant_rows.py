"""Row-independent arithmetic: the same bits alone, in any batch, in any row, in any chunks."""

from __future__ import annotations

import purestep as ps
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import GREEDY, engine_model, feed_in_chunks, random_ids

MODELS = {
    dtype: engine_model(config, random_tensors(config, seed=11, storage=getattr(torch, dtype)), numerics=numerics)
    for dtype, config, numerics in (
        ("float32", tiny_config(index_topk=6), ps.Numerics(invariant=True)),
        ("bfloat16", tiny_config(index_topk=6, torch_dtype="bfloat16"), ps.Numerics(invariant=True, kv_qdq=True)),
    )
}
N = 150
IDS = [random_ids(N, 64, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def solo() -> dict[str, list[torch.Tensor]]:
    """Logits of every prompt fed alone, whole."""
    return {dtype: [feed_in_chunks(model, ids, [N]) for ids in IDS] for dtype, model in MODELS.items()}


@pytest.mark.parametrize("dtype", MODELS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_company_and_chunks_change_no_bit(dtype: str, solo: dict[str, list[torch.Tensor]], data: st.DataObject) -> None:
    """Mates, row places, chunk borders and page sizes leave every row's logits equal to the solo run, bit for bit."""
    model = MODELS[dtype]
    n_rows = data.draw(st.integers(1, 4))
    page_size = data.draw(st.sampled_from([4, 12, 32, 128]))
    state = ps.init_state(model, ps.Capacity(4, 4 * 256, 256), page_size=page_size)
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
            expected = solo[dtype][requests.index(request)][fed[request] : fed[request] + sizes[request]]
            assert torch.equal(logits, expected)
            fed[request] += sizes[request]


def test_fused_kernels_are_refused() -> None:
    """Kernels that cannot promise row independence are refused at load."""
    config = tiny_config()
    with pytest.raises(ps.ConfigError, match="row-independent"):
        engine_model(config, random_tensors(config, 0), numerics=ps.Numerics(invariant=True), kernels="fused")
