"""Where a compiled step's time goes: milliseconds by graph, and by operator from torch's profiler.

python tests/bench/bench_graphs.py --case small --dtype float32 --batch 16 --context 1024
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import attrs
import harness
import purestep as ps
import torch
from purestep.serving.bench_steps import laid_state


def timed(compiled: Any, seconds: dict[str, list[float]]) -> Any:
    """Return the same compiled step, with a clock around the calls of its graphs."""

    def clocked(one: Any) -> Any:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            found = one.graph.call(*args)
            seconds[one.name].append(time.perf_counter() - start)
            return found

        return attrs.evolve(one, graph=attrs.evolve(one.graph, call=call))

    return attrs.evolve(compiled, graphs={key: clocked(one) for key, one in compiled.graphs.items()})


def main() -> None:
    """Measure and print both tables."""
    options = harness.step_parser(__doc__, batch=16).parse_args()
    model = harness.load_ours(options.case, options.dtype)
    room = 2 * options.rounds + 8
    compiled = ps.compile_step(model, [(options.batch, options.context + room)])
    state, ids = laid_state(model, options.batch, options.context, room=room)
    state, _ = compiled(model, state, force=dict.fromkeys(ids, 1))
    seconds: dict[str, list[float]] = defaultdict(list)
    step, whole = timed(compiled, seconds), []
    for _ in range(options.rounds):
        start = time.perf_counter()
        state, _ = step(model, state)
        whole.append(time.perf_counter() - start)
    rows = [
        {
            "bench": "graphs",
            "graph": name,
            "calls": len(found) // options.rounds,
            "ms": sum(found) / options.rounds * 1e3,
        }
        for name, found in sorted(seconds.items(), key=lambda item: -sum(item[1]))
    ]
    rows.append({"bench": "graphs", "graph": "whole step", "calls": 1, "ms": statistics.median(whole) * 1e3})
    harness.report(f"one step of {options.case}, {options.dtype}, batch {options.batch}", rows)
    with torch.profiler.profile() as profiler:
        for _ in range(options.rounds):
            state, _ = compiled(model, state)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))


if __name__ == "__main__":
    main()
