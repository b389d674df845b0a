"""Decode steps on an accelerator, eager and compiled, beside the least that the device allows; some three minutes.

python tests/bench/bench_device.py                                   # flash-slice in bfloat16 on "cuda"
python tests/bench/bench_device.py --device cpu --case tiny --batch 1 # the same script where there is none
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import purestep as ps
import torch
from purestep.serving.bench_cases import CASES, Machine, floor_of
from purestep.serving.bench_steps import DTYPES, alternate, laid_state, median_ms, our_step, write_case
from torch.utils import _pytree as pytree

PROBE_BYTES = 1 << 30
PROBE_WIDTH = 4096


def waiting(run: Callable[[], object], device: str) -> Callable[[], object]:
    """Make a function that returns when the device is done."""

    def go() -> object:
        out = run()
        if device != "cpu":
            torch.cuda.synchronize()
        return out

    return go


def probe(dtype: torch.dtype, device: str) -> Machine:
    """Measure reading and products on the device."""
    size, width = (PROBE_BYTES, PROBE_WIDTH) if device != "cpu" else (PROBE_BYTES >> 3, PROBE_WIDTH >> 2)
    buffer = torch.ones(size // 4, device=device)
    square = torch.randn(width, width, device=device).to(dtype)
    runs = {"read": waiting(buffer.sum, device), "product": waiting(lambda: square @ square, device)}
    times = {name: median_ms(one) / 1e3 for name, one in alternate(runs, rounds=5).items()}
    return Machine(read=size / times["read"], flops=2 * width**3 / times["product"])


def main() -> None:
    """Print one JSON line for every batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", default="flash-slice", choices=CASES)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(f"device: expected an accelerator for {options.device}, got none; --device cpu runs anywhere")
    dtype, config = DTYPES[options.dtype][0], CASES[options.case]
    with TemporaryDirectory() as folder:
        write_case(config, options.dtype, Path(folder))
        model = ps.load_model(folder, dtype=options.dtype, numerics=ps.Numerics.plain(), kernels="reference")
    params = pytree.tree_map_only(torch.Tensor, lambda w: w.to(options.device), model.params)
    model = attrs.evolve(model, params=params)
    start = time.perf_counter()
    room = options.rounds + 8
    step = ps.compile_step(model, [(batch, options.context + room) for batch in options.batch])
    compile_s = time.perf_counter() - start
    for batch in options.batch:
        runs = {
            name: waiting(
                our_step(model, *laid_state(model, batch, options.context, room=room), decode), options.device
            )
            for name, decode in (("eager", ps.decode_step), ("compiled", step))
        }
        machine = probe(dtype, options.device)
        times = {name: median_ms(one) for name, one in alternate(runs, options.rounds).items()}
        floor = floor_of(config, batch, options.context, dtype.itemsize)
        line = {
            "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
            **{"case": options.case, "dtype": options.dtype, "batch": batch, "context": options.context},
            **{f"{name}_ms": round(one, 3) for name, one in times.items()},
            "floor_ms": round(machine.floor_ms(floor), 3),
            "read_gb_s": round(machine.read / 1e9, 1),
            "achieved_gb_s": round(floor.n_bytes / times["compiled"] / 1e6, 1),
            "compile_s": round(compile_s, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
