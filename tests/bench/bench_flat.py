"""What a decode step must not cost more for: larger pools, wider tables, states that somebody still holds.

Every row is a step of the same requests at the same context, eager and compiled, in turns with the plain one.

python tests/bench/bench_flat.py --case small --batch 4 --context 1024
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
import purestep as ps
import torch
from purestep.serving.bench_cases import CASES
from purestep.serving.bench_steps import DTYPES, alternate, laid_state, median_ms, write_case

ROOM, WIDER, LARGER, HELD = 64, 16, 32, 100


def stepping(model: ps.Model, decode: Any, state: ps.DecodeState, n_held: int) -> Callable[[], object]:
    """Make a function that steps on and holds the last states."""
    held = deque([state], maxlen=n_held + 1)

    def step() -> object:
        after, out = decode(model, held[-1])
        held.append(after)
        return out

    # What holding costs shows once all are held.
    for _ in range(n_held):
        step()
    return step


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="small")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        write_case(CASES[options.case], options.dtype, Path(folder))
        model = ps.load_model(folder, dtype=options.dtype, numerics=ps.Numerics.plain())
    room = ROOM + options.rounds + HELD
    compiled = ps.compile_step(model, [(options.batch, options.context + room)])
    rows = []
    for name, decode in (("eager", ps.decode_step), ("compiled", compiled)):
        runs = {}
        for what, wider, larger, n_held in (
            ("plain", 1, 1, 0),
            (f"pools {LARGER} times larger", 1, LARGER, 0),
            (f"tables {WIDER} times wider", WIDER, 1, 0),
            (f"{HELD} states held", 1, 1, HELD),
        ):
            torch.manual_seed(0)
            longest = (options.context + room) * wider
            state, ids = laid_state(
                model, options.batch, options.context, room=longest - options.context, pool_scale=larger
            )
            state, _ = decode(model, state, force=dict.fromkeys(ids, 1))
            runs[what] = stepping(model, decode, state, n_held)
        times = {what: median_ms(found) for what, found in alternate(runs, options.rounds).items()}
        rows += [
            {"bench": "flat", "step": name, "what": what, "ms": ms, "ratio": ms / times["plain"]}
            for what, ms in times.items()
        ]
    harness.report(
        f"one step of {options.case}, {options.dtype}, batch {options.batch}, {options.context} tokens", rows
    )


if __name__ == "__main__":
    main()
