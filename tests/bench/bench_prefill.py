"""Prefill beside transformers: tokens a second in chunks of 1,024, their ratio, and peak memory.

The engines take turns chunk by chunk, so that both meet the same minute of a shared machine.

python tests/bench/bench_prefill.py --case small --dtype float32 --context 128 1024 8192
python tests/bench/bench_prefill.py --case small --context 8192 --memory
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import harness
import purestep as ps
import torch
from purestep.serving.bench_cases import CASES
from purestep.serving.bench_steps import DTYPES
from transformers import DynamicCache

CHUNK = 1024


def our_prefill(model: ps.Model, ids: torch.Tensor) -> Iterator[None]:
    """Prefill all rows of ``ids``, a chunk at every turn."""
    batch, context = ids.shape
    state = ps.init_state(model, ps.Capacity(batch, batch * (context + 128), context))
    requests = []
    for _ in range(batch):
        state, request = ps.open_request(state, ps.SamplingParams(temperature=0))
        requests.append(request)
    for start in range(0, context, CHUNK):
        chunk = {r: row[start : start + CHUNK] for r, row in zip(requests, ids, strict=True)}
        state, _ = ps.extend_step(model, state, chunk, sample=start + CHUNK >= context)
        yield


def peer_prefill(engines: harness.Engines, ids: torch.Tensor) -> Iterator[None]:
    """The same with the peer."""
    cache = DynamicCache(config=engines.peer.config)
    for chunk in ids.split(CHUNK, dim=1):
        with torch.inference_mode():
            engines.peer(input_ids=chunk, cache=cache, use_cache=True, logits_to_keep=1)
        yield


def alternate_chunks(runs: Mapping[str, Callable[[], Iterator[None]]], rounds: int) -> dict[str, float]:
    """Take turns chunk by chunk, after a round that nobody measures; seconds, the sum of each chunk's median."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        turns = {name: run() for name, run in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        while turns:
            for name, turn in tuple(turns.items()):
                begin = time.perf_counter()
                if next(turn, turn) is turn:
                    del turns[name]
                else:
                    times[name].append(time.perf_counter() - begin)
        for name, found in times.items():
            seconds[name].append(found)
    return {name: sum(map(statistics.median, zip(*found[1:], strict=True))) for name, found in seconds.items()}


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
            runs = {"ours": partial(our_prefill, engines.ours, ids), "peer": partial(peer_prefill, engines, ids)}
            if options.only:
                print(json.dumps({"peak_mib": sampled_peak(lambda run=runs[options.only]: list(run()))}))
                return
            times = alternate_chunks(runs, options.rounds)
            ours, peer = times["ours"], times["peer"]
            row: dict[str, Any] = {"bench": "prefill", "case": options.case, "dtype": options.dtype, "batch": batch}
            row |= {"context": context, "ours_tok_s": batch * context / ours}
            row |= {"peer_tok_s": batch * context / peer, "speed_up": peer / ours}
            if options.memory:
                row |= {f"{engine}_peak_mib": peak_mib(options, engine, context) for engine in ("ours", "peer")}
            rows.append(row)
    harness.report(f"prefill, {options.threads} threads, medians of {options.rounds} alternating runs", rows)


if __name__ == "__main__":
    main()
