"""What one decode step of a layout costs on every rank, found by running the step on tensors without content.

The step is the real one: the same functions, the same metadata, the same collectives over a process group that sends
nothing. Layers of a kind are alike, and so are ranks but for rounding of their shares: one of each is run.

Source: none; sizes are checked against the model sheet, section 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, prod
from typing import Any, Final

import attrs
import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ..model.cuts import check_layout, cut_shape, leaf_cuts
from ..model.forward import layer_operands, run_model
from ..model.layout import Kind, leaf_shapes
from ..model.leaves import params_from_leaves
from ..model.model import Model
from ..model.ranks import Ranks, join_ranks
from ..ops.dispatch import REFERENCE
from ..state.batch import ForwardBatch
from ..state.capacity import C4_RATIO, C128_RATIO, Capacity, PoolSizes
from ..state.config import Config
from ..state.decode import DecodeState
from ..state.errors import ConfigError
from ..state.kv import KVState, init_kv
from ..state.numerics import Numerics
from ..state.parallel import Parallel
from ..state.sampling import SamplingState
from ..state.shares import RowShares
from ..state.table import init_table
from ..step.commit import commit
from ..step.forward_batch import forward_batch
from ..step.prepare import prepare_extend
from ..step.requests import open_request
from .chips import Chip
from .costs import cache_costs
from .plan_counters import Collective, StepCounter

__all__ = ["FORMATS", "StepPlan", "plan_step", "step_seconds", "tokens_that_fit"]

PAGE: Final = 128
BF16: Final = torch.bfloat16.itemsize
F32: Final = torch.float32.itemsize

_WIDE: Final = ("head", ".gate", "compressor.wkv", "compressor.wgate")
"""What a model holds in F32 whatever its dtype, besides norms."""

FORMATS: Final = ("bf16", "released")
"""How weights are counted: all in bfloat16, or as released, in FP8 and FP4 with their scales."""


@attrs.frozen(kw_only=True)
class StepPlan:
    """One rank's share of a decode step.

    Attributes:
        parallel: the layout.
        requests: of each replica.
        context: tokens of each request, the new one included.
        weights: bytes of weights held.
        caches: buffer -> bytes, for these requests.
        per_token: bytes of caches for each further token of context.
        scratch: most bytes held at once besides weights and caches.
        collectives: what is exchanged.
        flops: of this rank.
        weights_read: bytes of weights that the step reads, experts as often as uniform routing would hit them.
        caches_read: bytes of caches that it reads.
    """

    parallel: Parallel
    requests: int
    context: int
    weights: int
    caches: Mapping[str, int]
    per_token: float
    scratch: int
    collectives: tuple[Collective, ...]
    flops: int
    weights_read: int
    caches_read: int


def plan_step(
    config: Config, parallel: Parallel, *, requests: int = 8, context: int = 131072, weights: str = "released"
) -> StepPlan:
    """Plan a decode step.

    Args:
        config: the model's numbers.
        parallel: the layout; with ``moe="ep"`` its capacity is set to what the rows need.
        requests: that every replica decodes.
        context: tokens of each, the new one included.
        weights: one of ``FORMATS``.
    Returns:
        The plan of rank 0.
    Raises:
        ConfigError: a layout that the model cannot be cut for, an unknown format, or a context beyond the model's.
    """
    if weights not in FORMATS:
        raise ConfigError(f"weights: expected one of {', '.join(FORMATS)}, got {weights!r}", field="weights")
    if not 2 <= context <= config.max_position_embeddings:
        raise ConfigError(
            f"context: expected 2 to {config.max_position_embeddings} tokens, got {context}", field="context"
        )
    check_layout(config, parallel)
    if parallel.moe == "ep":
        parallel = attrs.evolve(parallel, capacity=ceil(requests / parallel.tp))
    with _pretended(parallel) as ranks:
        return _planned(config, ranks, requests, context, weights)


@contextmanager
def _pretended(parallel: Parallel) -> Iterator[Ranks]:
    """Join a process group of which this is the only process."""
    if parallel.ranks == 1:
        yield join_ranks(parallel)
        return
    distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=parallel.ranks)
    try:
        yield join_ranks(parallel)
    finally:
        distributed.destroy_process_group()


def _planned(config: Config, ranks: Ranks, requests: int, context: int, weights: str) -> StepPlan:
    batch, kv = _prepared(config, ranks.parallel, requests, context)
    specs = {name: kv.handle.spec(name) for name in kv.handle.names}
    held = {
        path: _held(config, ranks, path, shape, kind, weights) for path, (shape, kind) in leaf_shapes(config).items()
    }
    # Layers of a kind are alike, so each kind runs once; what is no layer's runs without any.
    frame = _run(_without_layers(config), ranks, batch, kv.layout.sizes, requests)
    kinds = Counter((ratio, config.is_hash(i)) for i, ratio in enumerate(config.compress_ratios))
    runs = [(frame, 1 - config.num_hidden_layers)]
    for (ratio, is_hash), n in kinds.items():
        alone = attrs.evolve(config, num_hidden_layers=1, compress_ratios=(ratio,), num_hash_layers=1 if is_hash else 0)
        runs.append((_run(alone, ranks, batch, kv.layout.sizes, requests), n))
    costs = cache_costs(config, torch.bfloat16).values()
    return StepPlan(
        parallel=ranks.parallel,
        requests=requests,
        context=context,
        weights=sum(held.values()),
        caches={name: prod(shape) * dtype.itemsize for name, (shape, dtype, _) in specs.items()},
        per_token=float(sum(cost.per_token for cost in costs)) / ranks.parallel.dcp,
        scratch=max(run.peak for run, _ in runs),
        collectives=_added([(run.collectives, n) for run, n in runs]),
        flops=sum(n * run.flops for run, n in runs),
        weights_read=_weights_read(config, ranks.parallel, requests, held),
        caches_read=requests * _caches_read(config, context) // ranks.parallel.dcp,
    )


def _without_layers(config: Config) -> Config:
    return attrs.evolve(config, num_hidden_layers=0, compress_ratios=(), num_hash_layers=0)


@attrs.frozen
class _Run:
    """What running some layers came to."""

    collectives: tuple[Collective, ...]
    flops: int
    peak: int


def _run(config: Config, ranks: Ranks, batch: ForwardBatch, sizes: PoolSizes, requests: int) -> _Run:
    """Run a step of a model of these layers, on tensors without content."""
    groups = {str(group.name): group.size for group in (ranks.world, ranks.attn)}
    flops, inside = _experts_inside(config, ranks.parallel, requests)
    kv = init_kv(config, sizes, torch.bfloat16, torch.device("meta"), ways=ranks.parallel.dcp)
    with FakeTensorMode():
        model = _hollow(config, ranks)
        specs = {name: kv.handle.spec(name) for name in kv.handle.names}
        buffers = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype, _) in specs.items()}
        batch = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), batch)
        operands = layer_operands(model, kv.layout, batch)
        counted = FlopCounterMode(display=False, custom_mapping={torch.ops.purestep.experts_sorted: flops})
        with counted, StepCounter(groups, {"experts_sorted": inside}) as counter, torch.no_grad():
            run_model(model, buffers, kv.layout, batch, operands)
    return _Run(counter.collectives, counted.get_total_flops(), counter.peak)


def _added(parts: Sequence[tuple[tuple[Collective, ...], int]]) -> tuple[Collective, ...]:
    """Add up what several runs exchange, each as often as it stands for."""
    sums: dict[tuple[str, int], list[int]] = {}
    for collectives, n in parts:
        for one in collectives:
            held = sums.setdefault((one.name, one.group), [0, 0, 0])
            for at, number in enumerate((one.count, one.operand, one.moved)):
                held[at] += n * number
    return tuple(
        Collective(name=name, group=group, count=count, operand=operand, moved=moved)
        for (name, group), (count, operand, moved) in sorted(sums.items())
        if count
    )


def _hollow(config: Config, ranks: Ranks) -> Model:
    """Make a rank's part of a model without content."""
    leaves = {}
    for path, (shape, kind) in leaf_shapes(config).items():
        dtype = {"f32": torch.float32, "ids": torch.int64}.get(kind, torch.bfloat16)
        if kind == "norm" or path.endswith(_WIDE):
            dtype = torch.float32
        leaves[path] = torch.empty(cut_shape(shape, leaf_cuts(config, ranks, path)), dtype=dtype)
    return Model(
        config=config,
        params=params_from_leaves(leaves),
        numerics=Numerics.official(),
        ops=REFERENCE,
        dtype=torch.bfloat16,
        ranks=ranks,
        fingerprint="a plan",
    )


def _prepared(config: Config, parallel: Parallel, requests: int, context: int) -> tuple[ForwardBatch, KVState]:
    """Prepare a decode of requests that are one token short of the context, caches without content."""
    device = torch.device("meta")
    window = requests * (2 * config.sliding_window + 2 * PAGE)
    tokens = requests * ceil(context / PAGE) * PAGE
    capacity = Capacity(requests=requests, tokens=tokens, context=context, swa_tokens=max(window, tokens))
    sizes = PoolSizes.of(capacity, PAGE)
    state = DecodeState(
        config=config,
        numerics=Numerics.official(),
        fingerprint="a plan",
        capacity=capacity,
        seed=0,
        next_id=0,
        requests=(),
        table=init_table(sizes),
        kv=init_kv(config, sizes, torch.bfloat16, device, ways=parallel.dcp),
        relay=torch.zeros(requests + 1, dtype=torch.int64, device=device),
        sampling=SamplingState(rows=()),
        launched=None,
    )
    ids = []
    for _ in range(requests):
        state, request = open_request(state)
        ids.append(request)
    if context > 1:
        state, _ = prepare_extend(state, {request: [0] * (context - 1) for request in ids})
        state, _ = commit(state, None)
    state, batch = prepare_extend(state, {request: [0] for request in ids})
    rows = (requests,) * parallel.dp
    shares = RowShares(tokens=rows, logits=rows, is_extend=False, tp=parallel.tp)
    # What a decode in the long run holds of the window: its last pages alone.
    kept = PoolSizes.of(attrs.evolve(capacity, swa_tokens=window), PAGE)
    return forward_batch(state, batch, shares=shares), init_kv(config, kept, torch.bfloat16, device, ways=parallel.dcp)


def _held(config: Config, ranks: Ranks, path: str, shape: tuple[int, ...], kind: Kind, weights: str) -> int:
    """Count the bytes of a weight that a rank holds."""
    local = cut_shape(shape, leaf_cuts(config, ranks, path))
    n = prod(local)
    if kind == "linear" and weights == "released":
        return n + prod(ceil(side / 128) for side in local)
    if kind == "expert" and weights == "released":
        return n // 2 + n // 32
    return n * {"f32": F32, "ids": 8}.get(kind, BF16)


def _weights_read(config: Config, parallel: Parallel, requests: int, held: Mapping[str, int]) -> int:
    """Count what a step reads of the weights: all but the embedding, the expert tables and experts that nobody hits."""
    share = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** (requests * parallel.dp)
    total = 0.0
    for path, n_bytes in held.items():
        if path != "embed" and not path.endswith("tid2eid"):
            total += n_bytes * (share if path.endswith((".ffn.w13", ".ffn.w2")) else 1)
    return round(total)


def _caches_read(config: Config, context: int) -> int:
    """Count what one request's step reads of the caches."""
    row, key = config.head_dim * BF16, config.index_head_dim * BF16
    read = config.num_hidden_layers * min(config.sliding_window, context) * row
    entries = context // C4_RATIO
    read += config.n_layers_of_ratio(C4_RATIO) * (min(config.index_topk, entries) * row + entries * key)
    return read + config.n_layers_of_ratio(C128_RATIO) * (context // C128_RATIO) * row


def _experts_inside(config: Config, parallel: Parallel, requests: int) -> tuple[Callable[..., int], Callable[..., int]]:
    """Say what the opaque expert operator computes, and what it holds inside: functions of its arguments.

    Where whole experts are dealt, its rows have room for more than is sent: choices are counted as routing spreads
    them.
    """
    dealt = requests * parallel.dp * config.num_experts_per_tok / parallel.ranks

    def flops(x: Any, ids: Any, weights: Any, w13: Any, w2: Any, *_: Any, **_named: Any) -> int:
        choices = prod(ids) if parallel.moe == "tp" else dealt
        return round(2 * choices * (prod(w13[1:]) + prod(w2[1:])))

    def inside(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, *_: Any) -> int:
        choices = ids.numel() if parallel.moe == "tp" else ceil(dealt)
        return choices * (w13.shape[1] * (BF16 + F32) + w2.shape[1] * 2 * BF16)

    return flops, inside


def tokens_that_fit(plan: StepPlan, chip: Chip, config: Config) -> int:
    """Count the tokens of context that each of the requests may have, in what a rank's memory leaves."""
    fixed = sum(cost.fixed for cost in cache_costs(config, torch.bfloat16).values())
    left = chip.memory - plan.weights - plan.scratch - plan.requests * fixed
    return max(0, min(config.max_position_embeddings, int(left / plan.per_token / plan.requests)))


def step_seconds(plan: StepPlan, chip: Chip) -> tuple[float, float, float]:
    """Bound the time of a step from below: (computing, reading memory, sending); latencies are not counted."""
    moved = sum(one.moved for one in plan.collectives)
    read = plan.weights_read + plan.caches_read
    return plan.flops / chip.flops, read / chip.bandwidth, moved / chip.link
