"""The models that speed is measured on, and the least that one of their decode steps must read and compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs
import torch

from ..state.capacity import C4_RATIO, C128_RATIO
from ..state.config import Config
from ..state.released import RELEASED
from .bench_steps import alternate
from .costs import active_parameters, part_costs

__all__ = ["CASES", "Floor", "Machine", "floor_of", "probe_machine"]

CASES: Final[Mapping[str, Config]] = {
    # Bound by the cost of calling operators: everything fits in the caches of the processor.
    "tiny": attrs.evolve(
        RELEASED["flash"],
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        compress_ratios=(0, 0, 4, 128, 4, 128),
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        num_hash_layers=1,
    ),
    # In between: about 150 MB of float32 weights.
    "small": attrs.evolve(
        RELEASED["flash"],
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=128,
        qk_rope_head_dim=32,
        q_lora_rank=256,
        o_groups=4,
        o_lora_rank=128,
        compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128),
        moe_intermediate_size=256,
        n_routed_experts=32,
        num_experts_per_tok=4,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=128,
        num_hash_layers=1,
    ),
    # The widths of V4-Flash, one layer of each kind, 16 of 256 experts; the vocabulary is cut so that the head keeps
    # the share of a step that it has among 43 layers.
    "flash-slice": attrs.evolve(
        RELEASED["flash"],
        vocab_size=9216,
        num_hidden_layers=3,
        compress_ratios=(0, 4, 128),
        n_routed_experts=16,
        num_hash_layers=1,
    ),
}
"""Numbers by name."""

_PROBE_BYTES: Final = 384 << 20
"""Larger than the caches of a processor."""

_PROBE_WIDTH: Final = 1024


@attrs.frozen(kw_only=True)
class Floor:
    """What one decode step cannot do without.

    Attributes:
        n_bytes: of weights and cache entries, each read once.
        flops: two for every multiplication with a weight or a cache entry.
    """

    n_bytes: float
    flops: float


@attrs.frozen(kw_only=True)
class Machine:
    """How fast this machine is just now.

    Attributes:
        read: bytes a second from memory, as a sum over a large buffer reads them.
        flops: of a square matrix product, a second: in the case's dtype, or in float32 where that is faster, as on a
            processor that only emulates the other.
    """

    read: float
    flops: float

    def floor_ms(self, floor: Floor) -> float:
        """Milliseconds below which no step of this machine can come."""
        return max(floor.n_bytes / self.read, floor.flops / self.flops) * 1e3


def floor_of(config: Config, batch: int, context: int, itemsize: int) -> Floor:
    """Count what a decode step must read and compute, activations taken as free.

    Weights are read once whatever the batch; of the routed experts only those that somebody chose, as many as chance
    lets expect. Of the caches a token reads its window, on C128 layers every entry, and on C4 layers every index key
    and the entries that it picks.

    Args:
        config: the model's numbers.
        batch: rows of the step.
        context: tokens that each row has before it.
        itemsize: bytes of a weight and of a number in the caches; mHC's weights have 4.
    """
    parts = part_costs(config)
    n_experts, n_chosen = config.n_routed_experts, config.num_experts_per_tok
    hit = 1.0 - (1.0 - n_chosen / n_experts) ** batch
    counts = {name: float(cost.n_parameters) for name, cost in parts.items() if name != "embedding"}
    counts["routed experts"] *= hit
    weights = sum(count * (4 if name == "mHC" else itemsize) for name, count in counts.items())
    keys, products = 0.0, 0.0
    for ratio in config.compress_ratios[: config.num_hidden_layers]:
        n_entries = context // ratio if ratio else 0
        if ratio == C4_RATIO:
            keys += n_entries * config.index_head_dim
            products += n_entries * config.index_head_dim * config.index_n_heads
            n_entries = min(n_entries, config.index_topk)
        assert ratio in (0, C4_RATIO, C128_RATIO), ratio
        n_read = min(context, config.sliding_window) + n_entries
        keys += n_read * config.head_dim
        products += 2 * n_read * config.head_dim * config.num_attention_heads
    dense = active_parameters(config) - parts["embedding"].n_parameters
    return Floor(n_bytes=weights + batch * keys * itemsize, flops=2.0 * batch * (dense + products))


def probe_machine(dtype: torch.dtype) -> Machine:
    """Measure memory and matrix products, half a second in all, beside the steps that are judged by it."""
    buffer = torch.ones(_PROBE_BYTES // 4)
    wide = torch.randn(_PROBE_WIDTH, _PROBE_WIDTH)
    narrow = wide.to(dtype)
    runs: dict[str, Callable[[], object]] = {
        "read": buffer.sum,
        "wide": lambda: wide @ wide,
        "narrow": lambda: narrow @ narrow,
    }
    # The fastest, not the median: what others take from the machine for a moment is no limit of it.
    times = {name: min(one) for name, one in alternate(runs, rounds=5, warmup=1).items()}
    fastest = min(times["wide"], times["narrow"])
    return Machine(read=_PROBE_BYTES / times["read"], flops=2 * _PROBE_WIDTH**3 / fastest)
