"""Routed experts of one layer by the two routes of compiled steps: blocks of rows, and products on packed weights.

python tests/bench/bench_experts.py --case flash-slice --dtype bfloat16 --batch 16
"""

from __future__ import annotations

from itertools import cycle

import harness
import torch
from purestep.ops import packed
from purestep.ops.blocks import experts_blocked
from purestep.serving.bench_cases import CASES
from purestep.serving.bench_steps import DTYPES, alternate, median_ms

CHOICES = 20
"""Routings that the rounds go through."""


def main() -> None:
    """Measure and print."""
    options = harness.step_parser(__doc__, batch=16).parse_args()
    config, dtype = CASES[options.case], DTYPES[options.dtype][0]
    n, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    draw = torch.Generator().manual_seed(0)
    w13 = (torch.randn(n, 2 * inner, width, generator=draw) / 50).to(dtype)
    w2 = (torch.randn(n, width, inner, generator=draw) / 50).to(dtype)
    p13, p2 = (packed.pack_stack(w.float().unbind(0)) for w in (w13, w2))
    x = torch.randn(options.batch, width, generator=draw).to(dtype)
    weights = torch.rand(options.batch, config.num_experts_per_tok, generator=draw)
    ids = [
        torch.stack([torch.randperm(n, generator=draw)[: weights.shape[1]] for _ in range(options.batch)])
        for _ in range(CHOICES)
    ]
    one, other = cycle(ids), cycle(ids)
    runs = {
        "blocks": lambda: experts_blocked(x, next(one), weights, w13, w2, 10.0),
        "packed": lambda: packed.experts(x, next(other), weights, p13, p2, 10.0),
    }
    times = {name: median_ms(found) for name, found in alternate(runs, options.rounds).items()}
    flops = 6 * options.batch * weights.shape[1] * inner * width
    rows = [
        {"bench": "experts", "route": name, "ms": ms, "GFLOP/s": flops / ms / 1e6, "bytes": kind}
        for (name, ms), kind in zip(times.items(), (w13.dtype.itemsize, 4), strict=True)
    ]
    harness.report(f"experts of {options.case}, {options.dtype}, batch {options.batch}", rows)


if __name__ == "__main__":
    main()
