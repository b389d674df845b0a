"""What the engine adds to the model: time of whole turns beside the time of the forwards in them.

python tests/bench/bench_engine.py --batch 1 16 --context 256
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import harness
import purestep as ps
import torch
from purestep.serving.asks import Ask, Ended
from purestep.serving.engine import Engine, EngineLimits
from purestep.step import extend


class Clock:
    """Times every forward of a run."""

    def __init__(self) -> None:
        self.forwards: list[float] = []
        self.turns: list[float] = []

    def timed(self, function: Any, into: list[float]) -> Any:
        """Wrap a function so that its seconds are kept."""

        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                into.append(time.perf_counter() - start)

        return call


async def run(model: ps.Model, batch: int, context: int, steps: int) -> Clock:
    """Decode a full batch for some steps: the clock of the decode turns."""
    limits = EngineLimits(
        running=batch, waiting=batch, tokens=batch * (context + steps + 256), context=context + steps + 8
    )
    engine, clock = Engine(model, limits), Clock()
    original = extend.forward
    extend.forward = clock.timed(original, clock.forwards)
    engine._turn = clock.timed(engine._turn, clock.turns)
    try:
        await engine.start()
        params = ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=steps)
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
        extend.forward = original
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
        half = options.steps // 2  # the last turns decode the whole batch
        forward, turn = (statistics.median(seconds[-half - 2 : -2]) * 1e3 for seconds in (clock.forwards, clock.turns))
        row = {"bench": "engine", "batch": batch, "context": options.context, "turn_ms": turn, "forward_ms": forward}
        rows.append(row | {"overhead": (turn - forward) / forward})
    harness.report(f"engine over the embedded model, {options.threads} threads, medians of {half} turns", rows)


if __name__ == "__main__":
    main()
