"""The bound of a step's scratch memory against what the allocator says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import purestep as ps
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import form_numerics, tiny_model
from kit.steps import examples, ids_of
from purestep.model.initial import init_params
from purestep.model.loading import build_model
from purestep.model.scratch import step_scratch
from purestep.state.kv import CacheForm
from torch.profiler import ProfilerActivity, profile


def peak_of(model: ps.Model, state: ps.DecodeState, chunks: dict[int, tuple[int, ...]], folder: Path) -> int:
    """Bytes that are allocated at once in a step, beyond what was before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        ps.extend_step(model, state, chunks)
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"] for event in events if event["name"] == "[memory]"]
    first = sizes[0]["Total Allocated"] - sizes[0]["Bytes"]
    return max(one["Total Allocated"] for one in sizes) - first


@examples(8)
@given(
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    n_cached=st.sampled_from((0, 130, 900, 3000)),
    n_chunk=st.sampled_from((0, 1, 40, 300)),
    rows=st.integers(1, 6),
    topk=st.sampled_from((16, 1024)),
    wide=st.booleans(),
    form=st.sampled_from(("plain", "online", "fp8", "fp4-online")),
)
def test_a_step_stays_below_its_bound(
    dtype: torch.dtype,
    n_cached: int,
    n_chunk: int,
    rows: int,
    topk: int,
    wide: bool,
    form: CacheForm,
    tmp_path_factory: Any,
) -> None:
    """KVA-11: whatever is fed after whatever history, a step allocates no more than the bound says before it."""
    sizes = {"hidden": 64, "heads": 8, "head_dim": 32, "experts": 4, "inter": 64, "vocab": 500} if wide else {}
    config = tiny_model((0, 4, 128), window=16, index_topk=topk, **sizes).config
    numerics = None if form == "plain" else form_numerics(form, dtype, activation_qdq=True)
    params = init_params(config, torch.Generator().manual_seed(0), dtype)
    model = build_model(config, params, dtype=dtype, numerics=numerics)
    context = n_cached + n_chunk + 8
    capacity = ps.Capacity(requests=rows, tokens=rows * (context + 128), context=context)
    state = ps.init_state(model, capacity, caches=form)
    ids = []
    for _ in range(rows):
        state, request_id = ps.open_request(state, ps.SamplingParams(temperature=0, ignore_eos=True))
        ids.append(request_id)
        if n_cached:
            state, _ = ps.extend_step(model, state, {request_id: ids_of(n_cached, config.vocab_size)})
    # One long chunk beside decoding rows.
    n_first = n_chunk if n_cached else max(1, n_chunk)
    chunks = {
        i: tuple(ids_of(n_first if at == 0 or not n_cached else 0, config.vocab_size)) for at, i in enumerate(ids)
    }
    tokens = sum(max(1, len(chunk)) for chunk in chunks.values()) + rows
    rounds = model.rounds_activations
    sized = {"tokens": tokens, "rows": rows, "context": context}
    bound = step_scratch(config, dtype, **sized, form=form, rounds_activations=rounds)
    peak = peak_of(model, state, chunks, tmp_path_factory.mktemp("trace"))
    print(peak, bound)
    assert 0 < peak <= bound
