"""Prefill beside transformers: tokens a second in chunks of 1,024, their ratio, and peak memory.

python tests/bench/bench_prefill.py --case small --dtype float32 --context 128 1024 8192
python tests/bench/bench_prefill.py --case small --context 8192 --memory
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import purestep as ps
import torch
from purestep.serving.bench_cases import CASES
from purestep.serving.bench_steps import DTYPES, alternate, median_ms
from transformers import DynamicCache

CHUNK = 1024


def our_prefill(model: ps.Model, ids: torch.Tensor) -> Callable[[], object]:
    """Prefill all rows of ``ids`` in chunks."""
    batch, context = ids.shape

    def run() -> object:
        state = ps.init_state(model, ps.Capacity(batch, batch * (context + 128), context))
        requests = []
        for _ in range(batch):
            state, request = ps.open_request(state, ps.SamplingParams(temperature=0))
            requests.append(request)
        for start in range(0, context, CHUNK):
            chunk = {r: row[start : start + CHUNK] for r, row in zip(requests, ids, strict=True)}
            state, out = ps.extend_step(model, state, chunk, sample=start + CHUNK >= context)
        return out

    return run


def peer_prefill(engines: harness.Engines, ids: torch.Tensor) -> Callable[[], object]:
    """The same with the peer."""

    def run() -> object:
        cache = DynamicCache(config=engines.peer.config)
        with torch.inference_mode():
            for chunk in ids.split(CHUNK, dim=1):
                out = engines.peer(input_ids=chunk, cache=cache, use_cache=True, logits_to_keep=1)
        return out.logits

    return run


def peak_mib(options: argparse.Namespace, engine: str, context: int) -> float:
    """Prefill once in a process of its own and return what it needed beyond the loaded engines, in MiB."""
    command = [sys.executable, __file__, "--case", options.case, "--dtype", options.dtype, "--only", engine]
    command += ["--context", str(context), "--batch", str(options.batch[0]), "--threads", str(options.threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["peak_mib"])


def sampled_peak(run: Callable[[], object]) -> float:
    """Run once and return the most resident memory seen beyond what was there before, in MiB, looking every 2 ms."""
    statm, page = Path("/proc/self/statm"), resource.getpagesize()

    def resident() -> int:
        return int(statm.read_text().split()[1]) * page

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that building the engines left in the heap would hide what the run takes
    before, seen, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen[0] = max(seen[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return seen[0] / 2**20


def main() -> None:
    """Measure every combination and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="small")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--memory", action="store_true", help="also measure peak memory, each engine in its own process"
    )
    parser.add_argument("--only", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    engines = harness.build(options.case, options.dtype)
    rows = []
    for context in options.context:
        for batch in options.batch:
            ids = torch.randint(engines.config.vocab_size, (batch, context))
            runs = {"ours": our_prefill(engines.ours, ids), "peer": peer_prefill(engines, ids)}
            if options.only:
                print(json.dumps({"peak_mib": sampled_peak(runs[options.only])}))
                return
            times = alternate(runs, options.rounds, warmup=1)
            ours, peer = (median_ms(times[name]) for name in ("ours", "peer"))
            row: dict[str, Any] = {"bench": "prefill", "case": options.case, "dtype": options.dtype, "batch": batch}
            row |= {"context": context, "ours_tok_s": batch * context / ours * 1e3}
            row |= {"peer_tok_s": batch * context / peer * 1e3, "speed_up": peer / ours}
            if options.memory:
                row |= {f"{engine}_peak_mib": peak_mib(options, engine, context) for engine in ("ours", "peer")}
            rows.append(row)
    harness.report(f"prefill, {options.threads} threads, medians of {options.rounds} alternating runs", rows)


if __name__ == "__main__":
    main()
