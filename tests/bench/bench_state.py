"""What it costs to keep, branch, cut and move a state: time and bytes, beside a deep copy of it.

python tests/bench/bench_state.py --batch 4 --context 1000
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import purestep as ps
import torch


def timed(call: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Run a call several times: (median milliseconds, what it returned last)."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3, result


def handles(state: ps.DecodeState) -> tuple[Any, ...]:
    return state.table.handle, state.kv.handle


def saved_bytes(state: ps.DecodeState) -> int:
    """Bytes that all versions of a state's buffers hold besides the buffers."""
    return sum(handle.saved_bytes() for handle in handles(state))


def operations(state: ps.DecodeState, request: int, rounds: int) -> list[dict[str, Any]]:
    """Time every operation on one state, each from the same input."""
    length = len(ps.find_request(state, request).tokens)
    unit = math.lcm(state.table.sizes.page_size, 128)
    aligned = length // unit * unit
    exported = ps.export_request(ps.retract_request(state, request), request)
    full = ps.export_request(state, request)
    calls: dict[str, Callable[[], Any]] = {
        "fork at the tip": lambda: ps.fork_request(state, request)[0],
        f"fork at {aligned} (reuse point)": lambda: ps.fork_request(state, request, at=aligned)[0],
        f"rewind to {aligned}": lambda: ps.rewind_request(state, request, aligned),
        "retract": lambda: ps.retract_request(state, request),
        "export": lambda: ps.export_request(state, request),
        "import": lambda: ps.import_request(state, full)[0],
        "import of a retracted one": lambda: ps.import_request(state, exported)[0],
        "deep copy of the state": lambda: copy.deepcopy(state),
    }
    rows = []
    for name, call in calls.items():
        milliseconds, result = timed(call, rounds)
        row = {"operation": name, "ms": milliseconds, "bytes": 0}
        if name == "export":
            row["bytes"] = sum(tensor.nbytes for tensor in result.caches.values())
        elif name.startswith("deep"):
            row["bytes"] = sum(handle.nbytes for handle in handles(result))
        elif isinstance(result, ps.DecodeState):
            row["bytes"] = saved_bytes(state)
        del result
        rows.append({"bench": "state", **row})
    return rows


def holding(model: ps.Model, state: ps.DecodeState, counts: list[int], steps: int) -> list[dict[str, Any]]:
    """Step while the newest k states are held: milliseconds a step and bytes kept."""
    rows = []
    for count in counts:
        now, held, seconds = copy.deepcopy(state), [], []  # buffers of its own, so that nothing else is held
        for _ in range(count + steps):
            start = time.perf_counter()
            now, _ = ps.decode_step(model, now)
            seconds.append(time.perf_counter() - start)
            held = [*held, now][-count:] if count else []
        kept = saved_bytes(now)
        milliseconds = statistics.median(seconds[count:]) * 1e3
        rows.append({"bench": "held", "states": count, "step_ms": milliseconds, "bytes": kept})
        oldest = held[0] if held else now
        rows[-1]["step_from_oldest_ms"] = timed(lambda oldest=oldest: ps.decode_step(model, oldest), 1)[0]
    return rows


def main() -> None:
    """Measure operations and held states, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--pool-tokens", type=int, default=65536)
    parser.add_argument("--held", type=int, nargs="+", default=[0, 1, 10, 100])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = ps.load_model("tiny")
    room = max(options.held) + options.steps + 1
    longest = options.context + room
    state = ps.init_state(model, ps.Capacity(options.batch + 1, options.pool_tokens, longest))
    prompts = {}
    for seed in range(options.batch):
        state, request = ps.open_request(state, ps.SamplingParams(temperature=0, ignore_eos=True))
        generator = torch.Generator().manual_seed(seed)
        prompts[request] = torch.randint(model.config.vocab_size, (options.context,), generator=generator).tolist()
    state, _ = ps.extend_step(model, state, prompts)
    title = f"embedded model, {options.batch} requests of {options.context} tokens, room for {options.pool_tokens}"
    harness.report(f"operations on a state ({title})", operations(state, 0, options.rounds))
    harness.report(f"stepping with old states held ({title})", holding(model, state, options.held, options.steps))


if __name__ == "__main__":
    main()
