"""Decode beside transformers: milliseconds a step, tokens a second, their ratio, and whether the pool's size matters.

python tests/bench/bench_decode.py --case small --dtype float32 --batch 1 16 --context 128 1024 8192
python tests/bench/bench_decode.py --case small --batch 4 --context 1024 --pool-scale 32
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import harness
import purestep as ps
import torch


def our_step(model: ps.Model, state: ps.DecodeState, requests: list[int]) -> Callable[[], object]:
    """Step a state with fresh random tokens each time, keeping only the newest state."""
    held = [state]
    vocab = model.config.vocab_size

    def step() -> object:
        tokens = torch.randint(vocab, (len(requests),)).tolist()
        held[0], out = ps.decode_step(model, held[0], force=dict(zip(requests, tokens, strict=True)))
        return out

    return step


def peer_step(engines: harness.Engines, batch: int, context: int) -> Callable[[], object]:
    """Step the peer the same way; it ends in argmax, as ours ends in greedy sampling."""
    cache = harness.peer_cache(engines, batch, context)
    vocab = engines.config["vocab_size"]

    def step() -> object:
        tokens = torch.randint(vocab, (batch, 1))
        with torch.inference_mode():
            out = engines.peer(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1)

    return step


def measure(engines: harness.Engines, batch: int, context: int, rounds: int, pool_scale: int) -> dict[str, Any]:
    """Alternate the engines on one (batch, context)."""
    room = rounds + 8
    state, requests = harness.our_state(engines.ours, batch, context, room=room)
    runs = {"ours": our_step(engines.ours, state, requests)}
    del state
    if pool_scale > 1:
        state, requests = harness.our_state(engines.ours, batch, context, room=room, pool_scale=pool_scale)
        runs["scaled"] = our_step(engines.ours, state, requests)
        del state
    else:
        runs["peer"] = peer_step(engines, batch, context)
    times = harness.alternate(runs, rounds)
    ours = harness.median_ms(times["ours"])
    row: dict[str, Any] = {"batch": batch, "context": context, "ours_ms": ours, "ours_tok_s": batch / ours * 1e3}
    if pool_scale > 1:
        scaled = harness.median_ms(times["scaled"])
        return row | {"pool_scale": pool_scale, "scaled_ms": scaled, "scaled_over_ours": scaled / ours}
    peer = harness.median_ms(times["peer"])
    return row | {"peer_ms": peer, "peer_tok_s": batch / peer * 1e3, "speed_up": peer / ours}


def main() -> None:
    """Measure every combination and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(harness.CASES), default="small")
    parser.add_argument("--dtype", choices=list(harness.DTYPES), default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pool-scale", type=int, default=1, help="compare with a pool so many times larger instead")
    parser.add_argument("--kernels", choices=["fused", "reference"], default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    engines = harness.build(options.case, options.dtype, kernels=options.kernels)
    rows = []
    for context in options.context:
        for batch in options.batch:
            row = measure(engines, batch, context, options.rounds, options.pool_scale)
            rows.append({"bench": "decode", "case": options.case, "dtype": options.dtype} | row)
    harness.report(f"decode, {options.threads} threads, medians of {options.rounds} alternating steps", rows)


if __name__ == "__main__":
    main()
