"""What a served step costs besides the model: from one step to the next, ``extend_step`` in it, the forward in that.

``engine`` is what the server adds to ``extend_step`` (scheduling, streams, threads); ``bookkeeping`` is what
``extend_step`` adds to the forward (slots, metadata, sampling, commit); ``all`` is both together. Measured are the
turns in which the whole batch decodes: none in which a prompt is fed or a request has ended.

python tests/bench/bench_engine.py --batch 1 16 --context 256
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from itertools import pairwise
from typing import Any

import harness
import purestep as ps
import torch
from purestep.serving import engine as serving
from purestep.serving.asks import Ask, Ended
from purestep.serving.engine import Engine, EngineLimits
from purestep.step import extend


class Clock:
    """Times the steps and their forwards.

    Attributes:
        calls: name -> (start, end) of every call; each step makes one forward.
        n_fed: tokens that each step fed.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[float, float]]] = {}
        self.n_fed: list[int] = []

    def timed(self, name: str, function: Any) -> Any:
        """Wrap a function so that the start and the end of its calls are kept."""
        calls = self.calls.setdefault(name, [])

        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                calls.append((start, time.perf_counter()))

        return call

    def counted(self, function: Any) -> Any:
        """Wrap the step's forward so that what it fed is kept."""

        def call(model: Any, kv: Any, view: Any, **options: Any) -> Any:
            self.n_fed.append(len(view.input_ids))
            return function(model, kv, view, **options)

        return call

    def turns(self, batch: int, n_turns: int) -> tuple[float, float, float]:
        """Return the medians of the last turns that decode the whole batch: one step to the next, step, forward."""
        fed = pairwise(self.n_fed)
        full = [at for at, pair in enumerate(fed) if pair == (batch, batch)][-n_turns:]
        step, forward = self.calls["step"], self.calls["forward"]
        return (
            statistics.median(step[at + 1][0] - step[at][0] for at in full),
            statistics.median(step[at][1] - step[at][0] for at in full),
            statistics.median(forward[at][1] - forward[at][0] for at in full),
        )


async def run(model: ps.Model, batch: int, context: int, steps: int) -> Clock:
    """Decode a full batch for some steps and return the clock."""
    new = steps + batch * (context // 256 + 1)  # the first goes on until the last has been fed, and for the steps then
    limits = EngineLimits(running=batch, waiting=batch, tokens=batch * (context + new + 256), context=context + new + 8)
    engine, clock = Engine(model, limits), Clock()
    forward, step = extend.forward, serving.extend_step
    extend.forward = clock.counted(clock.timed("forward", forward))
    serving.extend_step = clock.timed("step", step)
    try:
        await engine.start()
        params = ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=new)
        streams = []
        for seed in range(batch):
            generator = torch.Generator().manual_seed(seed)
            prompt = torch.randint(model.config.vocab_size, (context,), generator=generator).tolist()
            streams.append(engine.submit(Ask(prompt_ids=tuple(prompt), params=params)))

        async def drain(stream: Any) -> None:
            async for item in stream:
                if isinstance(item, Ended):
                    return

        await asyncio.gather(*(drain(stream) for stream in streams))
    finally:
        extend.forward, serving.extend_step = forward, step
        await engine.stop()
    return clock


def main() -> None:
    """Measure every batch and print the share that is not the model's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, rows = ps.load_model("tiny"), []
    for batch in options.batch:
        clock = asyncio.run(run(model, batch, options.context, options.steps))
        turn, step, forward = clock.turns(batch, options.steps)
        times = {"turn_ms": turn * 1e3, "step_ms": step * 1e3, "forward_ms": forward * 1e3}
        shares = {"engine": turn / step - 1, "bookkeeping": step / forward - 1, "all": turn / forward - 1}
        rows.append({"bench": "engine", "batch": batch, "context": options.context} | times | shares)
    harness.report(f"engine over the embedded model, {options.threads} threads, medians of {options.steps} steps", rows)


if __name__ == "__main__":
    main()
