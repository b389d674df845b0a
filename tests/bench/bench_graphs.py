"""Where a compiled step's time goes: milliseconds by graph, and by operator from torch's profiler.

python tests/bench/bench_graphs.py --case small --dtype float32 --batch 16 --context 1024
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import harness
import purestep as ps
import torch
from purestep.serving.bench_cases import CASES
from purestep.serving.bench_steps import DTYPES, laid_state, write_case


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="small")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        write_case(CASES[options.case], options.dtype, Path(folder))
        model = ps.load_model(folder, dtype=options.dtype, numerics=ps.Numerics.plain())
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
