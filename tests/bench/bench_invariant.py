"""What row-independent arithmetic costs: a decode step with ``Numerics(invariant=True)`` beside the default one.

python tests/bench/bench_invariant.py --case small --batch 1 8 32 --context 128 1024
"""

from __future__ import annotations

import argparse

import attrs
import harness
import torch
from bench_decode import our_step
from kit.checkpoints import random_tensors
from kit.engine import engine_model


def main() -> None:
    """Alternate the two on every (dtype, batch, context) and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(harness.CASES), default="small")
    parser.add_argument("--dtype", choices=list(harness.DTYPES), nargs="+", default=list(harness.DTYPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = harness.CASES[options.case]
    tensors = random_tensors(config, seed=0)
    rows = []
    for dtype in options.dtype:
        plain = engine_model(config, tensors, dtype=dtype)
        numerics = attrs.evolve(plain.numerics, invariant=True)
        models = {"default": plain, "invariant": engine_model(config, tensors, dtype=dtype, numerics=numerics)}
        for context in options.context:
            for batch in options.batch:
                runs = {}
                for name, model in models.items():
                    state, requests = harness.our_state(model, batch, context, room=options.rounds + 8)
                    runs[name] = our_step(model, state, requests)
                times = {name: harness.median_ms(one) for name, one in harness.alternate(runs, options.rounds).items()}
                row = {"bench": "invariant", "case": options.case, "dtype": dtype, "batch": batch, "context": context}
                measured = {f"{name}_ms": ms for name, ms in times.items()}
                rows.append(row | measured | {"cost": times["invariant"] / times["default"]})
    harness.report(
        f"invariant numerics, {options.threads} threads, medians of {options.rounds} alternating steps", rows
    )


if __name__ == "__main__":
    main()
