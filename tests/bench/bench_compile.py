"""How long compiling one bucket takes: the first time in several processes and in one, and at a later start.

python tests/bench/bench_compile.py --case small --batch 16

Every run is a process of its own; a first start has an empty folder for what is made, later ones a filled one. Times
are of ``compile_step`` alone, the compiler's import included.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import harness

_RUN = """
import sys, time
import purestep as ps
from purestep.step import compiled
folder, dtype, rows, context, helpers = sys.argv[1:]
model = ps.load_model(folder, dtype=dtype, numerics=ps.Numerics.plain())
compiled.MOST_HELPERS = int(helpers)
start = time.perf_counter()
ps.compile_step(model, [(int(rows), int(context))])
print(time.perf_counter() - start)
"""


def main() -> None:
    """Measure and print."""
    options = harness.step_parser(__doc__, batch=16).parse_args()

    def seconds(weights: Path, made: str, helpers: int) -> float:
        arguments = [str(weights), options.dtype, str(options.batch), str(options.context), str(helpers)]
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *arguments],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": made},
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout.split()[-1])

    rows = []
    with harness.folder_of(options.case, options.dtype) as weights:
        for helpers, start in ((7, "first"), (0, "first")):
            with TemporaryDirectory() as made:
                rows.append(
                    {"bench": "compile", "start": start, "helpers": helpers, "s": seconds(weights, made, helpers)}
                )
                if helpers:
                    later = min(seconds(weights, made, helpers) for _ in range(3))
                    rows.append({"bench": "compile", "start": "later", "helpers": helpers, "s": later})
    harness.report(f"compiling {options.case}, {options.dtype}, batch {options.batch}", rows)


if __name__ == "__main__":
    main()
