"""What row-independent arithmetic costs: a decode step with ``Numerics(invariant=True)`` beside the default one.

python tests/bench/bench_invariant.py --case small --batch 1 8 32 --context 128 1024
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import harness
import purestep as ps
import torch
from purestep.serving.bench_cases import CASES
from purestep.serving.bench_steps import DTYPES, alternate, laid_state, median_ms, our_step, write_case


def main() -> None:
    """Alternate the two on every (dtype, batch, context) and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="small")
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=list(DTYPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for dtype in options.dtype:
        with TemporaryDirectory() as folder:
            write_case(CASES[options.case], dtype, Path(folder))
            models = {
                name: ps.load_model(folder, dtype=dtype, numerics=ps.Numerics(invariant=name == "invariant"))
                for name in ("default", "invariant")
            }
        for context in options.context:
            for batch in options.batch:
                runs = {}
                for name, model in models.items():
                    runs[name] = our_step(model, *laid_state(model, batch, context, room=options.rounds + 8))
                times = {name: median_ms(one) for name, one in alternate(runs, options.rounds).items()}
                row = {"bench": "invariant", "case": options.case, "dtype": dtype, "batch": batch, "context": context}
                measured = {f"{name}_ms": ms for name, ms in times.items()}
                rows.append(row | measured | {"cost": times["invariant"] / times["default"]})
    harness.report(
        f"invariant numerics, {options.threads} threads, medians of {options.rounds} alternating steps", rows
    )


if __name__ == "__main__":
    main()
