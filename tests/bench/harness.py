"""What the benchmarks share: model cases, both engines on the same weights, synthetic contexts, alternating clocks.

The peer is Hugging Face transformers' ``DeepseekV4ForCausalLM`` in its default set-up (eager attention is the only one
it has). A long context is laid synthetically on both sides, with random values in exactly the shapes that a prefill
leaves. Ratios come from one process that alternates the two engines, because a shared machine drifts from minute to
minute.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from kit.checkpoints import peer_model, random_tensors
from kit.configs import tiny_config
from kit.engine import engine_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

CASES: dict[str, dict[str, Any]] = {
    # bound by the cost of calling operators: everything fits in the caches of the processor
    "tiny": tiny_config(
        (0, 0, 4, 128, 4, 128),
        vocab=512,
        hidden=128,
        heads=4,
        head_dim=64,
        rope_dim=16,
        q_lora=64,
        o_groups=2,
        o_lora=32,
        inter=64,
        experts=8,
        topk=2,
        index_heads=4,
        index_dim=32,
        index_topk=64,
        swiglu_limit=10.0,
        max_positions=65536,
    ),
    # in between: about 150 MB of float32 weights
    "small": tiny_config(
        (0, 0, 4, 128, 4, 128, 4, 128),
        vocab=8192,
        hidden=512,
        heads=8,
        head_dim=128,
        rope_dim=32,
        q_lora=256,
        o_groups=4,
        o_lora=128,
        inter=256,
        experts=32,
        topk=4,
        index_heads=8,
        index_dim=64,
        index_topk=128,
        swiglu_limit=10.0,
        max_positions=65536,
    ),
}


@attrs.frozen(eq=False)
class Engines:
    """Both engines on the same weights."""

    config: dict[str, Any]
    dtype: torch.dtype
    ours: ps.Model
    peer: DeepseekV4ForCausalLM


def build(case: str, dtype: str, **options: Any) -> Engines:
    """Draw weights and load them into both engines."""
    config = CASES[case]
    tensors = random_tensors(config, seed=0)
    kind = DTYPES[dtype]
    options.setdefault("numerics", ps.Numerics.plain())
    ours = engine_model(config, tensors, dtype=dtype, **options)
    return Engines(config, kind, ours, peer_model(config, tensors, kind))


def peer_cache(engines: Engines, batch: int, context: int) -> DynamicCache:
    """Lay the peer's cache as a prefill of ``context`` tokens leaves it."""
    config = engines.peer.config
    cache = DynamicCache(config=config)

    def noise(*shape: int, dtype: torch.dtype = engines.dtype) -> Tensor:
        return (torch.randn(*shape) * 0.5).to(dtype)

    for layer, kind in zip(cache.layers, config.layer_types, strict=True):
        keys = noise(batch, 1, min(context, config.sliding_window - 1), config.head_dim)
        layer.lazy_initialization(keys, keys)
        layer.keys = layer.values = keys
        layer.cumulative_length = context
        if kind == "sliding_attention":
            continue
        rate, overlaps = layer.compress_rate, kind == "compressed_sparse_attention"
        for name, width in (("compressor", config.head_dim), ("indexer", config.index_head_dim)):
            if name not in layer.compressed_kv:
                continue
            layer.compressed_kv[name] = noise(batch, context // rate, width)
            layer.entry_count[name] = context // rate
            for buffer in (layer.buffer_kv, layer.buffer_gate):
                buffer[name] = noise(batch, context % rate, width * (1 + overlaps))
            if overlaps and context >= rate:
                layer.overlap_kv[name] = noise(batch, rate, width)
                layer.overlap_gate[name] = noise(batch, rate, width, dtype=torch.float32)
    return cache


def our_state(
    model: ps.Model, batch: int, context: int, *, room: int, pool_scale: int = 1
) -> tuple[ps.DecodeState, list[int]]:
    """Lay our caches the same way: slots are allocated as for a prefill, contents are random."""
    longest = context + room
    tokens = batch * (longest + 128)
    capacity = ps.Capacity(batch, tokens * pool_scale, longest)
    state = ps.init_state(model, capacity)
    ids = torch.randint(model.config.vocab_size, (batch, context)).tolist()
    requests = []
    for _ in range(batch):
        state, request = ps.open_request(state, ps.SamplingParams(temperature=0, ignore_eos=True))
        requests.append(request)
    state, _batch = ps.prepare_extend(state, dict(zip(requests, ids, strict=True)))
    state, _finished = ps.commit(state, None)
    handle = state.kv.handle
    used = tokens + 256  # slots beyond are free pages that no row names
    rows = {}
    for name in handle.names:
        slots, layers = state.kv.layout.n_slots(name), state.kv.layout.n_layers(name)
        live = torch.arange(min(slots - 1, used))
        rows[name] = (torch.arange(layers).unsqueeze(-1) * slots + live).flatten()
    with handle.write(rows) as write:
        for name, at in rows.items():
            buffer = write.tensors[name]
            buffer[at] = torch.randn(len(at), buffer.shape[1]).mul_(0.5).to(buffer.dtype)
    return attrs.evolve(state, kv=attrs.evolve(state.kv, handle=write.handle)), requests


def alternate(runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Run every engine once a round, in turns; seconds by engine."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def median_ms(seconds: Sequence[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(seconds) * 1e3


def report(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for people, then one JSON line a row."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(stderr=True).print(table)
    for row in rows:
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
