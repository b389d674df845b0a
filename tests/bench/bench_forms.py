"""Time and memory of a decode step over every form of caches: steps of all forms in turn, so that all meet one load.

python tests/bench/bench_forms.py --batch 8 --context 1000
"""

from __future__ import annotations

import argparse
import time

import purestep as ps
import torch


def main() -> None:
    """Print a line for each form that the model has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=25)
    given = parser.parse_args()
    model = ps.load_model(given.model, dtype="bfloat16")
    states, feed = {}, {}
    for form in model.cache_forms:
        length = given.context + given.steps + 1
        state = ps.init_state(model, ps.Capacity(given.batch, given.batch * (length + 128), length), caches=form)
        chunks = {}
        for row in range(given.batch):
            state, request = ps.open_request(state, ps.SamplingParams(temperature=0, ignore_eos=True))
            generator = torch.Generator().manual_seed(row)
            chunks[request] = torch.randint(2, model.config.vocab_size, (given.context,), generator=generator).tolist()
        began = time.perf_counter()
        states[form], _ = ps.extend_step(model, state, chunks)
        feed[form] = time.perf_counter() - began
    best = dict.fromkeys(states, float("inf"))
    for _ in range(given.steps):
        for form in states:
            began = time.perf_counter()
            states[form], _ = ps.decode_step(model, states[form])
            best[form] = min(best[form], time.perf_counter() - began)
    for form, state in states.items():
        n_bytes = state.kv.handle.nbytes / 1e6
        print(f"{form:12} prefill {feed[form]:6.2f} s, decode {1e3 * best[form]:7.2f} ms, pools {n_bytes:8.1f} MB")


if __name__ == "__main__":
    main()
