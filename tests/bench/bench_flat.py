"""What a decode step must not cost more for: larger pools, wider tables, states that somebody still holds.

Every row is a step of the same requests at the same context, eager and compiled, in turns with the plain one.

python tests/bench/bench_flat.py --case small --batch 4 --context 1024
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import harness
import purestep as ps
import torch
from purestep.serving.bench_steps import alternate, laid_state, median_ms

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
    options = harness.step_parser(__doc__, batch=4).parse_args()
    model = harness.load_ours(options.case, options.dtype)
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
